//! The shim's own process: set-up, then one loop until the harness has ended and all is recorded.

mod connection;
mod ending;
mod output;
mod requests;
mod state;

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::ExitCode;

use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use rustix::process::{DumpableBehavior, set_dumpable_behavior, setsid};

use crate::harness::{Failure, Plan};
use crate::launch::{Answer, FailureKind, Info, Launch, Order};
use crate::limits::{LAUNCH_BYTES_MAX, PIPE_BYTES};
use crate::process::{self, Process};
use crate::rundir::{self, EXIT, FORMAT_VERSION, Files, KILL, META, Meta, OWNER, Phase, RESERVE, SECRET, SOCKET};
use crate::tree::{Place, Tree};
use crate::wire::{self, Decoder};
use crate::{spool, sys};
use state::Holder;

/// The OOM score adjustment of a shim, where it may be set.
const OOM_SCORE: &[u8] = b"-900";
const OOM_FILE: &str = "/proc/self/oom_score_adj";

/// The whole life of a shim.
pub(crate) fn main() -> ExitCode {
    let Ok((order, answer, oom_score)) = arrive() else { return ExitCode::from(2) };
    let mut answer = File::from(answer);
    match prepare(&order, oom_score) {
        Ok(holder) => {
            let info = holder.info();
            drop(order);
            // If the node died meanwhile nobody reads this; the run goes on and is found by its successor.
            let _ = answer.write_all(&wire::encode(&Answer::Ready(info)));
            drop(answer);
            holder.run();
            ExitCode::SUCCESS
        }
        Err(Failure { kind, text }) => {
            let _ = answer.write_all(&wire::encode(&Answer::Failed { kind, text }));
            ExitCode::from(1)
        }
    }
}

/// Cuts every tie to the process that started us, takes protection, and reads the order.
fn arrive() -> io::Result<(Order, OwnedFd, Option<Vec<u8>>)> {
    sys::close_others(&[]);
    let (input, answer) = (sys::take_inherited(0)?, sys::take_inherited(1)?);
    sys::null_stdio()?;
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM, libc::SIGPIPE, libc::SIGQUIT, libc::SIGXFSZ] {
        sys::ignore_signal(signal);
    }
    // Fails only if we lead a group already; then we are out of the terminal's reach as well.
    let _ = setsid();
    std::env::set_current_dir("/")?;
    let _ = rustix::thread::set_name(c"acri-shim");
    let oom_score = protect_from_oom();
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let mut bytes = Vec::new();
    File::from(input).take(u64::try_from(LAUNCH_BYTES_MAX).unwrap_or(u64::MAX)).read_to_end(&mut bytes)?;
    let mut decoder = Decoder::new(LAUNCH_BYTES_MAX);
    decoder.push(&bytes);
    let order = decoder.pop().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    Ok((order.ok_or(io::ErrorKind::UnexpectedEof)?, answer, oom_score))
}

/// Lowers the own OOM score and returns the old one for the harness; `None` if that is not permitted.
fn protect_from_oom() -> Option<Vec<u8>> {
    let old = std::fs::read(OOM_FILE).ok()?;
    std::fs::write(OOM_FILE, OOM_SCORE).ok()?;
    Some(old)
}

/// Takes the run directory and starts the harness in it. On failure nothing is left that says something was started.
fn prepare(order: &Order, oom_score: Option<Vec<u8>>) -> Result<Holder, Failure> {
    let launch = &order.launch;
    let at_dir = |error: io::Error| Failure::at(&launch.dir, &error);
    let Some(files) = Files::lock(&launch.dir).map_err(at_dir)? else {
        return Err(Failure::new(FailureKind::AlreadyRunning, format!("a shim lives in {}", launch.dir.display())));
    };
    if launch.dir.join(META).exists() || launch.dir.join(EXIT).exists() {
        let text = format!("a run was started in {} before", launch.dir.display());
        return Err(Failure::new(FailureKind::AlreadyStarted, text));
    }
    occupy(order, files, oom_score).inspect_err(|_| vacate(&launch.dir))
}

