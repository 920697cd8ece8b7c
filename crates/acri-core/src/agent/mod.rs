//! One agent with its runs, as its events make it.
//!
//! [`Agent::evolve`] folds an event, `decide` answers a command with one event
//! or a refusal, `due` tells what is still owed. None of them knows how an
//! event is stored.

pub mod decide;
pub mod due;
mod evolve;
mod status;
mod verdict;

pub use evolve::FoldError;
pub(crate) use evolve::decode;
pub(crate) use verdict::cut;

use crate::appender::{Command, Creation, Me};
use acri::{
    AgentId, AgentSpec, CapabilitySet, CommandId, Epoch, EventId, Incarnation, NodeId, Payload, RunId, RunState,
    StreamSeq, Timestamp,
    command::{AgentHandle, OnExpiry, RunHandle},
    event::{ExitStatus, FailReason, Source, WaitReason},
    id::{EventSeq, Sha256Digest},
    log::Stream,
    status::Termination,
};
use std::collections::BTreeMap;

/// An agent, folded from its events. Equal histories give equal agents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agent {
    id: AgentId,
    spec: AgentSpec,
    capabilities: CapabilitySet,
    working_directory: Option<String>,
    created: Timestamp,
    created_by: Option<CommandId>,
    owner: Owner,
    removed: Option<Removal>,
    last: Last,
    /// Boxed, since a map's node has room for eleven values, and most agents
    /// have one run.
    runs: BTreeMap<RunId, Box<Run>>,
    last_run: Option<RunId>,
    accepted: BTreeMap<CommandId, Accepted>,
}

/// Who owns an agent.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Owner {
    /// The node.
    pub node: NodeId,
    /// Which start of it.
    pub incarnation: Incarnation,
    /// Which owner that is, counted from 1.
    pub epoch: Epoch,
}

/// The last event of an agent: what the next one rests on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Last {
    /// Its sequence in the stream.
    pub seq: StreamSeq,
    /// Its position in the agent's history.
    pub sequence: EventSeq,
    /// Its id.
    pub id: EventId,
    /// SHA-256 of its stored bytes.
    pub digest: Sha256Digest,
    /// When it was decided.
    pub time: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Removal {
    reason: String,
    at: Timestamp,
}

/// A command that became an event, remembered for as long as it can be
/// repeated.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Accepted {
    at: Timestamp,
    order: AcceptedOrder,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum AcceptedOrder {
    Start { run: RunId, task: Sha256Digest },
    Stop { run: RunId, reason: String, on_expiry: OnExpiry, deadline: Timestamp },
    Kill { run: RunId, reason: String },
    Remove { reason: String },
}

/// A run, folded from its events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Its id.
    pub id: RunId,
    /// Position of its last event in its history.
    pub sequence: EventSeq,
    /// The node that accepted its Start: where a local harness lives.
    pub home: NodeId,
    /// When its Start was accepted.
    pub accepted_at: Timestamp,
    /// The Start's command.
    pub command: Option<CommandId>,
    /// Who gave it.
    pub principal: Option<String>,
    /// The task, kept until the harness has begun.
    pub task: Option<Payload>,
    /// Its state.
    pub state: RunState,
    /// Since when.
    pub since: Timestamp,
    /// Whether `run.started` is recorded.
    pub started: bool,
    /// What it waits for, while it waits.
    pub waiting: Option<WaitReason>,
    /// The Stop in force.
    pub stop: Option<Stop>,
    /// The commands of all Stops that were accepted, with their reasons.
    pub stops: BTreeMap<CommandId, String>,
    /// The Kill that was accepted.
    pub kill: Option<Kill>,
    /// How it ended.
    pub end: Option<End>,
    /// Whether its log is complete: nothing follows.
    pub sealed: bool,
    /// Whether it was sealed while output was known to be missing.
    pub gap: bool,
    /// The highest source of a derived event, per stream.
    pub sources: BTreeMap<Stream, Source>,
}

/// A Stop in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stop {
    /// Its command.
    pub command: CommandId,
    /// Who gave it.
    pub principal: String,
    /// Why.
    pub reason: String,
    /// When its grace is over.
    pub deadline: Timestamp,
    /// What happens then.
    pub on_expiry: OnExpiry,
}

