//! The one list of error codes that a command can be answered with.

use serde::{Deserialize, Serialize};

macro_rules! codes {
    ($($(#[$doc:meta])* $variant:ident = $number:literal, $name:literal, $retryable:literal;)*) => {
        /// A public error code. Each has a page `docs/errors/ACRI-NNNN.md`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub enum ErrorCode {
            $($(#[$doc])* $variant,)*
        }

        impl ErrorCode {
            /// Every code, in order.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// The number, as in `ACRI-0001`.
            #[must_use]
            pub fn number(self) -> u16 {
                match self { $(Self::$variant => $number,)* }
            }

            /// The name on the wire.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Whether the same command may succeed later.
            #[must_use]
            pub fn retryable(self) -> bool {
                match self { $(Self::$variant => $retryable,)* }
            }
        }
    };
}

codes! {
    /// The body is no command of this verb.
    Malformed = 1, "malformed", false;
    /// A field breaks its limit or its rule.
    InvalidArgument = 2, "invalid_argument", false;
    /// Nothing enforces or supports what a field asks for.
    Unsupported = 3, "unsupported", false;
    /// There is no such agent, run or harness.
    NotFound = 4, "not_found", false;
    /// The state does not allow it.
    FailedPrecondition = 5, "failed_precondition", false;
    /// The command is too old, or from the future.
    Expired = 6, "deadline_exceeded", false;
    /// A limit of the node or the bus is reached.
    ResourceExhausted = 7, "resource_exhausted", true;
    /// The owner cannot answer now.
    Unavailable = 8, "unavailable", true;
    /// A fault of ours.
    Internal = 9, "internal", false;
    /// The body is larger than its limit.
    TooLarge = 10, "too_large", false;
    /// There is no such verb.
    UnknownVerb = 11, "unknown_verb", false;
    /// The id was used for another command.
    IdReused = 12, "id_reused", false;
}

impl std::fmt::Display for ErrorCode {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "ACRI-{:04} {}", self.number(), self.name())
    }
}

impl TryFrom<String> for ErrorCode {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        Self::ALL.iter().copied().find(|code| code.name() == name).ok_or_else(|| format!("unknown error code {name:?}"))
    }
}

impl From<ErrorCode> for String {
    fn from(code: ErrorCode) -> Self {
        code.name().to_owned()
    }
}

/// The body of an answer that says no.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{code}: {message}")]
pub struct ErrorBody {
    /// Which error.
    pub code: ErrorCode,
    /// What happened, with the values that matter.
    pub message: String,
    /// The field that is at fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// Whether the same command may succeed later.
    #[serde(default)]
    pub retryable: bool,
}

impl ErrorBody {
    /// An error with its text.
    #[must_use]
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), field: None, retryable: code.retryable() }
    }
}

impl From<crate::spec::Invalid> for ErrorBody {
    fn from(invalid: crate::spec::Invalid) -> Self {
        Self { field: Some(invalid.field.to_owned()), ..Self::new(ErrorCode::InvalidArgument, invalid.to_string()) }
    }
}

impl From<crate::codec::Error> for ErrorBody {
    fn from(error: crate::codec::Error) -> Self {
        Self::new(ErrorCode::Malformed, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_are_unique() {
        let numbers: std::collections::BTreeSet<_> = ErrorCode::ALL.iter().map(|code| code.number()).collect();
        let names: std::collections::BTreeSet<_> = ErrorCode::ALL.iter().map(|code| code.name()).collect();
        assert_eq!((numbers.len(), names.len()), (ErrorCode::ALL.len(), ErrorCode::ALL.len()));
    }
}
