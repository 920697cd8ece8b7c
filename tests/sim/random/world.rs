//! The world of one history: nodes that come and go, harnesses and their
//! holders, clients, a bus that fails, one clock.

use super::{
    dice::Dice,
    holder::Holder,
    node::{End, Life, Node, Owner},
    promises::{Holders, Promises},
};
use crate::stage;
use acri::{AgentId, AgentSpec, CommandId, Event, RunId, Timestamp};
use acri_bus::memory::{State, fault::Write};
use acri_core::appender::{Answer, Command};
use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

/// Names of the faults; each must have struck before the test passes.
pub(crate) mod fault {
    pub(crate) const ACK_LOST: &str = "acknowledgement lost after the commit";
    pub(crate) const TWICE: &str = "duplicate delivery";
    pub(crate) const LATE: &str = "delayed commit that lands late";
    pub(crate) const LATE_OLD: &str = "late commit of a former owner that is stored";
    pub(crate) const NEVER: &str = "write that never arrives";
    pub(crate) const IN_FLIGHT: &str = "another write is said to be in flight";
    pub(crate) const REFUSED: &str = "refused append";
    pub(crate) const STALE_READ: &str = "stale read at a takeover";
    pub(crate) const READ_FAILED: &str = "read without an answer";
    pub(crate) const ROLLED_BACK: &str = "rolled-back stream";
    pub(crate) const CRASH: &str = "crash";
    pub(crate) const CRASH_BEFORE_EFFECT: &str = "crash between append and effect";
    pub(crate) const CRASH_AFTER_EFFECT: &str = "crash between effect and its report";
    pub(crate) const EFFECT_REPEATED: &str = "effect whose answer is lost";
    pub(crate) const PAUSED: &str = "paused owner that goes on after the takeover";
    pub(crate) const OUTAGE: &str = "bus outage";
    pub(crate) const LAPSED: &str = "lapsed lease";
    pub(crate) const REPLY_LOST: &str = "answer that never reaches its asker";
    pub(crate) const ORPHANED: &str = "harness ended for want of an owner";

    pub(crate) const ALL: [&str; 19] = [
        ACK_LOST,
        TWICE,
        LATE,
        LATE_OLD,
        NEVER,
        IN_FLIGHT,
        REFUSED,
        STALE_READ,
        READ_FAILED,
        ROLLED_BACK,
        CRASH,
        CRASH_BEFORE_EFFECT,
        CRASH_AFTER_EFFECT,
        EFFECT_REPEATED,
        PAUSED,
        OUTAGE,
        LAPSED,
        REPLY_LOST,
        ORPHANED,
    ];
}

pub(crate) type Counts = BTreeMap<&'static str, u64>;

/// How many machines there are, and agents.
pub(crate) const MACHINES: usize = 2;
pub(crate) const AGENTS: usize = 3;
/// Steps with faults, before everything is put right.
pub(crate) const STEPS: usize = 1500;
/// Steps in which everything must then come to its end.
const HEALING_STEPS_MAX: usize = 6000;

/// One agent, whether it was created yet or not.
pub(crate) struct Agent {
    pub(crate) id: AgentId,
    pub(crate) create: CommandId,
    pub(crate) spec: AgentSpec,
    /// Whether only the machine that began a harness can reach it.
    pub(crate) local: bool,
}

/// One command of a client.
pub(crate) struct Question {
    pub(crate) agent: usize,
    pub(crate) command: Command,
    pub(crate) answer: Option<Answer>,
}

