//! Breadth first, each state once; the shortest way to whatever is wrong.

use super::{
    plan::Plan,
    steps::{Steps, Violation},
    world::{Action, World},
};
use std::{
    collections::{HashMap, VecDeque},
    fmt::Write as _,
    hash::{BuildHasherDefault, Hasher},
};

/// What a walk found.
pub(crate) struct Found {
    pub(crate) states: usize,
    pub(crate) steps: usize,
    pub(crate) depth: usize,
    pub(crate) violation: Option<Wrong>,
    pub(crate) covered: &'static str,
    pub(crate) tables: String,
}

/// What is wrong, and the shortest way there.
pub(crate) struct Wrong {
    pub(crate) what: Violation,
    pub(crate) trace: Vec<Action>,
}

impl std::fmt::Display for Wrong {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(formatter, "{}, after {} steps:", self.what, self.trace.len())?;
        let mut text = String::new();
        for (number, action) in (1..).zip(&self.trace) {
            writeln!(text, "{number:>4}  {action:?}")?;
        }
        formatter.write_str(&text)
    }
}

/// A key is a hash already.
#[derive(Default)]
struct Plain(u64);

impl Hasher for Plain {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are numbers")
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

/// The states met: how each was first reached.
struct Met {
    numbers: HashMap<u64, u32, BuildHasherDefault<Plain>>,
    from: Vec<Option<(u32, Action)>>,
}

impl Met {
    /// The number of a state; `true` if it is new.
    fn number(&mut self, world: &World, from: Option<(u32, Action)>) -> (u32, bool) {
        let next = u32::try_from(self.from.len()).expect("a walk is not that large");
        let number = *self.numbers.entry(world.key()).or_insert(next);
        if number == next {
            self.from.push(from);
        }
        (number, number == next)
    }

    fn trace(&self, mut state: u32) -> Vec<Action> {
        let mut trace = Vec::new();
        while let Some((from, action)) = self.from[state as usize] {
            trace.push(action);
            state = from;
        }
        trace.reverse();
        trace
    }
}

/// Walks until everything within the plan is seen, or something is wrong.
pub(crate) fn search(plan: Plan) -> Found {
    let states_max = plan.states_max;
    let (mut steps, world) = Steps::begin(plan);
    let mut met = Met { numbers: HashMap::default(), from: Vec::new() };
    let (first, _) = met.number(&world, None);
    let mut waiting = VecDeque::from([(first, 0, world)]);
    // Steps that need no fault, backwards; and the states that are complete.
    let mut back: Vec<(u32, u32)> = Vec::new();
    let mut complete = Vec::new();
    let (mut depth, mut made, mut covered) = (0, 0, "all of it");
    let mut wrong = None;
    'walk: while let Some((state, far, world)) = waiting.pop_front() {
        depth = far;
        if met.from.len() > states_max {
            covered = "cut off at states_max: not all of it";
            break;
        }
        let actions = steps.actions(&world);
        if steps.is_complete(&world) {
            complete.push(state);
        }
        if actions.iter().all(|action| action.is_fault())
            && let Err(what) = steps.at_rest(&world)
        {
            wrong = Some(Wrong { what, trace: met.trace(state) });
            break;
        }
        for action in actions {
            made += 1;
            match steps.apply(&world, action) {
                Ok(next) => {
                    let (number, new) = met.number(&next, Some((state, action)));
                    if !action.is_fault() {
                        back.push((number, state));
                    }
                    if new {
                        waiting.push_back((number, far + 1, next));
                    }
                }
                Err(what) => {
                    let mut trace = met.trace(state);
                    trace.push(action);
                    wrong = Some(Wrong { what, trace });
                    break 'walk;
                }
            }
        }
    }
    if wrong.is_none() && waiting.is_empty() {
        wrong = stuck(met.from.len(), back, &complete)
            .map(|state| Wrong { what: "from here the run can never be sealed".to_owned(), trace: met.trace(state) });
    }
    Found { states: met.from.len(), steps: made, depth, violation: wrong, covered, tables: steps.tables() }
}

/// The first state from which no complete one can be reached without a fault.
fn stuck(states: usize, mut back: Vec<(u32, u32)>, complete: &[u32]) -> Option<u32> {
    back.sort_unstable();
    let mut good = vec![false; states];
    let mut waiting: Vec<u32> = complete.to_vec();
    complete.iter().for_each(|state| good[*state as usize] = true);
    while let Some(state) = waiting.pop() {
        let first = back.partition_point(|(to, _)| *to < state);
        for (_, from) in back[first..].iter().take_while(|(to, _)| *to == state) {
            if !std::mem::replace(&mut good[*from as usize], true) {
                waiting.push(*from);
            }
        }
    }
    let bad = good.iter().position(|good| !good)?;
    u32::try_from(bad).ok()
}
