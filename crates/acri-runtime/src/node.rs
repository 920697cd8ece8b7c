//! One node: its start in the order that nothing can fall between, its loops,
//! its drain.

use crate::{
    adopt::{self, Adopter, Index},
    adoptions::Adoptions,
    agent,
    clock::{BusClock, boot_time},
    config::Config,
    control::{self, Control, Switches},
    counters::Counters,
    histories::{self, Histories},
    lease::{Lease, Terms},
    room::{self, Room},
    service::{self, Service},
    supervisor::{self, Supervisor},
};
use acri::{AgentId, CommandId, EventId, HarnessType, Incarnation, NodeId, RunId, StreamSeq, id::Epoch, limits};
use acri_bus::port::{EventSelection, Fault, LeaseEntry, Leased, SharedBus, Until};
use acri_drivers::driver::{Driver, Held, KillRequest, Owner, Session};
use bytes::Bytes;
use futures_util::{StreamExt as _, future::BoxFuture};
use ractor::{Actor, ActorRef};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs::File,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// Makes a connection to the bus. Called once on the data runtime and once on
/// the control thread: a connection lives on the runtime that made it.
pub type Connect = Arc<dyn Fn() -> BoxFuture<'static, Result<SharedBus, Fault>> + Send + Sync>;

/// How often it is looked whose holder is to hear from its owner.
const CONTACT_LOOK_EVERY: Duration = Duration::from_millis(250);
/// How often a lease that may be nobody's any more is looked at.
const LEASE_LOOK_EVERY: Duration = Duration::from_millis(500);
/// How long a start waits for its lease.
const LEASE_WAIT_MAX: Duration = Duration::from_secs(30);
/// How long a node that leaves tries to give its lease back.
const GIVE_BACK_MAX: Duration = Duration::from_secs(3);
/// How long the fencing of a predecessor is tried.
const FENCE_ATTEMPTS_MAX: u32 = 50;

/// Why a node did not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another process holds the state directory.
    #[error("state directory {0} is in use by another node")]
    Locked(String),
    /// A file of the node's own cannot be read or written.
    #[error("{operation} {path}: {source}")]
    File {
        /// What was tried.
        operation: &'static str,
        /// On which file.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The bus did not do its part.
    #[error("{operation}: {source}")]
    Bus {
        /// What was tried.
        operation: &'static str,
        /// What the bus said.
        source: Fault,
    },
    /// A node of the same name lives elsewhere.
    #[error("another node named {node} is alive (incarnation {incarnation}); names must be unique")]
    NameTaken {
        /// The name.
        node: NodeId,
        /// The other's incarnation.
        incarnation: Incarnation,
    },
    /// The lease was not granted in time.
    #[error("no lease within {0} s")]
    NoLease(u64),
    /// The node's clock is too far from the bus's.
    #[error("clock differs from the bus's by {0} ms, more than {max} ms", max = limits::CLOCK_SKEW_MAX.as_millis())]
    Skew(i64),
    /// An actor did not start.
    #[error("supervisor of {harness}: {detail}")]
    Supervisor {
        /// Whose.
        harness: HarnessType,
        /// What was said.
        detail: String,
    },
}

