//! Folding: an event makes the agent what it is.
//!
//! An unknown type counts in sequences and chain, and is skipped. A known one
//! that does not fit is an error that stops this agent, never a silent skip.

use super::{Accepted, AcceptedOrder, Agent, End, Kill, Last, Owner, Removal, Run, Stop};
use crate::appender::Stored;
use acri::{
    Event, EventEnvelope, RunId, RunState, StreamSeq, Timestamp, codec,
    event::{AgentCreated, ExitStatus, KillCause, RunAccepted, RunFailed, RunKilled, RunStopRequested},
    id::{EventSeq, Sha256Digest},
    limits::COMMAND_AGE_MAX,
    status::Termination,
};
use std::{collections::BTreeMap, time::Duration};

/// Why a stored event cannot be folded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FoldError {
    /// The bytes are no event.
    #[error("event at stream sequence {seq}: {detail}")]
    Malformed {
        /// Where.
        seq: StreamSeq,
        /// What the decoder said.
        detail: String,
    },
    /// The event does not fit the history before it.
    #[error("event at stream sequence {seq} ({kind}): {problem}")]
    Unfit {
        /// Where.
        seq: StreamSeq,
        /// Its type.
        kind: String,
        /// What is wrong.
        problem: String,
    },
}

/// When a command id is too old to be repeated: the end of its memory. An id
/// without a time counts from when it was accepted.
fn forgotten_after(command: acri::CommandId, accepted: Timestamp) -> Timestamp {
    let minted = command.millis().and_then(|millis| i64::try_from(millis).ok()).and_then(|ms| ms.checked_mul(1000));
    minted.map_or(accepted, Timestamp::from_micros).plus(COMMAND_AGE_MAX).plus(Duration::from_millis(1))
}

/// The digest by which a repeated task is told from another one.
pub(super) fn task_digest(task: &acri::Payload) -> Sha256Digest {
    // A payload always has a MessagePack form.
    Sha256Digest::of(&codec::to_msgpack(task).unwrap_or_default())
}

