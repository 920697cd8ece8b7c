//! The second tier: a pid namespace whose init is a fork of the shim and dies with it; the kernel then kills the rest.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{
    DumpableBehavior, Pid, Signal, WaitOptions, getegid, geteuid, pidfd_send_signal, set_dumpable_behavior,
    set_parent_process_death_signal,
};

use super::StartError;
use crate::harness::{Failure, Plan};
use crate::launch::{FailureKind, timespec};
use crate::limits::INIT_START;
use crate::process::{Process, children};
use crate::sys::{self, Forked};

const STARTED: u8 = 1;
const UNAVAILABLE: u8 = 2;
const FAILED: u8 = 3;
const ENDED: u8 = 4;
/// Kind, then an errno or a wait status.
type Report = [u8; 5];

#[derive(Debug)]
pub(crate) struct Namespace {
    init: Pid,
    pidfd: OwnedFd,
    main: Process,
    reports: Option<OwnedFd>,
    /// Keeps the mount namespace: taking it down costs the kernel some 10 ms, which a Kill must not wait for.
    _mounts: Option<File>,
}

impl Namespace {
    pub(crate) fn start(plan: &Plan<'_>) -> Result<Self, StartError> {
        let unavailable = |error: io::Error| StartError::Unavailable(error.to_string());
        let (reports, theirs) = pipe_with(PipeFlags::CLOEXEC).map_err(|error| unavailable(error.into()))?;
        // The init sees the other end closed if the shim died before the parent-death signal was armed.
        let (life, line) = pipe_with(PipeFlags::CLOEXEC).map_err(|error| unavailable(error.into()))?;
        let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
        let plain = libc::CLONE_NEWPID | libc::CLONE_NEWNS;
        let forked = match sys::fork_with(plain, libc::SIGCHLD) {
            Ok(forked) => forked.with_map(None),
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                let forked = sys::fork_with(plain | libc::CLONE_NEWUSER, libc::SIGCHLD).map_err(unavailable)?;
                forked.with_map(Some((uid, gid)))
            }
            Err(error) => return Err(unavailable(error)),
        };
        let init = match forked {
            Ok(pid) => pid,
            Err(map) => init_main(plan, &Stage { reports: &theirs, life: &life, line: &line, map }),
        };
        drop((theirs, life));
        let pidfd = super::open_child(init).map_err(unavailable)?;
        let namespace = Self { init, pidfd, main: Process::default(), reports: Some(reports), _mounts: None };
        let started = namespace.await_start(plan);
        // The init waits for this before it reaps; and before its parent-death signal was armed, it would have seen us die.
        drop(line);
        match started {
            Ok(main) => {
                let mounts = File::open(format!("/proc/{}/ns/mnt", init.as_raw_nonzero())).ok();
                Ok(Self { main, _mounts: mounts, ..namespace })
            }
            Err(error) => {
                namespace.kill();
                let _ = rustix::process::waitpid(Some(init), WaitOptions::empty());
                Err(error)
            }
        }
    }

    fn await_start(&self, plan: &Plan<'_>) -> Result<Process, StartError> {
        let lost = || StartError::Unavailable("the init of the namespace gave no report".to_owned());
        let Some(reports) = &self.reports else { return Err(lost()) };
        let timeout = timespec(super::nanos(INIT_START));
        let mut report: Report = [0; 5];
        let ready = poll(&mut [PollFd::new(reports, PollFlags::IN)], Some(&timeout));
        // Reports are shorter than PIPE_BUF, so a read gets a whole one.
        if !ready.is_ok_and(|n| n > 0) || !rustix::io::read(reports, &mut report).is_ok_and(|n| n == report.len()) {
            return Err(lost());
        }
        let _ = rustix::io::ioctl_fionbio(reports, true);
        let error = io::Error::from_raw_os_error(number(report));
        match report[0] {
            STARTED => children(self.init.as_raw_nonzero().get()).first().copied().ok_or_else(lost),
            FAILED => Err(StartError::Failed(
                plan.judge(&error).unwrap_or_else(|| Failure::new(FailureKind::Other, error.to_string())),
            )),
            _ => Err(StartError::Unavailable(format!("set up the namespace: {error}"))),
        }
    }

    pub(crate) fn init(&self) -> Pid {
        self.init
    }

    pub(crate) fn main(&self) -> Process {
        self.main
    }

    /// Readable when the init has something to say.
    pub(crate) fn reports(&self) -> Option<BorrowedFd<'_>> {
        self.reports.as_ref().map(|fd| fd.as_fd())
    }

    /// The wait status of the main process, when it has ended.
    pub(crate) fn read_report(&mut self) -> Option<i32> {
        let reports = self.reports.as_ref()?;
        let mut report: Report = [0; 5];
        match rustix::io::read(reports, &mut report) {
            Ok(n) if n == report.len() && report[0] == ENDED => Some(number(report)),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => None,
            // The init is gone. A closed pipe would be readable for ever.
            Ok(_) | Err(_) => {
                self.reports = None;
                None
            }
        }
    }

    /// Kills the init, and with it everything in the namespace; its reaping then proves that.
    pub(crate) fn kill(&self) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }
}

