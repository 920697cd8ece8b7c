//! Any program, run through a holder of its own (`acri shim`).
//!
//! | in the state directory | is |
//! |---|---|
//! | `runs/<agent>/<run>/` | the run directory: the holder's files, its socket, the spool |
//! | `agents/<agent>/work/` | the working directory of an agent that names none |
//!
//! All are 0700. The program gets the spec's environment and nothing of the
//! node's; `PATH` if the spec has none; and the task's text, the agent's id and
//! the run's id in [`TASK_VARIABLE`], [`AGENT_VARIABLE`], [`RUN_VARIABLE`].
//! Its standard input is empty.
//!
//! What is known of a run is its directory: a start looks there first and never
//! starts what may have been started. Only the latch of a Kill that comes before
//! there is a directory is in memory, where the start looks again after it has
//! made one.

mod check;
mod found;
mod kill;
pub mod limits;
mod link;
mod output;
mod reap;
mod registry;
mod session;
mod start;

pub(crate) use check::check_task;
pub use check::{AGENT_VARIABLE, PATH_DEFAULT, RUN_VARIABLE, TASK_VARIABLE};

use crate::driver::{
    Attached, Driver, Fault, Held, KillSwitch, Owner, Provisioned, Refusal, Session, Start, StartError,
};
use acri::{
    AgentId, AgentSpec, CapabilitySet, ErrorBody, ErrorCode, HarnessType, Payload, RunId,
    capability::Fidelity,
    limits::{PROCESSES_PER_NODE_MAX, SPOOL_BYTES_MAX},
};
use acri_shim::{Isolation, Launch, Limits, Tier};
use async_trait::async_trait;
use check::refusal;
use found::Found;
use limits::{FORGET_WAIT, LOOK_PAUSE, SPAWNS_AT_ONCE_MAX, SPOOL_NODE_BYTES_MAX};
use output::Reads;
use registry::{Key, Registry};
use std::{
    fs::DirBuilder,
    io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};
use tokio::{sync::Semaphore, time::Instant};

/// The name of the harness type.
pub const HARNESS: &str = "process";

/// How a node runs processes.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where runs and working directories are kept. Made if it is missing.
    pub state_dir: PathBuf,
    /// The program whose hidden verb `shim` is the holder: `acri` itself.
    pub exe: PathBuf,
    /// The bounds of a run. `orphan_after` is the spec's; of
    /// `spool_bytes_max` a run is granted as much as the node's budget allows.
    pub limits: Limits,
    /// How trees may be held, the preferred way first.
    pub tiers: Vec<Tier>,
    /// Where cgroups are made; missing: the node's own, else the root.
    pub cgroup_parent: Option<PathBuf>,
    /// Processes that the node may hold at once.
    pub processes_max: usize,
    /// Unreleased bytes that all spools together may hold.
    pub spool_node_bytes_max: u64,
}

impl Config {
    /// The defaults.
    #[must_use]
    pub fn new(state_dir: impl Into<PathBuf>, exe: impl Into<PathBuf>) -> Self {
        Self {
            state_dir: state_dir.into(),
            exe: exe.into(),
            limits: Limits { spool_bytes_max: SPOOL_BYTES_MAX, ..Limits::default() },
            tiers: vec![Tier::Cgroup, Tier::Pidns, Tier::Subreaper],
            cgroup_parent: None,
            processes_max: PROCESSES_PER_NODE_MAX,
            spool_node_bytes_max: SPOOL_NODE_BYTES_MAX,
        }
    }
}

/// The driver of plain processes.
#[derive(Clone)]
pub struct ProcessDriver {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for ProcessDriver {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("ProcessDriver").field("config", &self.inner.config).finish_non_exhaustive()
    }
}

pub(crate) struct Inner {
    config: Config,
    harness: HarnessType,
    capabilities: CapabilitySet,
    registry: Registry,
    /// The best tier that can be had here.
    tier: Tier,
    reads: Reads,
    spawns: Semaphore,
}

