//! The process tree of a harness: started, signalled, killed, and proved empty.
//!
//! In every tier the shim is the parent of the tree's root and the reaper of its orphans, or the parent of a pid
//! namespace's init. "No children left" in the answer of `wait` is therefore a proof, given by the kernel in one step;
//! the walk over `/proc` only finds whom to signal. The first tier wants the cgroup unpopulated as well: a process that
//! moved itself to another cgroup is still a descendant, one that was moved in from elsewhere is still a member.

mod cgroup;
mod guardian;
mod hunt;
mod pidns;

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, getpid, pidfd_open};

pub(crate) use hunt::{end_shim, hunt};

use crate::harness::{Failure, Plan};
use crate::launch::FailureKind;
use crate::limits::{KILL_LOOK, WALKS_PER_ROUND};
use crate::process::{Process, Stat, Walk, walk};
use crate::rundir::{Meta, Tier};
use crate::sys;

/// Why a tree was not started.
pub(crate) enum StartError {
    /// This tier cannot be had here; the next one may do.
    Unavailable(String),
    /// The harness cannot be started, whatever the tier.
    Failed(Failure),
}

/// How the main process ended, and when that was seen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ended {
    /// The raw wait status.
    pub(crate) status: i32,
    pub(crate) boot_ns: u64,
    pub(crate) wall_ns: u64,
}

impl Ended {
    fn now(status: i32) -> Self {
        Self { status, boot_ns: sys::boot_ns(), wall_ns: sys::wall_ns() }
    }
}

/// A running tree.
#[derive(Debug)]
pub(crate) struct Tree {
    tier: Tier,
    /// The harness's main process.
    main: Process,
    /// The shim's child: the main process, or the init of its pid namespace.
    child: Pid,
    childless: bool,
    ended: Option<Ended>,
    cgroup: Option<(cgroup::Cgroup, guardian::Guardian)>,
    namespace: Option<pidns::Namespace>,
    signals: OwnedFd,
}

/// Where and how a tree may be started.
pub(crate) struct Place<'a> {
    pub(crate) plan: &'a Plan<'a>,
    pub(crate) cgroup_parent: Option<&'a std::path::Path>,
    /// Goes into the cgroup's name, by which it is found again.
    pub(crate) run_dir: &'a std::path::Path,
}

impl Tree {
    /// Starts the harness in the first of the tiers that can be had.
    pub(crate) fn start(tiers: &[Tier], place: &Place<'_>) -> Result<Self, Failure> {
        let other = |error: io::Error| Failure::new(FailureKind::Other, format!("prepare the tree: {error}"));
        let signals = sys::child_signal_fd().map_err(other)?;
        let mut reasons = String::new();
        for tier in tiers {
            let own = signals.try_clone().map_err(other)?;
            let started = match tier {
                Tier::Cgroup => Self::start_cgroup(place, own),
                Tier::Pidns => Self::start_pidns(place, own),
                Tier::Subreaper => Self::start_subreaper(place, own),
            };
            match started {
                Ok(tree) => return Ok(tree),
                Err(StartError::Failed(failure)) => return Err(failure),
                Err(StartError::Unavailable(reason)) => reasons.push_str(&format!("; {tier:?}: {reason}")),
            }
        }
        Err(Failure::new(FailureKind::Tier, format!("none of the allowed tiers can be had{reasons}")))
    }

    fn start_cgroup(place: &Place<'_>, signals: OwnedFd) -> Result<Self, StartError> {
        let cgroup = cgroup::Cgroup::create(place.cgroup_parent, place.run_dir).map_err(StartError::Unavailable)?;
        let guardian = guardian::Guardian::start(&cgroup).map_err(|error| {
            cgroup.remove();
            StartError::Failed(Failure::new(FailureKind::Limits, format!("start the guardian: {error}")))
        })?;
        match Self::start_child(place, Some(cgroup.procs())) {
            Ok((child, main)) => {
                Ok(Self { cgroup: Some((cgroup, guardian)), ..Self::new(Tier::Cgroup, main, child, signals) })
            }
            Err(error) => {
                guardian.dismiss();
                cgroup.remove();
                Err(error)
            }
        }
    }

    fn start_subreaper(place: &Place<'_>, signals: OwnedFd) -> Result<Self, StartError> {
        let (child, main) = Self::start_child(place, None)?;
        Ok(Self::new(Tier::Subreaper, main, child, signals))
    }

