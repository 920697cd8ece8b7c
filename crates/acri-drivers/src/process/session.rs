//! A started process, as its owner sees it.

use super::{
    Inner, blocking_or, found,
    link::{Link, Seen},
    output,
    registry::Entry,
};
use crate::driver::{Chunk, ChunkEnd, Exit, Fault, Info, KillRequest, Owner, Session};
use acri::{
    CommandId,
    event::{ExitStatus, FailReason},
};
use acri_shim::{
    ExitReason, Scan, Token,
    limits::RESUME_TOKEN_BYTES_MAX,
    spool::{Progress, RECORD_BYTES_MAX, Reader},
    wire::{Body, Op, Release, Stop},
};
use async_trait::async_trait;
use bytes::Bytes;
use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};
use tokio::sync::{OnceCell, watch};

/// The node's own copy of the resume token, written when no shim is left to
/// keep it; it is then the newer one.
const LATE_TOKEN: &str = "late-token";

/// What became of a run whose shim is gone.
#[derive(Debug, Clone)]
pub(super) enum Outcome {
    /// Its end was told.
    Ended {
        exit: Exit,
        /// Where its output ends; `None` where that is not known.
        spool_end: Option<u64>,
    },
    /// It died without a word; [`Session::lost_reason`] says of what.
    Dead { detail: String },
}

pub(super) struct ProcessSession {
    inner: Arc<Inner>,
    entry: Arc<Entry>,
    dir: PathBuf,
    info: Info,
    pub(super) link: Link,
    /// Where the last read ended, for the next one to go on.
    reader: Mutex<Option<Reader>>,
    outcome: OnceCell<Outcome>,
    /// Whether the machine was restarted since the run was started.
    boot_changed: bool,
}

/// What is known of a run when its session is opened.
pub(super) struct Opened {
    pub(super) info: Info,
    /// Opens the socket of the shim; `None`: there is none any more.
    pub(super) secret: Option<Token>,
    pub(super) boot_changed: bool,
}

impl ProcessSession {
    pub(super) fn new(inner: &Arc<Inner>, entry: &Arc<Entry>, dir: PathBuf, opened: Opened) -> Self {
        let link = match opened.secret {
            Some(secret) => {
                inner.registry.found_alive(entry);
                let (owner, of) = (Arc::clone(inner), Arc::clone(entry));
                Link::open(dir.clone(), secret, move || owner.registry.gone(&of))
            }
            None => Link::closed(),
        };
        Self {
            inner: Arc::clone(inner),
            entry: Arc::clone(entry),
            dir,
            info: opened.info,
            link,
            reader: Mutex::default(),
            outcome: OnceCell::new(),
            boot_changed: opened.boot_changed,
        }
    }

    async fn outcome(&self) -> Result<&Outcome, Fault> {
        let (inner, dir) = (Arc::clone(&self.inner), self.dir.clone());
        let settle = || async { blocking_or("wait for the end", move || settle(&inner, &dir)).await };
        self.outcome.get_or_try_init(settle).await
    }

    /// Waits until `of` finds something in what the shim told.
    async fn until(&self, seen: &mut watch::Receiver<Seen>, of: impl FnMut(&Seen) -> bool) -> Result<Seen, Fault> {
        let told = seen.wait_for(of).await.map(|seen| *seen);
        told.map_err(|_| Fault::Unreachable {
            operation: "wait for the shim",
            detail: "the connection's task is gone".to_owned(),
        })
    }

    async fn read(&self, offset: u64, bytes_max: usize, seen: Seen) -> Result<output::Batch, Fault> {
        let kept = self.reader.lock().unwrap_or_else(PoisonError::into_inner).take();
        let reader = kept.filter(|reader| reader.offset() == offset).unwrap_or_else(|| Reader::open(&self.dir, offset));
        let known = seen.spool_end.checked_sub(offset).and_then(|bytes| usize::try_from(bytes).ok());
        let room = known.map(|known| known.min(bytes_max.saturating_add(RECORD_BYTES_MAX)));
        let (reader, batch) = self.inner.reads.read(reader, bytes_max, room).await?;
        *self.reader.lock().unwrap_or_else(PoisonError::into_inner) = Some(reader);
        Ok(batch)
    }