/// Removes what [`occupy`] wrote; a recorded Kill stays.
fn vacate(dir: &Path) {
    for name in [META, SECRET, OWNER, RESERVE, SOCKET] {
        let _ = std::fs::remove_file(dir.join(name));
    }
    spool::Writer::discard(dir);
}

fn occupy(order: &Order, files: Files, oom_score: Option<Vec<u8>>) -> Result<Holder, Failure> {
    let launch = &order.launch;
    let at_dir = |error: io::Error| Failure::at(&launch.dir, &error);
    let spool = spool::Writer::create(files.dir(), launch.limits.segment_bytes).map_err(at_dir)?;
    files.reserve().map_err(at_dir)?;
    files.write_bytes(SECRET, order.token.as_bytes()).map_err(at_dir)?;
    files.write(OWNER, &launch.owner).map_err(at_dir)?;
    let listener = bind(files.dir()).map_err(at_dir)?;
    let (stdout, stdout_theirs) = output_pipe().map_err(at_dir)?;
    let (stderr, stderr_theirs) = output_pipe().map_err(at_dir)?;
    let plan = Plan::new(launch, stdout_theirs, stderr_theirs, oom_score)?;
    let mut meta = new_meta(launch).map_err(at_dir)?;
    files.write(META, &meta).map_err(at_dir)?;
    // The latch: a Kill that came while we were being started. Looked at here and again when the harness runs.
    if rundir::read::<rundir::KillRequest>(files.dir(), KILL).map_err(at_dir)?.is_some() {
        return Err(Failure::new(FailureKind::Killed, "a Kill was recorded before the start"));
    }
    let place = Place { plan: &plan, cgroup_parent: launch.cgroup_parent.as_deref(), run_dir: &launch.dir };
    let tree = Tree::start(&launch.tiers, &place)?;
    drop(plan);
    meta.phase = Phase::Running;
    meta.tier = Some(tree.tier());
    meta.harness = Some(tree.main());
    meta.cgroup = tree.cgroup_dir().map(Path::to_owned);
    let written = files.write_surely(META, &meta);
    let mut holder = Holder::new(state::Parts {
        files,
        meta,
        token: order.token.clone(),
        limits: launch.limits.clone(),
        owner: launch.owner,
        spool,
        pipes: [stdout, stderr],
        tree,
        listener,
    })
    .map_err(at_dir)?;
    if written.is_err() {
        holder.retry_meta();
    }
    holder.honour_latch();
    Ok(holder)
}

fn new_meta(launch: &Launch) -> io::Result<Meta> {
    let own = i32::try_from(std::process::id()).map_err(|_| io::ErrorKind::InvalidData)?;
    Ok(Meta {
        version: FORMAT_VERSION,
        boot_id: process::boot_id()?,
        phase: Phase::Spawning,
        shim: Process::of(own)?,
        created_wall_ns: sys::wall_ns(),
        argv0: launch.argv.first().cloned().unwrap_or_default(),
        ..Meta::default()
    })
}

/// Binds the socket through a descriptor of its directory: a unix address holds 107 bytes, a state path may be longer.
fn bind(dir: &Path) -> io::Result<UnixListener> {
    let directory = File::open(dir)?;
    let path = format!("/proc/self/fd/{}/{SOCKET}", directory.as_raw_fd());
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// A pipe for one of the harness's streams: our end does not block, its end does.
fn output_pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = pipe_with(PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    // Not permitted to everybody at any number; the default of 64 KiB works as well.
    let _ = fcntl_setpipe_size(&ours, PIPE_BYTES);
    Ok((ours, theirs))
}

impl Holder {
    fn info(&self) -> Info {
        let meta = self.meta();
        Info {
            tier: self.tier(),
            isolation: meta.isolation,
            shim: meta.shim,
            harness: meta.harness.unwrap_or_default(),
        }
    }
}
