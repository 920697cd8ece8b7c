//! Verifies stored histories: what must be true of every agent's events,
//! whoever wrote them. It shares no code with the fold.
//!
//! Checked: the chain `prev`, sequences 1, 2, 3 … per agent and run, epochs
//! that never go back, one owner per epoch, unique ids, causes, that the
//! subject says what the body says, at most one end per run, an end before
//! the seal, and nothing after seal or removal. Not checked: whether the tail
//! was cut off.

use crate::{agent::decode, appender::Stored};
use acri::{
    AgentId, Epoch, Event, EventEnvelope, EventId, Incarnation, RunId, StreamSeq, Subject, Timestamp,
    id::{EventSeq, Sha256Digest},
};
use std::collections::{BTreeMap, BTreeSet};

/// Problems that are kept; more are only counted.
pub const PROBLEMS_MAX: usize = 1_000;

/// Something that must not be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Whose event; missing if that cannot be told.
    pub agent: Option<AgentId>,
    /// Of which run.
    pub run: Option<RunId>,
    /// Where in the stream.
    pub seq: StreamSeq,
    /// What is wrong.
    pub what: String,
}

/// What a verification found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// How many agents.
    pub agents: usize,
    /// How many runs.
    pub runs: usize,
    /// How many events.
    pub events: usize,
    /// What is wrong, at most [`PROBLEMS_MAX`] of it.
    pub problems: Vec<Problem>,
    /// How many problems there are.
    pub problem_count: usize,
}

/// Verifies a history as it comes, of many agents interleaved.
#[derive(Debug, Clone, Default)]
pub struct Verifier {
    agents: BTreeMap<AgentId, Track>,
    ids: BTreeSet<EventId>,
    last: StreamSeq,
    report: Report,
}

#[derive(Debug, Clone)]
struct Track {
    sequence: EventSeq,
    digest: Sha256Digest,
    epoch: Epoch,
    incarnation: Incarnation,
    time: Timestamp,
    removed: bool,
    runs: BTreeMap<RunId, RunTrack>,
}

#[derive(Debug, Clone, Default)]
struct RunTrack {
    sequence: EventSeq,
    ended: bool,
    sealed: bool,
}

/// Verifies a whole history, in stream order.
#[must_use]
pub fn verify(history: &[(Subject, Stored)]) -> Report {
    let mut verifier = Verifier::default();
    for (subject, stored) in history {
        verifier.push(subject, stored);
    }
    verifier.finish()
}

impl Verifier {
    /// Takes the next event of the stream.
    pub fn push(&mut self, subject: &Subject, stored: &Stored) {
        self.report.events += 1;
        let mut found = Vec::new();
        if stored.seq <= self.last {
            found.push(format!("stream sequence after {}", self.last));
        }
        self.last = stored.seq;
        let envelope = match decode(stored) {
            Ok(envelope) => envelope,
            Err(error) => {
                self.blame(None, None, stored.seq, vec![error.to_string()]);
                return;
            }
        };
        let expected = Subject::Event(envelope.agent, envelope.run, envelope.event.type_name().to_owned());
        if *subject != expected {
            found.push(format!("stored under {subject}, its body says {expected}"));
        }
        if !self.ids.insert(envelope.id) {
            found.push(format!("event id {} a second time", envelope.id));
        }
        check_body(&envelope, &mut found);
        let digest = Sha256Digest::of(&stored.bytes);
        let runs_before = self.agents.get(&envelope.agent).map_or(0, |track| track.runs.len());
        match self.agents.get_mut(&envelope.agent) {
            Some(track) => track.follow(&envelope, &mut found),
            None => {
                self.report.agents += 1;
                self.agents.insert(envelope.agent, Track::begin(&envelope, &mut found));
            }
        }
        if let Some(track) = self.agents.get_mut(&envelope.agent) {
            track.digest = digest;
            self.report.runs += track.runs.len() - runs_before;
        }
        self.blame(Some(envelope.agent), envelope.run, stored.seq, found);
    }

    /// What was found.
    #[must_use]
    pub fn finish(self) -> Report {
        self.report
    }

    fn blame(&mut self, agent: Option<AgentId>, run: Option<RunId>, seq: StreamSeq, found: Vec<String>) {
        for what in found {
            self.report.problem_count += 1;
            if self.report.problems.len() < PROBLEMS_MAX {
                self.report.problems.push(Problem { agent, run, seq, what });
            }
        }
    }
}

