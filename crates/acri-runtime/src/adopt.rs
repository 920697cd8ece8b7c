//! The adopter: who owns which agent, as the events tell, and the take-over
//! of agents whose node is silent.
//!
//! A silent incarnation is fenced first, and only by a node that has itself
//! held its lease without a break for one TTL: after an outage of the bus
//! every lease is an expiry marker, and nobody may conclude anything from
//! that. A harness that only its own node can reach is given up after
//! `node_lost_after` of silence, observed without a break.

use crate::{agent, clock::boot_time, histories, node::Shared, supervisor};
use acri::{AgentId, Event, EventEnvelope, HarnessType, Incarnation, NodeId, RunId, StreamSeq, Subject};
use acri_bus::port::{EventSelection, Fault, LeaseEntry, Leased, Recorded, Until};
use acri_drivers::driver::Driver;
use bytes::Bytes;
use futures_util::StreamExt as _;
use ractor::ActorRef;
use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio_util::sync::CancellationToken;

/// Pause before the events are followed again after a fault.
const FOLLOW_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// What is known of one agent's ownership.
#[derive(Debug, Clone)]
struct Entry {
    node: NodeId,
    incarnation: Incarnation,
    harness: HarnessType,
    lost_after: Duration,
    /// The open run, and the node that accepted its Start.
    open: Option<(RunId, NodeId)>,
}

/// Who owns which agent that is not removed.
#[derive(Debug, Default)]
pub(crate) struct Index {
    agents: HashMap<AgentId, Entry>,
    next: StreamSeq,
    /// The last event that was noted.
    last: Option<(StreamSeq, Bytes)>,
}

impl Index {
    /// Takes in one stored event.
    pub(crate) fn note(&mut self, recorded: &Recorded) {
        self.next = recorded.seq.next();
        self.last = Some((recorded.seq, recorded.bytes.clone()));
        let Subject::Event(agent, run, kind) = &recorded.subject else { return };
        match kind.as_str() {
            "agent.created" | "agent.assigned" => self.owned(*agent, &recorded.bytes),
            "agent.removed" => {
                self.agents.remove(agent);
            }
            "run.accepted" | "run.logs_sealed" => {
                if let Some(entry) = self.agents.get_mut(agent) {
                    entry.open = run.filter(|_| kind == "run.accepted").map(|run| (run, entry.node.clone()));
                }
            }
            _ => {}
        }
    }

    /// The node that owes a run its logs and its end, if it is open.
    pub(crate) fn owner_of_open(&self, agent: AgentId, run: RunId) -> Option<&NodeId> {
        let entry = self.agents.get(&agent)?;
        entry.open.as_ref().filter(|(open, _)| *open == run).map(|_| &entry.node)
    }

    /// Agents whose open run was accepted by this node and is owned by another.
    pub(crate) fn given_up(&self, home: &NodeId) -> Vec<(AgentId, HarnessType)> {
        let is = |entry: &&Entry| entry.node != *home && entry.open.as_ref().is_some_and(|(_, node)| node == home);
        let given_up = self.agents.iter().filter(|(_, entry)| is(entry));
        given_up.map(|(agent, entry)| (*agent, entry.harness.clone())).collect()
    }

    fn owned(&mut self, agent: AgentId, bytes: &[u8]) {
        // One that cannot be read is the concern of whoever folds it.
        let Ok(envelope) = acri::codec::from_msgpack::<EventEnvelope>(bytes) else { return };
        match envelope.event {
            Event::AgentCreated(created) => {
                let entry = Entry {
                    node: envelope.node,
                    incarnation: envelope.incarnation,
                    harness: created.spec.harness.clone(),
                    lost_after: created.spec.node_lost_after(),
                    open: None,
                };
                self.agents.insert(agent, entry);
            }
            Event::AgentAssigned(assigned) => {
                if let Some(entry) = self.agents.get_mut(&agent) {
                    entry.node = envelope.node;
                    entry.incarnation = envelope.incarnation;
                    entry.lost_after = Duration::from_millis(assigned.node_lost_after_ms);
                }
            }
            _ => {}
        }
    }
}

/// Since when each incarnation is seen silent, and at which revision.
type Silence = BTreeMap<Incarnation, (Duration, Option<StreamSeq>)>;

/// The adopter of a node.
pub(crate) struct Adopter {
    pub(crate) shared: Arc<Shared>,
    pub(crate) drivers: Vec<Arc<dyn Driver>>,
    pub(crate) supervisors: BTreeMap<HarnessType, ActorRef<supervisor::Msg>>,
    pub(crate) index: Arc<Mutex<Index>>,
}

/// Follows the events, so that the index stays true. At each interruption it
/// looks whether the stream is still the one that was read: one that was put
/// back to an older state gives its sequences out again, and an owner who has
/// nothing to append would never hear of it.
pub(crate) async fn follow(
    shared: Arc<Shared>,
    supervisors: Vec<ActorRef<supervisor::Msg>>,
    index: Arc<Mutex<Index>>,
    stop: CancellationToken,
) {
    let work = async {
        let mut looks = tokio::time::interval(FOLLOW_AGAIN_AFTER);
        let mut lost = shared.bus.connections_lost();
        loop {
            let from = lock(&index).next;
            match shared.bus.read(EventSelection::All, from, Until::Dropped).await {
                Ok(mut events) => loop {
                    tokio::select! {
                        item = events.next() => match item {
                            Some(Ok(recorded)) => lock(&index).note(&recorded),
                            Some(Err(_)) | None => break,
                        },
                        _ = looks.tick() => if shared.bus.connections_lost() != lost { break },
                    }
                },
                Err(error) => tracing::warn!(%error, "events are not followed"),
            }
            let now = shared.bus.connections_lost();
            match was_put_back(&shared, &index).await {
                Ok(false) => lost = now,
                Ok(true) => {
                    lost = now;
                    tracing::error!("the event stream was put back to an older state: every agent is compared with it");
                    *lock(&index) = Index::default();
                    shared.forget_acknowledged();
                    for supervisor in &supervisors {
                        let _ = supervisor.cast(supervisor::Msg::CompareHistories);
                    }
                }
                Err(error) => tracing::warn!(%error, "the event stream cannot be compared yet"),
            }
            tokio::time::sleep(FOLLOW_AGAIN_AFTER).await;
        }
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = work => {}
    }
}

