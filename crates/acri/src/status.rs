//! The state of a run (spec, section 1, Status).

use crate::{
    event::ExitStatus,
    id::{AgentId, Epoch, EventSeq, NodeId, RunId},
    time::Timestamp,
};
use serde::{Deserialize, Serialize};

/// The six states of the spec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    /// Accepted, not yet begun.
    Pending,
    /// At work.
    Running,
    /// Blocked on a tool call, a clarification or a resource.
    Waiting,
    /// Finished with success.
    Completed,
    /// Halted gracefully.
    Stopped,
    /// Ended otherwise; a killed run too, see [`Termination`].
    Failed,
}

impl RunState {
    /// Whether the run has ended.
    #[must_use]
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Stopped | Self::Failed)
    }
}

/// What goes on within a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// A Stop is requested and its grace runs.
    Stopping,
    /// A Kill is requested and the end is not yet proved.
    Killing,
    /// Held by an injection.
    Paused,
    /// No node that owns the agent can be reached. Derived by whoever asks,
    /// never recorded.
    Unreachable,
}

/// How a run came to its end, finer than its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Termination {
    /// The harness proved success.
    Completed,
    /// Stop, within its grace.
    Stopped,
    /// The harness failed, or was lost.
    Failed,
    /// Kill, or a Stop whose grace expired.
    Killed,
}

/// The answer to Status.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentStatus {
    /// The agent.
    pub agent: AgentId,
    /// The node that owns it.
    pub node: NodeId,
    /// Which owner that is, counted from 1.
    pub epoch: Epoch,
    /// Whether the agent was removed.
    #[serde(default)]
    pub removed: bool,
    /// The last event of the agent that this answer knows of.
    pub sequence: EventSeq,
    /// The run asked for, or the agent's last one; missing if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunStatus>,
}

/// The state of one run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunStatus {
    /// The run.
    pub run: RunId,
    /// Its state.
    pub state: RunState,
    /// What goes on within it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// Why it is in this state, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Since when.
    pub since: Timestamp,
    /// How it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub termination: Option<Termination>,
    /// How its process ended, where it had one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<ExitStatus>,
    /// Whether its log is complete.
    #[serde(default)]
    pub sealed: bool,
}
