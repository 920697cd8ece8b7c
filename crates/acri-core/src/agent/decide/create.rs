//! Create, to an agent that exists.

use super::super::Agent;
use acri::{ErrorBody, ErrorCode};

/// Another command's Create cannot make this agent again.
pub(crate) fn already_there(agent: &Agent) -> ErrorBody {
    ErrorBody::new(ErrorCode::FailedPrecondition, format!("agent {} was created by another command", agent.id))
}
