//! Starting a run, or finding it started.

use super::{
    Inner, blocking, blocking_or, check,
    found::{self, Found},
    kill,
    limits::{LOOK_PAUSE, START_WAIT},
    make_private, output, reap,
    registry::{Entry, Key},
    session::{self, NeverRun, Opened, ProcessSession},
};
use crate::driver::{Attached, Fault, Info, KillRequest, Owner, Refusal, Session, Start, StartError};
use acri::{ErrorBody, ErrorCode, Payload, event::FailReason, id::Epoch};
use acri_shim::{FailureKind, Launch, Limits, SpawnError, Spawned, wire::Op};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};
use tokio::{
    sync::MutexGuard,
    time::{Instant, timeout},
};

/// Waits until no start of this run is going on, and keeps others from beginning.
pub(super) async fn wait<'a>(operation: &'static str, entry: &'a Entry) -> Result<MutexGuard<'a, ()>, Fault> {
    timeout(START_WAIT, entry.starting.lock()).await.map_err(|_| Fault::Unreachable {
        operation,
        detail: format!("another start of this run does not end within {} ms", START_WAIT.as_millis()),
    })
}

/// Looks at a run directory, and waits while a shim that an earlier node began
/// is about to start its harness.
pub(super) async fn look_settled(operation: &'static str, dir: &Path) -> Result<Found, Fault> {
    let deadline = Instant::now() + acri_shim::limits::LAUNCH_ANSWER;
    loop {
        let at = dir.to_owned();
        match blocking_or(operation, move || found::look(&at)).await? {
            Found::Launching if Instant::now() < deadline => tokio::time::sleep(LOOK_PAUSE).await,
            Found::Launching => {
                return Err(Fault::Unreachable { operation, detail: "its shim does not begin".to_owned() });
            }
            other => return Ok(other),
        }
    }
}

/// Claims a run that was started once, and opens it.
pub(super) async fn open(
    inner: &Arc<Inner>,
    key: Key,
    entry: &Arc<Entry>,
    dir: PathBuf,
    scan: &acri_shim::Scan,
    owner: Owner,
) -> Result<Attached, Fault> {
    if let Some(highest) = scan.owner.filter(|highest| highest.epoch > owner.epoch.0) {
        return Err(Fault::Stale(Epoch(highest.epoch)));
    }
    entry.claim(owner)?;
    if !scan.alive && scan.exit.is_none() && found::ended_unseen(scan).is_none() {
        let (of, at) = (Arc::clone(inner), dir.clone());
        // Whoever hears that it is lost acts on it: nothing of it may be left then.
        let readable = blocking_or("attach", move || {
            found::sweep(&of, &at)?;
            output::is_readable(&at)
        });
        if !readable.await? {
            return Ok(lost(scan.boot_changed));
        }
    }
    if scan.alive && scan.secret.is_none() {
        // It lives, and will take no word from anybody.
        let detail = "its shim cannot be asked: the file `secret` is missing or damaged".to_owned();
        return Err(Fault::Unreachable { operation: "attach", detail });
    }
    let opened = Opened {
        info: session::info(scan),
        secret: scan.secret.clone().filter(|_| scan.alive),
        boot_changed: scan.boot_changed,
    };
    let session = ProcessSession::new(inner, entry, dir, opened);
    if scan.alive {
        tracing::info!(agent = %key.0, run = %key.1, epoch = %owner.epoch, "claim");
        // `None`: it has ended meanwhile, which the session tells.
        session.link.ask("claim", Op::Claim(found::shim_owner(owner))).await?;
    }
    Ok(Attached::Session(Arc::new(session)))
}

/// What it means that there is nothing of a run: it was never started, or its directory was removed from under it. Then
/// nobody can reach it any more, and it is ended.
pub(super) async fn vanished(inner: &Arc<Inner>, dir: PathBuf) -> Result<Attached, Fault> {
    let of = Arc::clone(inner);
    match blocking_or("attach", move || Ok((found::sweep(&of, &dir)?, dir.try_exists()?))).await? {
        (0, _) => Ok(Attached::NeverStarted),
        // What it wrote may be left.
        (_, true) => Err(Fault::Unreachable {
            operation: "attach",
            detail: "its files were removed, and what ran was ended".to_owned(),
        }),
        (_, false) => Ok(Attached::Lost {
            reason: FailReason::HarnessLost,
            message: "its run directory was removed, and what ran was ended".to_owned(),
        }),
    }
}