fn check_body(envelope: &EventEnvelope, found: &mut Vec<String>) {
    let asked = matches!(
        envelope.event,
        Event::AgentCreated(_)
            | Event::AgentRemoved(_)
            | Event::RunAccepted(_)
            | Event::RunStopRequested(_)
            | Event::RunKillRequested(_)
    );
    let kind = envelope.event.type_name();
    if asked && (envelope.cause.is_none() || envelope.principal.is_none()) {
        found.push(format!("{kind} without the command that caused it"));
    }
    let (of_agent, of_run) = (kind.starts_with("agent."), kind.starts_with("run.") || kind.starts_with("escalation."));
    if (of_agent && envelope.run.is_some()) || (of_run && envelope.run.is_none()) {
        found.push(format!("{kind} {} a run", if of_agent { "of" } else { "without" }));
    }
    if let (Event::RunAccepted(_), Some(run), Some(command)) = (&envelope.event, envelope.run, envelope.cause)
        && run != RunId::derive(envelope.agent, command)
    {
        found.push("run id that its command does not give".to_owned());
    }
}

impl Track {
    fn begin(envelope: &EventEnvelope, found: &mut Vec<String>) -> Self {
        if !matches!(envelope.event, Event::AgentCreated(_)) {
            found.push("history that does not begin with agent.created".to_owned());
        }
        if envelope.sequence != EventSeq(1) {
            found.push(format!("sequence {}, expected 1", envelope.sequence));
        }
        if envelope.prev.is_some() {
            found.push("first event that follows another".to_owned());
        }
        if envelope.epoch.0 == 0 {
            found.push("epoch 0".to_owned());
        }
        let mut track = Self {
            sequence: envelope.sequence,
            digest: Sha256Digest::default(),
            epoch: envelope.epoch,
            incarnation: envelope.incarnation,
            time: envelope.time,
            removed: false,
            runs: BTreeMap::new(),
        };
        track.follow_run(envelope, found);
        track
    }

    fn follow(&mut self, envelope: &EventEnvelope, found: &mut Vec<String>) {
        if envelope.sequence != self.sequence.next() {
            found.push(format!("sequence {}, expected {}", envelope.sequence, self.sequence.next()));
        }
        if envelope.prev != Some(self.digest) {
            found.push("broken chain: `prev` is not the digest of the event before it".to_owned());
        }
        if envelope.time < self.time {
            found.push(format!("time {} before {}", envelope.time, self.time));
        }
        if self.removed {
            found.push("event after agent.removed".to_owned());
        }
        if matches!(envelope.event, Event::AgentCreated(_)) {
            found.push("agent.created a second time".to_owned());
        }
        let claims = matches!(envelope.event, Event::AgentAssigned(_));
        if envelope.epoch < self.epoch || (claims && envelope.epoch == self.epoch) {
            found.push(format!("epoch {} after {}", envelope.epoch, self.epoch));
        } else if envelope.epoch > self.epoch && !claims {
            found.push(format!("epoch {} that nobody claimed", envelope.epoch));
        } else if !claims && envelope.incarnation != self.incarnation {
            found.push(format!("two owners in epoch {}", envelope.epoch));
        }
        self.removed |= matches!(envelope.event, Event::AgentRemoved(_));
        self.sequence = envelope.sequence;
        self.epoch = envelope.epoch;
        self.incarnation = envelope.incarnation;
        self.time = envelope.time;
        self.follow_run(envelope, found);
    }

    fn follow_run(&mut self, envelope: &EventEnvelope, found: &mut Vec<String>) {
        let Some(run) = envelope.run else {
            if envelope.run_sequence.is_some() {
                found.push("run sequence without a run".to_owned());
            }
            if matches!(envelope.event, Event::AgentRemoved(_)) && self.runs.values().any(|run| !run.sealed) {
                found.push("agent.removed while a run is open".to_owned());
            }
            return;
        };
        let accepted = matches!(envelope.event, Event::RunAccepted(_));
        if accepted && self.runs.values().any(|run| !run.sealed) {
            found.push("second open run".to_owned());
        }
        if accepted == self.runs.contains_key(&run) {
            found.push(if accepted { "run accepted a second time" } else { "run that was never accepted" }.to_owned());
        }
        let track = self.runs.entry(run).or_default();
        if envelope.run_sequence != Some(track.sequence.next()) {
            let given = envelope.run_sequence.map_or_else(|| "none".to_owned(), |sequence| sequence.to_string());
            found.push(format!("run sequence {given}, expected {}", track.sequence.next()));
        }
        track.sequence = envelope.run_sequence.unwrap_or(track.sequence.next());
        if track.sealed {
            found.push("event after the run's seal".to_owned());
        }
        if envelope.event.is_terminal() {
            if track.ended {
                found.push("second end of the run".to_owned());
            }
            track.ended = true;
        }
        if matches!(envelope.event, Event::RunLogsSealed(_)) {
            if !track.ended {
                found.push("seal before the run's end".to_owned());
            }
            track.sealed = true;
        }
    }
}