    fn start_pidns(place: &Place<'_>, signals: OwnedFd) -> Result<Self, StartError> {
        let namespace = pidns::Namespace::start(place.plan)?;
        let (main, child) = (namespace.main(), namespace.init());
        Ok(Self { namespace: Some(namespace), ..Self::new(Tier::Pidns, main, child, signals) })
    }

    fn new(tier: Tier, main: Process, child: Pid, signals: OwnedFd) -> Self {
        Self { tier, main, child, childless: false, ended: None, cgroup: None, namespace: None, signals }
    }

    /// Starts the harness as a child of the shim, which becomes the reaper of its orphans.
    fn start_child(place: &Place<'_>, cgroup: Option<BorrowedFd<'_>>) -> Result<(Pid, Process), StartError> {
        let failed = |error: &io::Error| match place.plan.judge(error) {
            Some(failure) => StartError::Failed(failure),
            None => StartError::Unavailable("the cgroup takes no process".to_owned()),
        };
        rustix::process::set_child_subreaper(Some(getpid())).map_err(|error| failed(&error.into()))?;
        let number = place.plan.start(cgroup).map_err(|error| failed(&error))?;
        // Not reaped yet, whatever it did since: the number is still its own.
        let main = Process::of(number).unwrap_or(Process { pid: number, start: 0 });
        let child = Pid::from_raw(number).ok_or_else(|| failed(&io::ErrorKind::InvalidData.into()))?;
        Ok((child, main))
    }

    pub(crate) fn tier(&self) -> Tier {
        self.tier
    }

    pub(crate) fn main(&self) -> Process {
        self.main
    }

    pub(crate) fn cgroup_dir(&self) -> Option<&std::path::Path> {
        self.cgroup.as_ref().map(|(cgroup, _)| cgroup.dir())
    }

    /// How the main process ended, if it has.
    pub(crate) fn ended(&self) -> Option<Ended> {
        self.ended
    }

    /// The descriptors whose readiness calls for [`Self::look`].
    pub(crate) fn watched(&self) -> impl Iterator<Item = (BorrowedFd<'_>, PollFlags)> {
        let cgroup = self.cgroup.iter().flat_map(|(cgroup, guardian)| {
            let guardian = guardian.pidfd().map(|fd| (fd, PollFlags::IN));
            cgroup.watched().map(|fd| (fd, PollFlags::PRI)).into_iter().chain(guardian)
        });
        let namespace = self.namespace.iter().filter_map(|n| n.reports()).map(|fd| (fd, PollFlags::IN));
        std::iter::once((self.signals.as_fd(), PollFlags::IN)).chain(cgroup).chain(namespace)
    }

