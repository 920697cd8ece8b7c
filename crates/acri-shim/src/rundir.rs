//! The run directory: the files that a shim leaves and a restarted node reads.
//!
//! | file | written | holds |
//! |---|---|---|
//! | `lock` | at start | nothing; locked (flock) while the shim lives |
//! | `meta` | before and after the harness is started | [`Meta`] |
//! | `owner` | at each new claim | [`Owner`] |
//! | `secret` | at start | the token that the socket wants: a node killed with SIGKILL has nothing else to come back with |
//! | `kill` | before the first signal of a Kill | [`KillRequest`], the first one wins |
//! | `orphaned` | before the orphan rule kills | [`Orphaned`] |
//! | `exit` | when the tree is proved empty and everything is spooled | [`Exit`] |
//! | `token` | with each release | the node's resume token, opaque |
//! | `reserve` | at start, removed when the disk is full | bytes that make room for `kill` and `exit` |
//! | `socket` | while the shim lives | |
//! | `spool-*` | | see [`crate::spool`] |
//!
//! State files are maps in MessagePack with named fields, replaced by rename, mode 0600. Fields are only ever added and
//! have a default.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::launch::Token;
use crate::limits::{RESERVE_BYTES, STATE_FILE_BYTES_MAX};
use crate::process::{self, Process};
use crate::{sys, tree};

pub(crate) const LOCK: &str = "lock";
pub(crate) const META: &str = "meta";
pub(crate) const OWNER: &str = "owner";
pub(crate) const SECRET: &str = "secret";
pub(crate) const KILL: &str = "kill";
pub(crate) const ORPHANED: &str = "orphaned";
pub(crate) const EXIT: &str = "exit";
pub(crate) const TOKEN: &str = "token";
pub(crate) const RESERVE: &str = "reserve";
pub(crate) const SOCKET: &str = "socket";

/// Version of the files' format.
pub const FORMAT_VERSION: u32 = 1;

/// How far a run has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The harness may have been started, or not: it must not be started again.
    #[default]
    Spawning,
    /// The harness was started.
    Running,
}

/// A way of holding a process tree, strongest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// A cgroup of its own, ended by `cgroup.kill`; dies with the shim through a guardian process.
    Cgroup,
    /// A pid namespace whose init dies with the shim.
    Pidns,
    /// The shim adopts orphans and walks the tree. If the shim dies, only the main process surely dies with it.
    Subreaper,
}

/// What keeps the harness from the state directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Isolation {
    /// Nothing: a harness of the same user can reach the run directory.
    #[default]
    None,
}

/// The file `meta`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Meta {
    /// [`FORMAT_VERSION`] of the writer.
    pub version: u32,
    /// Boot id of the system that it runs or ran on.
    pub boot_id: String,
    /// How far it came.
    pub phase: Phase,
    /// The tier in force; missing while spawning.
    pub tier: Option<Tier>,
    /// The isolation in force.
    pub isolation: Isolation,
    /// The shim.
    pub shim: Process,
    /// The harness's main process, in the shim's pid namespace; missing while spawning.
    pub harness: Option<Process>,
    /// Wall time in nanoseconds since the epoch at which the shim began.
    pub created_wall_ns: u64,
    /// The program as the launch named it.
    pub argv0: String,
    /// The harness's cgroup directory, in the first tier.
    pub cgroup: Option<PathBuf>,
}

/// Who owns the run: the highest epoch seen, and the node incarnation that claimed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Owner {
    /// Counts the owners.
    pub epoch: u64,
    /// UUID of the node process.
    #[serde(with = "serde_bytes")]
    pub incarnation: [u8; 16],
}

/// The file `kill`: a recorded Kill.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct KillRequest {
    /// The command's id.
    pub command_id: String,
    /// Who asked.
    pub principal: String,
    /// Why.
    pub reason: String,
    /// Under which epoch.
    pub epoch: u64,
    /// Wall time of the record in nanoseconds since the epoch.
    pub wall_ns: u64,
    /// CLOCK_BOOTTIME of the record in nanoseconds.
    pub boot_ns: u64,
}

/// The file `orphaned`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Orphaned {
    /// CLOCK_BOOTTIME in nanoseconds of the last valid contact.
    pub last_contact_boot_ns: u64,
    /// Wall time in nanoseconds since the epoch at which the rule struck.
    pub wall_ns: u64,
    /// CLOCK_BOOTTIME in nanoseconds at which the rule struck.
    pub boot_ns: u64,
    /// The owner that stayed away.
    pub owner: Owner,
}

/// Why a run ended, as far as the shim knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitReason {
    /// The main process ended by itself or by a signal that was not the shim's.
    #[default]
    Exited,
    /// It ended after a Stop.
    Stopped,
    /// A Kill was recorded before the tree was empty.
    Killed,
    /// The orphan rule struck.
    Orphaned,
}

