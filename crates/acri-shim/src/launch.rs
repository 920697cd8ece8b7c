//! Starting a shim, the node's side.

use std::io::{self, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use crate::limits::{
    LAUNCH_ANSWER, LAUNCH_BYTES_MAX, MESSAGE_BYTES_MAX, ORPHAN_AFTER, SEGMENT_BYTES, SPOOL_BYTES_MAX, STOP_DRAIN,
};
use crate::process::Process;
use crate::rundir::{self, Isolation, Owner, Tier};
use crate::wire::{self, Decoder};
use crate::{VERB, sys};

/// The secret that opens a shim's socket. Neither shown by `Debug` nor compared in variable time.
#[derive(Clone, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Token(#[serde(with = "serde_bytes")] [u8; 32]);

impl Token {
    /// A new one from the system's randomness.
    pub fn random() -> io::Result<Self> {
        Ok(Self(sys::random()?))
    }

    /// From its bytes.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        // All bytes are looked at whatever they are, and the optimiser is kept from ending early.
        let differences = self.0.iter().zip(other.0).fold(0u8, |sum, (a, b)| sum | (a ^ b));
        std::hint::black_box(differences) == 0
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

/// The bounds of one run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// Unreleased spool bytes at which the shim stops reading and the harness blocks.
    pub spool_bytes_max: u64,
    /// Size in bytes at which a segment is ended.
    pub segment_bytes: u64,
    /// Time without contact of a leased owner after which the tree is killed.
    pub orphan_after: Duration,
    /// How long the pipes are still read after the main process ended before what it left is killed.
    pub stop_drain: Duration,
    /// Open files that the harness may have at first (the soft limit; it may raise it). Missing: as many as the shim.
    pub open_files: Option<u64>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            spool_bytes_max: SPOOL_BYTES_MAX,
            segment_bytes: SEGMENT_BYTES,
            orphan_after: ORPHAN_AFTER,
            stop_drain: STOP_DRAIN,
            open_files: None,
        }
    }
}

/// What is to be started, and how.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Launch {
    /// The run directory, absolute; exists, belongs to the caller, mode 0700, holds no run yet.
    pub dir: PathBuf,
    /// The program and its arguments. Without a slash the program is looked up on the PATH of `env`.
    pub argv: Vec<String>,
    /// The working directory, absolute.
    pub cwd: PathBuf,
    /// The complete environment; nothing is inherited.
    pub env: Vec<(String, String)>,
    /// The first owner; the orphan timer starts with the launch.
    pub owner: Owner,
    /// The bounds.
    pub limits: Limits,
    /// Tiers that may be used, the preferred one first.
    pub tiers: Vec<Tier>,
    /// Where the harness's cgroup is made; missing: the caller's own cgroup if writable, else the hierarchy's root.
    pub cgroup_parent: Option<PathBuf>,
}

/// A shim that was started.
#[derive(Debug)]
pub struct Spawned {
    /// The shim is a child of the caller, who must wait for it in the end.
    pub child: Child,
    /// Opens its socket.
    pub token: Token,
    /// What is in force.
    pub info: Info,
}

impl Spawned {
    /// The shim's process number.
    pub fn shim_pid(&self) -> u32 {
        self.child.id()
    }
}

/// What is in force for a run that was started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Info {
    /// How the tree is held.
    pub tier: Tier,
    /// What keeps the harness from the state directory.
    #[serde(default)]
    pub isolation: Isolation,
    /// The shim.
    #[serde(default)]
    pub shim: Process,
    /// The main process, in the shim's pid namespace.
    #[serde(default)]
    pub harness: Process,
}

/// The kind of a failed launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The program does not exist.
    NotFound,
    /// The program may not be executed.
    Permission,
    /// The working directory is missing, not a directory, or may not be entered.
    Cwd,
    /// Too many processes, descriptors, arguments; too little memory.
    Limits,
    /// None of the allowed tiers can be had here.
    Tier,
    /// A Kill was recorded in the run directory before the start.
    Killed,
    /// A shim lives in this run directory.
    AlreadyRunning,
    /// A run was started in this directory before.
    AlreadyStarted,
    /// Anything else.
    #[default]
    Other,
}

/// Why a launch failed.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The shim said so; nothing was started and nothing is left running. The text names the path.
    #[error("start the harness: {text}")]
    Failed {
        /// What stood in the way.
        kind: FailureKind,
        /// The same for people.
        text: String,
    },
    /// The shim could not be started.
    #[error("start the shim {}", exe.display())]
    Shim {
        /// The program tried.
        exe: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The shim gave no answer and was killed. Whether the harness was ever started, the run directory tells: if it has a
    /// `meta`, it may have been.
    #[error("get an answer of the shim within {limit:?}")]
    NoAnswer {
        /// How long it was waited for.
        limit: Duration,
        /// What went wrong, if it was not time.
        #[source]
        source: Option<io::Error>,
    },
}

