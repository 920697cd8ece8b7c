//! What must be true after every step, kept up as things are stored.

use super::holder::Holder;
use crate::{
    check,
    stage::{Expected, long},
};
use acri::{
    AgentId, Event, EventEnvelope, RunId, StreamSeq, codec,
    event::{FailReason, RunFailed},
    id::LogSeq,
    log::ResumeToken,
};
use acri_bus::{memory::State, port::EventSelection};
use acri_core::{
    agent::due::NODE_LOST_LOG_WAIT,
    check::Verifier,
    writer::reader::{Frame, LogItem, LogStream, Next, Reader, Since},
};
use std::collections::{BTreeMap, BTreeSet};

pub(crate) type Holders = BTreeMap<(AgentId, RunId), Holder>;

/// A client that reads a run's log as it comes.
struct Live {
    reader: Reader,
    read: usize,
    last: StreamSeq,
    token: ResumeToken,
}

#[derive(Default)]
pub(crate) struct Promises {
    verifier: Verifier,
    pub(crate) events: BTreeMap<AgentId, Vec<EventEnvelope>>,
    last: StreamSeq,
    last_frame: StreamSeq,
    live: BTreeMap<RunId, Live>,
    /// Agents whose history was put back: what was promised of them is gone.
    pub(crate) spoiled: BTreeSet<AgentId>,
    /// Those of them whose history was then continued wrongly. A compare-and-set
    /// by sequence cannot know a sequence that came again.
    pub(crate) damaged: BTreeSet<AgentId>,
    /// Whether that is accepted.
    pub(crate) damage_is_known: bool,
}

impl Promises {
    /// The event stream was put back to this.
    pub(crate) fn put_back(&mut self, bus: &State) {
        let before = std::mem::take(&mut self.events);
        (self.verifier, self.last) = (Verifier::default(), StreamSeq(0));
        self.note(bus);
        for (agent, events) in before {
            if events.len() != self.events_of(agent).len() {
                self.spoiled.insert(agent);
            }
        }
    }

    pub(crate) fn events_of(&self, agent: AgentId) -> &[EventEnvelope] {
        self.events.get(&agent).map_or(&[], Vec::as_slice)
    }

    fn note(&mut self, bus: &State) -> Vec<EventEnvelope> {
        let mut new = Vec::new();
        for recorded in bus.read(&EventSelection::All, self.last.next()) {
            self.last = recorded.seq;
            self.verifier.push(&recorded.subject, &check::stored(recorded));
            let event: EventEnvelope = codec::from_msgpack(&recorded.bytes).expect("what is stored is an event");
            self.events.entry(event.agent).or_default().push(event.clone());
            new.push(event);
        }
        new
    }

    /// After a step.
    pub(crate) fn check(&mut self, bus: &State, holders: &Holders) -> Result<(), String> {
        let new = self.note(bus);
        if !new.is_empty() {
            for problem in self.verifier.clone().finish().problems {
                let known = problem.agent.filter(|agent| self.damage_is_known && self.spoiled.contains(agent));
                let Some(agent) = known else {
                    return Err(format!("event at {}: {}", problem.seq, problem.what));
                };
                self.damaged.insert(agent);
            }
        }
        for event in new {
            self.check_derived(&event, holders)?;
            self.check_gap(&event, holders)?;
        }
        let last = bus.log_facts().last;
        if last > self.last_frame {
            self.last_frame = last;
            for ((agent, run), holder) in holders {
                self.read(bus, *agent, *run, holder)?;
            }
        }
        for ((_, run), holder) in holders {
            if holder.begun > 1 {
                return Err(format!("the harness of run {run} was begun twice"));
            }
        }
        Ok(())
    }

    fn check_derived(&self, event: &EventEnvelope, holders: &Holders) -> Result<(), String> {
        let (Some(source), Some(run)) = (event.source, event.run) else { return Ok(()) };
        let holder = holders.get(&(event.agent, run)).ok_or("an event out of no output")?;
        if !Expected::of(&holder.spool, true).derived.contains(&source) {
            return Err(format!("an event from {source:?}, where there was none"));
        }
        let same = |other: &&EventEnvelope| other.run == Some(run) && other.source == Some(source);
        if self.events_of(event.agent).iter().filter(same).count() > 1 {
            return Err(format!("the event from {source:?} a second time"));
        }
        Ok(())
    }

    /// Output that can still come back is waited for, a day after its run's end.
    fn check_gap(&self, event: &EventEnvelope, holders: &Holders) -> Result<(), String> {
        let (Event::RunLogsSealed(seal), Some(run)) = (&event.event, event.run) else { return Ok(()) };
        let begun = holders.get(&(event.agent, run)).is_some_and(|holder| holder.begun > 0);
        if !seal.gap || !begun || self.spoiled.contains(&event.agent) {
            return Ok(());
        }
        let ends = |end: &&EventEnvelope| end.run == Some(run) && end.event.is_terminal();
        let end = self.events_of(event.agent).iter().find(ends).map_or(event.time, |end| end.time);
        if event.time.since(end) >= NODE_LOST_LOG_WAIT {
            return Ok(());
        }
        Err(format!("run {run} is sealed with a gap, while its output can still be read"))
    }