impl Agent {
    /// Folds a whole history, in order. `None` if it has no event.
    ///
    /// # Errors
    /// The first event that cannot be folded.
    pub fn fold<'a>(history: impl IntoIterator<Item = &'a Stored>) -> Result<Option<Self>, FoldError> {
        let mut agent: Option<Self> = None;
        for stored in history {
            match &mut agent {
                Some(agent) => agent.evolve(stored)?,
                None => agent = Some(Self::first(stored)?),
            }
        }
        Ok(agent)
    }

    /// Begins an agent with its first event.
    ///
    /// # Errors
    /// If it is no `agent.created` that could be the first.
    pub(crate) fn first(stored: &Stored) -> Result<Self, FoldError> {
        let envelope = decode(stored)?;
        let unfit = |problem: &str| Err(unfit(stored, &envelope, problem));
        let Event::AgentCreated(AgentCreated { spec, capabilities, working_directory }) = &envelope.event else {
            return unfit("is the agent's first event and not agent.created");
        };
        if envelope.sequence != EventSeq(1) || envelope.prev.is_some() || envelope.epoch.0 == 0 {
            return unfit("is not the beginning of a history");
        }
        if envelope.run.is_some() || envelope.run_sequence.is_some() {
            return unfit("is the agent's own and names a run");
        }
        Ok(Self {
            id: envelope.agent,
            spec: spec.clone(),
            capabilities: capabilities.clone(),
            working_directory: working_directory.clone(),
            created: envelope.time,
            created_by: envelope.cause,
            owner: owner_of(&envelope),
            removed: None,
            last: last_of(stored, &envelope),
            runs: BTreeMap::new(),
            last_run: None,
            accepted: BTreeMap::new(),
        })
    }

    /// Folds the next event.
    ///
    /// # Errors
    /// If it is malformed, breaks sequence or chain, or is a known type that
    /// does not fit. The agent is then unusable: part of the event may be in.
    pub fn evolve(&mut self, stored: &Stored) -> Result<(), FoldError> {
        let envelope = decode(stored)?;
        self.fits(stored, &envelope)
            .and_then(|()| self.apply(&envelope))
            .map_err(|problem| unfit(stored, &envelope, &problem))?;
        self.last = last_of(stored, &envelope);
        self.accepted.retain(|command, accepted| envelope.time <= forgotten_after(*command, accepted.at));
        Ok(())
    }

    fn fits(&self, stored: &Stored, envelope: &EventEnvelope) -> Result<(), String> {
        if envelope.agent != self.id {
            return Err(format!("belongs to agent {}", envelope.agent));
        }
        if stored.seq <= self.last.seq {
            return Err(format!("is not after {}", self.last.seq));
        }
        if envelope.sequence != self.last.sequence.next() {
            return Err(format!("has sequence {} after {}", envelope.sequence, self.last.sequence));
        }
        if envelope.prev != Some(self.last.digest) {
            return Err("does not follow the event before it: the chain is broken".to_owned());
        }
        if self.removed() {
            return Err("follows agent.removed".to_owned());
        }
        if matches!(envelope.event, Event::AgentAssigned(_)) {
            if envelope.epoch <= self.owner.epoch {
                return Err(format!("claims epoch {} after {}", envelope.epoch, self.owner.epoch));
            }
        } else if envelope.epoch != self.owner.epoch {
            return Err(format!("bears epoch {}, the owner's is {}", envelope.epoch, self.owner.epoch));
        }
        Ok(())
    }

    fn apply(&mut self, envelope: &EventEnvelope) -> Result<(), String> {
        match envelope.run {
            None => self.apply_own(envelope),
            Some(run) => self.apply_run(run, envelope),
        }
    }

    fn apply_own(&mut self, envelope: &EventEnvelope) -> Result<(), String> {
        if envelope.run_sequence.is_some() {
            return Err("has a place in a run and names none".to_owned());
        }
        match &envelope.event {
            Event::AgentAssigned(_) => self.owner = owner_of(envelope),
            Event::AgentRemoved(data) => {
                if let Some(run) = self.open_run() {
                    return Err(format!("removes the agent while run {} is open", run.id));
                }
                self.removed = Some(Removal { reason: data.reason.clone(), at: envelope.time });
                self.remember(envelope, AcceptedOrder::Remove { reason: data.reason.clone() });
            }
            Event::Unknown { .. } => {}
            Event::AgentCreated(_) => return Err("creates the agent again".to_owned()),
            Event::RunAccepted(_)
            | Event::RunStarted(_)
            | Event::RunWaiting(_)
            | Event::RunResumed(_)
            | Event::RunStopRequested(_)
            | Event::RunStopExpired(_)
            | Event::RunKillRequested(_)
            | Event::RunCompleted(_)
            | Event::RunStopped(_)
            | Event::RunFailed(_)
            | Event::RunKilled(_)
            | Event::RunLogsSealed(_)
            | Event::EscalationRaised(_) => return Err("is a run's and names none".to_owned()),
        }
        Ok(())
    }

    fn apply_run(&mut self, id: RunId, envelope: &EventEnvelope) -> Result<(), String> {
        if let Event::RunAccepted(data) = &envelope.event {
            return self.accept(id, data, envelope);
        }
        if matches!(envelope.event, Event::Unknown { .. }) && !self.runs.contains_key(&id) {
            return Ok(());
        }
        let Some(run) = self.runs.get_mut(&id) else {
            return Err(format!("is of run {id}, which was never accepted"));
        };
        if envelope.run_sequence != Some(run.sequence.next()) {
            return Err(format!(
                "has run sequence {:?} after {}",
                envelope.run_sequence.map(|seq| seq.0),
                run.sequence
            ));
        }
        if run.sealed && !matches!(envelope.event, Event::Unknown { .. }) {
            return Err(format!("follows the seal of run {id}"));
        }
        run.evolve(envelope)?;
        run.sequence = run.sequence.next();
        if let Some(source) = envelope.source {
            let known = run.sources.entry(source.stream).or_insert(source);
            *known = source.max(*known);
        }
        if let Event::RunStopRequested(RunStopRequested { reason, deadline, on_expiry }) = &envelope.event {
            let (reason, on_expiry, deadline) = (reason.clone(), *on_expiry, *deadline);
            self.remember(envelope, AcceptedOrder::Stop { run: id, reason, on_expiry, deadline });
        }
        if let Event::RunKillRequested(data) = &envelope.event {
            self.remember(envelope, AcceptedOrder::Kill { run: id, reason: data.reason.clone() });
        }
        Ok(())
    }

    fn accept(&mut self, id: RunId, data: &RunAccepted, envelope: &EventEnvelope) -> Result<(), String> {
        if let Some(open) = self.open_run() {
            return Err(format!("begins run {id} while run {} is open", open.id));
        }
        if self.runs.contains_key(&id) {
            return Err(format!("begins run {id} again"));
        }
        if envelope.run_sequence != Some(EventSeq(1)) {
            return Err("begins a run at another sequence than 1".to_owned());
        }
        self.runs.insert(
            id,
            Box::new(Run {
                id,
                sequence: EventSeq(1),
                home: envelope.node.clone(),
                accepted_at: envelope.time,
                command: envelope.cause,
                principal: envelope.principal.clone(),
                task: Some(data.task.clone()),
                state: RunState::Pending,
                since: envelope.time,
                started: false,
                waiting: None,
                stop: None,
                stops: BTreeMap::new(),
                kill: None,
                end: None,
                sealed: false,
                gap: false,
                sources: BTreeMap::new(),
            }),
        );
        self.last_run = Some(id);
        self.remember(envelope, AcceptedOrder::Start { run: id, task: task_digest(&data.task) });
        Ok(())
    }

    fn remember(&mut self, envelope: &EventEnvelope, order: AcceptedOrder) {
        if let Some(command) = envelope.cause {
            self.accepted.insert(command, Accepted { at: envelope.time, order });
        }
    }
}

