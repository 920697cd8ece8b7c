//! The holder of one local harness process.
//!
//! `acri shim` is a small synchronous process that owns a harness's stdout, stderr and process tree and outlives the node
//! that started it. It appends what it reads to a spool in its run directory, answers a few requests on a unix socket
//! there, and ends the tree when it is told to, when its owner is gone for too long, or (where the system can do that)
//! when it dies itself. This library is both sides: the shim ([`dispatch`], [`main_entry`]) and what a node needs to
//! start, find, read and recover one.
//!
//! It must never
//! - start a second thread or an async runtime in the shim,
//! - signal a bare process number: signals go through a pidfd whose process was verified, or through the cgroup,
//! - put a secret into an argument list or an environment of its own,
//! - lose a byte that it has read, or hand out a record that it cannot prove whole,
//! - report a tree as ended that is not proved empty.
//!
//! Start reading at [`Launch`] and [`spawn`] (how a shim comes to be), then [`wire`] (what it can be asked),
//! [`spool`] (what it leaves), [`rundir`] (its files, and what a restarted node learns from them); inside, `holder` is
//! the loop and `tree` the three ways of holding a process tree.

pub mod client;
mod harness;
mod holder;
mod launch;
pub mod limits;
mod process;
pub mod rundir;
pub mod spool;
mod sys;
mod tree;
pub mod wire;

use std::ffi::OsString;
use std::process::ExitCode;

pub use launch::{FailureKind, Info, Launch, Limits, SpawnError, Spawned, Token, spawn};
pub use process::{Process, boot_id};
pub use rundir::{
    Exit, ExitReason, Isolation, KillRequest, Meta, Orphaned, Owner, Phase, Scan, Tier, end_shim, latch_kill, remove,
    scan, sweep,
};

/// The hidden verb that starts a shim.
pub const VERB: &str = "shim";

/// Runs one of the shim's hidden verbs if `args[1]` is one; `args[0]` is the program's name.
///
/// To be called first in `main`, before anything starts a thread, reads a configuration or writes to stdout.
pub fn dispatch(args: &[OsString]) -> Option<ExitCode> {
    let verb = args.get(1)?;
    (verb == VERB).then(|| main_entry(&args[2..]))
}

/// The shim itself: reads its launch description from stdin, answers on stdout, and returns when the harness has ended
/// and everything is recorded. Takes no arguments.
pub fn main_entry(args: &[OsString]) -> ExitCode {
    if args.is_empty() { holder::main() } else { ExitCode::from(2) }
}
