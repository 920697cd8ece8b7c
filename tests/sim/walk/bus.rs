//! The bus as a numbered value: each state of it is checked once, when it is
//! first met.

use super::{
    machines::{Id, Table},
    plan::{Mutant, Plan},
    world::Answered,
};
use crate::check::{self, Log, Reading};
use acri::{Epoch, StreamSeq, id::LogSeq};
use acri_bus::{
    memory::{State, fault::Write},
    port::{Appended, EventSelection},
};
use acri_core::{appender::Stored, writer::LogEnd};
use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    rc::Rc,
};

/// A state of the bus, and what is to be known of it.
#[derive(Debug)]
pub(crate) struct Bus {
    pub(crate) state: State,
    pub(crate) epoch: Epoch,
    /// Whether the newest owner has decided anything beside his claim.
    pub(crate) decided: bool,
    pub(crate) stop_is_stored: bool,
    pub(crate) log: Log,
    /// Sealed, with all that the harness wrote.
    pub(crate) complete: bool,
    last_event: StreamSeq,
    last_frame: StreamSeq,
    /// Frames of who was no longer the owner; kept for one mutant only.
    foreign: Vec<StreamSeq>,
}

/// Buses, writes, and what a write makes of a bus.
pub(crate) struct Buses {
    plan: Rc<Plan>,
    buses: Vec<Rc<Bus>>,
    numbers: HashMap<u64, Id>,
    pub(crate) writes: Table<Write>,
    landed: HashMap<(Id, Id), (Id, Answered)>,
}

impl Buses {
    pub(crate) fn new(plan: Rc<Plan>) -> Self {
        Self { plan, buses: Vec::new(), numbers: HashMap::new(), writes: Table::default(), landed: HashMap::new() }
    }

    pub(crate) fn get(&self, id: Id) -> Rc<Bus> {
        Rc::clone(&self.buses[id as usize])
    }

    pub(crate) fn len(&self) -> usize {
        self.buses.len()
    }

    pub(crate) fn keep(&mut self, state: State, foreign: Vec<StreamSeq>) -> Result<Id, String> {
        let mut hasher = DefaultHasher::new();
        (&state, &foreign).hash(&mut hasher);
        let key = hasher.finish();
        if let Some(known) = self.numbers.get(&key) {
            return Ok(*known);
        }
        let bus = self.checked(state, foreign)?;
        let id = Id::try_from(self.buses.len()).expect("a walk is not that large");
        self.buses.push(Rc::new(bus));
        self.numbers.insert(key, id);
        Ok(id)
    }

    fn checked(&self, state: State, foreign: Vec<StreamSeq>) -> Result<Bus, String> {
        let Plan { agent, run, expected, stop, mutant, .. } = &*self.plan;
        let events = check::events(&state, *agent);
        check::histories(&state)?;
        check::derived(&state, *agent, *run, &events, expected)?;
        let reading = match mutant {
            Mutant::ReaderByEpoch => Reading::Without(&foreign),
            _ => Reading::Right,
        };
        let log = check::log(&state, *agent, *run, expected, reading)?;
        check::seal(*run, &events, log, false)?;
        let sealed = check::is_sealed(*run, &events);
        if sealed && log.count != LogSeq(crate::stage::long(expected.log.len())) {
            return Err(format!("sealed with {} log records", log.count));
        }
        let derived = events.iter().filter(|event| event.source.is_some()).count();
        if sealed && derived != expected.derived.len() {
            return Err(format!("sealed with {derived} derived events"));
        }
        let (epoch, decided) = check::epoch(&events);
        let stop_is_stored = check::caused(&events, *stop);
        let (last_event, last_frame) = (state.last_seq(*agent), last_frame(&state, &self.plan));
        Ok(Bus { last_event, last_frame, state, epoch, decided, stop_is_stored, log, complete: sealed, foreign })
    }

    /// A write reaches the bus.
    pub(crate) fn land(&mut self, bus: Id, write: Id) -> Result<(Id, Answered), String> {
        if let Some(known) = self.landed.get(&(bus, write)) {
            return Ok(*known);
        }
        let before = self.get(bus);
        let mut state = before.state.clone();
        let mut foreign = before.foreign.clone();
        let mut write_as = Write::clone(&self.writes.get(write));
        if let (Write::Frame(frame), Mutant::NoFrameCheck) = (&mut write_as, self.plan.mutant) {
            frame.expect = last_frame(&state, &self.plan);
        }
        let answered = match write_as.apply(&mut state) {
            Appended::Stored(seq) => Answered::Stored(seq),
            Appended::Duplicate(seq) => Answered::Duplicate(seq),
            Appended::Conflict => Answered::Conflict,
            other => unreachable!("the memory bus says {other:?}"),
        };
        if let (Write::Frame(frame), Answered::Stored(seq), Mutant::ReaderByEpoch) =
            (&write_as, answered, self.plan.mutant)
            && frame.epoch < before.epoch
        {
            foreign.push(seq);
        }
        let next = self.keep(state, foreign)?;
        self.landed.insert((bus, write), (next, answered));
        Ok((next, answered))
    }

    /// Whether a write can never be stored any more.
    pub(crate) fn is_dead(&self, bus: Id, write: Id) -> bool {
        let bus = &self.buses[bus as usize];
        match &*self.writes.get(write) {
            Write::Event(append) => append.expect != bus.last_event,
            Write::Frame(frame) => self.plan.mutant != Mutant::NoFrameCheck && frame.expect != bus.last_frame,
        }
    }

    /// A leader read of the agent's events, as the adapter does it.
    pub(crate) fn read_after(&self, bus: Id, after: StreamSeq) -> (Vec<Stored>, StreamSeq) {
        let state = &self.get(bus).state;
        let selection = EventSelection::Agent(self.plan.agent);
        let stored = state.read(&selection, after.next()).map(check::stored).collect();
        (stored, state.last_seq(self.plan.agent))
    }

    pub(crate) fn last_frame(&self, bus: Id) -> LogEnd {
        let bus = self.get(bus);
        bus.state.last_frame(self.plan.agent, Some(self.plan.run)).map(check::last).unwrap_or_default()
    }
}

fn last_frame(state: &State, plan: &Plan) -> StreamSeq {
    state.last_frame(plan.agent, Some(plan.run)).map_or(StreamSeq(0), |frame| frame.seq)
}
