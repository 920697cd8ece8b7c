//! The log: the port through which everything reaches the bus, its adapter to
//! NATS JetStream, its adapter in memory (with faults), and the helper that
//! finds or starts a local server.
//!
//! Begin with [`port`]: it states the rules that both adapters keep, and
//! `suite` (feature `testing`) proves that they do.
//!
//! This crate must never decide about the domain: it does not fold events,
//! and knows of an event only what stands in its envelope.
#![forbid(unsafe_code)]

pub mod local;
mod login;
pub mod memory;
pub mod nats;
pub mod port;
#[cfg(feature = "testing")]
pub mod suite;
mod version;

pub use version::Version;