    /// Takes note of what happened: reaps children, reads reports, replaces a lost guardian.
    pub(crate) fn look(&mut self) {
        let mut drain = [0u8; 1024];
        while rustix::io::read(&self.signals, &mut drain).is_ok_and(|n| n == drain.len()) {}
        if let Some((cgroup, guardian)) = &mut self.cgroup {
            guardian.keep_alive(cgroup);
            // Read even if nobody asks: an event that was not fetched keeps the descriptor ready for ever.
            cgroup.is_empty();
        }
        if let Some(namespace) = &mut self.namespace {
            while let Some(status) = namespace.read_report() {
                self.ended.get_or_insert_with(|| Ended::now(status));
            }
        }
        while !self.childless {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => self.reaped(pid, status.as_raw()),
                Ok(None) => break,
                Err(rustix::io::Errno::CHILD) => self.childless = true,
                Err(_) => break,
            }
        }
    }

    fn reaped(&mut self, pid: Pid, status: i32) {
        if pid == self.child && self.namespace.is_none() {
            self.ended.get_or_insert_with(|| Ended::now(status));
        }
    }

    /// True once the kernel says that no process of the tree is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.childless && self.cgroup.as_ref().is_none_or(|(cgroup, _)| cgroup.is_empty())
    }

    /// Looks at everything below the root, with a signal if one is given. The init of the namespace is not part of it.
    fn walk(&self, signal: Option<Signal>) -> Walk {
        match (&self.namespace, &self.cgroup) {
            (Some(namespace), _) => walk(namespace.init().as_raw_nonzero().get(), None, signal),
            (None, Some((_, guardian))) => walk(own_pid(), Some(guardian.pid()), signal),
            (None, None) => walk(own_pid(), None, signal),
        }
    }

    /// Sends a signal to every process, for a graceful end. Returns to how many.
    pub(crate) fn signal_all(&self, signal: Signal) -> u32 {
        // Not while walking: the children of a process that ends at once move away from under the walk.
        let walk = self.walk(None);
        let reached = walk.seen.iter().filter(|process| process.signal(signal)).count();
        // A signal to a zombie succeeds too.
        u32::try_from(reached).unwrap_or(u32::MAX).min(walk.living)
    }

    /// The first round of killing. Returns how many processes were seen alive.
    pub(crate) fn kill_first(&self) -> u32 {
        let seen = match (&self.namespace, &self.cgroup) {
            (Some(_), _) => self.walk(None).living,
            (None, Some((cgroup, _))) if !cgroup.is_empty() => cgroup.count(),
            // Counted while it is being killed.
            (None, _) => return self.stop_and_kill(),
        };
        self.kill_round();
        seen
    }

    /// One round of killing. To be repeated until [`Self::is_empty`]: a process may have been forked meanwhile.
    pub(crate) fn kill_round(&self) {
        match (&self.namespace, &self.cgroup) {
            (Some(namespace), _) => namespace.kill(),
            (None, Some((cgroup, _))) if !cgroup.is_empty() => cgroup.kill(),
            // The third tier; or the first one, for who moved out of the cgroup.
            (None, _) => {
                self.stop_and_kill();
            }
        }
    }

    fn stop_and_kill(&self) -> u32 {
        stop_and_kill(|signal| self.walk(Some(signal))).living
    }

    /// Gives back what the tree stood on. Only when it is empty.
    pub(crate) fn close(self) {
        if let Some((cgroup, guardian)) = self.cgroup {
            guardian.dismiss();
            cgroup.remove();
        }
    }
}

/// Stopped first, then killed: a tree that forks faster than it is walked is at rest after some walks.
fn stop_and_kill(walk_with: impl Fn(Signal) -> Walk) -> Walk {
    let mut walk = walk_with(Signal::STOP);
    for _ in 1..WALKS_PER_ROUND {
        let next = walk_with(Signal::STOP);
        let grown = next.seen.len() > walk.seen.len();
        walk = next;
        if !grown {
            break;
        }
    }
    for process in &walk.seen {
        process.signal(Signal::KILL);
    }
    walk
}

fn own_pid() -> i32 {
    getpid().as_raw_nonzero().get()
}

/// Kills what a dead shim left; see [`crate::sweep`].
pub(crate) fn sweep(meta: &Meta) -> io::Result<usize> {
    let deadline = sys::boot_ns() + nanos(SWEEP);
    let mut signalled = 0;
    loop {
        let mut left = false;
        if let Some(dir) = &meta.cgroup {
            left |= cgroup::sweep(dir)?;
        }
        if let Some(main) = meta.harness
            && main.exists()
        {
            for process in walk(main.pid, None, Some(Signal::STOP)).seen {
                signalled += usize::from(process.signal(Signal::KILL));
            }
            // A zombie is no longer ours to wait for: whoever inherited it reaps it.
            if !Stat::read(main.pid).is_ok_and(|stat| matches!(stat.state, b'Z' | b'X')) {
                signalled += usize::from(main.signal(Signal::KILL));
                left = true;
            }
        }
        if !left {
            return Ok(signalled);
        }
        if sys::boot_ns() > deadline {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "what a dead shim left does not end"));
        }
        pause();
    }
}

/// How long a sweep or a hunt waits for what it killed.
const SWEEP: Duration = Duration::from_secs(3);

/// A pause between two looks where there is no event to wait for.
pub(crate) fn pause() {
    #[expect(
        clippy::disallowed_methods,
        reason = "synchronous code, and the kernel offers no event here; bounded by the caller"
    )]
    std::thread::sleep(KILL_LOOK);
}

/// A duration in nanoseconds, at most some 584 years.
pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX / 4).min(u64::MAX / 4)
}

/// A pidfd of an unreaped child, whose number cannot have been used again.
fn open_child(pid: Pid) -> io::Result<OwnedFd> {
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}
