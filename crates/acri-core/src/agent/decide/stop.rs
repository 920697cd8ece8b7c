//! Stop.

use super::{
    super::{AcceptedOrder, Agent},
    Decided, Draft, no_such_run,
};
use crate::appender::{Answer, Command};
use acri::{
    ErrorBody, ErrorCode, RunId, Timestamp,
    command::{StopAck, StopRun},
    event::RunStopRequested,
};

/// The newest Stop counts, but a grace can only be shortened: the deadline is
/// the earlier one.
pub(super) fn decide(
    agent: &Agent,
    command: &Command,
    run: RunId,
    data: &StopRun,
    now: Timestamp,
) -> Result<Decided, ErrorBody> {
    let state = agent.run(run).ok_or_else(|| no_such_run(run))?;
    if state.end.is_some() {
        return Err(ErrorBody::new(ErrorCode::FailedPrecondition, format!("run {run} has ended")));
    }
    if state.kill.is_some() {
        return Err(ErrorBody::new(ErrorCode::FailedPrecondition, format!("run {run} is being killed")));
    }
    let mut deadline = now.plus(data.grace());
    if let Some(stop) = &state.stop {
        deadline = deadline.min(stop.deadline);
    }
    let event = RunStopRequested { reason: data.reason.clone(), deadline, on_expiry: data.on_expiry };
    Ok(Decided::Append(Draft::caused(command, Some(run), event)))
}

/// The first deadline. The grace is not compared: the event does not keep it.
pub(super) fn repeat(accepted: &AcceptedOrder, asked: RunId, data: &StopRun) -> Option<Decided> {
    let AcceptedOrder::Stop { run, reason, on_expiry, deadline } = accepted else { return None };
    let same = (*run, reason, *on_expiry) == (asked, &data.reason, data.on_expiry);
    same.then_some(Decided::Known(Answer::Stopping(StopAck { run: *run, deadline: *deadline })))
}
