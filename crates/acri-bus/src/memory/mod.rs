//! The port in memory: for tests of what stands upon it, and for the model
//! that the checker walks over.
//!
//! [`State`] is the bus as a value: deterministic, without a clock, without a
//! task, `Clone + Eq + Hash`. [`MemoryBus`] puts it behind the asynchronous
//! port, one handle a client, and [`fault`] makes it fail as a real one does.

mod bus;
mod commands;
pub mod fault;
mod state;

pub use bus::MemoryBus;
pub use state::{DUPLICATE_WINDOW, MARKER_TTL, State};
