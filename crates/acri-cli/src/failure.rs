//! How an error ends: its text on stderr, with the code and what to do next,
//! and the exit status for scripts.

use crate::output::Closed;
use acri::{ErrorBody, ErrorCode};
use acri_bus::port::Fault;
use std::process::ExitCode;

/// Everything went as asked.
pub(crate) const OK: u8 = 0;
/// The answer is no: `verify` found damage, `wait` saw the run fail.
pub(crate) const NO: u8 = 1;
/// Wrong usage, or a request that can never be accepted as it is.
pub(crate) const USAGE: u8 = 2;
/// No such agent, run, harness or file.
pub(crate) const NOT_FOUND: u8 = 3;
/// The state does not allow it.
pub(crate) const PRECONDITION: u8 = 4;
/// Nobody answered, in time or at all.
pub(crate) const UNAVAILABLE: u8 = 5;
/// `run`: acri itself failed, or the run ended without a status of its own.
pub(crate) const RUN_FAILED: u8 = 125;
/// `run`: the program cannot be executed.
pub(crate) const RUN_NOT_EXECUTABLE: u8 = 126;
/// `run`: there is no such program.
pub(crate) const RUN_NO_PROGRAM: u8 = 127;
/// `run`: nobody reads our output any more.
pub(crate) const OUTPUT_CLOSED: u8 = 141;

/// The table of exit statuses in `--help`.
pub(crate) const EXIT_HELP: &str = "\
Exit status:
  0  done                          3  not found
  1  the answer is no, or a fault  4  the state does not allow it
  2  wrong usage or request        5  nobody answered in time
  `acri run` ends with the program's own status, 128 + n if signal n ended it,
  125 if acri failed, 126 if the program cannot be executed, 127 if it is missing.";

/// An error with a message of its own and an exit status.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Failure {
    pub(crate) status: u8,
    pub(crate) message: String,
    pub(crate) hint: Option<String>,
}

impl Failure {
    pub(crate) fn new(status: u8, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), hint: None }
    }

    pub(crate) fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }
}

/// Ends with this status and says nothing more.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("exit status {0}")]
pub(crate) struct Silent(pub(crate) u8);

pub(crate) fn status_of_code(code: ErrorCode) -> u8 {
    match code {
        ErrorCode::Malformed
        | ErrorCode::InvalidArgument
        | ErrorCode::Unsupported
        | ErrorCode::TooLarge
        | ErrorCode::UnknownVerb => USAGE,
        ErrorCode::NotFound => NOT_FOUND,
        ErrorCode::FailedPrecondition | ErrorCode::IdReused => PRECONDITION,
        ErrorCode::Expired | ErrorCode::ResourceExhausted | ErrorCode::Unavailable => UNAVAILABLE,
        ErrorCode::Internal => NO,
    }
}

/// What to do next, per code.
pub(crate) fn advice(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::Malformed => "client and node speak different versions: compare `acri --version` on both",
        ErrorCode::InvalidArgument => "correct the field and ask again",
        ErrorCode::Unsupported => "`acri caps` tells what the harness can do",
        ErrorCode::NotFound => "`acri ps -a` lists agents and their runs",
        ErrorCode::FailedPrecondition => "`acri status` tells the state that stands in the way",
        ErrorCode::Expired => "give the command again, under a new id; check the clock with `acri doctor`",
        ErrorCode::ResourceExhausted => {
            "a limit is reached: `acri doctor` and `acri nodes` tell which; try again later"
        }
        ErrorCode::Unavailable => "is a node up? `acri nodes` lists them, `acri up` starts one here",
        ErrorCode::Internal => "a fault of ours: the node's log tells more; please report it",
        ErrorCode::TooLarge => "put large content into a file in the working directory",
        ErrorCode::UnknownVerb => "client and node speak different versions: compare `acri --version` on both",
        ErrorCode::IdReused => "use a new command id",
    }
}

/// The error code within an error, if it has one.
pub(crate) fn body_of(error: &anyhow::Error) -> Option<ErrorBody> {
    error.chain().find_map(|cause| {
        cause
            .downcast_ref::<acri_client::Error>()
            .map(acri_client::Error::body)
            .or_else(|| cause.downcast_ref::<ErrorBody>().cloned())
            .or_else(|| cause.downcast_ref::<Fault>().map(body_of_fault))
    })
}

fn body_of_fault(fault: &Fault) -> ErrorBody {
    let code = match fault {
        Fault::Unavailable { .. } => ErrorCode::Unavailable,
        Fault::Refused { .. } => ErrorCode::FailedPrecondition,
        Fault::Malformed { .. } => ErrorCode::Internal,
    };
    ErrorBody::new(code, fault.to_string())
}

/// The exit status of an error.
pub(crate) fn status_of(error: &anyhow::Error) -> u8 {
    if error.is::<Closed>() {
        return OK;
    }
    if let Some(Silent(status)) = error.downcast_ref() {
        return *status;
    }
    if let Some(failure) = error.chain().find_map(|cause| cause.downcast_ref::<Failure>()) {
        return failure.status;
    }
    body_of(error).map_or(NO, |body| status_of_code(body.code))
}

/// The lines for stderr; none for a silent end.
pub(crate) fn text_of(error: &anyhow::Error) -> Option<String> {
    if error.is::<Closed>() || error.is::<Silent>() {
        return None;
    }
    let mut text = String::from("acri: ");
    match body_of(error) {
        Some(body) => {
            text.push_str(&format!("{body}"));
            if let Some(field) = &body.field
                && !body.message.contains(field)
            {
                text.push_str(&format!(" (field `{field}`)"));
            }
            let advice = match &body.field {
                Some(_) if body.code == ErrorCode::FailedPrecondition => {
                    "correct the field, or what it names on the node, and ask again"
                }
                _ => advice(body.code),
            };
            text.push_str(&format!("\n      {advice}"));
            text.push_str(&format!("\n      see docs/errors/ACRI-{:04}.md", body.code.number()));
        }
        None => {
            let causes: Vec<_> = error.chain().map(ToString::to_string).collect();
            text.push_str(&causes.join(": "));
        }
    }
    if let Some(hint) = error.chain().find_map(|cause| cause.downcast_ref::<Failure>()).and_then(|f| f.hint.as_ref()) {
        text.push_str(&format!("\n      {hint}"));
    }
    Some(text)
}

/// Ends the program with the exit status of an error, after saying it.
pub(crate) fn end(error: &anyhow::Error, out: &mut crate::output::Out) -> ExitCode {
    if let Some(text) = text_of(error) {
        out.failure(text);
    }
    ExitCode::from(status_of(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_told_with_its_code_its_advice_and_its_page() {
        let error = anyhow::Error::from(ErrorBody::new(ErrorCode::NotFound, "no agent begins with \"ab\""))
            .context("failed to stop");
        assert_eq!(status_of(&error), NOT_FOUND);
        let text = text_of(&error).unwrap();
        assert!(text.starts_with("acri: ACRI-0004 not_found: no agent begins with \"ab\"\n"), "{text}");
        assert!(text.contains("acri ps -a") && text.contains("docs/errors/ACRI-0004.md"), "{text}");
    }

    #[test]
    fn a_closed_output_ends_quietly() {
        let error = anyhow::Error::from(Closed);
        assert_eq!((status_of(&error), text_of(&error)), (OK, None));
    }

    #[test]
    fn every_code_has_an_exit_status_that_is_documented() {
        for code in ErrorCode::ALL {
            assert!((1..=5).contains(&status_of_code(*code)), "{code}");
        }
    }
}