fn lost(boot_changed: bool) -> Attached {
    let (reason, message) = if boot_changed {
        (FailReason::MachineRestarted, "the machine was restarted, and the harness had written nothing")
    } else {
        (FailReason::HarnessLost, "the shim is gone without a word, and the harness had written nothing")
    };
    Attached::Lost { reason, message: message.to_owned() }
}

/// Starts a run, or finds it started.
pub(super) async fn start(inner: Arc<Inner>, start: Start) -> Result<Arc<dyn Session>, StartError> {
    let key = (start.agent, start.run);
    let (entry, dir) = (inner.registry.entry(key), inner.run_dir(key));
    let _starting = wait("start", &entry).await?;
    let latched = match look_settled("start", &dir).await? {
        Found::Alive(scan) | Found::Over(scan) => {
            return started(open(&inner, key, &entry, dir, &scan, start.owner).await?);
        }
        Found::Nothing { kill } => kill,
        Found::Launching => None,
    };
    entry.claim(start.owner)?;
    // After the look: a refusal says that nothing runs.
    check::check_spec(&start.spec)?;
    check::check_task(&start.task)?;
    if let Some(killed) = latched {
        return Ok(Arc::new(NeverRun { entry: Arc::clone(&entry), killed }));
    }
    let spool_bytes_max = inner.registry.admit(&entry)?;
    match launch(&inner, &entry, &dir, &start, spool_bytes_max).await {
        Ok(Launched::Session(session)) => Ok(session),
        Ok(Launched::Killed(killed)) => {
            inner.registry.emptied(&entry);
            Ok(Arc::new(NeverRun { entry: Arc::clone(&entry), killed }))
        }
        Err(refused @ StartError::Refused(_)) => {
            inner.registry.emptied(&entry);
            Err(refused)
        }
        Err(fault) => {
            inner.registry.gone(&entry);
            Err(fault)
        }
    }
}

/// What a launch came to.
enum Launched {
    Session(Arc<dyn Session>),
    /// A Kill came before it.
    Killed(KillRequest),
}

async fn launch(
    inner: &Arc<Inner>,
    entry: &Arc<Entry>,
    dir: &Path,
    start: &Start,
    spool_bytes_max: u64,
) -> Result<Launched, StartError> {
    let at = dir.to_owned();
    blocking(move || make_private(&at)).await.map_err(|error| unavailable(format!("run directory: {error}")))?;
    // After the directory was made: a Kill that comes from here on finds it, and the shim finds the Kill.
    if let Some(killed) = entry.latched() {
        let (at, request) = (dir.to_owned(), killed.clone());
        blocking_or("start", move || kill::latch(&at, &request)).await?;
        return Ok(Launched::Killed(killed));
    }
    let _permit = inner.spawns.acquire().await.map_err(|error| unavailable(error.to_string()))?;
    let (exe, order) = (inner.config.exe.clone(), order(inner, dir, start, spool_bytes_max));
    let spawned = blocking(move || Ok(acri_shim::spawn(&exe, &order))).await;
    match spawned.map_err(|error| Fault::Unreachable { operation: "start", detail: error.to_string() })? {
        Ok(spawned) => Ok(Launched::Session(Arc::new(begun(inner, entry, dir, spawned)))),
        Err(error) => judge(inner, entry, dir, start, error).await,
    }
}

fn order(inner: &Inner, dir: &Path, start: &Start, spool_bytes_max: u64) -> Launch {
    let directory = start.provisioned.working_directory.as_ref().or(start.spec.working_directory.as_ref());
    let task = match &start.task {
        Payload::Text { text, .. } => text.as_str(),
        Payload::Octets { .. } => "",
    };
    Launch {
        dir: dir.to_owned(),
        argv: start.spec.command.clone(),
        cwd: directory.map_or_else(|| inner.work_dir(start.agent), PathBuf::from),
        env: check::environment(start, task),
        owner: found::shim_owner(start.owner),
        limits: Limits { spool_bytes_max, orphan_after: start.spec.orphan_after(), ..inner.config.limits.clone() },
        tiers: inner.config.tiers.clone(),
        cgroup_parent: inner.config.cgroup_parent.clone(),
    }
}