/// An accepted Kill.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kill {
    /// Its command.
    pub command: CommandId,
    /// Who gave it.
    pub principal: String,
    /// Why.
    pub reason: String,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    /// In one word.
    pub termination: Termination,
    /// Why it failed, if it did.
    pub failure: Option<FailReason>,
    /// In words.
    pub reason: Option<String>,
    /// How its process ended.
    pub exit: Option<ExitStatus>,
    /// When that was recorded.
    pub at: Timestamp,
}

impl Run {
    /// Whether an owner still owes this run something.
    #[must_use]
    pub fn is_open(&self) -> bool {
        !self.sealed
    }

    /// Whether it ended in the history while its harness may live: its node
    /// was silent, or the stream lost what happened. A log that was sealed
    /// whole proves the end: only a holder that saw it can tell so much.
    #[must_use]
    pub fn end_is_unproved(&self) -> bool {
        let unproved = |end: &End| matches!(end.failure, Some(FailReason::NodeLost | FailReason::HistoryLost));
        let whole = self.sealed && !self.gap;
        !whole && self.end.as_ref().is_some_and(unproved)
    }
}

impl Agent {
    /// Its id.
    #[must_use]
    pub fn id(&self) -> AgentId {
        self.id
    }

    /// Its spec.
    #[must_use]
    pub fn spec(&self) -> &AgentSpec {
        &self.spec
    }

    /// What its harness could do on the node that created it.
    #[must_use]
    pub fn capabilities(&self) -> &CapabilitySet {
        &self.capabilities
    }

    /// Its working directory, if its harness has one.
    #[must_use]
    pub fn working_directory(&self) -> Option<&str> {
        self.working_directory.as_deref()
    }

    /// When it was created.
    #[must_use]
    pub fn created(&self) -> Timestamp {
        self.created
    }

    /// The Create that made it.
    #[must_use]
    pub fn created_by(&self) -> Option<CommandId> {
        self.created_by
    }

    /// Who owns it.
    #[must_use]
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Whether it was given up.
    #[must_use]
    pub fn removed(&self) -> bool {
        self.removed.is_some()
    }

    /// Its last event.
    #[must_use]
    pub fn last(&self) -> &Last {
        &self.last
    }

    /// All its runs.
    #[must_use]
    pub fn runs(&self) -> &BTreeMap<RunId, Box<Run>> {
        &self.runs
    }

    /// One run.
    #[must_use]
    pub fn run(&self, run: RunId) -> Option<&Run> {
        self.runs.get(&run).map(AsRef::as_ref)
    }

    /// Its last run.
    #[must_use]
    pub fn last_run(&self) -> Option<&Run> {
        self.last_run.and_then(|run| self.run(run))
    }

    /// The run that is not sealed; an agent has one at most.
    #[must_use]
    pub fn open_run(&self) -> Option<&Run> {
        self.last_run().filter(|run| run.is_open())
    }

    /// Whether its open run's Start was accepted by another node than this
    /// one: a local harness of it is out of this node's reach.
    #[must_use]
    pub fn open_run_is_elsewhere(&self, node: &NodeId) -> bool {
        self.open_run().is_some_and(|run| run.home != *node)
    }

    /// The agent that a Create will make: before its first event, at sequence
    /// 0.
    pub(crate) fn unborn(creation: Creation, me: &Me, command: &Command, now: Timestamp) -> Self {
        Self {
            id: creation.agent,
            spec: creation.spec,
            capabilities: creation.capabilities,
            working_directory: creation.working_directory,
            created: now,
            created_by: Some(command.id),
            owner: Owner { node: me.node.clone(), incarnation: me.incarnation, epoch: Epoch(1) },
            removed: None,
            last: Last {
                seq: StreamSeq(0),
                sequence: EventSeq(0),
                id: EventId::from_uuid(*creation.agent.as_uuid()),
                digest: Sha256Digest::default(),
                time: now,
            },
            runs: BTreeMap::new(),
            last_run: None,
            accepted: BTreeMap::new(),
        }
    }

    /// What Create answers.
    #[must_use]
    pub fn handle(&self) -> AgentHandle {
        AgentHandle {
            agent: self.id,
            harness: self.spec.harness.clone(),
            node: self.owner.node.clone(),
            capabilities: self.capabilities.clone(),
            created: self.created,
        }
    }

    /// What Start answered for this run.
    #[must_use]
    pub fn run_handle(&self, run: RunId) -> RunHandle {
        RunHandle { agent: self.id, run }
    }
}
