//! Remove.

use super::{super::Agent, Decided, Draft, is_removed, open_run};
use crate::appender::{Answer, Command};
use acri::{
    ErrorBody,
    command::{RemoveAck, RemoveAgent},
    event::AgentRemoved,
};

pub(super) fn decide(agent: &Agent, command: &Command, data: &RemoveAgent) -> Result<Decided, ErrorBody> {
    if agent.removed() {
        return Err(is_removed());
    }
    if let Some(run) = agent.open_run() {
        return Err(open_run(run));
    }
    Ok(Decided::Append(Draft::caused(command, None, AgentRemoved { reason: data.reason.clone() })))
}

pub(super) fn repeat(agent: &Agent, reason: &str, data: &RemoveAgent) -> Option<Decided> {
    (reason == data.reason).then_some(Decided::Known(Answer::Removed(RemoveAck { agent: agent.id })))
}
