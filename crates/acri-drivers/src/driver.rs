//! The driver trait and its rules.
//!
//! ```text
//!            create        start            output … exit           release … forget
//!   node ──────────► driver ──────► session ──────────────► node ─────────────────►
//!                       ▲                │ kill switch: beside everything, from the control thread
//!                       └── attach ◄─────┘ after a node's restart, with a higher epoch
//! ```
//!
//! Rules, each a case of the driver suite:
//! 1. `start` is idempotent by run: a harness is never started twice for one run, whatever crashed in between.
//! 2. `attach` claims: when it returns, requests of lower epochs are refused, for ever.
//! 3. Output is read by offset and may be read again from any offset that is not released. It is exact: what the
//!    harness wrote, in order per stream, each byte once.
//! 4. `exit` is told only after the last output can be read and the whole process tree is proved gone.
//! 5. A kill switch works while everything else is blocked; it answers when the tree is proved gone; repeated, it
//!    answers again. Its request is recorded before its first effect.
//! 6. What fails says whether something may have happened ([`Fault`]) or certainly nothing did ([`Refusal`]).

use acri::{
    AgentId, AgentSpec, CapabilitySet, CommandId, ErrorBody, HarnessType, Incarnation, Payload, RunId, Timestamp,
    event::ExitStatus, id::Epoch, log::Stream,
};
use async_trait::async_trait;
use bytes::Bytes;
use std::sync::Arc;

/// Who acts: every request to a harness's holder carries it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// Counts the agent's owners.
    pub epoch: Epoch,
    /// Which start of which node.
    pub incarnation: Incarnation,
}

/// Certainly nothing happened, and the asker can know why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(pub ErrorBody);

/// The harness or its holder did not do what was asked; something may have
/// happened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The holder is of a newer owner.
    #[error("a newer owner (epoch {0}) has claimed the harness")]
    Stale(Epoch),
    /// The holder cannot be reached.
    #[error("{operation}: the harness's holder does not answer: {detail}")]
    Unreachable {
        /// What was tried.
        operation: &'static str,
        /// What the system said.
        detail: String,
    },
    /// The harness's output cannot be read.
    #[error("{operation}: {detail}")]
    Broken {
        /// What was tried.
        operation: &'static str,
        /// What was found.
        detail: String,
    },
}

/// What Create found out.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Provisioned {
    /// The working directory in force, absolute.
    pub working_directory: Option<String>,
}

/// A run to be started.
#[derive(Debug, Clone)]
pub struct Start {
    /// Whose.
    pub agent: AgentId,
    /// Which.
    pub run: RunId,
    /// The agent's spec.
    pub spec: AgentSpec,
    /// What Create found out.
    pub provisioned: Provisioned,
    /// The task.
    pub task: Payload,
    /// Who asks.
    pub owner: Owner,
}

/// Why a run did not start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// Certainly nothing runs, and a repeat would meet the same.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// It may run: attach to find out.
    #[error(transparent)]
    Fault(#[from] Fault),
}

/// What is left of a run at its holder.
pub enum Attached {
    /// It lives, or ended and can still be read; either way claimed.
    Session(Arc<dyn Session>),
    /// Nothing was ever started for this run.
    NeverStarted,
    /// It was started, nothing of it lives any more, and nothing can be
    /// read. The reason says why: `harness_lost` or `machine_restarted`.
    Lost {
        /// Why.
        reason: acri::event::FailReason,
        /// In words.
        message: String,
    },
}

impl std::fmt::Debug for Attached {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Session(_) => "Session",
            Self::NeverStarted => "NeverStarted",
            Self::Lost { .. } => "Lost",
        })
    }
}

/// A run that a scan found at its holder.
pub struct Held {
    /// Whose.
    pub agent: AgentId,
    /// Which.
    pub run: RunId,
    /// Ends it.
    pub kill_switch: Arc<dyn KillSwitch>,
}

impl std::fmt::Debug for Held {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Held").field("agent", &self.agent).field("run", &self.run).finish_non_exhaustive()
    }
}

/// One harness type on this node.
#[async_trait]
pub trait Driver: Send + Sync {
    /// Which type.
    fn harness(&self) -> &HarnessType;
    /// What it can do here.
    fn capabilities(&self) -> CapabilitySet;
    /// Whether this node's own restart ends the harness, or another node can
    /// reach it: a local one waits for its own node.
    fn is_local(&self) -> bool;
    /// Checks the spec against this node and prepares what must be there
    /// before a run. Repeated, it finds what the first did.
    ///
    /// # Errors
    /// [`Refusal`] with the field and the reason.
    async fn create(&self, agent: AgentId, spec: &AgentSpec) -> Result<Provisioned, Refusal>;
    /// Checks a task before it is accepted. It computes and does nothing else: it
    /// is called on the thread that kills, which must not wait.
    ///
    /// # Errors
    /// [`Refusal`] with the field and the reason.
    fn check_task(&self, spec: &AgentSpec, task: &Payload) -> Result<(), Refusal>;
    /// Starts a run, or finds it started.
    ///
    /// # Errors
    /// [`StartError`].
    async fn start(&self, start: &Start) -> Result<Arc<dyn Session>, StartError>;
    /// Finds a run that an earlier owner may have started, and claims it.
    ///
    /// # Errors
    /// [`Fault`] if it cannot be told; try again.
    async fn attach(&self, agent: AgentId, run: RunId, owner: Owner) -> Result<Attached, Fault>;
    /// Ends what is left of a run that cannot be attached, without its
    /// holder's help. `Ok` is the proof that nothing of it lives. Nothing can
    /// be attached any more then.
    ///
    /// # Errors
    /// [`Fault`]: not proved; repeat it.
    async fn give_up(&self, agent: AgentId, run: RunId, owner: Owner) -> Result<(), Fault>;
    /// Every run whose holder is on this node, claimed by nobody yet. Called
    /// once, before anything else.
    async fn scan(&self) -> Vec<Held>;
    /// The kill switch of a run, whether its harness is started yet or not: a
    /// kill before the start is a latch that the start finds.
    fn kill_switch(&self, agent: AgentId, run: RunId) -> Arc<dyn KillSwitch>;
    /// Removes what is kept of a run whose log is sealed. Idempotent.
    async fn forget(&self, agent: AgentId, run: RunId);
    /// Removes what is kept of an agent that was removed. Idempotent.
    async fn remove(&self, agent: AgentId);
}

