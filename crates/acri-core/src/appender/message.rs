//! What goes into the machine and what comes out of it.

use acri::{
    AgentId, AgentSpec, AgentStatus, CapabilitySet, CommandId, ErrorBody, Event, EventId, HarnessType, Incarnation,
    NodeId, Payload, RunId, StreamSeq, Subject, Timestamp,
    command::{AgentHandle, CreateAgent, KillAck, RemoveAck, RemoveAgent, RunHandle, StartRun, StopAck, StopRun},
    event::{ExitStatus, FailReason, Source},
    id::{Epoch, LogSeq, Sha256Digest},
};
use bytes::Bytes;

/// Names one waiting asker (a reply subject that the actor keeps).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Asker(pub u64);

/// Names one attempt, effect or wait; a result bears the token it left with,
/// and a stale one is counted and dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u64);

/// Who owns, from this machine's point of view.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Me {
    /// The node.
    pub node: NodeId,
    /// Its incarnation.
    pub incarnation: Incarnation,
}

/// A command to this agent, its envelope already checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Command {
    /// Its id.
    pub id: CommandId,
    /// Who gave it.
    pub principal: String,
    /// When it expires, if it says so.
    pub expires: Option<Timestamp>,
    /// What is asked.
    pub order: Order,
}

/// What a command asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// A repeat of the Create that made this agent.
    Create(CreateAgent),
    /// Start a run. The driver has checked the task.
    Start(StartRun),
    /// Stop a run.
    Stop(RunId, StopRun),
    /// Kill a run: the effect is already on its way, this is its record.
    Kill(RunId, acri::command::KillRun),
    /// Tell the status of the agent or a run.
    Status(Option<RunId>),
    /// Give the agent up.
    Remove(RemoveAgent),
}

/// An answer to a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// To Create.
    Created(AgentHandle),
    /// To Start.
    Started(RunHandle),
    /// To Stop.
    Stopping(StopAck),
    /// To Kill.
    Killed(KillAck),
    /// To Status.
    Status(AgentStatus),
    /// To remove.
    Removed(RemoveAck),
    /// No.
    Refused(ErrorBody),
}

/// What the session of a run tells.
#[derive(Debug, Clone, PartialEq)]
#[expect(
    clippy::large_enum_variant,
    reason = "reports are few and short-lived; a box would be noise to who makes them"
)]
pub enum Report {
    /// The harness has begun (or was found alive after an adoption).
    Started(acri::event::RunStarted),
    /// It certainly did not begin.
    NotStarted(FailReason, String),
    /// After an adoption: nothing was ever started for this run.
    NeverStarted,
    /// The harness ended, its tree is proved gone, its output can all be read.
    Exited {
        /// Its status, where known.
        status: Option<ExitStatus>,
        /// The Kill that its holder recorded.
        killed: Option<(CommandId, String, String)>,
        /// Whether its holder ended it for want of an owner.
        orphaned: bool,
    },
    /// The harness can neither be reached nor read. What is known of its stored
    /// log follows as `LogsDone`, with a gap.
    Lost(FailReason, String),
    /// A Stop signal was delivered to the harness.
    StopDelivered,
    /// An event found in its output. The writer waits for
    /// [`Output::Derived`] before it publishes what covers it.
    Derived(Source, Event),
    /// All output is published: the run may be sealed.
    LogsDone {
        /// How many log events.
        count: LogSeq,
        /// Chain over all frames.
        chain: Sha256Digest,
        /// Whether output is known to be missing.
        gap: bool,
    },
}

/// An event as the stream gives it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Stored {
    /// Sequence in the stream.
    pub seq: StreamSeq,
    /// The bus's time of storing.
    pub time: Timestamp,
    /// The stored bytes.
    pub bytes: Bytes,
}

/// What happens to the machine.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// A command arrived.
    Command(Asker, Command),
    /// A run's session tells something.
    Report(RunId, Report),
    /// The attempt was stored at this sequence.
    Appended(Token, StreamSeq),
    /// The server claims to have it already, at this sequence: proves nothing
    /// until a leader read shows our bytes.
    Duplicate(Token, StreamSeq),
    /// Error 10071.
    Conflict(Token),
    /// Error 10164, time-out, absence: repeat the same.
    Unknown(Token),
    /// Certainly not stored (stream full, too large): the asker hears it.
    Refused(Token, ErrorBody),
    /// Answer to [`Output::Reread`]: everything of this agent after the
    /// sequence asked for, from the leader, in order, up to its last; and that
    /// last sequence (0: the agent has no event at all).
    Caught(Token, Vec<Stored>, StreamSeq),
    /// The read failed: ask again.
    ReadFailed(Token),
    /// An effect is done (or failed for good; what that means comes as a
    /// report).
    EffectDone(Token),
    /// Time passed.
    Tick,
}

