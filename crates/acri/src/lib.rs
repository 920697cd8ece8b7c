//! The contract of ACRI: what travels between an orchestrator, a node and the
//! streams, as types.
//!
//! Begin with [`subject`] (where each message goes), then [`command`] (what an
//! orchestrator asks), [`event`] (what happened) and [`log`] (what a harness
//! said). [`codec`] is the only way in and out of bytes.
//!
//! This crate must never do IO, read a clock, draw a random number, or know
//! that NATS, tokio or a process exists: a stranger may link it alone to read
//! an archive.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod capability;
pub mod codec;
pub mod command;
pub mod cursor;
pub mod error;
pub mod event;
pub mod id;
pub mod limits;
pub mod log;
pub mod node;
pub mod payload;
pub mod spec;
pub mod status;
pub mod subject;
pub mod time;
pub mod value;

pub use capability::CapabilitySet;
pub use error::{ErrorBody, ErrorCode};
pub use event::{Event, EventEnvelope};
pub use id::{AgentId, CommandId, Epoch, EventId, HarnessType, Incarnation, NodeId, RunId, StreamSeq};
pub use payload::Payload;
pub use spec::AgentSpec;
pub use status::{AgentStatus, RunState};
pub use subject::Subject;
pub use time::Timestamp;