impl Run {
    fn evolve(&mut self, envelope: &EventEnvelope) -> Result<(), String> {
        let time = envelope.time;
        if self.end.is_some() {
            return self.evolve_ended(envelope);
        }
        match &envelope.event {
            Event::RunStarted(_) if self.started => return Err("starts the run again".to_owned()),
            Event::RunStarted(_) => {
                self.started = true;
                self.task = None;
                self.enter(RunState::Running, time);
            }
            Event::RunWaiting(data) => {
                if !matches!(self.state, RunState::Running | RunState::Waiting) {
                    return Err("lets a run wait that does not run".to_owned());
                }
                self.waiting = Some(data.reason);
                self.enter(RunState::Waiting, time);
            }
            Event::RunResumed(_) => {
                if self.state != RunState::Waiting {
                    return Err("resumes a run that does not wait".to_owned());
                }
                self.waiting = None;
                self.enter(RunState::Running, time);
            }
            Event::RunStopRequested(data) => self.stop_requested(data, envelope)?,
            Event::RunStopExpired(_) => {
                self.stop.take().ok_or("ends the grace of a Stop that is not in force")?;
            }
            Event::RunKillRequested(data) => {
                if self.kill.is_some() {
                    return Err("records a second Kill".to_owned());
                }
                let command = envelope.cause.ok_or("is a Kill without its command")?;
                let principal = envelope.principal.clone().unwrap_or_default();
                self.kill = Some(Kill { command, principal, reason: data.reason.clone() });
            }
            Event::RunCompleted(data) => {
                self.end(RunState::Completed, End::new(Termination::Completed, None, data.exit, time));
            }
            Event::RunStopped(data) => {
                let end = End::new(Termination::Stopped, Some(data.reason.clone()), data.exit, time);
                self.end(RunState::Stopped, end);
            }
            Event::RunFailed(data) => self.fail(data, time),
            Event::RunKilled(data) => self.killed(data, time),
            Event::RunLogsSealed(_) => return Err("seals a run that has not ended".to_owned()),
            Event::EscalationRaised(_) | Event::Unknown { .. } => {}
            Event::RunAccepted(_) | Event::AgentCreated(_) | Event::AgentAssigned(_) | Event::AgentRemoved(_) => {
                return Err("is the agent's own and names a run".to_owned());
            }
        }
        Ok(())
    }

