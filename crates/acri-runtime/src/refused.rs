//! What a refused append is answered with: the bus's word, its error code, and
//! the next step.

use acri::{ErrorBody, ErrorCode};
use acri_bus::port::{Fault, Why};

pub(crate) fn append(fault: &Fault) -> ErrorBody {
    let (code, next) = match fault {
        Fault::Refused { why: Why::Full, .. } => (
            ErrorCode::ResourceExhausted,
            "there is no room for it: give the event stream, the account or the bus's disk more",
        ),
        Fault::Refused { why: Why::TooLarge, .. } => (
            ErrorCode::TooLarge,
            "put large content into a file and name it in the task, or let the event stream take larger messages",
        ),
        Fault::Refused { why: Why::Permission, .. } => {
            (ErrorCode::FailedPrecondition, "the node's user of the bus must be allowed to publish events")
        }
        Fault::Refused { why: Why::State, .. } => {
            (ErrorCode::FailedPrecondition, "`acri doctor` compares the bus with what it must be")
        }
        Fault::Unavailable { .. } | Fault::Malformed { .. } => {
            (ErrorCode::Unavailable, "`acri doctor` looks at the bus")
        }
    };
    ErrorBody::new(code, format!("{fault}; {next}"))
}
