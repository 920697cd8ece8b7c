//! What each request does.

use rustix::process::Signal;

use super::connection::Watching;
use super::state::{Holder, Waiter};
use crate::limits::{KILL_WAITERS_MAX, RESUME_TOKEN_BYTES_MAX, TEXT_BYTES_MAX};
use crate::rundir::{KillRequest, OWNER, Owner, TOKEN};
use crate::sys;
use crate::wire::{
    self, Activity, Body, Kill, Killed, Op, Refusal, Refused, Release, Released, Request, Stale, Status, Stop,
    Stopping, Welcome,
};

impl Holder {
    /// The answer, or `None` if it comes later or the connection is to be closed.
    pub(super) fn answer(&mut self, index: usize, request: Request) -> Option<Body> {
        if !self.connections[index].greeted {
            return self.greet(index, &request.op);
        }
        Some(match request.op {
            Op::Hello(_) => Body::Welcome(Welcome { version: wire::VERSION }),
            Op::Claim(owner) => self.claim(owner),
            Op::Contact(owner) => self.contact(owner),
            Op::Status => Body::Status(Box::new(self.status())),
            Op::Stop(stop) => self.stop(&stop),
            Op::Kill(kill) => return self.kill(index, request.id, kill),
            Op::Release(release) => self.release(&release),
            Op::Watch(watch) => {
                self.connections[index].watching = Some(Watching { known: watch.offset, armed: true });
                Body::Done
            }
            // The shim ends by itself right after the exit is recorded, so whoever gets an answer is too early.
            Op::Finish(finish) => match self.stale(finish.epoch) {
                Some(stale) => stale,
                None => refused(Refusal::NotExited, "the exit is not recorded yet"),
            },
            Op::Unknown => refused(Refusal::Unsupported, "unknown operation"),
        })
    }

    fn greet(&mut self, index: usize, op: &Op) -> Option<Body> {
        let connection = &mut self.connections[index];
        match op {
            Op::Hello(hello) if hello.token == self.token => {
                connection.greet();
                Some(Body::Welcome(Welcome { version: wire::VERSION }))
            }
            _ => {
                connection.broken = true;
                None
            }
        }
    }

    /// The answer to an epoch that is not the highest claim's.
    fn stale(&self, epoch: u64) -> Option<Body> {
        (epoch != self.owner.epoch).then(|| self.stale_body())
    }

    fn stale_body(&self) -> Body {
        Body::Stale(Stale { highest: self.owner.epoch })
    }

    fn claim(&mut self, owner: Owner) -> Body {
        let repeated = owner == self.owner;
        if !repeated && owner.epoch <= self.owner.epoch {
            return self.stale_body();
        }
        if !repeated {
            if let Err(error) = self.files.write_surely(OWNER, &owner) {
                return refused(Refusal::Disk, &error.to_string());
            }
            self.owner = owner;
        }
        self.contacted();
        Body::Done
    }

    fn contact(&mut self, owner: Owner) -> Body {
        if owner != self.owner {
            return self.stale_body();
        }
        self.contacted();
        Body::Done
    }

    fn status(&self) -> Status {
        let [stdout_bytes, stderr_bytes] = self.spool.streams();
        let left_ns = self.orphan_at_ns().saturating_sub(sys::boot_ns());
        Status {
            meta: self.meta().clone(),
            activity: self.activity(),
            owner: self.owner,
            spool_end: self.spool.end(),
            released: self.spool.released(),
            stdout_bytes,
            stderr_bytes,
            spool_full: self.spool_full(),
            disk_refuses: self.retry_at_ns.is_some(),
            kill_recorded: self.kill.is_some(),
            orphan_in_ms: left_ns / 1_000_000,
            exit: self.exit.clone(),
        }
    }

    fn activity(&self) -> Activity {
        match (self.exit.is_some(), self.empty, self.killing_since_ns.is_some(), self.stop_requested) {
            (true, ..) => Activity::Exited,
            (_, true, ..) => Activity::Draining,
            (_, _, true, _) => Activity::Killing,
            (_, _, _, true) => Activity::Stopping,
            _ => Activity::Running,
        }
    }

    fn stop(&mut self, stop: &Stop) -> Body {
        if let Some(stale) = self.stale(stop.epoch) {
            return stale;
        }
        let number = if stop.signal == 0 { libc::SIGTERM } else { stop.signal };
        let Some(signal) = Signal::from_named_raw(number) else {
            return refused(Refusal::Invalid, "no such signal");
        };
        self.stop_requested = true;
        Body::Stopping(Stopping { processes: self.tree.signal_all(signal) })
    }

    fn kill(&mut self, index: usize, request: u64, kill: Kill) -> Option<Body> {
        let since_ns = sys::boot_ns();
        // A newer epoch than the last claim's is no reason to let a tree live.
        if kill.epoch < self.owner.epoch {
            return Some(self.stale_body());
        }
        if self.waiters.len() >= KILL_WAITERS_MAX {
            return Some(refused(Refusal::Busy, "too many kills wait"));
        }
        let already = self.record_kill(KillRequest {
            command_id: cut(kill.command_id),
            principal: cut(kill.principal),
            reason: cut(kill.reason),
            epoch: kill.epoch,
            wall_ns: sys::wall_ns(),
            boot_ns: since_ns,
        });
        if self.empty {
            return Some(Body::Killed(Killed { already, ..Killed::default() }));
        }
        self.begin_killing();
        let connection = self.connections[index].id;
        self.waiters.push(Waiter { connection, request, already, since_ns });
        None
    }

    fn release(&mut self, release: &Release) -> Body {
        if let Some(stale) = self.stale(release.epoch) {
            return stale;
        }
        if release.token.len() > RESUME_TOKEN_BYTES_MAX {
            return refused(Refusal::Invalid, "the resume token is longer than 64 KiB");
        }
        if release.offset > self.spool.end() {
            return refused(Refusal::Invalid, "the offset is beyond the end of the spool");
        }
        // The token first, or a crash in between would leave neither it nor the bytes; on a full disk the bytes must go
        // first to make room for it.
        let mut token_saved = self.save_token(&release.token);
        self.spool.release(release.offset);
        if !token_saved {
            token_saved = self.save_token(&release.token);
        }
        self.retry_at_ns = None;
        self.retry_pending();
        Body::Released(Released { offset: self.spool.released(), token_saved })
    }

    fn save_token(&self, token: &[u8]) -> bool {
        token.is_empty() || self.files.write_bytes(TOKEN, token).is_ok()
    }
}

fn refused(code: Refusal, text: &str) -> Body {
    Body::Refused(Refused { code, text: text.to_owned() })
}

/// Bounds a text of a client.
fn cut(mut text: String) -> String {
    if text.len() > TEXT_BYTES_MAX {
        text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
    }
    text
}