/// What all actors of a node share.
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) incarnation: Incarnation,
    pub(crate) bus: SharedBus,
    pub(crate) control: Control,
    pub(crate) lease: Arc<Lease>,
    pub(crate) clock: Arc<BusClock>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) sessions: Sessions,
    pub(crate) room: Room,
    pub(crate) agents: AtomicU64,
    /// Those under way, for which logs wait.
    pub(crate) adoptions: Adoptions,
    /// The newest event that was acknowledged to this node.
    acknowledged: Mutex<Option<(StreamSeq, Bytes)>>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Shared").field("incarnation", &self.incarnation).finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn mint_event_id(&self) -> EventId {
        EventId::from_uuid(Uuid::now_v7())
    }

    /// Takes note of an event that was acknowledged.
    pub(crate) fn note_acknowledged(&self, seq: StreamSeq, bytes: &Bytes) {
        let mut newest = self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner);
        if newest.as_ref().is_none_or(|(former, _)| *former < seq) {
            *newest = Some((seq, bytes.clone()));
        }
    }

    /// The newest event that was acknowledged to this node.
    pub(crate) fn acknowledged(&self) -> Option<(StreamSeq, Bytes)> {
        self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Forgets it: after the stream was put back it is no measure any more.
    pub(crate) fn forget_acknowledged(&self) {
        *self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The counters that the heartbeat tells.
    pub(crate) fn counter_values(&self) -> BTreeMap<String, u64> {
        let mut values = self.counters.snapshot();
        let lost = self.bus.connections_lost() + self.control.connections_lost();
        values.insert("connections_lost".to_owned(), lost);
        values
    }

    pub(crate) fn agents_owned(&self) -> u64 {
        self.agents.load(Ordering::Relaxed)
    }
}

#[derive(Clone)]
struct SessionEntry {
    owner: Owner,
    session: Arc<dyn Session>,
    /// How often its holder must hear that it is owned.
    every: Duration,
    /// When it is due next, by boot time.
    due: Duration,
}

/// The sessions of all runs: their holders hear regularly that they are owned.
#[derive(Default)]
pub(crate) struct Sessions {
    entries: Mutex<HashMap<(AgentId, RunId), SessionEntry>>,
}

impl Sessions {
    fn with<T>(&self, act: impl FnOnce(&mut HashMap<(AgentId, RunId), SessionEntry>) -> T) -> T {
        act(&mut self.entries.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Registers a session whose holder must hear from us within
    /// `orphan_after`: it is told four times as often, and every `at_most`.
    pub(crate) fn register(
        &self,
        (agent, run): (AgentId, RunId),
        owner: Owner,
        session: Arc<dyn Session>,
        orphan_after: Duration,
        at_most: Duration,
    ) {
        let every = (orphan_after / 4).min(at_most);
        let entry = SessionEntry { owner, session, every, due: boot_time() + every };
        self.with(|entries| entries.insert((agent, run), entry));
    }

    pub(crate) fn drop_run(&self, agent: AgentId, run: RunId) {
        self.with(|entries| entries.remove(&(agent, run)));
    }

    /// Who owns which run's harness, as far as it was reached.
    fn owners(&self) -> Vec<((AgentId, RunId), Owner)> {
        self.with(|entries| entries.iter().map(|(key, entry)| (*key, entry.owner)).collect())
    }

    /// Those whose holders are to hear from us now.
    fn due(&self) -> Vec<(Owner, Arc<dyn Session>)> {
        let now = boot_time();
        self.with(|entries| {
            let due = entries.values_mut().filter(|entry| entry.due <= now);
            due.map(|entry| {
                entry.due = now + entry.every;
                (entry.owner, Arc::clone(&entry.session))
            })
            .collect()
        })
    }
}

/// How a node ended by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Its incarnation was fenced: others may own its agents now. Start again.
    Fenced,
}

/// A running node.
pub struct Node {
    shared: Arc<Shared>,
    supervisors: BTreeMap<HarnessType, ActorRef<supervisor::Msg>>,
    stop: CancellationToken,
    // Held as long as the node lives.
    _lock: File,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Node").field("incarnation", &self.shared.incarnation).finish_non_exhaustive()
    }
}

impl Node {
    /// Starts a node: scan, kill switches, connections, lease, fold, adopt,
    /// serve. When this returns its harnesses' commands are answered.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn start(config: Config, connect: Connect, drivers: Vec<Arc<dyn Driver>>) -> Result<Self, Error> {
        let lock = lock_state(&config.state_dir)?;
        let incarnation = Incarnation::from_uuid(Uuid::new_v4());
        let switches = Arc::new(Switches::default());
        let mut held = Vec::new();
        for driver in &drivers {
            for found in driver.scan().await {
                switches.register(found.agent, found.run, Arc::clone(&found.kill_switch));
                held.push((Arc::clone(driver), found));
            }
        }
        let bus = connect().await.map_err(|source| Error::Bus { operation: "connect", source })?;
        // Fenced before it is forgotten: a crash between the two only fences it
        // once more.
        if let Some(predecessor) = read_incarnation(&config.state_dir)? {
            fence(&bus, predecessor).await?;
        }
        write_incarnation(&config.state_dir, incarnation)?;
        let (lease, clock, counters) =
            (Arc::new(Lease::default()), Arc::new(BusClock::default()), Arc::new(Counters::default()));
        let terms = Terms {
            node: config.node.clone(),
            incarnation,
            ttl: config.lease_ttl,
            renew_every: config.lease_renew_every,
            stop_after: config.lease_stop_after,
        };
        let parts = control::Parts {
            terms,
            lease: Arc::clone(&lease),
            clock: Arc::clone(&clock),
            counters: Arc::clone(&counters),
            switches,
        };
        let control =
            Control::start(connect, parts).await.map_err(|source| Error::Bus { operation: "connect", source })?;
        let granted = tokio::time::timeout(LEASE_WAIT_MAX, lease.wait()).await;
        if granted != Ok(true) {
            control.end();
            return Err(Error::NoLease(LEASE_WAIT_MAX.as_secs()));
        }
        check_skew(&bus, &clock).await.inspect_err(|_| control.end())?;
        let shared = Arc::new(Shared {
            config,
            incarnation,
            bus,
            control,
            lease,
            clock,
            counters,
            sessions: Sessions::default(),
            room: Room::default(),
            agents: AtomicU64::new(0),
            adoptions: Adoptions::default(),
            acknowledged: Mutex::default(),
        });
        let mut node = Self { shared, supervisors: BTreeMap::new(), stop: CancellationToken::new(), _lock: lock };
        node.begin(drivers, held).await.inspect_err(|_| node.shared.control.end())?;
        Ok(node)
    }

    async fn begin(&mut self, drivers: Vec<Arc<dyn Driver>>, held: Vec<(Arc<dyn Driver>, Held)>) -> Result<(), Error> {
        for driver in &drivers {
            let parts = supervisor::Parts { shared: Arc::clone(&self.shared), driver: Arc::clone(driver) };
            let (supervisor, _) = Actor::spawn(None, Supervisor, parts)
                .await
                .map_err(|error| Error::Supervisor { harness: driver.harness().clone(), detail: error.to_string() })?;
            self.supervisors.insert(driver.harness().clone(), supervisor);
        }
        let index = self.adopt_own().await?;
        for (driver, held) in held {
            match index.owner_of_open(held.agent, held.run) {
                // Others reach it too, and its owner may live: the adopter
                // sees to it.
                Some(node) if *node != self.shared.config.node && !driver.is_local() => {
                    self.shared.control.switches.drop_run(held.agent, held.run);
                }
                Some(_) => {}
                None if !driver.is_local() => self.shared.control.switches.drop_run(held.agent, held.run),
                None => {
                    tokio::spawn(reclaim(Arc::clone(&self.shared), driver, held));
                }
            }
        }
        // Given up while this node was away, by whoever owns it now: what it
        // wrote is still owed, or that it never began, and only this node knows.
        for (agent, harness) in index.given_up(&self.shared.config.node) {
            if drivers.iter().any(|driver| *driver.harness() == harness && driver.is_local()) {
                self.take_back(&harness, agent).await?;
            }
        }
        // Known before the first Create can come.
        room::look(&self.shared).await;
        tokio::spawn(room::watch(Arc::clone(&self.shared), self.stop.clone()));
        let index = Arc::new(Mutex::new(index));
        for driver in &drivers {
            let Some(supervisor) = self.supervisors.get(driver.harness()).cloned() else {
                continue;
            };
            // Not on the connection that events and logs go over: strangers
            // publish to this subject.
            let requests = self
                .shared
                .control
                .bus
                .serve_harness(driver.harness())
                .await
                .map_err(|source| Error::Bus { operation: "serve a harness", source })?;
            let service =
                Arc::new(Service { shared: Arc::clone(&self.shared), driver: Arc::clone(driver), supervisor });
            tokio::spawn(service.run(requests, self.stop.clone()));
        }
        let all = self.supervisors.values().cloned().collect();
        tokio::spawn(adopt::follow(Arc::clone(&self.shared), all, Arc::clone(&index), self.stop.clone()));
        let adopter = Adopter {
            shared: Arc::clone(&self.shared),
            drivers: drivers.clone(),
            supervisors: self.supervisors.clone(),
            index,
        };
        tokio::spawn(adopter.run(self.stop.clone()));
        tokio::spawn(service::heartbeat(Arc::clone(&self.shared), drivers, self.stop.clone()));
        tokio::spawn(contact(Arc::clone(&self.shared), self.stop.clone()));
        Ok(())
    }

    async fn take_back(&self, harness: &HarnessType, agent: AgentId) -> Result<(), Error> {
        let read = agent::read_after(&self.shared, agent, StreamSeq(0)).await;
        let (history, _) = read.map_err(|source| Error::Bus { operation: "read a history", source })?;
        if let (Some(supervisor), Some(folded)) = (self.supervisors.get(harness), histories::folded(agent, &history)) {
            tracing::warn!(%agent, "an agent that was given up is taken back");
            let _ = supervisor.cast(supervisor::Msg::Adopt(folded, self.shared.adoptions.begin()));
        }
        Ok(())
    }

    /// One ordered read over all events, then an adoption of each agent that
    /// this node's predecessors owned.
    async fn adopt_own(&self) -> Result<Index, Error> {
        let fault = |source| Error::Bus { operation: "read the events", source };
        let mut histories = Histories::new(self.supervisors.keys().cloned());
        let mut index = Index::default();
        let mut events = self.shared.bus.read(EventSelection::All, StreamSeq(1), Until::Now).await.map_err(fault)?;
        while let Some(recorded) = events.next().await {
            let recorded = recorded.map_err(fault)?;
            index.note(&recorded);
            histories.note(&recorded);
        }
        let mut checked = BTreeSet::new();
        for folded in histories.owned_by(&self.shared.config.node) {
            let Some(supervisor) = self.supervisors.get(&folded.spec().harness) else { continue };
            let owner = folded.owner().incarnation;
            if checked.insert(owner) {
                // The lock file proves the death of predecessors in this state
                // directory only; a namesake elsewhere may live.
                if self.is_renewed(owner).await? {
                    return Err(Error::NameTaken { node: self.shared.config.node.clone(), incarnation: owner });
                }
                fence(&self.shared.bus, owner).await?;
            }
            let _ = supervisor.cast(supervisor::Msg::Adopt(folded, self.shared.adoptions.begin()));
        }
        Ok(index)
    }

    /// Whether that incarnation still renews its lease. An entry that looks
    /// live is watched for one TTL: a bus that was down, or put back to an older
    /// store, expires late what nobody renews any more.
    async fn is_renewed(&self, incarnation: Incarnation) -> Result<bool, Error> {
        let fault = |source| Error::Bus { operation: "read a lease", source };
        let deadline = boot_time() + self.shared.config.lease_ttl;
        let mut seen = None;
        loop {
            let LeaseEntry::Live { revision, renewed, .. } = self.shared.bus.lease(incarnation).await.map_err(fault)?
            else {
                return Ok(false);
            };
            if seen.is_some_and(|former| former != revision) {
                return Ok(true);
            }
            seen = Some(revision);
            let stale = self.shared.clock.now().since(renewed) > self.shared.config.lease_ttl;
            if stale || boot_time() >= deadline {
                return Ok(false);
            }
            tokio::time::sleep(LEASE_LOOK_EVERY).await;
        }
    }

    /// Which start of the node this is.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.shared.incarnation
    }

    /// Waits until the node ends by itself.
    pub async fn ended(&self) -> Ended {
        self.shared.lease.fenced().await;
        Ended::Fenced
    }

    /// Whether its lease lets it act at this moment: without it nothing is
    /// acknowledged.
    #[must_use]
    pub fn may_act(&self) -> bool {
        self.shared.lease.may_act()
    }

    /// How many runs' harnesses this node holds.
    #[must_use]
    pub fn runs(&self) -> usize {
        self.shared.control.switches.len()
    }

    /// Leaves: takes no further command and lets the harnesses go on for the
    /// next start of this node. Where none goes on, its lease is given back.
    pub async fn leave(&self) {
        self.stop.cancel();
        for actor in self.actors().await {
            let _ = actor.cast(agent::Msg::Leave);
        }
        for supervisor in self.supervisors.values() {
            // A second wait would return at once; one is made, with a limit.
            let _ = supervisor.stop_children_and_wait(None, Some(Duration::from_secs(5))).await;
            supervisor.stop(None);
        }
        let was_ours = !self.shared.lease.is_fenced();
        // From here on nothing acts any more: no append, no effect, no reply,
        // whatever is still on its way to one.
        self.shared.lease.end();
        self.shared.control.end();
        if was_ours {
            self.give_back().await;
        }
        self.shared.bus.drain().await;
    }

    /// Fences itself, so that nobody need wait for the lease to run out. Not
    /// where a harness lives on: its holder counts on the whole lease before
    /// another node begins to count its silence.
    async fn give_back(&self) {
        if self.runs() > 0 {
            return;
        }
        match tokio::time::timeout(GIVE_BACK_MAX, fence(&self.shared.bus, self.shared.incarnation)).await {
            Ok(Ok(())) => tracing::info!(incarnation = %self.shared.incarnation, "lease is given back"),
            Ok(Err(error)) => tracing::warn!(%error, "lease is not given back: it runs out"),
            Err(_) => tracing::warn!("lease is not given back in time: it runs out"),
        }
    }

    async fn actors(&self) -> Vec<ActorRef<agent::Msg>> {
        let mut actors = Vec::new();
        for supervisor in self.supervisors.values() {
            actors.extend(ractor::call_t!(supervisor, supervisor::Msg::Agents, 5_000).unwrap_or_default());
        }
        actors
    }

    /// Stops every open run with this grace and waits until all are sealed, or
    /// until the grace and a little more is over. Returns how many are left.
    pub async fn stop_runs(&self, grace: Duration) -> usize {
        self.order_all(|| agent::Msg::StopRun {
            command: CommandId::from_uuid(Uuid::now_v7()),
            grace,
            reason: "the node drains".to_owned(),
        })
        .await;
        self.wait_sealed(grace + limits::KILL_PROOF_MAX * 2).await
    }

    /// Kills every open run and waits until all are sealed. Returns how many
    /// are left. The harnesses end whether the bus is there or not; what can
    /// be left then is the record of it.
    pub async fn kill_runs(&self) -> usize {
        for ((agent, run), owner) in self.shared.sessions.owners() {
            let request = KillRequest {
                command: CommandId::from_uuid(Uuid::now_v7()),
                principal: self.shared.config.node.to_string(),
                reason: "the node was told to end at once".to_owned(),
                owner,
            };
            self.shared.control.kill_here(agent, run, request).await;
        }
        self.order_all(|| agent::Msg::KillRun {
            command: CommandId::from_uuid(Uuid::now_v7()),
            reason: "the node was told to end at once".to_owned(),
        })
        .await;
        self.wait_sealed(limits::KILL_PROOF_MAX * 2).await
    }

    async fn order_all(&self, message: impl Fn() -> agent::Msg) {
        for actor in self.actors().await {
            let _ = actor.cast(message());
        }
    }

    async fn wait_sealed(&self, at_most: Duration) -> usize {
        let _ = tokio::time::timeout(at_most, self.shared.control.switches.empty()).await;
        self.runs()
    }
}

