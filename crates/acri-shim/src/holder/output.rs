//! From the harness's pipes to the spool.

use super::state::{Holder, Ready};
use crate::limits::DISK_RETRY;
use crate::rundir::META;
use crate::spool::{Append, Stream};
use crate::sys;
use crate::tree::nanos;

impl Holder {
    pub(super) fn spool_full(&self) -> bool {
        !self.empty && self.spool.held() >= self.limits.spool_bytes_max.max(1)
    }

    pub(super) fn read_output(&mut self, ready: &Ready) {
        if self.empty || !self.retry_pending() {
            return;
        }
        for stream in Stream::ALL {
            if ready.pipes[stream.index()] && self.pending.is_none() && !self.spool_full() {
                self.read_pipe(stream);
            }
        }
    }

    /// Reads once and spools it. False: there was nothing to read.
    pub(super) fn read_pipe(&mut self, stream: Stream) -> bool {
        let Some(pipe) = &self.pipes[stream.index()] else { return false };
        match rustix::io::read(pipe, &mut *self.buffer) {
            Ok(0) => {
                self.pipes[stream.index()] = None;
                true
            }
            Ok(n) => {
                self.pending = Some((stream, n));
                self.retry_at_ns = None;
                self.retry_pending();
                true
            }
            Err(rustix::io::Errno::INTR) => true,
            Err(rustix::io::Errno::AGAIN) => false,
            Err(_) => {
                self.pipes[stream.index()] = None;
                true
            }
        }
    }

    /// Spools what was read before. False while the disk refuses.
    pub(super) fn retry_pending(&mut self) -> bool {
        let now = sys::boot_ns();
        if self.retry_at_ns.is_some_and(|at| now < at) {
            return false;
        }
        self.retry_at_ns = None;
        if self.unwritten.meta {
            self.unwritten.meta = self.files.write_surely(META, &self.meta).is_err();
        }
        let Some((stream, n)) = self.pending else { return true };
        match self.spool.append(stream, &self.buffer[..n]) {
            Append::Done => {
                self.pending = None;
                true
            }
            Append::DiskRefused => {
                self.retry_at_ns = Some(now + nanos(DISK_RETRY));
                false
            }
        }
    }

    /// Reads what the dead tree left in its pipes, whatever the spool's limit: at most what two pipes hold. True when
    /// everything is spooled.
    pub(super) fn drained(&mut self) -> bool {
        if !self.retry_pending() {
            return false;
        }
        for stream in Stream::ALL {
            while self.pipes[stream.index()].is_some() {
                // Nobody of the tree is left to write: an empty pipe is at its end, even if its other end was handed out.
                if !self.read_pipe(stream) && self.pending.is_none() {
                    self.pipes[stream.index()] = None;
                }
                if self.pending.is_some() {
                    return false;
                }
            }
        }
        true
    }
}