/// The file `exit`: written when the tree is proved empty, its pipes are drained and everything is spooled.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Exit {
    /// Exit code of the main process, if it exited.
    pub code: Option<i32>,
    /// Signal that ended the main process, if one did.
    pub signal: Option<i32>,
    /// It dumped core.
    pub core_dumped: bool,
    /// Why the run ended.
    pub reason: ExitReason,
    /// Processes that the main process left behind and that were killed, at the least.
    pub leftovers: u32,
    /// Wall time in nanoseconds since the epoch at which the main process was seen to have ended.
    pub wall_ns: u64,
    /// CLOCK_BOOTTIME of the same in nanoseconds.
    pub boot_ns: u64,
    /// The spool's final end offset.
    pub spool_end: u64,
    /// Bytes of stdout spooled in all.
    pub stdout_bytes: u64,
    /// Bytes of stderr spooled in all.
    pub stderr_bytes: u64,
}

/// Everything that a run directory tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scan {
    /// A shim holds the lock.
    pub alive: bool,
    /// Missing: nothing was ever started here, or a living shim has only begun.
    pub meta: Option<Meta>,
    /// Present: the run has ended and the spool is complete.
    pub exit: Option<Exit>,
    /// The recorded Kill.
    pub kill: Option<KillRequest>,
    /// The orphan rule struck.
    pub orphaned: Option<Orphaned>,
    /// The last resume token.
    pub token: Option<Vec<u8>>,
    /// The token for the socket.
    pub secret: Option<Token>,
    /// The highest epoch claimed.
    pub owner: Option<Owner>,
    /// The machine was restarted since: nothing of the run can be alive.
    pub boot_changed: bool,
    /// Files that are there and cannot be understood, by name. What they would say is missing above, but for a `kill`:
    /// that there is one is all that counts.
    pub damaged: Vec<&'static str>,
}

impl Scan {
    /// A run was started here, whether `meta` can still be read or not.
    pub fn was_started(&self) -> bool {
        self.meta.is_some() || self.is_unidentified()
    }

    /// A run was started here, and `meta` cannot tell any more what its shim and its tree were.
    pub fn is_unidentified(&self) -> bool {
        self.damaged.contains(&META)
    }
}

/// Reads a run directory. What is damaged is told in [`Scan::damaged`]; an error is one of the file system.
///
/// `alive` is looked at first: if it is false, no file changes any more.
pub fn scan(dir: &Path) -> io::Result<Scan> {
    let alive = alive(dir)?;
    let mut damaged = Vec::new();
    let meta: Option<Meta> = readable(dir, META, &mut damaged)?;
    let boot_changed = match &meta {
        Some(meta) => meta.boot_id != process::boot_id()?,
        None => false,
    };
    let secret = read_bytes(dir, SECRET)?.and_then(|bytes| {
        let token = <[u8; 32]>::try_from(bytes.as_slice()).map(Token::from_bytes);
        token.map_err(|_| damaged.push(SECRET)).ok()
    });
    let exit = readable(dir, EXIT, &mut damaged)?;
    let kill = readable(dir, KILL, &mut damaged)?;
    Ok(Scan {
        alive,
        meta,
        exit,
        kill: if damaged.contains(&KILL) { Some(KillRequest::default()) } else { kill },
        orphaned: readable(dir, ORPHANED, &mut damaged)?,
        token: read_bytes(dir, TOKEN)?,
        secret,
        owner: readable(dir, OWNER, &mut damaged)?,
        boot_changed,
        damaged,
    })
}

/// Like [`read`], with damage noted beside it.
fn readable<T: DeserializeOwned>(
    dir: &Path,
    name: &'static str,
    damaged: &mut Vec<&'static str>,
) -> io::Result<Option<T>> {
    match read(dir, name) {
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            damaged.push(name);
            Ok(None)
        }
        other => other,
    }
}

/// True if a shim holds the lock of this directory.
pub(crate) fn alive(dir: &Path) -> io::Result<bool> {
    let file = match File::open(dir.join(LOCK)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    // A shared lock for an instant: several scans do not see each other, and a shim that starts waits for it.
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(false),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// Removes a run directory and all in it. Refuses with `ResourceBusy` while a shim lives there.
pub fn remove(dir: &Path) -> io::Result<()> {
    if !dir.exists() {
        return Ok(());
    }
    if alive(dir)? {
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, format!("a shim lives in {}", dir.display())));
    }
    std::fs::remove_dir_all(dir)
}