/// Whether the stream no longer holds the last event that was read from it, or
/// the newest that was acknowledged to this node, which may be newer.
async fn was_put_back(shared: &Shared, index: &Mutex<Index>) -> Result<bool, Fault> {
    let read = lock(index).last.clone();
    for (seq, bytes) in read.into_iter().chain(shared.acknowledged()) {
        let mut events = shared.bus.read(EventSelection::All, seq, Until::Now).await?;
        let found = events.next().await.transpose()?;
        if found.is_none_or(|found| found.seq != seq || found.bytes != bytes) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn lock(index: &Mutex<Index>) -> std::sync::MutexGuard<'_, Index> {
    index.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Adopter {
    /// Looks for silent owners, again and again.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let mut every = tokio::time::interval(self.shared.config.adopt_every);
        let mut silence = Silence::new();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = every.tick() => {}
            }
            if self.shared.lease.held_for() < self.shared.config.lease_ttl {
                // Silence counts only while the observer itself was there.
                silence.clear();
                continue;
            }
            if let Err(error) = self.look(&mut silence).await {
                tracing::warn!(%error, "silent owners cannot be looked for");
                silence.clear();
            }
        }
    }

    async fn look(&self, silence: &mut Silence) -> Result<(), Fault> {
        let leases: BTreeMap<Incarnation, LeaseEntry> = self.shared.bus.leases().await?.into_iter().collect();
        let owned = lock(&self.index).agents.clone();
        self.collect(&leases, &owned).await?;
        let mut seen = Silence::new();
        for (agent, entry) in owned {
            if entry.incarnation == self.shared.incarnation {
                continue;
            }
            let lease = leases.get(&entry.incarnation).unwrap_or(&LeaseEntry::Absent);
            let revision = match lease {
                LeaseEntry::Live { .. } => continue,
                LeaseEntry::Expired(revision) => Some(*revision),
                LeaseEntry::Fenced(_) | LeaseEntry::Absent => None,
            };
            // A tombstone after a marker is the same silence going on.
            let since = match silence.get(&entry.incarnation) {
                Some((since, former)) if revision.is_none() || *former == revision => *since,
                _ => boot_time(),
            };
            seen.insert(entry.incarnation, (since, revision));
            if !self.fenced(entry.incarnation, lease).await? {
                continue;
            }
            self.consider(agent, &entry, boot_time().saturating_sub(since)).await?;
        }
        *silence = seen;
        Ok(())
    }

    /// Whether the silent incarnation is fenced by now.
    async fn fenced(&self, incarnation: Incarnation, lease: &LeaseEntry) -> Result<bool, Fault> {
        let expect = match lease {
            LeaseEntry::Fenced(_) => return Ok(true),
            LeaseEntry::Live { .. } => return Ok(false),
            LeaseEntry::Expired(revision) => *revision,
            LeaseEntry::Absent => StreamSeq(0),
        };
        match self.shared.bus.fence(incarnation, expect).await {
            Leased::Written(_) => {
                tracing::warn!(%incarnation, "a silent incarnation is fenced");
                Ok(true)
            }
            // Somebody else fenced it, or it came back: the next look tells.
            Leased::Lost => Ok(false),
            Leased::Unknown(fault) => Err(fault),
        }
    }

    async fn consider(&self, agent: AgentId, entry: &Entry, silent: Duration) -> Result<(), Fault> {
        let Some(supervisor) = self.supervisors.get(&entry.harness) else { return Ok(()) };
        let local = self.drivers.iter().any(|driver| *driver.harness() == entry.harness && driver.is_local());
        let here = &self.shared.config.node;
        let node_lost = local && entry.node != *here && entry.open.as_ref().is_none_or(|(_, home)| home != here);
        if node_lost && (entry.open.is_none() || silent < entry.lost_after) {
            return Ok(());
        }
        let (history, _) = agent::read_after(&self.shared, agent, StreamSeq(0)).await?;
        let folded = histories::folded(agent, &history);
        // Otherwise somebody was quicker; the index hears of it in a moment.
        if let Some(folded) = folded.filter(|folded| folded.owner().incarnation == entry.incarnation) {
            tracing::warn!(%agent, former = %entry.node, node_lost, "an agent of a silent node is taken over");
            let _ = supervisor.cast(supervisor::Msg::Adopt(folded, self.shared.adoptions.begin()));
        }
        Ok(())
    }

    /// Removes tombstones that no agent names any more.
    async fn collect(
        &self,
        leases: &BTreeMap<Incarnation, LeaseEntry>,
        owned: &HashMap<AgentId, Entry>,
    ) -> Result<(), Fault> {
        for (incarnation, lease) in leases {
            if let LeaseEntry::Fenced(revision) = lease
                && !owned.values().any(|entry| entry.incarnation == *incarnation)
            {
                self.shared.bus.collect_tombstone(*incarnation, *revision).await?;
            }
        }
        Ok(())
    }
}