fn begun(inner: &Arc<Inner>, entry: &Arc<Entry>, dir: &Path, spawned: Spawned) -> ProcessSession {
    let info = Info {
        tree_control: Some(super::tier_name(spawned.info.tier).to_owned()),
        isolation: Some(super::isolation_name(spawned.info.isolation).to_owned()),
        pid: u32::try_from(spawned.info.harness.pid).ok(),
    };
    let (owner, of, child) = (Arc::clone(inner), Arc::clone(entry), spawned.child);
    tokio::spawn(async move {
        reap::reap(child).await;
        owner.registry.gone(&of);
    });
    let opened = Opened { info, secret: Some(spawned.token), boot_changed: false };
    ProcessSession::new(inner, entry, dir.to_owned(), opened)
}

fn unavailable(message: impl Into<String>) -> StartError {
    Refusal(ErrorBody::new(ErrorCode::Unavailable, message)).into()
}

/// What a failed spawn means.
async fn judge(
    inner: &Arc<Inner>,
    entry: &Arc<Entry>,
    dir: &Path,
    start: &Start,
    error: SpawnError,
) -> Result<Launched, StartError> {
    let refused = match error {
        SpawnError::Failed { kind, text } => match kind {
            FailureKind::Killed | FailureKind::AlreadyRunning | FailureKind::AlreadyStarted => {
                return look_again(inner, entry, dir, start).await;
            }
            FailureKind::NotFound | FailureKind::Permission => {
                check::refusal(ErrorCode::FailedPrecondition, "command", text)
            }
            FailureKind::Cwd => check::refusal(ErrorCode::FailedPrecondition, "working_directory", text),
            FailureKind::Limits => Refusal(ErrorBody::new(ErrorCode::ResourceExhausted, text)),
            FailureKind::Tier | FailureKind::Other => Refusal(ErrorBody::new(ErrorCode::Unavailable, text)),
        },
        SpawnError::Shim { exe, source } => {
            let text = format!("the shim {} cannot be started: {source}", exe.display());
            Refusal(ErrorBody::new(ErrorCode::Unavailable, text))
        }
        SpawnError::NoAnswer { .. } => {
            let text = error.to_string();
            match look_settled("start", dir).await? {
                Found::Nothing { .. } => Refusal(ErrorBody::new(ErrorCode::Unavailable, text)),
                _ => return Err(Fault::Unreachable { operation: "start", detail: text }.into()),
            }
        }
    };
    let at = dir.to_owned();
    if let Err(error) = blocking(move || acri_shim::remove(&at)).await {
        tracing::warn!(dir = %dir.display(), %error, "run directory of a failed start is not removed");
    }
    Err(refused.into())
}

/// Somebody was there first: a Kill, or another start.
async fn look_again(inner: &Arc<Inner>, entry: &Arc<Entry>, dir: &Path, start: &Start) -> Result<Launched, StartError> {
    match look_settled("start", dir).await? {
        Found::Alive(scan) | Found::Over(scan) => {
            let key = (start.agent, start.run);
            started(open(inner, key, entry, dir.to_owned(), &scan, start.owner).await?).map(Launched::Session)
        }
        Found::Nothing { kill } => match kill.or_else(|| entry.latched()) {
            Some(killed) => Ok(Launched::Killed(killed)),
            None => Err(never("nothing was started, and nobody says why")),
        },
        Found::Launching => Err(never("its shim does not begin")),
    }
}

fn started(attached: Attached) -> Result<Arc<dyn Session>, StartError> {
    match attached {
        Attached::Session(session) => Ok(session),
        // It may have been started: never again.
        Attached::Lost { message, .. } => Err(never(&message)),
        Attached::NeverStarted => Err(never("nothing was started")),
    }
}

fn never(detail: &str) -> StartError {
    Fault::Broken { operation: "start", detail: detail.to_owned() }.into()
}