/// Records a Kill in the directory of a run whose shim cannot be asked yet: it is honoured before and right after the
/// harness is started. The first recorded Kill stays. True if this one was recorded.
///
/// It may come a moment too late for that last look. So a caller whose launch succeeds in spite of it asks for the Kill
/// over the socket as well, which is answered with `already`.
pub fn latch_kill(dir: &Path, request: &KillRequest) -> io::Result<bool> {
    let (temporary, bytes) = (dir.join(format!(".kill.{}", std::process::id())), to_bytes(request)?);
    write_new(&temporary, &bytes)?;
    let linked = std::fs::hard_link(&temporary, dir.join(KILL));
    std::fs::remove_file(&temporary)?;
    match linked {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

/// Kills what a dead shim may have left of its tree and waits until it is gone, as far as it can be found: the cgroup of
/// the first tier, the main process and its descendants in the third. Returns how many processes were signalled.
/// Refuses with `ResourceBusy` while the shim lives; does nothing after a restart of the machine. Waits up to 3 seconds,
/// then fails with `TimedOut`.
///
/// Where `meta` is missing or damaged, or the whole directory gone, a shim that still lives is ended too: nobody can
/// reach it any more. It is found by the name that it runs under, and a cgroup below `cgroup_parent` (missing: the usual
/// places) by its name; returned is then the number of shims found.
pub fn sweep(dir: &Path, cgroup_parent: Option<&Path>) -> io::Result<usize> {
    if alive(dir)? {
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, format!("a shim lives in {}", dir.display())));
    }
    match usable_meta(dir)? {
        Some(meta) if meta.boot_id == process::boot_id()? => tree::sweep(&meta),
        Some(_) => Ok(0),
        None => hunt(dir, cgroup_parent),
    }
}

/// Kills a shim that does not answer, with its tree; what is left is [`sweep`]'s. Where `meta` does not tell who it is, it
/// is found as [`sweep`] does. Does nothing if there is none. Waits up to 3 seconds for the tree.
pub fn end_shim(dir: &Path, cgroup_parent: Option<&Path>) -> io::Result<()> {
    match usable_meta(dir)? {
        // Another boot's number says nothing.
        Some(meta) if meta.boot_id == process::boot_id()? => tree::end_shim(meta.shim, dir),
        Some(_) => Ok(()),
        None => hunt(dir, cgroup_parent).map(drop),
    }
}

/// Ends what no file leads to. What was ended is noted in a new `meta`: something ran here, and nothing of it lives.
fn hunt(dir: &Path, cgroup_parent: Option<&Path>) -> io::Result<usize> {
    let found = tree::hunt(cgroup_parent, dir)?;
    if found > 0 && dir.try_exists()? {
        let meta = Meta { version: FORMAT_VERSION, boot_id: process::boot_id()?, ..Meta::default() };
        replace(dir, META, &to_bytes(&meta)?)?;
    }
    Ok(found)
}

fn usable_meta(dir: &Path) -> io::Result<Option<Meta>> {
    readable(dir, META, &mut Vec::new())
}

fn damaged(name: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("damaged state file {name}"))
}

fn to_bytes<T: Serialize>(value: &T) -> io::Result<Vec<u8>> {
    rmp_serde::encode::to_vec_named(value).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

pub(crate) fn read<T: DeserializeOwned>(dir: &Path, name: &str) -> io::Result<Option<T>> {
    let Some(bytes) = read_bytes(dir, name)? else { return Ok(None) };
    let mut rest = bytes.as_slice();
    let value = rmp_serde::from_read(&mut rest).map_err(|_| damaged(name))?;
    if rest.is_empty() { Ok(Some(value)) } else { Err(damaged(name)) }
}

fn read_bytes(dir: &Path, name: &str) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(dir.join(name)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    file.take(STATE_FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)
}

fn replace(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let temporary = dir.join(format!(".{name}.new"));
    let written = write_new(&temporary, bytes).and_then(|()| std::fs::rename(&temporary, dir.join(name)));
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written
}

/// The shim's hand on its directory.
#[derive(Debug)]
pub(crate) struct Files {
    dir: PathBuf,
    /// Locked for the shim's life.
    _lock: File,
}

impl Files {
    /// Takes the lock, or `None` if another shim has it. Waits a moment for a scan to let go.
    pub(crate) fn lock(dir: &Path) -> io::Result<Option<Self>> {
        let path = dir.join(LOCK);
        let lock = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path)?;
        let deadline = sys::boot_ns() + tree::nanos(crate::limits::LOCK_WAIT);
        loop {
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Some(Self { dir: dir.to_owned(), _lock: lock })),
                Err(rustix::io::Errno::WOULDBLOCK) if sys::boot_ns() < deadline => tree::pause(),
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Writes the bytes that [`Self::write_surely`] can give up.
    pub(crate) fn reserve(&self) -> io::Result<()> {
        write_new(&self.dir.join(RESERVE), &[0x5a; RESERVE_BYTES])
    }

    pub(crate) fn write<T: Serialize>(&self, name: &str, value: &T) -> io::Result<()> {
        self.write_bytes(name, &to_bytes(value)?)
    }

    pub(crate) fn write_bytes(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        replace(&self.dir, name, bytes)
    }

    /// Like [`Self::write`], and on a full disk once more without the reserve.
    pub(crate) fn write_surely<T: Serialize>(&self, name: &str, value: &T) -> io::Result<()> {
        self.write(name, value).or_else(|_| {
            self.remove(RESERVE);
            self.write(name, value)
        })
    }

    pub(crate) fn remove(&self, name: &str) {
        let _ = std::fs::remove_file(self.dir.join(name));
    }
}
