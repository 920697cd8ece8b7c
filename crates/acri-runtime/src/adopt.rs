//! The adopter: who owns which agent, as the events tell, and the take-over
//! of agents whose node is silent.
//!
//! A silent incarnation is fenced first, and only by a node that has itself
//! held its lease without a break for one TTL: after an outage of the bus
//! every lease is an expiry marker, and nobody may conclude anything from
//! that. A harness that only its own node can reach is given up after
//! `node_lost_after` of silence, observed without a break.

use crate::{agent, clock::boot_time, node::Shared, supervisor};
use acri::{AgentId, Event, EventEnvelope, HarnessType, Incarnation, NodeId, RunId, StreamSeq, Subject};
use acri_bus::port::{EventSelection, Fault, LeaseEntry, Leased, Recorded, Until};
use acri_drivers::driver::Driver;
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
}

impl Index {
    /// Takes in one stored event.
    pub(crate) fn note(&mut self, recorded: &Recorded) {
        self.next = recorded.seq.next();
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

/// Follows the events, so that the index stays true.
pub(crate) async fn follow(shared: Arc<Shared>, index: Arc<Mutex<Index>>, stop: CancellationToken) {
    let work = async {
        loop {
            let from = lock(&index).next;
            match shared.bus.read(EventSelection::All, from, Until::Dropped).await {
                Ok(mut events) => {
                    while let Some(Ok(recorded)) = events.next().await {
                        lock(&index).note(&recorded);
                    }
                }
                Err(error) => tracing::warn!(%error, "events are not followed"),
            }
            tokio::time::sleep(FOLLOW_AGAIN_AFTER).await;
        }
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = work => {}
    }
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
        let owner = history
            .last()
            .and_then(|last| acri::codec::from_msgpack::<EventEnvelope>(&last.bytes).ok())
            .map(|last| last.incarnation);
        if owner != Some(entry.incarnation) {
            // Somebody was quicker; the index hears of it in a moment.
            return Ok(());
        }
        tracing::warn!(%agent, former = %entry.node, node_lost, "an agent of a silent node is taken over");
        let _ = supervisor.cast(supervisor::Msg::Adopt { agent, history });
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
