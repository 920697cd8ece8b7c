//! Agents as their stored events make them.

use crate::{
    error::Error,
    events::{EventItem, EventTypes, EventsSince, StoredEvent},
    fold,
    operations::Client,
};
use acri::{
    AgentId, AgentStatus, ErrorBody, ErrorCode, RunId, StreamSeq,
    status::{Phase, RunStatus},
};
use acri_bus::port::{EventSelection, Fault, LeaseEntry, Until};
use acri_core::agent::Agent;
use futures_util::StreamExt as _;
use std::collections::{BTreeMap, BTreeSet};
use tokio::time::sleep;

/// Every agent that the event stream knows.
#[derive(Debug, Clone, Default)]
pub struct Overview {
    /// Those that could be folded, in the order of their first event.
    pub agents: Vec<Agent>,
    /// Those that could not, and why.
    pub broken: BTreeMap<AgentId, String>,
}

/// How often a history that is behind its leader is read again.
const STALE_READS_MAX: u32 = 20;

impl Client {
    /// All events of an agent, up to the last one that the leader has. Empty
    /// if there is no such agent.
    ///
    /// # Errors
    /// [`Error::Bus`], and [`Error::Unreadable`] for an event that is none.
    pub async fn history(&self, agent: AgentId) -> Result<Vec<StoredEvent>, Error> {
        let failed = Error::bus("history");
        let Some(last) = self.bus().last(agent).await.map_err(&failed)? else {
            return Ok(Vec::new());
        };
        let mut events: Vec<StoredEvent> = Vec::new();
        for _ in 0..STALE_READS_MAX {
            let from = events.last().map_or(StreamSeq(1), |event| event.seq.next());
            let mut stored = self.bus().read(EventSelection::Agent(agent), from, Until::Now).await.map_err(&failed)?;
            while let Some(recorded) = stored.next().await {
                let recorded = recorded.map_err(&failed)?;
                let event = StoredEvent::read(&recorded).map_err(|error| Error::Unreadable {
                    operation: "history",
                    detail: format!("event at {}: {error}", recorded.seq),
                })?;
                events.push(event);
            }
            if events.last().is_some_and(|event| event.seq >= last.seq) {
                return Ok(events);
            }
            // A follower answered that is behind the leader.
            sleep(self.limits().retry_pause_first).await;
        }
        let detail = format!("the events up to {} do not arrive", last.seq);
        Err(failed(Fault::Unavailable { operation: "history", detail }))
    }

    /// An agent, folded from its events.
    ///
    /// # Errors
    /// [`Error`]; `not_found` if the events know of no such agent.
    pub async fn agent(&self, agent: AgentId) -> Result<Agent, Error> {
        self.known_agent("history", agent).await
    }

    pub(crate) async fn known_agent(&self, operation: &'static str, agent: AgentId) -> Result<Agent, Error> {
        let mut folded = None;
        for event in self.history(agent).await? {
            fold::apply(&mut folded, &event).map_err(|detail| Error::Unreadable { operation, detail })?;
        }
        folded.ok_or_else(|| Error::not_found(operation, format!("there is no agent {agent}")))
    }

    /// All agents, folded by one read of the whole event stream.
    ///
    /// # Errors
    /// [`Error::Bus`].
    pub async fn agents(&self) -> Result<Overview, Error> {
        let mut order = Vec::new();
        let mut folded: BTreeMap<AgentId, Option<Agent>> = BTreeMap::new();
        let mut broken = BTreeMap::new();
        let mut events = self.events(EventSelection::All, EventTypes::All, EventsSince::Start, false);
        while let Some(item) = events.next().await {
            let EventItem::Event(event) = item? else { continue };
            let agent = event.envelope.agent;
            if broken.contains_key(&agent) {
                continue;
            }
            let state = folded.entry(agent).or_insert_with(|| {
                order.push(agent);
                None
            });
            if let Err(detail) = fold::apply(state, &event) {
                broken.insert(agent, detail);
            }
        }
        let agents = order
            .iter()
            .filter(|agent| !broken.contains_key(agent))
            .filter_map(|agent| folded.remove(agent).flatten())
            .collect();
        Ok(Overview { agents, broken })
    }

    /// Statuses of folded agents, in their order, with phase `unreachable`
    /// where the lease of the owner is not live.
    ///
    /// # Errors
    /// [`Error::Bus`].
    pub async fn statuses(&self, agents: &[Agent]) -> Result<Vec<AgentStatus>, Error> {
        let leases = self.bus().leases().await.map_err(Error::bus("status"))?;
        let live: BTreeSet<_> = leases
            .into_iter()
            .filter(|(_, entry)| matches!(entry, LeaseEntry::Live { .. }))
            .map(|(incarnation, _)| incarnation)
            .collect();
        agents.iter().map(|agent| status(agent, None, live.contains(&agent.owner().incarnation))).collect()
    }

    /// Waits until a run has ended.
    ///
    /// # Errors
    /// [`Error`]; `not_found` if the events know of no such agent or run.
    pub async fn wait(&self, agent: AgentId, run: RunId) -> Result<RunStatus, Error> {
        self.known_run("wait", agent, run).await?;
        let mut folded = None;
        let mut events = self.events(EventSelection::Agent(agent), EventTypes::All, EventsSince::Start, true);
        while let Some(item) = events.next().await {
            match item? {
                EventItem::Event(event) => {
                    let unreadable = |detail| Error::Unreadable { operation: "wait", detail };
                    fold::apply(&mut folded, &event).map_err(unreadable)?;
                    let ended = folded.as_ref().and_then(|agent: &Agent| agent.run(run));
                    if let Some(ended) = ended.filter(|run| run.end.is_some()) {
                        return Ok(ended.status());
                    }
                }
                EventItem::Rewound => {
                    // What was folded may be gone: begin anew.
                    folded = None;
                    events = self.events(EventSelection::Agent(agent), EventTypes::All, EventsSince::Start, true);
                }
                EventItem::Unreadable { seq, detail } => {
                    let detail = format!("event at {seq}: {detail}");
                    return Err(Error::Unreadable { operation: "wait", detail });
                }
            }
        }
        let detail = "the reader ended".to_owned();
        Err(Error::bus("wait")(Fault::Unavailable { operation: "wait", detail }))
    }

    pub(crate) async fn known_run(&self, operation: &'static str, agent: AgentId, run: RunId) -> Result<Agent, Error> {
        let folded = self.known_agent(operation, agent).await?;
        match folded.run(run) {
            Some(_) => Ok(folded),
            None => Err(no_run(operation, agent, run)),
        }
    }
}

fn no_run(operation: &'static str, agent: AgentId, run: RunId) -> Error {
    Error::not_found(operation, format!("agent {agent} has no run {run}"))
}

/// The status of a folded agent as an asker sees it who knows whether its
/// owner's lease is live.
pub(crate) fn status(agent: &Agent, run: Option<RunId>, owner_lives: bool) -> Result<AgentStatus, Error> {
    let missing = || match run {
        Some(run) => no_run("status", agent.id(), run),
        None => {
            Error::Refused { operation: "status", body: ErrorBody::new(ErrorCode::Internal, "the agent has no status") }
        }
    };
    let mut status = agent.status(run).ok_or_else(missing)?;
    if let Some(run) = &mut status.run
        && !run.state.is_terminal()
        && !owner_lives
    {
        run.phase = Some(Phase::Unreachable);
    }
    Ok(status)
}
