//! The guardian of the first tier: a forked process that kills the cgroup when the shim is gone.
//!
//! A cgroup does not end with the process that made it, and a parent-death signal reaches only the main process. The
//! guardian holds one end of a pipe and sleeps in `read`; when the shim dies, however it dies, the read returns and
//! `cgroup.kill` is written. A fork without exec was chosen over a nested pid namespace: it shares the shim's memory
//! pages and leaves the harness's view of the system alone.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};

use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, pidfd_send_signal};

use super::cgroup::Cgroup;
use crate::limits::{GUARDIAN_RESTARTS_MAX, GUARDIAN_WAIT};
use crate::sys::{self, Forked};

/// The name of its thread.
pub(super) const NAME: &str = "acri-guardian";

#[derive(Debug)]
pub(crate) struct Guardian {
    pid: Pid,
    pidfd: OwnedFd,
    /// Held, never used: its closing is the message.
    _line: OwnedFd,
    restarts: u32,
    /// It ended and no other could be started.
    lost: bool,
}

impl Guardian {
    pub(crate) fn start(cgroup: &Cgroup) -> io::Result<Self> {
        let (theirs, line) = pipe_with(PipeFlags::CLOEXEC)?;
        // Exit signal 0: a plain wait does not see it, so that "no children" still means "no harness".
        match sys::fork_with(0, 0)? {
            Forked::Child => guard(&theirs, cgroup),
            Forked::Parent(pid) => {
                Ok(Self { pid, pidfd: super::open_child(pid)?, _line: line, restarts: 0, lost: false })
            }
        }
    }

    pub(crate) fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Becomes readable when the guardian ends. `None` if it has, and could not be replaced.
    pub(crate) fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        (!self.lost).then(|| self.pidfd.as_fd())
    }

    /// Starts another guardian if this one was killed.
    pub(crate) fn keep_alive(&mut self, cgroup: &Cgroup) {
        if self.lost || !sys::reap_quiet_child(self.pid) {
            return;
        }
        let restarts = self.restarts + 1;
        match Self::start(cgroup) {
            Ok(next) if restarts <= GUARDIAN_RESTARTS_MAX => *self = Self { restarts, ..next },
            Ok(next) => {
                next.dismiss();
                self.lost = true;
            }
            Err(_) => self.lost = true,
        }
    }

    /// Ends the guardian; the cgroup is left alone.
    pub(crate) fn dismiss(self) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        while !sys::reap_quiet_child(self.pid) {
            super::pause();
        }
    }
}

/// The guardian's whole life.
fn guard(line: &OwnedFd, cgroup: &Cgroup) -> ! {
    let _ = rustix::thread::set_name(c"acri-guardian");
    // The write end of the line and the run directory's lock above all must not be held here.
    sys::close_others(&[line.as_raw_fd(), cgroup.kill_fd().as_raw_fd(), cgroup.events().as_raw_fd()]);
    let mut byte = [0u8; 1];
    while rustix::io::read(line, &mut byte) == Err(rustix::io::Errno::INTR) {}
    cgroup.kill();
    cgroup.wait_empty(GUARDIAN_WAIT);
    cgroup.remove();
    sys::exit_now(0)
}