    /// What follows an offset up to which everything was read after the shim had ended.
    async fn end_at(&self, offset: u64) -> Result<ChunkEnd, Fault> {
        Ok(match self.outcome().await? {
            Outcome::Ended { spool_end: Some(end), .. } if offset >= *end => ChunkEnd::Ended,
            Outcome::Ended { .. } | Outcome::Dead { .. } => ChunkEnd::Torn,
        })
    }
}

/// What a run directory knows of its harness.
pub(super) fn info(scan: &Scan) -> Info {
    let Some(meta) = &scan.meta else { return Info::default() };
    Info {
        tree_control: meta.tier.map(|tier| super::tier_name(tier).to_owned()),
        isolation: Some(super::isolation_name(meta.isolation).to_owned()),
        pid: meta.harness.and_then(|process| u32::try_from(process.pid).ok()),
    }
}

/// Finds out how a run ended whose shim told so or is gone; ends what a dead
/// shim left. Blocks.
fn settle(inner: &Inner, dir: &Path) -> std::io::Result<Outcome> {
    let scan = acri_shim::scan(dir)?;
    if let Some(exit) = &scan.exit {
        let known = exit.code.is_some() || exit.signal.is_some();
        let killed = (exit.reason == ExitReason::Killed).then(|| found::kill_request(&scan)).flatten();
        let exit_told = Exit {
            status: known.then_some(ExitStatus { code: exit.code, signal: exit.signal }),
            killed,
            orphaned: exit.reason == ExitReason::Orphaned,
        };
        return Ok(Outcome::Ended { exit: exit_told, spool_end: Some(exit.spool_end) });
    }
    if scan.boot_changed {
        let detail = "the machine was restarted".to_owned();
        return Ok(found::ended_unseen(&scan).unwrap_or(Outcome::Dead { detail }));
    }
    // Whoever hears of the end acts on it at once, and what is left would go on beside him.
    found::sweep(inner, dir)?;
    let detail = "the shim is gone without a word".to_owned();
    Ok(found::ended_unseen(&scan).unwrap_or(Outcome::Dead { detail }))
}

#[async_trait]
impl Session for ProcessSession {
    fn info(&self) -> Info {
        self.info.clone()
    }

    fn lost_reason(&self) -> FailReason {
        if self.boot_changed { FailReason::MachineRestarted } else { FailReason::HarnessLost }
    }

    async fn stop(&self, owner: Owner, command: CommandId) -> Result<(), Fault> {
        let told = !self.entry.was_stopped_by(command);
        // A repeat still asks, without a signal: whether the owner may is the shim's to say.
        let op = if told {
            Op::Stop(Stop { epoch: owner.epoch.0, command_id: command.to_string(), signal: 0 })
        } else {
            Op::Contact(found::shim_owner(owner))
        };
        if self.link.ask("stop", op).await?.is_none() {
            return self.entry.check(owner);
        }
        if told {
            self.entry.remember_stop(command);
        }
        Ok(())
    }

    async fn contact(&self, owner: Owner) -> Result<(), Fault> {
        match self.link.ask("contact", Op::Contact(found::shim_owner(owner))).await? {
            Some(_) => Ok(()),
            None => self.entry.check(owner),
        }
    }