    fn evolve_ended(&mut self, envelope: &EventEnvelope) -> Result<(), String> {
        match &envelope.event {
            Event::RunLogsSealed(sealed) => (self.sealed, self.gap) = (true, sealed.gap),
            Event::EscalationRaised(_) | Event::Unknown { .. } => {}
            Event::RunAccepted(_)
            | Event::AgentCreated(_)
            | Event::AgentAssigned(_)
            | Event::AgentRemoved(_)
            | Event::RunStarted(_)
            | Event::RunWaiting(_)
            | Event::RunResumed(_)
            | Event::RunStopRequested(_)
            | Event::RunStopExpired(_)
            | Event::RunKillRequested(_)
            | Event::RunCompleted(_)
            | Event::RunStopped(_)
            | Event::RunFailed(_)
            | Event::RunKilled(_) => return Err("follows the end of its run".to_owned()),
        }
        Ok(())
    }

    fn enter(&mut self, state: RunState, time: Timestamp) {
        self.state = state;
        self.since = time;
    }

    fn stop_requested(&mut self, data: &RunStopRequested, envelope: &EventEnvelope) -> Result<(), String> {
        let command = envelope.cause.ok_or("is a Stop without its command")?;
        self.stops.insert(command, data.reason.clone());
        self.stop = Some(Stop {
            command,
            principal: envelope.principal.clone().unwrap_or_default(),
            reason: data.reason.clone(),
            deadline: data.deadline,
            on_expiry: data.on_expiry,
        });
        Ok(())
    }

    fn end(&mut self, state: RunState, end: End) {
        self.enter(state, end.at);
        self.end = Some(end);
        self.task = None;
        self.waiting = None;
    }

    fn fail(&mut self, data: &RunFailed, at: Timestamp) {
        let reason = if data.message.is_empty() {
            data.reason.as_str().to_owned()
        } else {
            format!("{}: {}", data.reason.as_str(), data.message)
        };
        let end = End::new(Termination::Failed, Some(reason), data.exit, at);
        self.end(RunState::Failed, End { failure: Some(data.reason), ..end });
    }

    fn killed(&mut self, data: &RunKilled, at: Timestamp) {
        let cause = match data.cause {
            KillCause::Requested => "killed",
            KillCause::GraceExpired => "grace expired",
        };
        let reason = format!("{cause}: {}", data.reason);
        self.end(RunState::Failed, End::new(Termination::Killed, Some(reason), data.exit, at));
    }
}

impl End {
    fn new(termination: Termination, reason: Option<String>, exit: Option<ExitStatus>, at: Timestamp) -> Self {
        Self { termination, failure: None, reason, exit, at }
    }
}

pub(crate) fn decode(stored: &Stored) -> Result<EventEnvelope, FoldError> {
    codec::from_msgpack(&stored.bytes)
        .map_err(|error| FoldError::Malformed { seq: stored.seq, detail: error.to_string() })
}

fn unfit(stored: &Stored, envelope: &EventEnvelope, problem: &str) -> FoldError {
    let kind = envelope.event.type_name().chars().take(80).collect();
    FoldError::Unfit { seq: stored.seq, kind, problem: problem.to_owned() }
}

fn owner_of(envelope: &EventEnvelope) -> Owner {
    Owner { node: envelope.node.clone(), incarnation: envelope.incarnation, epoch: envelope.epoch }
}

fn last_of(stored: &Stored, envelope: &EventEnvelope) -> Last {
    Last {
        seq: stored.seq,
        sequence: envelope.sequence,
        id: envelope.id,
        digest: Sha256Digest::of(&stored.bytes),
        time: envelope.time,
    }
}