impl Forked {
    /// The parent's side, or what the child has to do about user ids.
    fn with_map(self, map: Option<(u32, u32)>) -> Result<Pid, Option<(u32, u32)>> {
        match self {
            Self::Parent(pid) => Ok(pid),
            Self::Child => Err(map),
        }
    }
}

fn number(report: Report) -> i32 {
    i32::from_le_bytes([report[1], report[2], report[3], report[4]])
}

/// What the init needs of the shim.
struct Stage<'a> {
    reports: &'a OwnedFd,
    life: &'a OwnedFd,
    line: &'a OwnedFd,
    map: Option<(u32, u32)>,
}

impl Stage<'_> {
    fn report(&self, kind: u8, number: i32) {
        let n = number.to_le_bytes();
        let _ = rustix::io::write(self.reports, &[kind, n[0], n[1], n[2], n[3]]);
    }

    fn end_with(&self, kind: u8, error: &io::Error) -> ! {
        self.report(kind, error.raw_os_error().unwrap_or(libc::EINVAL));
        sys::exit_now(1)
    }
}

/// The init's whole life: prepares the namespace, starts the harness, reaps until nothing is left.
fn init_main(plan: &Plan<'_>, stage: &Stage<'_>) -> ! {
    if let Err(error) = prepare(plan, stage) {
        stage.end_with(UNAVAILABLE, &error);
    }
    let main = match plan.start(None) {
        Ok(main) => main,
        Err(error) => stage.end_with(FAILED, &error),
    };
    // Only the harness may hold the pipes now, or their end would never be seen.
    sys::close_others(&[stage.reports.as_raw_fd(), stage.life.as_raw_fd()]);
    stage.report(STARTED, 0);
    // Nothing is reaped before the shim has seen the main process's number out there, or a short one would be missed.
    while rustix::io::read(stage.life, &mut [0u8; 1]) == Err(rustix::io::Errno::INTR) {}
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid.as_raw_nonzero().get() == main => stage.report(ENDED, status.as_raw()),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => sys::exit_now(0),
        }
    }
}

fn prepare(plan: &Plan<'_>, stage: &Stage<'_>) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let _ = rustix::thread::set_name(c"acri-init");
    let mut keep = vec![stage.reports.as_raw_fd(), stage.life.as_raw_fd()];
    keep.extend(plan.descriptors());
    debug_assert!(!keep.contains(&stage.line.as_raw_fd()), "the init must not hold the shim's end of the line");
    sys::close_others(&keep);
    // Gone already? Then nobody will ever kill us.
    let timeout = timespec(0);
    if poll(&mut [PollFd::new(stage.life, PollFlags::IN)], Some(&timeout))? > 0 {
        sys::exit_now(1);
    }
    if let Some((uid, gid)) = stage.map {
        map_ids(uid, gid)?;
    }
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("proc", "/proc", "proc", flags, None)?;
    Ok(())
}

/// Maps the own user and group to themselves in a new user namespace.
fn map_ids(uid: u32, gid: u32) -> io::Result<()> {
    // The files belong to root as long as the process is not dumpable.
    set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/uid_map", format!("{uid} {uid} 1"))?;
    std::fs::write("/proc/self/gid_map", format!("{gid} {gid} 1"))?;
    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}
