//! Why an operation has no answer that the caller hoped for.

use acri::{ErrorBody, ErrorCode};
use acri_bus::port::Fault;

/// What went wrong. Each has an [`ErrorBody`], see [`Error::body`].
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The owner, or a node, answered no. Nothing was done.
    #[error("{operation}: {body}")]
    Refused {
        /// What was asked.
        operation: &'static str,
        /// The answer.
        body: ErrorBody,
    },
    /// The streams say that there is no such agent or run.
    #[error("{operation}: {body}")]
    NotFound {
        /// What was asked.
        operation: &'static str,
        /// In the words of an answer.
        body: ErrorBody,
    },
    /// Nobody answered until the deadline. The command may have been carried
    /// out: ask again with the same id, or read the status.
    #[error("{operation}: {body}")]
    Unanswered {
        /// What was asked.
        operation: &'static str,
        /// In the words of an answer; tells the last obstacle.
        body: ErrorBody,
    },
    /// The bus failed, or refused the client.
    #[error("{operation}: the bus failed")]
    Bus {
        /// What was asked.
        operation: &'static str,
        /// What the bus said.
        #[source]
        source: Fault,
    },
    /// Something was answered or stored that cannot be read.
    #[error("{operation}: unreadable: {detail}")]
    Unreadable {
        /// What was asked.
        operation: &'static str,
        /// What was found.
        detail: String,
    },
}

impl Error {
    /// The error as a node would answer it.
    #[must_use]
    pub fn body(&self) -> ErrorBody {
        match self {
            Self::Refused { body, .. } | Self::NotFound { body, .. } | Self::Unanswered { body, .. } => body.clone(),
            Self::Bus { source: source @ Fault::Unavailable { .. }, .. } => {
                ErrorBody::new(ErrorCode::Unavailable, source.to_string())
            }
            // Permissions, a missing stream: nothing that a repeat would change.
            Self::Bus { source: source @ Fault::Refused { .. }, .. } => {
                ErrorBody::new(ErrorCode::FailedPrecondition, source.to_string())
            }
            Self::Bus { source, .. } => ErrorBody::new(ErrorCode::Internal, source.to_string()),
            Self::Unreadable { operation, detail } => {
                ErrorBody::new(ErrorCode::Internal, format!("{operation}: unreadable: {detail}"))
            }
        }
    }

    /// Its code.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        self.body().code
    }

    pub(crate) fn not_found(operation: &'static str, message: impl Into<String>) -> Self {
        Self::NotFound { operation, body: ErrorBody::new(ErrorCode::NotFound, message) }
    }

    pub(crate) fn bus(operation: &'static str) -> impl Fn(Fault) -> Self {
        move |source| Self::Bus { operation, source }
    }
}