/// What the machine wants done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Store this event. A repeat of the same slot has identical bytes, id and
    /// expectation, and a fresh token.
    Append {
        /// Comes back with the outcome.
        token: Token,
        /// Where.
        subject: Subject,
        /// The event's id.
        id: EventId,
        /// The agent's last sequence.
        expect: StreamSeq,
        /// The bytes.
        bytes: Bytes,
        /// How many attempts of this slot came before: the actor waits longer
        /// each time.
        attempt: u32,
    },
    /// Read from the leader everything of this agent after this sequence.
    Reread {
        /// Comes back with what was read.
        token: Token,
        /// The last that is known; 0 for all.
        after: StreamSeq,
    },
    /// Do this. Checked against the lease by the actor at once before.
    Effect {
        /// Comes back when it is done.
        token: Token,
        /// Which run it is for.
        run: RunId,
        /// What.
        effect: Effect,
    },
    /// Answer an asker.
    Reply(Asker, Answer),
    /// A derived event up to this source is stored: what covers it may be
    /// published.
    Derived(RunId, Source),
    /// The run is sealed: its session may end and its spool be removed.
    Sealed(RunId),
    /// Call [`Input::Tick`] at this time, at the latest. Replaces an earlier
    /// wish.
    WakeAt(Timestamp),
    /// The agent was removed and nothing is owed: stop serving it.
    Retired,
    /// Stop acting for this agent.
    Halt(Halt),
}

/// Why the machine stops.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Halt {
    /// A newer owner exists.
    Fenced {
        /// Its epoch.
        by: Epoch,
    },
    /// Create found that the agent exists and is somebody's; the handle was
    /// answered.
    NotOurs,
    /// The stream lost events that were acknowledged to us. Adopt again with
    /// `history_lost`.
    HistoryLost,
    /// A stored event of this agent cannot be folded, or one that we did not
    /// write bears our epoch: a bug, said loudly.
    Bug(String),
}

/// Work that follows from the state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Attach to what an earlier owner may have started, and claim it. The
    /// first effect of an adoption, for each open run.
    Attach {
        /// As which owner.
        epoch: Epoch,
    },
    /// Start the harness.
    Spawn {
        /// The task.
        task: Payload,
        /// As which owner.
        epoch: Epoch,
    },
    /// Ask the harness to end.
    Stop {
        /// The Stop's command.
        command: CommandId,
        /// As which owner.
        epoch: Epoch,
    },
    /// End the harness: a Kill, an expired Stop, or a history that ended
    /// without it. Repeated until the exit is reported.
    Kill {
        /// The command that asked.
        command: CommandId,
        /// Who asked.
        principal: String,
        /// Why.
        reason: String,
        /// As which owner.
        epoch: Epoch,
    },
    /// Begin to publish the run's output, if that has not begun.
    Pump {
        /// As which owner.
        epoch: Epoch,
    },
}

/// What Create needs beside the command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Creation {
    /// The harness.
    pub harness: HarnessType,
    /// The agent's id, derived from the command.
    pub agent: AgentId,
    /// The spec as accepted by the driver.
    pub spec: AgentSpec,
    /// What the driver can do.
    pub capabilities: CapabilitySet,
    /// The working directory in force.
    pub working_directory: Option<String>,
}

impl Command {
    /// Refuses a command that comes too late, or from the future: it is never
    /// carried out. A repeat of an accepted one is answered all the same.
    ///
    /// # Errors
    /// `deadline_exceeded`, or `invalid_argument` for an id that is no UUIDv7.
    pub fn check_time(&self, now: Timestamp) -> Result<(), ErrorBody> {
        crate::agent::decide::check_time(self.id, self.expires, now)
    }

    /// Refuses a Create that is certainly no repeat where the event stream is
    /// nearly full, before anything is provisioned for it. What an [`Appender`]
    /// is asked it checks itself.
    ///
    /// [`Appender`]: super::Appender
    ///
    /// # Errors
    /// `resource_exhausted`.
    pub fn check_room(&self, events_percent: u64) -> Result<(), ErrorBody> {
        let begins = matches!(self.order, Order::Create(_));
        if begins { crate::agent::decide::room(events_percent) } else { Ok(()) }
    }
}