    fn read(&mut self, bus: &State, agent: AgentId, run: RunId, holder: &Holder) -> Result<(), String> {
        let created = bus.log_facts().created.as_micros();
        let facts = LogStream { created, first: StreamSeq(1), last: StreamSeq(0) };
        let live = self.live.entry(run).or_insert_with(|| Live {
            reader: Reader::new(facts, Since::Start),
            read: 0,
            last: StreamSeq(0),
            token: ResumeToken::start(),
        });
        let expected = Expected::of(&holder.spool, holder.exit.is_some());
        let mut items = Vec::new();
        let mut covered = BTreeMap::new();
        let frames: Vec<_> = bus.read_frames(agent, Some(run), live.last.next()).collect();
        live.token = check::chained(&frames, live.token.clone())?;
        for frame in frames {
            live.last = frame.seq;
            if live.reader.push(Frame { seq: frame.seq, owned: frame.mark.is_some(), bytes: &frame.bytes }, &mut items)
                == Next::Restart
            {
                return Err("a reader from the start begins again".to_owned());
            }
            covered.extend(check::resume(frame).streams);
        }
        for item in items {
            let LogItem::Event(event, _) = item else { return Err(format!("a reader got {item:?}")) };
            let place = live.read;
            live.read += 1;
            let Some((stream, line)) = expected.log.get(place) else {
                return Err(format!("log record {} of {}", live.read, expected.log.len()));
            };
            let as_written = event.stream == Some(*stream) && event.payload.as_bytes() == line.as_slice();
            if event.sequence != LogSeq(long(live.read)) || !as_written {
                return Err(format!("log record {} is {event:?}, expected {line:?}", live.read));
            }
        }
        if self.spoiled.contains(&agent) {
            return Ok(());
        }
        let events = self.events_of(agent);
        for source in &expected.derived {
            let published = covered.get(&source.stream).is_some_and(|at| at.published > source.offset);
            let known = |event: &EventEnvelope| event.run == Some(run) && event.source == Some(*source);
            if published && !events.iter().any(known) {
                return Err(format!("a frame covers {source:?}, whose event is not stored"));
            }
        }
        Ok(())
    }

    pub(crate) fn is_sealed(&self, agent: AgentId, run: RunId) -> bool {
        check::is_sealed(run, self.events_of(agent))
    }

    /// The run that has begun and is not sealed.
    pub(crate) fn open_run(&self, agent: AgentId) -> Option<RunId> {
        let accepted = |event: &&EventEnvelope| matches!(event.event, Event::RunAccepted(_));
        let run = self.events_of(agent).iter().rev().find(accepted)?.run?;
        (!self.is_sealed(agent, run)).then_some(run)
    }

    /// Whether the run was given up by somebody who could not reach it.
    pub(crate) fn was_given_up(&self, agent: AgentId, run: RunId) -> bool {
        self.events_of(agent).iter().any(|event| {
            let given_up = |data: &RunFailed| {
                matches!(data.reason, FailReason::NodeLost | FailReason::HistoryLost | FailReason::HarnessLost)
            };
            event.run == Some(run) && matches!(&event.event, Event::RunFailed(data) if given_up(data))
        })
    }

    /// At the end of a history, when all faults are over.
    pub(crate) fn at_rest(&self, bus: &State, holders: &Holders) -> Result<(), String> {
        if self.damaged.is_empty() {
            check::histories(bus)?;
        }
        for (agent, events) in &self.events {
            if self.damaged.contains(agent) || (self.damage_is_known && self.spoiled.contains(agent)) {
                continue;
            }
            for run in events.iter().filter(|event| matches!(event.event, Event::RunAccepted(_))) {
                let run = run.run.ok_or("a run without its id")?;
                if !check::is_sealed(run, events) {
                    return Err(format!("run {run} is never sealed"));
                }
            }
        }
        for ((agent, run), holder) in holders {
            if holder.is_alive() {
                return Err(format!("the harness of run {run} lives on"));
            }
            if self.spoiled.contains(agent) || !self.is_sealed(*agent, *run) {
                continue;
            }
            let expected = Expected::of(&holder.spool, true);
            let events = self.events_of(*agent);
            let log = check::log(bus, *agent, *run, &expected, check::Reading::Right)?;
            check::derived(bus, *agent, *run, events, &expected)?;
            let gap = self.was_given_up(*agent, *run);
            check::seal(*run, events, log, gap)?;
            if gap {
                continue;
            }
            let derived = events.iter().filter(|event| event.run == Some(*run) && event.source.is_some()).count();
            if log.count != LogSeq(long(expected.log.len())) || derived != expected.derived.len() {
                return Err(format!("run {run} is sealed with {log:?}, {derived} questions, not with all"));
            }
        }
        Ok(())
    }
}