/// What a session knows of a started harness.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Info {
    /// How its process tree is held.
    pub tree_control: Option<String>,
    /// What keeps it from the node's files.
    pub isolation: Option<String>,
    /// Its process id, for a human.
    pub pid: Option<u32>,
}

/// One piece of output, as the harness's holder took it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputRecord {
    /// Offset of this record in the spool.
    pub spool_offset: u64,
    /// Which stream.
    pub stream: Stream,
    /// Offset of the first byte in that stream.
    pub stream_offset: u64,
    /// When it was read.
    pub time: Timestamp,
    /// The bytes.
    pub bytes: Bytes,
}

/// What a read of output gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Records in order.
    pub records: Vec<OutputRecord>,
    /// Where to read on.
    pub next: u64,
    /// What follows.
    pub end: ChunkEnd,
}

/// What follows a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChunkEnd {
    /// More, now or later: read again.
    Open,
    /// Nothing ever: the harness ended and this was all.
    Ended,
    /// Nothing readable: the rest is torn or lost.
    Torn,
    /// What was asked for is released; the first that is left begins here.
    Gone {
        /// Offset of the first record that can still be read.
        first: u64,
    },
}

/// A Kill that was requested, as recorded by the holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KillRequest {
    /// The Kill's command.
    pub command: CommandId,
    /// Who asked.
    pub principal: String,
    /// Why.
    pub reason: String,
    /// As which owner.
    pub owner: Owner,
}

/// How a harness ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exit {
    /// Its status; `None` where it is not known.
    pub status: Option<ExitStatus>,
    /// The Kill that the holder recorded, if there was one.
    pub killed: Option<KillRequest>,
    /// Whether the holder ended it because no owner spoke to it.
    pub orphaned: bool,
}

/// A run's harness, started.
#[async_trait]
pub trait Session: Send + Sync {
    /// What is known of it.
    fn info(&self) -> Info;
    /// Asks the harness to end at a safe point. Repeats by `command` are one.
    ///
    /// # Errors
    /// [`Fault`].
    async fn stop(&self, owner: Owner, command: CommandId) -> Result<(), Fault>;
    /// Tells the holder that its owner lives.
    ///
    /// # Errors
    /// [`Fault`].
    async fn contact(&self, owner: Owner) -> Result<(), Fault>;
    /// Reads at most about `bytes_max` of output from a spool offset on, and
    /// waits for some if there is none yet.
    ///
    /// # Errors
    /// [`Fault`].
    async fn output(&self, offset: u64, bytes_max: usize) -> Result<Chunk, Fault>;
    /// Waits for the end.
    ///
    /// # Errors
    /// [`Fault::Broken`] if the holder died without a word: the harness is
    /// gone (or best effort was made, tier three) and its status unknown. Any
    /// other: nothing is known yet, ask again.
    async fn exit(&self) -> Result<Exit, Fault>;
    /// What it means when [`Session::exit`] says [`Fault::Broken`]:
    /// `harness_lost` or `machine_restarted`. What can still be read of a run
    /// that was lost is read through a session like any other.
    fn lost_reason(&self) -> acri::event::FailReason {
        acri::event::FailReason::HarnessLost
    }
    /// Gives up output below the offset and keeps the resume token for the
    /// next owner.
    ///
    /// # Errors
    /// [`Fault`].
    async fn release(&self, owner: Owner, offset: u64, token: Bytes) -> Result<(), Fault>;
    /// The token of the last release.
    ///
    /// # Errors
    /// [`Fault`].
    async fn resume_token(&self) -> Result<Option<Bytes>, Fault>;
}

/// Ends a run's harness, whatever is blocked.
#[async_trait]
pub trait KillSwitch: Send + Sync {
    /// Records the request, ends the whole tree, and answers when it is proved
    /// gone. Works before the start (the start then finds the latch) and after
    /// the end. Cancelling the future does not take the kill back.
    ///
    /// # Errors
    /// [`Fault`]: not proved; repeat it.
    async fn kill(&self, request: KillRequest) -> Result<(), Fault>;
}
