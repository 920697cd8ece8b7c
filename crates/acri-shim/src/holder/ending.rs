//! How a run ends: Kill, the orphan rule, leftovers, the proof, the record.

use rustix::time::{Itimerspec, TimerfdTimerFlags, timerfd_settime};

use super::state::Holder;
use crate::launch::timespec;
use crate::limits::{DISK_RETRY, KILL_LOOK_MAX, KILL_LOOK_MIN, KILL_ROUND};
use crate::rundir::{self, EXIT, Exit, ExitReason, KILL, KillRequest, META, ORPHANED, Orphaned};
use crate::sys;
use crate::tree::nanos;
use crate::wire::{Body, Killed};

impl Holder {
    /// The running `meta` could not be written: the disk is full already.
    pub(super) fn retry_meta(&mut self) {
        self.unwritten.meta = true;
        self.retry_at_ns = Some(sys::boot_ns());
    }

    /// A Kill that was recorded by the node while the harness was being started.
    pub(super) fn honour_latch(&mut self) {
        if let Ok(Some(request)) = rundir::read::<KillRequest>(self.files.dir(), KILL) {
            self.kill = Some(request);
            self.begin_killing();
        }
    }

    /// A valid owner was heard: the orphan timer starts anew.
    pub(super) fn contacted(&mut self) {
        self.last_contact_ns = sys::boot_ns();
        // A timer of its own, since poll's time-out stands still in suspend.
        let value = timespec(self.orphan_at_ns());
        let spec = Itimerspec { it_interval: timespec(0), it_value: value };
        let _ = timerfd_settime(&self.orphan_timer, TimerfdTimerFlags::ABSTIME, &spec);
    }

    pub(super) fn orphan_at_ns(&self) -> u64 {
        self.last_contact_ns.saturating_add(nanos(self.limits.orphan_after))
    }

    pub(super) fn check_orphaned(&mut self) {
        let now = sys::boot_ns();
        if self.empty || self.orphaned.is_some() || now < self.orphan_at_ns() {
            return;
        }
        let orphaned = Orphaned {
            last_contact_boot_ns: self.last_contact_ns,
            wall_ns: sys::wall_ns(),
            boot_ns: now,
            owner: self.owner,
        };
        self.unwritten.orphaned = self.files.write_surely(ORPHANED, &orphaned).is_err();
        self.orphaned = Some(orphaned);
        self.disarm_timer();
        self.begin_killing();
    }

    pub(super) fn disarm_timer(&self) {
        let spec = Itimerspec { it_interval: timespec(0), it_value: timespec(0) };
        let _ = timerfd_settime(&self.orphan_timer, TimerfdTimerFlags::empty(), &spec);
    }

    /// Records a Kill: in its file before the first signal. The first one stays. True if there was one already.
    pub(super) fn record_kill(&mut self, request: KillRequest) -> bool {
        if self.kill.is_some() {
            return true;
        }
        // The node may have latched one after the last look at the file: that one came first.
        if let Ok(Some(latched)) = rundir::read::<KillRequest>(self.files.dir(), KILL) {
            self.kill = Some(latched);
            return true;
        }
        // A full disk must not save the tree: the file is written later, before the exit.
        self.unwritten.kill = self.files.write_surely(KILL, &request).is_err();
        self.kill = Some(request);
        false
    }

    /// Sends the first signals; [`Self::progress`] goes on until the tree is empty.
    pub(super) fn begin_killing(&mut self) {
        if self.killing_since_ns.is_some() || self.empty {
            return;
        }
        let now = sys::boot_ns();
        self.killing_since_ns = Some(now);
        self.next_round_ns = now + nanos(KILL_ROUND);
        self.victims = self.tree.kill_first();
        self.tree.look();
    }

    /// Without a Stop, what outlives the main process is killed after a short drain.
    pub(super) fn kill_leftovers(&mut self) {
        let Some(ended) = self.tree.ended() else { return };
        if self.stop_requested || self.killing_since_ns.is_some() || self.tree.is_empty() {
            return;
        }
        let closed = self.pipes.iter().all(Option::is_none);
        if closed || sys::boot_ns() >= ended.boot_ns + nanos(self.limits.stop_drain) {
            self.begin_killing();
            self.leftovers = self.victims;
        }
    }

