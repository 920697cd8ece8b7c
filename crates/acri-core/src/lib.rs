//! The brain: what may happen to an agent and its runs, and what is owed.
//!
//! Begin with [`agent`]: `decide` may refuse, `evolve` may not, `due` derives
//! what is owed. [`appender`] sequences the appends of one agent; `writer`
//! turns a harness's output into log frames. [`check`] verifies a history.
//!
//! This crate must never do IO, read a clock, draw a random number, spawn,
//! await, or know that NATS exists.
#![forbid(unsafe_code)]
#![warn(missing_docs)]
#![warn(clippy::wildcard_enum_match_arm)]

pub mod agent;
pub mod appender;
pub mod check;
pub mod writer;
