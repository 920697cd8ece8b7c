//! The actors: one node, its agents and their runs.
//!
//! ```text
//!  data runtime                                   control thread, a bus connection of its own
//!  Node ─ service (Create, Capabilities)          lease keeper
//!   └ Supervisor, one a harness type              subscriptions of all agents ─► kill switches
//!      └ agent actor: the shell round an Appender ◄──────────────────────────┘ (all but the kill effect)
//!         └ run actor: session, pump (log writer)
//! ```
//!
//! Begin with [`node`], then [`agent`]: it calls `Appender::step` and carries
//! out what that says; [`machine`] has what it shares with the control thread.
//!
//! An actor never decides about the domain: a rule belongs in `acri-core`.
//! Kill never passes a mailbox: it goes from the control thread to the switch.
#![forbid(unsafe_code)]

mod adopt;
mod adoptions;
mod agent;
pub mod clock;
pub mod config;
mod control;
mod counters;
mod frames;
mod histories;
mod lease;
mod machine;
pub mod node;
mod pump;
mod refused;
mod request;
mod room;
mod run;
mod service;
mod supervisor;

pub use config::Config;
pub use node::{Ended, Node};
