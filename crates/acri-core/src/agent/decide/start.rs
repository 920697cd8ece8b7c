//! Start.

use super::{
    super::{Agent, evolve::task_digest},
    Decided, Draft, is_removed, open_run,
};
use crate::appender::{Answer, Command};
use acri::{
    ErrorBody, ErrorCode, RunId, command::StartRun, event::RunAccepted, id::Sha256Digest, limits::RUNS_PER_AGENT_MAX,
};

pub(super) fn decide(agent: &Agent, command: &Command, data: &StartRun) -> Result<Decided, ErrorBody> {
    if agent.removed() {
        return Err(is_removed());
    }
    if let Some(run) = agent.open_run() {
        return Err(open_run(run));
    }
    if agent.runs.len() >= RUNS_PER_AGENT_MAX {
        let text = format!("the agent has had {RUNS_PER_AGENT_MAX} runs, the most it may have");
        return Err(ErrorBody { retryable: false, ..ErrorBody::new(ErrorCode::ResourceExhausted, text) });
    }
    let run = RunId::derive(agent.id, command.id);
    Ok(Decided::Append(Draft::caused(command, Some(run), RunAccepted { task: data.task.clone() })))
}

/// The handle, even after the run has ended.
pub(super) fn repeat(agent: &Agent, run: RunId, task: Sha256Digest, data: &StartRun) -> Option<Decided> {
    (task_digest(&data.task) == task).then(|| Decided::Known(Answer::Started(agent.run_handle(run))))
}