impl Inner {
    fn run_dir(&self, (agent, run): Key) -> PathBuf {
        self.runs_dir(agent).join(run.to_string())
    }

    fn runs_dir(&self, agent: AgentId) -> PathBuf {
        self.config.state_dir.join("runs").join(agent.to_string())
    }

    fn agent_dir(&self, agent: AgentId) -> PathBuf {
        self.config.state_dir.join("agents").join(agent.to_string())
    }

    fn work_dir(&self, agent: AgentId) -> PathBuf {
        self.agent_dir(agent).join("work")
    }
}

/// Runs what blocks on another thread.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(cancelled) => Err(io::Error::other(cancelled)),
        },
    }
}

/// The same, its errors as faults: what is damaged is broken, all else may be otherwise the next time.
async fn blocking_or<T: Send + 'static>(
    operation: &'static str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, Fault> {
    blocking(work).await.map_err(|error| {
        let detail = error.to_string();
        match error.kind() {
            io::ErrorKind::InvalidData => Fault::Broken { operation, detail },
            _ => Fault::Unreachable { operation, detail },
        }
    })
}

fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Cgroup => "cgroup",
        Tier::Pidns => "pidns",
        Tier::Subreaper => "subreaper",
    }
}

fn isolation_name(isolation: Isolation) -> &'static str {
    match isolation {
        Isolation::None => "none",
    }
}

