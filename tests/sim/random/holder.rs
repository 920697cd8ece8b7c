//! The holder of one run's harness, by the driver's rules.

use crate::stage::{self, Record};
use acri::{
    CommandId, Incarnation, Timestamp,
    event::ExitStatus,
    id::Epoch,
    log::{ResumeToken, Stream},
};
use std::time::Duration;

/// Command, principal, reason.
pub(crate) type KillRecord = (CommandId, String, String);

/// Who asks: an epoch, and whose.
pub(crate) type Who = (Epoch, Incarnation);

/// How a harness ended.
#[derive(Debug, Clone)]
pub(crate) struct Exit {
    pub(crate) status: ExitStatus,
    pub(crate) killed: Option<KillRecord>,
    pub(crate) orphaned: bool,
}

/// What an owner is told who is one no longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stale;

#[derive(Debug, Clone)]
pub(crate) struct Holder {
    /// Which machine it is on, once it has begun.
    pub(crate) home: Option<usize>,
    /// How often the harness was begun.
    pub(crate) begun: u32,
    pub(crate) spool: Vec<Record>,
    pub(crate) exit: Option<Exit>,
    pub(crate) claimed: Option<Who>,
    pub(crate) stops: Vec<CommandId>,
    pub(crate) released: u64,
    pub(crate) kept: Option<ResumeToken>,
    latch: Option<KillRecord>,
    last_contact: Timestamp,
    orphan_after: Duration,
    /// Whether a Stop ends it.
    obeys: bool,
}

impl Holder {
    pub(crate) fn new(now: Timestamp, orphan_after: Duration, obeys: bool) -> Self {
        Self {
            home: None,
            begun: 0,
            spool: Vec::new(),
            exit: None,
            claimed: None,
            stops: Vec::new(),
            released: 0,
            kept: None,
            latch: None,
            last_contact: now,
            orphan_after,
            obeys,
        }
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.begun > 0 && self.exit.is_none()
    }

    fn end(&mut self, code: Option<i32>, orphaned: bool) {
        if self.is_alive() {
            let signal = code.is_none().then_some(9);
            let killed = self.latch.clone();
            self.exit = Some(Exit { status: ExitStatus { code, signal }, killed, orphaned });
        }
    }

    /// The orphan rule; looked at before anything is relayed. `true`: it struck.
    pub(crate) fn look_at_the_clock(&mut self, now: Timestamp) -> bool {
        let orphaned = self.is_alive() && now.since(self.last_contact) > self.orphan_after;
        if orphaned {
            self.end(None, true);
        }
        orphaned
    }

    pub(crate) fn claim(&mut self, who: Who, now: Timestamp) -> Result<(), Stale> {
        self.look_at_the_clock(now);
        let refused = |claimed: Who| who.0 < claimed.0 || (who.0 == claimed.0 && who != claimed);
        if self.claimed.is_some_and(refused) {
            return Err(Stale);
        }
        self.claimed = Some(who);
        self.last_contact = now;
        Ok(())
    }

    pub(crate) fn start(&mut self, who: Who, home: usize, now: Timestamp) -> Result<(), Stale> {
        self.claim(who, now)?;
        if self.begun == 0 {
            self.begun = 1;
            self.home = Some(home);
            if self.latch.is_some() {
                self.end(None, false);
            }
        }
        Ok(())
    }

    fn relay(&mut self, who: Who, now: Timestamp) -> Result<(), Stale> {
        self.look_at_the_clock(now);
        if self.claimed != Some(who) {
            return Err(Stale);
        }
        self.last_contact = now;
        Ok(())
    }

    pub(crate) fn contact(&mut self, who: Who, now: Timestamp) -> Result<(), Stale> {
        self.relay(who, now)
    }

    pub(crate) fn stop(&mut self, who: Who, command: CommandId, now: Timestamp) -> Result<(), Stale> {
        self.relay(who, now)?;
        if self.is_alive() && !self.stops.contains(&command) {
            self.stops.push(command);
            if self.obeys {
                self.end(Some(0), false);
            }
        }
        Ok(())
    }

    /// Recorded before it is done; the first record stays.
    pub(crate) fn kill(&mut self, who: Who, record: KillRecord, now: Timestamp) -> Result<(), Stale> {
        self.look_at_the_clock(now);
        if self.claimed.is_some_and(|claimed| who.0 < claimed.0) {
            return Err(Stale);
        }
        if self.exit.is_none() {
            self.latch.get_or_insert(record);
        }
        self.end(None, false);
        Ok(())
    }

    pub(crate) fn release(&mut self, who: Who, offset: u64, kept: ResumeToken, now: Timestamp) {
        if self.relay(who, now).is_ok() {
            self.released = self.released.max(offset);
            self.kept = Some(kept);
        }
    }

    pub(crate) fn write(&mut self, stream: Stream, bytes: &[u8], now: Timestamp) {
        if self.is_alive() {
            stage::write(&mut self.spool, stream, bytes, now);
        }
    }

    pub(crate) fn exits(&mut self, code: i32) {
        self.end(Some(code), false);
    }

    pub(crate) fn spool_end(&self) -> u64 {
        self.spool.last().map_or(0, |record| record.end)
    }
}