    async fn output(&self, offset: u64, bytes_max: usize) -> Result<Chunk, Fault> {
        let mut told = self.link.seen();
        loop {
            // Noted before the read: once it has ended, a read finds everything.
            let seen = *told.borrow_and_update();
            if seen.ended || seen.spool_end == 0 || offset < seen.spool_end {
                let batch = self.read(offset, bytes_max, seen).await?;
                let next = batch.next;
                if !batch.records.is_empty() {
                    let all = seen.ended && batch.progress == Progress::CaughtUp;
                    let end = if all { self.end_at(next).await? } else { ChunkEnd::Open };
                    return Ok(Chunk { records: batch.records, next, end });
                }
                let nothing = |end| Ok(Chunk { records: Vec::new(), next, end });
                match batch.progress {
                    Progress::More => continue,
                    Progress::BadTail { .. } => return nothing(ChunkEnd::Torn),
                    Progress::Gone { first } => return nothing(ChunkEnd::Gone { first }),
                    Progress::CaughtUp if seen.ended => return nothing(self.end_at(next).await?),
                    Progress::CaughtUp => {}
                }
            }
            self.link.watch(offset).await;
            self.until(&mut told, |seen| seen.ended || seen.spool_end > offset).await?;
        }
    }

    async fn exit(&self) -> Result<Exit, Fault> {
        self.until(&mut self.link.seen(), |seen| seen.ended).await?;
        match self.outcome().await? {
            Outcome::Ended { exit, .. } => Ok(exit.clone()),
            Outcome::Dead { detail } => Err(Fault::Broken { operation: "wait for the end", detail: detail.clone() }),
        }
    }

    async fn release(&self, owner: Owner, offset: u64, token: Bytes) -> Result<(), Fault> {
        let broken = |detail: String| Fault::Broken { operation: "release", detail };
        if token.len() > RESUME_TOKEN_BYTES_MAX {
            return Err(broken(format!("the token has {} bytes, more than {RESUME_TOKEN_BYTES_MAX}", token.len())));
        }
        let op = Op::Release(Release { epoch: owner.epoch.0, offset, token: token.to_vec() });
        match self.link.ask("release", op).await? {
            Some(Body::Released(released)) if released.token_saved => Ok(()),
            Some(_) => Err(broken("the disk did not take the resume token".to_owned())),
            None => {
                self.entry.check(owner)?;
                let dir = self.dir.clone();
                blocking_or("release", move || keep_token(&dir, &token)).await
            }
        }
    }

    async fn resume_token(&self) -> Result<Option<Bytes>, Fault> {
        let dir = self.dir.clone();
        blocking_or("read the resume token", move || kept_token(&dir)).await
    }
}

fn keep_token(dir: &Path, token: &[u8]) -> std::io::Result<()> {
    if token.is_empty() {
        return Ok(());
    }
    let new = dir.join(format!("{LATE_TOKEN}.new"));
    std::fs::write(&new, token)?;
    std::fs::rename(new, dir.join(LATE_TOKEN))
}

fn kept_token(dir: &Path) -> std::io::Result<Option<Bytes>> {
    match std::fs::read(dir.join(LATE_TOKEN)) {
        Ok(token) => Ok(Some(token.into())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(acri_shim::scan(dir)?.token.map(Bytes::from)),
        Err(error) => Err(error),
    }
}

/// A run whose Kill came before its start: it was never started and never will be.
pub(super) struct NeverRun {
    pub(super) entry: Arc<Entry>,
    pub(super) killed: KillRequest,
}

#[async_trait]
impl Session for NeverRun {
    fn info(&self) -> Info {
        Info::default()
    }
    async fn stop(&self, owner: Owner, _command: CommandId) -> Result<(), Fault> {
        self.entry.check(owner)
    }
    async fn contact(&self, owner: Owner) -> Result<(), Fault> {
        self.entry.check(owner)
    }
    async fn output(&self, offset: u64, _bytes_max: usize) -> Result<Chunk, Fault> {
        Ok(Chunk { records: Vec::new(), next: offset, end: ChunkEnd::Ended })
    }
    async fn exit(&self) -> Result<Exit, Fault> {
        Ok(Exit { status: None, killed: Some(self.killed.clone()), orphaned: false })
    }
    async fn release(&self, owner: Owner, _offset: u64, _token: Bytes) -> Result<(), Fault> {
        self.entry.check(owner)
    }
    async fn resume_token(&self) -> Result<Option<Bytes>, Fault> {
        Ok(None)
    }
}