fn make_private(directory: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

/// What a probe found.
struct Probed {
    tier: Tier,
    isolation: Isolation,
}

/// Starts a shim for a program that ends at once, to see what it can do here. Blocks.
fn probe(config: &Config) -> io::Result<Probed> {
    let dir = config.state_dir.join(format!("probe-{}", std::process::id()));
    acri_shim::remove(&dir)?;
    make_private(&dir)?;
    let program = config.exe.to_str().ok_or_else(|| io::Error::other("the shim's path is not UTF-8"))?;
    let launch = Launch {
        dir: dir.clone(),
        // A shim with an argument refuses to run, which is as short as a program can be.
        argv: vec![program.to_owned(), acri_shim::VERB.to_owned(), "probe".to_owned()],
        cwd: PathBuf::from("/"),
        limits: config.limits.clone(),
        tiers: config.tiers.clone(),
        cgroup_parent: config.cgroup_parent.clone(),
        ..Launch::default()
    };
    let spawned = acri_shim::spawn(&config.exe, &launch);
    let probed = spawned.map_err(io::Error::other).and_then(|mut spawned| {
        spawned.child.wait()?;
        Ok(Probed { tier: spawned.info.tier, isolation: spawned.info.isolation })
    });
    acri_shim::remove(&dir)?;
    probed
}

impl ProcessDriver {
    /// Makes the state directory and probes, once, how trees can be held here.
    /// Blocks for some milliseconds.
    ///
    /// # Errors
    /// If the state directory cannot be used or no shim can be started.
    pub fn new(mut config: Config) -> io::Result<Self> {
        make_private(&config.state_dir)?;
        config.state_dir = config.state_dir.canonicalize()?;
        config.exe = config.exe.canonicalize()?;
        let probed = probe(&config)?;
        let harness: HarnessType = HARNESS.parse().map_err(io::Error::other)?;
        let capabilities = CapabilitySet {
            // Lines are passed through as messages.
            structured_logs: Fidelity::Emulated,
            // SIGTERM.
            graceful_stop: Fidelity::Native,
            headless: Fidelity::Native,
            tree_control: Some(tier_name(probed.tier).to_owned()),
            isolation: Some(isolation_name(probed.isolation).to_owned()),
            ..CapabilitySet::none(harness.clone())
        };
        let (processes, spools) = (config.processes_max, config.spool_node_bytes_max);
        let registry = Registry::new(processes, spools, config.limits.spool_bytes_max);
        let spawns = Semaphore::new(SPAWNS_AT_ONCE_MAX);
        let inner = Inner { config, harness, capabilities, registry, tier: probed.tier, reads: Reads::new(), spawns };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Where a run's holder keeps its files, for people and tests.
    #[must_use]
    pub fn run_dir(&self, agent: AgentId, run: RunId) -> PathBuf {
        self.inner.run_dir((agent, run))
    }
}

#[async_trait]
impl Driver for ProcessDriver {
    fn harness(&self) -> &HarnessType {
        &self.inner.harness
    }

    fn capabilities(&self) -> CapabilitySet {
        self.inner.capabilities.clone()
    }

    fn is_local(&self) -> bool {
        true
    }

    async fn create(&self, agent: AgentId, spec: &AgentSpec) -> Result<Provisioned, Refusal> {
        check::check_spec(spec)?;
        let (spec, fresh) = (spec.clone(), self.inner.work_dir(agent));
        let failed = |error: io::Error| Refusal(ErrorBody::new(ErrorCode::Unavailable, error.to_string()));
        blocking(move || Ok(provision(&spec, fresh))).await.map_err(failed)?
    }

    fn check_task(&self, _spec: &AgentSpec, task: &Payload) -> Result<(), Refusal> {
        check_task(task)
    }

    async fn start(&self, start: &Start) -> Result<Arc<dyn Session>, StartError> {
        // A task of its own, so that whoever stops waiting leaves no child behind that nobody reaps.
        let starting = tokio::spawn(start::start(Arc::clone(&self.inner), start.clone()));
        let lost = |error: tokio::task::JoinError| Fault::Unreachable { operation: "start", detail: error.to_string() };
        starting.await.map_err(lost)?
    }

    async fn attach(&self, agent: AgentId, run: RunId, owner: Owner) -> Result<Attached, Fault> {
        let (key, inner) = ((agent, run), &self.inner);
        let (entry, dir) = (inner.registry.entry(key), inner.run_dir(key));
        let _starting = start::wait("attach", &entry).await?;
        match start::look_settled("attach", &dir).await? {
            Found::Alive(scan) | Found::Over(scan) => start::open(inner, key, &entry, dir, &scan, owner).await,
            Found::Nothing { .. } | Found::Launching => start::vanished(inner, dir).await,
        }
    }

    async fn give_up(&self, agent: AgentId, run: RunId, owner: Owner) -> Result<(), Fault> {
        let (key, inner) = ((agent, run), Arc::clone(&self.inner));
        let (entry, dir) = (inner.registry.entry(key), inner.run_dir(key));
        let _starting = start::wait("give up", &entry).await?;
        let highest = blocking_or("give up", {
            let dir = dir.clone();
            move || Ok(acri_shim::scan(&dir)?.owner.map_or(0, |owner| owner.epoch))
        });
        match highest.await? {
            highest if highest > owner.epoch.0 => return Err(Fault::Stale(acri::id::Epoch(highest))),
            _ => entry.claim(owner)?,
        }
        tracing::warn!(%agent, %run, "a run that cannot be reached is ended");
        let ended = blocking_or("give up", move || {
            acri_shim::end_shim(&dir, inner.config.cgroup_parent.as_deref())?;
            found::sweep(&inner, &dir)
        });
        ended.await?;
        self.inner.registry.gone(&entry);
        Ok(())
    }

    async fn scan(&self) -> Vec<Held> {
        let root = self.inner.config.state_dir.join("runs");
        let found = match blocking(move || find_runs(&root)).await {
            Ok(found) => found,
            Err(error) => {
                tracing::error!(%error, "run directories cannot be listed");
                Vec::new()
            }
        };
        for (key, _) in found.iter().filter(|(_, alive)| *alive) {
            self.inner.registry.found_alive(&self.inner.registry.entry(*key));
        }
        let held = |((agent, run), _)| Held { agent, run, kill_switch: self.kill_switch(agent, run) };
        found.into_iter().map(held).collect()
    }

    fn kill_switch(&self, agent: AgentId, run: RunId) -> Arc<dyn KillSwitch> {
        Arc::new(kill::ProcessKillSwitch { inner: Arc::clone(&self.inner), key: (agent, run) })
    }

    async fn forget(&self, agent: AgentId, run: RunId) {
        let dir = self.inner.run_dir((agent, run));
        let deadline = Instant::now() + FORGET_WAIT;
        loop {
            let at = dir.clone();
            match blocking(move || acri_shim::remove(&at)).await {
                Ok(()) => break self.inner.registry.forget((agent, run)),
                // It has told its end and is about to leave, or a Kill was
                // latched beside the removal.
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::ResourceBusy | io::ErrorKind::DirectoryNotEmpty)
                        && Instant::now() < deadline =>
                {
                    tokio::time::sleep(LOOK_PAUSE).await;
                }
                Err(error) => {
                    break tracing::warn!(%agent, %run, %error, "run directory is not removed");
                }
            }
        }
        let of = self.inner.runs_dir(agent);
        // Fails while there are others.
        let _ = blocking(move || std::fs::remove_dir(of)).await;
    }

    async fn remove(&self, agent: AgentId) {
        let of = self.inner.runs_dir(agent);
        let mut runs = blocking(move || runs_in(&of)).await.unwrap_or_default();
        runs.extend(self.inner.registry.runs_of(agent));
        runs.sort_unstable();
        runs.dedup();
        for run in runs {
            self.forget(agent, run).await;
        }
        let dir = self.inner.agent_dir(agent);
        let removed = blocking(move || match std::fs::remove_dir_all(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        });
        if let Err(error) = removed.await {
            tracing::warn!(%agent, %error, "working directory is not removed");
        }
    }
}

/// Blocks.
fn provision(spec: &AgentSpec, fresh: PathBuf) -> Result<Provisioned, Refusal> {
    let directory = match &spec.working_directory {
        Some(directory) => PathBuf::from(directory),
        None => {
            let failed = |error: io::Error| {
                refusal(ErrorCode::Unavailable, "working_directory", format_args!("cannot be made: {error}"))
            };
            make_private(&fresh).map_err(failed)?;
            fresh
        }
    };
    check::check_directory(&directory)?;
    check::check_program(spec, &directory)?;
    let directory = directory.to_str().map(str::to_owned);
    if directory.is_none() {
        return Err(refusal(ErrorCode::Unavailable, "working_directory", "is below a path that is not UTF-8"));
    }
    Ok(Provisioned { working_directory: directory })
}

/// Runs of which anything is kept, and whether a shim holds them. Blocks.
fn find_runs(root: &Path) -> io::Result<Vec<(Key, bool)>> {
    let mut found = Vec::new();
    for agent in ids_in::<AgentId>(root)? {
        let of = root.join(agent.to_string());
        for run in runs_in(&of)? {
            let alive = match found::look(&of.join(run.to_string())) {
                Ok(Found::Nothing { kill: None }) => continue,
                Ok(Found::Nothing { kill: Some(_) } | Found::Over(_)) => false,
                Ok(Found::Alive(_) | Found::Launching) => true,
                Err(error) => {
                    tracing::error!(%agent, %run, %error, "run directory cannot be read");
                    false
                }
            };
            found.push(((agent, run), alive));
        }
    }
    Ok(found)
}

fn runs_in(of_agent: &Path) -> io::Result<Vec<RunId>> {
    ids_in(of_agent)
}

/// The ids that name something in a directory; none if it does not exist. Blocks.
fn ids_in<T: std::str::FromStr>(directory: &Path) -> io::Result<Vec<T>> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut ids = Vec::new();
    for entry in entries {
        ids.extend(entry?.file_name().to_str().and_then(|name| name.parse().ok()));
    }
    Ok(ids)
}
