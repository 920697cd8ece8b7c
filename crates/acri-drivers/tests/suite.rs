//! The driver suite, on every driver there is.

#[path = "suite/process.rs"]
mod process;
#[path = "suite/scripted.rs"]
mod scripted;
