//! The driver suite, on every driver there is, and what only one of them has.
#![expect(clippy::unwrap_used, reason = "all of it is tests, which a broken rule ends")]

#[path = "suite/damage.rs"]
mod damage;
#[path = "suite/process.rs"]
mod process;
#[path = "suite/process_only.rs"]
mod process_only;
#[path = "suite/scripted.rs"]
mod scripted;