/// What the node sends over the shim's stdin: never arguments or environment, which others can read.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) launch: Launch,
    pub(crate) token: Token,
}

/// The shim's one answer over its stdout.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Answer {
    Ready(Info),
    Failed { kind: FailureKind, text: String },
}

/// Starts `exe shim` for a run and waits for its answer, at most 10 seconds.
///
/// The run directory must exist. On `Failed` nothing runs and the directory holds no `meta`; it may be removed or used
/// again, unless the kind is `AlreadyRunning` or `AlreadyStarted`: then it belongs to the other run. Blocks.
pub fn spawn(exe: &Path, launch: &Launch) -> Result<Spawned, SpawnError> {
    let shim = |source| SpawnError::Shim { exe: exe.to_owned(), source };
    let token = Token::random().map_err(shim)?;
    let order = wire::encode(&Order { launch: check(launch)?.clone(), token: token.clone() });
    if order.len() > LAUNCH_BYTES_MAX {
        let text = format!("a launch of {} bytes exceeds the limit of {LAUNCH_BYTES_MAX}", order.len());
        return Err(SpawnError::Failed { kind: FailureKind::Limits, text });
    }
    // No pre_exec: the standard library can then use vfork, which a large node with many threads needs. The shim itself
    // makes its session, closes what it inherited and goes to the root directory.
    #[expect(clippy::disallowed_methods, reason = "this is the place where shims are spawned")]
    let mut command = Command::new(exe);
    command
        .arg0(process_name(&launch.dir))
        .arg(VERB)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut child = command.spawn().map_err(shim)?;
    match converse(&mut child, &order) {
        Ok(Answer::Ready(info)) => Ok(Spawned { child, token, info }),
        Ok(Answer::Failed { kind, text }) => {
            let _ = child.wait();
            Err(SpawnError::Failed { kind, text })
        }
        Err(source) => {
            let _ = child.kill();
            let _ = child.wait();
            // What it may have begun is ended with it; a failure here leaves `meta`, by which recovery finds the rest.
            let _ = rundir::sweep(&launch.dir, launch.cgroup_parent.as_deref());
            let source = (source.kind() != io::ErrorKind::TimedOut).then_some(source);
            Err(SpawnError::NoAnswer { limit: LAUNCH_ANSWER, source })
        }
    }
}

/// The name that a shim runs under: the last way to find it, and what `ps` shows.
pub(crate) fn process_name(run_dir: &Path) -> String {
    format!("acri-shim:{}", run_dir.display())
}

/// Paths travel as text.
fn check(launch: &Launch) -> Result<&Launch, SpawnError> {
    let paths = [Some(&launch.dir), Some(&launch.cwd), launch.cgroup_parent.as_ref()];
    match paths.into_iter().flatten().find(|path| path.to_str().is_none()) {
        Some(path) => {
            let text = format!("path {} is not UTF-8", path.display());
            Err(SpawnError::Failed { kind: FailureKind::Other, text })
        }
        None => Ok(launch),
    }
}

fn converse(child: &mut Child, order: &[u8]) -> io::Result<Answer> {
    let (Some(mut input), Some(mut output)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(io::ErrorKind::BrokenPipe.into());
    };
    // The shim reads all of it before it does anything, so this cannot block for long.
    input.write_all(order)?;
    drop(input);
    let deadline = sys::boot_ns() + crate::tree::nanos(LAUNCH_ANSWER);
    let mut decoder = Decoder::new(MESSAGE_BYTES_MAX);
    let mut bytes = [0u8; 4096];
    loop {
        if let Some(answer) = decoder.pop().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))? {
            return Ok(answer);
        }
        let left = deadline.saturating_sub(sys::boot_ns());
        if left == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let timeout = timespec(left);
        match poll(&mut [PollFd::new(&output, PollFlags::IN)], Some(&timeout)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => continue,
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        match output.read(&mut bytes)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => decoder.push(&bytes[..n]),
        }
    }
}

/// Nanoseconds as the kernel wants them.
pub(crate) fn timespec(ns: u64) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX),
        tv_nsec: (ns % 1_000_000_000).cast_signed(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_not_shown() {
        let token = Token::from_bytes([7; 32]);
        assert_eq!(format!("{token:?}"), "Token(..)");
        assert_ne!(token, Token::from_bytes([8; 32]));
    }
}