pub(crate) struct World {
    pub(crate) dice: Dice,
    pub(crate) bus: State,
    pub(crate) late: VecDeque<Write>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) holders: Holders,
    pub(crate) agents: Vec<Agent>,
    pub(crate) questions: Vec<Question>,
    pub(crate) counts: Counts,
    pub(crate) healing: bool,
    pub(crate) minted: u64,
    pub(crate) commands: u64,
    pub(crate) promises: Promises,
    pub(crate) rolled_back: bool,
    /// Whether owners compare their agents' last events when the bus was
    /// restarted.
    pub(crate) owners_compare: bool,
    /// What was done, for whoever looks at a failure.
    pub(crate) told: Vec<(Timestamp, super::turns::Turn)>,
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let now = stage::at_millis(stage::START_MS);
        let mut dice = Dice::new(seed);
        let fresh = State::new(now);
        let bus = if dice.one_in(3) { fresh.replicated() } else { fresh };
        let agents = (0..AGENTS)
            .map(|number| {
                let create = stage::command_id(stage::START_MS, stage::long(number) + 1);
                let spec =
                    AgentSpec { orphan_after_ms: Some(40_000), node_lost_after_ms: Some(80_000), ..stage::spec() };
                Agent { id: stage::agent_id(create), create, spec, local: number == 0 }
            })
            .collect();
        let mut world = Self {
            dice,
            bus,
            late: VecDeque::new(),
            nodes: Vec::new(),
            holders: Holders::new(),
            agents,
            questions: Vec::new(),
            counts: Counts::new(),
            healing: false,
            minted: 0,
            commands: 100,
            promises: Promises::default(),
            rolled_back: false,
            owners_compare: true,
            told: Vec::new(),
        };
        world.owners_compare = world.dice.one_in(2);
        world.promises.damage_is_known = !world.owners_compare;
        (0..MACHINES).for_each(|machine| world.boot(machine));
        world
    }

    /// The whole history.
    pub(crate) fn run(&mut self) -> Result<(), String> {
        for _ in 0..STEPS {
            self.turn()?;
        }
        self.heal()?;
        for _ in 0..HEALING_STEPS_MAX {
            if self.is_at_rest() {
                return self.promises.at_rest(&self.bus, &self.holders);
            }
            self.turn()?;
        }
        Err(format!("{HEALING_STEPS_MAX} steps without a fault, and it has not come to its end: {}", self.open()))
    }

    fn turn(&mut self) -> Result<(), String> {
        let turn = self.choose();
        self.told.push((self.bus.now(), turn));
        self.take(turn)?;
        self.promises.check(&self.bus, &self.holders)
    }

    pub(crate) fn count(&mut self, name: &'static str) {
        *self.counts.entry(name).or_default() += 1;
    }

    /// Whether this fault strikes now.
    pub(crate) fn strikes(&mut self, one_in: usize) -> bool {
        !self.healing && self.dice.one_in(one_in)
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.bus.now()
    }

    /// The agents and questions that keep the world from resting.
    pub(crate) fn open(&self) -> String {
        let runs = self.agents.iter().filter_map(|agent| self.promises.open_run(agent.id));
        let questions = self.questions.iter().filter(|question| self.waits(question));
        let alive = self.holders.iter().filter(|(_, holder)| holder.is_alive());
        format!(
            "open runs {:?}, questions {:?}, harnesses {:?}",
            runs.map(|run| run.to_string()).collect::<Vec<_>>(),
            questions.map(|question| (question.agent, &question.command.order)).collect::<Vec<_>>(),
            alive.map(|((_, run), _)| run.to_string()).collect::<Vec<_>>(),
        )
    }

    /// Whether somebody waits for an answer. Nobody serves a removed agent: a
    /// client looks at its events.
    pub(crate) fn waits(&self, question: &Question) -> bool {
        let newest = self.promises.events_of(self.agents[question.agent].id).last();
        let removed = newest.is_some_and(|event| matches!(event.event, Event::AgentRemoved(_)));
        question.answer.is_none() && !removed && !self.is_damaged(question.agent)
    }

    fn is_at_rest(&self) -> bool {
        let idle = |owner: &Owner| owner.append.is_none() && owner.read.is_none() && owner.effects.is_empty();
        (0..AGENTS).all(|agent| self.is_damaged(agent) || self.promises.open_run(self.agents[agent].id).is_none())
            && self.questions.iter().all(|question| !self.waits(question))
            && self.holders.values().all(|holder| !holder.is_alive())
            && self.nodes.iter().flat_map(|node| node.owners.values()).all(idle)
    }

    /// Whether nothing can be expected of it: its history was put back, and its
    /// owner may not notice, or has continued it so that it cannot be folded.
    pub(crate) fn is_damaged(&self, agent: usize) -> bool {
        let id = &self.agents[agent].id;
        self.promises.damaged.contains(id) || (!self.owners_compare && self.promises.spoiled.contains(id))
    }

    /// From now on nothing fails.
    fn heal(&mut self) -> Result<(), String> {
        self.healing = true;
        for machine in 0..MACHINES {
            let last = self.nodes.iter().rposition(|node| node.machine == machine);
            if last.is_none_or(|last| self.nodes[last].life == Life::Dead) {
                self.boot(machine);
                self.take_back(machine)?;
            }
        }
        for node in &mut self.nodes {
            (node.away, node.unaware) = (false, 0);
            if node.life == Life::Paused {
                node.life = Life::Runs;
            }
        }
        Ok(())
    }

    /// Takes an actor out, lets it act, and puts it back if it lives on.
    pub(crate) fn with_owner(
        &mut self,
        at: usize,
        agent: usize,
        act: impl FnOnce(&mut Self, &mut Owner) -> Result<(), String>,
    ) -> Result<(), String> {
        let Some(mut owner) = self.nodes[at].owners.remove(&agent) else { return Ok(()) };
        act(self, &mut owner)?;
        match owner.end {
            None => {
                self.nodes[at].owners.insert(agent, owner);
            }
            Some(end) => {
                self.bury(owner);
                if let End::Again { history_lost } = end {
                    self.nodes[at].again.insert(agent, history_lost);
                }
            }
        }
        Ok(())
    }

    /// The actor is gone; what it had sent may still arrive.
    pub(crate) fn bury(&mut self, owner: Owner) {
        let event = owner.append.filter(|_| owner.answer.is_none()).map(|(_, append)| Write::Event(append));
        let frame = owner
            .pump
            .and_then(|pump| pump.publish.filter(|_| pump.answer.is_none()).map(|(_, frame)| Write::Frame(frame)));
        for write in [event, frame].into_iter().flatten() {
            if self.strikes(2) {
                self.count(fault::LATE);
                self.late.push_back(write);
            }
        }
    }

    pub(crate) fn holder(&mut self, agent: usize, run: RunId) -> &mut Holder {
        let (id, spec) = (self.agents[agent].id, &self.agents[agent].spec);
        let (now, orphan_after) = (self.bus.now(), spec.orphan_after());
        let obeys = run.as_uuid().as_bytes()[0].is_multiple_of(2);
        self.holders.entry((id, run)).or_insert_with(|| Holder::new(now, orphan_after, obeys))
    }

    pub(crate) fn pass(&mut self, time: Duration) {
        let now = self.now().plus(time);
        self.bus.advance_to(now);
    }
}
