//! Ending a process, whatever is blocked: a connection of its own per Kill, on
//! whichever runtime asks, and without the shim where the shim does not answer.

use super::{
    Inner, blocking_or,
    found::{self, Found},
    limits::{KILL_GREETING_WAIT, KILL_WAIT, LOOK_PAUSE},
    link,
    registry::Key,
};
use crate::driver::{Fault, KillRequest, KillSwitch};
use acri::id::Epoch;
use acri_shim::{
    Scan,
    wire::{self, Body, Kill, Op, Request},
};
use async_trait::async_trait;
use std::{io, path::Path, sync::Arc};
use tokio::{
    io::AsyncWriteExt as _,
    time::{Instant, timeout_at},
};

const OPERATION: &str = "kill";
const KILL_ID: u64 = 1;

pub(super) struct ProcessKillSwitch {
    pub(super) inner: Arc<Inner>,
    pub(super) key: Key,
}

#[async_trait]
impl KillSwitch for ProcessKillSwitch {
    async fn kill(&self, request: KillRequest) -> Result<(), Fault> {
        // A task of its own, so that whoever stops waiting does not stop the Kill.
        let (inner, key) = (Arc::clone(&self.inner), self.key);
        let killing = tokio::spawn(async move {
            kill(&inner, key, request).await?;
            inner.registry.gone(&inner.registry.entry(key));
            Ok(())
        });
        killing.await.map_err(|error| unproved(error.to_string()))?
    }
}

fn unproved(detail: impl Into<String>) -> Fault {
    Fault::Unreachable { operation: OPERATION, detail: detail.into() }
}

async fn kill(inner: &Arc<Inner>, key: Key, request: KillRequest) -> Result<(), Fault> {
    let began = Instant::now();
    let deadline = began + KILL_WAIT;
    let (entry, dir) = (inner.registry.entry(key), inner.run_dir(key));
    // From here on no start begins, and one that has begun finds it: a start looks at the latch after it has made the
    // directory and before it spawns, and the shim looks at the directory before and after.
    entry.latch(&request)?;
    if entry.starting.try_lock().is_err() {
        let (at, latched) = (dir.clone(), request.clone());
        blocking_or(OPERATION, move || latch(&at, &latched)).await?;
        drop(timeout_at(deadline, entry.starting.lock()).await.map_err(|_| unproved("its start does not end"))?);
    }
    loop {
        let at = dir.clone();
        match blocking_or(OPERATION, move || found::look(&at)).await? {
            Found::Over(scan) if scan.exit.is_some() || scan.boot_changed => return Ok(()),
            // Nothing: never started; or its directory was removed from under it, and it lives.
            Found::Over(_) | Found::Nothing { .. } => {
                let (inner, latched) = (Arc::clone(inner), request.clone());
                let swept = move || latch(&dir, &latched).and_then(|()| found::sweep(&inner, &dir));
                return blocking_or(OPERATION, swept).await.map(drop);
            }
            Found::Alive(scan) => match ask(&dir, &scan, &request, deadline).await {
                Asked::Killed => return Ok(()),
                Asked::Stale(epoch) => return Err(Fault::Stale(epoch)),
                Asked::Silent => {
                    tracing::warn!(agent = %key.0, run = %key.1, "shim does not answer, it is killed with its tree");
                    latch_and_end(inner, &dir, &request).await?;
                }
                // It may be about to listen; not for that long.
                Asked::Unheard if Instant::now() >= began + KILL_GREETING_WAIT => {
                    latch_and_end(inner, &dir, &request).await?;
                }
                Asked::Unheard | Asked::Unproved => {}
            },
            // A shim of an earlier node that has just begun: it finds the latch. Or one whose files are gone.
            Found::Launching if Instant::now() < began + KILL_GREETING_WAIT => {
                let (at, latched) = (dir.clone(), request.clone());
                blocking_or(OPERATION, move || latch(&at, &latched)).await?;
            }
            Found::Launching => latch_and_end(inner, &dir, &request).await?,
        }
        if Instant::now() >= deadline {
            return Err(unproved(format!("not proved gone within {} ms", KILL_WAIT.as_millis())));
        }
        tokio::time::sleep(LOOK_PAUSE).await;
    }
}

async fn latch_and_end(inner: &Arc<Inner>, dir: &Path, request: &KillRequest) -> Result<(), Fault> {
    let (inner, at, latched) = (Arc::clone(inner), dir.to_owned(), request.clone());
    let end = move || {
        latch(&at, &latched)?;
        acri_shim::end_shim(&at, inner.config.cgroup_parent.as_deref())
    };
    blocking_or(OPERATION, end).await
}

/// Records the Kill in the run's directory if there is one. Blocks.
pub(super) fn latch(dir: &Path, request: &KillRequest) -> io::Result<()> {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let wall_ns = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
    match acri_shim::latch_kill(dir, &found::shim_request(request, wall_ns)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map(drop),
    }
}

enum Asked {
    Killed,
    Stale(Epoch),
    /// Nobody answers at all.
    Silent,
    /// Nobody could be asked just now.
    Unheard,
    /// It answered, and the proof did not come in time.
    Unproved,
}

async fn ask(dir: &Path, scan: &Scan, request: &KillRequest, deadline: Instant) -> Asked {
    let Some(secret) = &scan.secret else { return Asked::Silent };
    let (mut stream, mut decoder) = match link::connect(dir, secret, KILL_GREETING_WAIT).await {
        Ok(greeted) => greeted,
        // Gone between the look and now, or about to listen: look again. Only silence is silence.
        Err(error) if error.kind() != io::ErrorKind::TimedOut => return Asked::Unheard,
        Err(_) => return Asked::Silent,
    };
    let kill = Kill {
        epoch: request.owner.epoch.0,
        command_id: request.command.to_string(),
        principal: request.principal.clone(),
        reason: request.reason.clone(),
    };
    let answered = async {
        stream.write_all(&wire::encode(&Request { id: KILL_ID, op: Op::Kill(kill) })).await?;
        loop {
            let reply = link::receive(&mut stream, &mut decoder).await?;
            if reply.id == KILL_ID {
                return Ok::<_, io::Error>(reply.body);
            }
        }
    };
    match timeout_at(deadline, answered).await {
        Ok(Ok(Body::Killed(_))) => Asked::Killed,
        Ok(Ok(Body::Stale(stale))) => Asked::Stale(Epoch(stale.highest)),
        _ => Asked::Unproved,
    }
}