/// Ends what is left of a run that this node no longer owes anything: sealed
/// before its spool was removed, or given up while this node was away.
async fn reclaim(shared: Arc<Shared>, driver: Arc<dyn Driver>, held: Held) {
    // Above every owner's: nobody owns this harness.
    let owner = Owner { epoch: Epoch(u64::MAX), incarnation: shared.incarnation };
    let request = KillRequest {
        command: CommandId::from_uuid(Uuid::now_v7()),
        principal: format!("node:{}", shared.config.node),
        reason: "the run was given up while its node was away".to_owned(),
        owner,
    };
    for attempt in 0.. {
        if !shared.lease.wait().await {
            return;
        }
        match held.kill_switch.kill(request.clone()).await {
            Ok(()) => break,
            Err(fault) => {
                tracing::warn!(agent = %held.agent, run = %held.run, %fault, "what is left of a run cannot be ended");
                tokio::time::sleep(agent::retry_pause(attempt)).await;
            }
        }
    }
    driver.forget(held.agent, held.run).await;
    shared.control.switches.drop_run(held.agent, held.run);
}

async fn check_skew(bus: &SharedBus, clock: &BusClock) -> Result<(), Error> {
    let offset =
        bus.clock_offset_micros().await.map_err(|source| Error::Bus { operation: "read the bus's clock", source })?;
    clock.set_offset_from_wall(offset);
    if u128::from(offset.unsigned_abs()) > limits::CLOCK_SKEW_MAX.as_micros() {
        return Err(Error::Skew(offset / 1_000));
    }
    Ok(())
}