    pub(super) fn prove_empty(&mut self) {
        if !self.tree.is_empty() {
            let now = sys::boot_ns();
            if self.killing_since_ns.is_some() && now >= self.next_round_ns {
                self.tree.kill_round();
                self.next_round_ns = now + nanos(KILL_ROUND);
            }
            return;
        }
        self.tree.look();
        self.empty = true;
        self.disarm_timer();
        self.reason = match (&self.kill, &self.orphaned) {
            (Some(_), _) => ExitReason::Killed,
            (None, Some(_)) => ExitReason::Orphaned,
            (None, None) if self.stop_requested => ExitReason::Stopped,
            (None, None) => ExitReason::Exited,
        };
        let now = sys::boot_ns();
        for waiter in std::mem::take(&mut self.waiters) {
            let took_us = now.saturating_sub(waiter.since_ns) / 1000;
            let killed = Killed { already: waiter.already, processes: self.victims, took_us };
            if let Some(connection) = self.connections.iter_mut().find(|c| c.id == waiter.connection) {
                connection.send(waiter.request, Body::Killed(killed));
            }
        }
    }

    pub(super) fn record_exit(&mut self) {
        let due = self.retry_at_ns.is_none_or(|at| sys::boot_ns() >= at);
        if !due {
            return;
        }
        let [stdout_bytes, stderr_bytes] = self.spool.streams();
        let ended = self.tree.ended();
        let status = ended.map(|ended| std::os::unix::process::ExitStatusExt::from_raw(ended.status));
        let mut exit = Exit {
            reason: self.reason,
            leftovers: self.leftovers,
            wall_ns: ended.map_or_else(sys::wall_ns, |ended| ended.wall_ns),
            boot_ns: ended.map_or_else(sys::boot_ns, |ended| ended.boot_ns),
            spool_end: self.spool.end(),
            stdout_bytes,
            stderr_bytes,
            ..Exit::default()
        };
        match status {
            Some(status) => describe(status, &mut exit),
            // The init of the namespace was killed before it could tell: its main process died of the same.
            None => exit.signal = Some(libc::SIGKILL),
        }
        if self.write_rest() && self.files.write_surely(EXIT, &exit).is_ok() {
            for connection in self.connections.iter_mut().filter(|c| c.watching.is_some()) {
                connection.send(0, Body::Exited(exit.clone()));
            }
            self.exit = Some(exit);
        } else {
            self.retry_at_ns = Some(sys::boot_ns() + nanos(DISK_RETRY));
        }
    }

    /// Writes state files that the disk refused before. True when none is left.
    pub(super) fn write_rest(&mut self) -> bool {
        if self.unwritten.meta {
            self.unwritten.meta = self.files.write_surely(META, &self.meta).is_err();
        }
        if let Some(request) = self.kill.as_ref().filter(|_| self.unwritten.kill) {
            self.unwritten.kill = self.files.write_surely(KILL, request).is_err();
        }
        if let Some(orphaned) = self.orphaned.as_ref().filter(|_| self.unwritten.orphaned) {
            self.unwritten.orphaned = self.files.write_surely(ORPHANED, orphaned).is_err();
        }
        !(self.unwritten.meta || self.unwritten.kill || self.unwritten.orphaned)
    }

    /// When the loop must go on without an event.
    pub(super) fn deadline_ns(&self) -> Option<u64> {
        let now = sys::boot_ns();
        let killing = self.killing_since_ns.filter(|_| !self.empty).map(|since| {
            let taken = now.saturating_sub(since);
            now + (taken / 4).clamp(nanos(KILL_LOOK_MIN), nanos(KILL_LOOK_MAX))
        });
        let leaving =
            self.tree.ended().filter(|_| !self.empty && self.killing_since_ns.is_none() && !self.stop_requested);
        let leaving = leaving.map(|ended| ended.boot_ns + nanos(self.limits.stop_drain));
        [self.retry_at_ns, killing, leaving].into_iter().flatten().min()
    }
}

fn describe(status: std::process::ExitStatus, exit: &mut Exit) {
    use std::os::unix::process::ExitStatusExt as _;
    exit.code = status.code();
    exit.signal = status.signal();
    exit.core_dumped = status.core_dumped();
}
