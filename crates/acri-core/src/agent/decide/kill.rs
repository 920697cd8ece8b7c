//! Kill: the effect does not wait for what is decided here, this is its
//! record.

use super::{
    super::{Agent, Run},
    Decided, Draft, no_such_run,
};
use crate::appender::{Answer, Command};
use acri::{
    ErrorBody, RunId,
    command::{KillAck, KillRun},
    event::RunKillRequested,
};

pub(super) fn decide(agent: &Agent, command: &Command, run: RunId, data: &KillRun) -> Result<Decided, ErrorBody> {
    let state = agent.run(run).ok_or_else(|| no_such_run(run))?;
    Ok(settled(state).unwrap_or_else(|| {
        Decided::Append(Draft::caused(command, Some(run), RunKillRequested { reason: data.reason.clone() }))
    }))
}

pub(super) fn repeat(agent: &Agent, run: RunId, reason: &str, asked: RunId, data: &KillRun) -> Option<Decided> {
    let same = run == asked && reason == data.reason;
    agent.run(run).filter(|_| same).and_then(settled)
}

/// One Kill is recorded a run; a run that has ended needs none.
fn settled(run: &Run) -> Option<Decided> {
    if run.end.is_some() {
        Some(Decided::Known(Answer::Killed(run.kill_ack())))
    } else {
        run.kill.as_ref().map(|_| Decided::Awaits(run.id))
    }
}

impl Run {
    /// What a Kill is answered now. A run that was given up while its harness
    /// may live has ended, but nothing is proved.
    #[must_use]
    pub fn kill_ack(&self) -> KillAck {
        KillAck { run: self.id, proved: self.end.is_some() && !self.end_is_unproved() }
    }
}