/// Fences an incarnation that is proved dead.
async fn fence(bus: &SharedBus, incarnation: Incarnation) -> Result<(), Error> {
    let fault = |source| Error::Bus { operation: "fence a predecessor", source };
    for attempt in 0..FENCE_ATTEMPTS_MAX {
        let expect = match bus.lease(incarnation).await.map_err(fault)? {
            LeaseEntry::Fenced(_) => return Ok(()),
            LeaseEntry::Live { revision, .. } | LeaseEntry::Expired(revision) => revision,
            LeaseEntry::Absent => StreamSeq(0),
        };
        match bus.fence(incarnation, expect).await {
            Leased::Written(_) => return Ok(()),
            Leased::Lost => {}
            Leased::Unknown(error) => tracing::warn!(%error, "fence has no answer"),
        }
        tokio::time::sleep(agent::retry_pause(attempt.min(4))).await;
    }
    Err(fault(Fault::Unavailable { operation: "fence", detail: "the entry changes again and again".to_owned() }))
}

async fn contact(shared: Arc<Shared>, stop: CancellationToken) {
    let mut every = tokio::time::interval(CONTACT_LOOK_EVERY);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = every.tick() => {}
        }
        // At once, not one after the other: one holder that does not answer
        // must not let the others' time run out.
        let contacts = shared.sessions.due().into_iter().map(|(owner, session)| {
            let lease = Arc::clone(&shared.lease);
            async move {
                if lease.may_act()
                    && let Err(fault) = session.contact(owner).await
                {
                    tracing::debug!(%fault, "a holder does not hear us");
                }
            }
        });
        for contact in contacts {
            tokio::spawn(contact);
        }
    }
}

fn file_error(operation: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.display().to_string();
    move |source| Error::File { operation, path, source }
}

fn lock_state(directory: &Path) -> Result<File, Error> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(file_error("create", directory))?;
    let path = directory.join("node.lock");
    let lock =
        File::options().create(true).truncate(false).write(true).open(&path).map_err(file_error("open", &path))?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive)
        .map_err(|_| Error::Locked(directory.display().to_string()))?;
    Ok(lock)
}

fn read_incarnation(directory: &Path) -> Result<Option<Incarnation>, Error> {
    let path = directory.join("incarnation");
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(text.trim().parse().ok()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(file_error("read", &path)(error)),
    }
}

fn write_incarnation(directory: &Path, incarnation: Incarnation) -> Result<(), Error> {
    let (path, fresh) = (directory.join("incarnation"), directory.join("incarnation.new"));
    std::fs::write(&fresh, incarnation.to_string()).map_err(file_error("write", &fresh))?;
    std::fs::rename(&fresh, &path).map_err(file_error("write", &path))
}
