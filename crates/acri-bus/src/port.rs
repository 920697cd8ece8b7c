//! The port: what the rest of ACRI may ask of the bus.
//!
//! ```text
//!   events  one sequence an agent      append = CAS on the agent's last sequence, id = the event's own
//!   logs    one sequence a run         append = CAS on the run's log subject, no id
//!   leases  one key an incarnation     TTL; fenced by a tombstone that stays
//!   commands  request/reply            no responders = nobody owns that agent
//! ```
//!
//! Rules for an adapter, each a case of the suite:
//! 1. An append that answers [`Appended::Stored`] is readable by [`Events::last`] at once (leader read).
//! 2. [`Appended::Unknown`] says nothing about the outcome. The caller repeats the identical bytes.
//! 3. [`Appended::Conflict`] says that the expected sequence was not the last one *when it was checked*; the
//!    event may be stored all the same, by an earlier attempt of the same bytes.
//! 4. `last` and `last_frame` never answer from a follower that may be behind.
//! 5. Reads are in stream order, without a hole, and end or follow as asked.
//! 6. A lease can be created once, renewed only over its own live entry or its own expiry marker, and never
//!    after a tombstone.

use acri::{
    AgentId, EventId, HarnessType, Incarnation, NodeId, RunId, StreamSeq, Subject, Timestamp, codec::Format, id::Epoch,
};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::BoxStream;
use std::{sync::Arc, time::Duration};

/// What stands in the way of something that the bus refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Why {
    /// There is no room: in the stream, the account or the server's store.
    Full,
    /// The message is larger than it may be.
    TooLarge,
    /// The user may not do it.
    Permission,
    /// What is there is not what it has to be: the server, a stream, a
    /// subject, a revision.
    State,
}

/// The world failed. Retryable unless it says otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Fault {
    /// The bus did not answer in time, or is not there.
    #[error("{operation} got no answer: {detail}")]
    Unavailable {
        /// What was tried.
        operation: &'static str,
        /// What the client library said.
        detail: String,
    },
    /// The bus said no for good: permissions, a missing stream, a limit.
    #[error("{operation} was refused: {detail}")]
    Refused {
        /// What was tried.
        operation: &'static str,
        /// What stands in the way.
        why: Why,
        /// What the server said, with its code.
        detail: String,
    },
    /// Something is stored that cannot be read.
    #[error("{operation} read something malformed: {detail}")]
    Malformed {
        /// What was tried.
        operation: &'static str,
        /// What was found.
        detail: String,
    },
}

/// How one attempt of an append ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Appended {
    /// Stored, at this stream sequence.
    Stored(StreamSeq),
    /// The server says that it has this id already, at this sequence. Counts
    /// only if the caller finds its own bytes there.
    Duplicate(StreamSeq),
    /// The expected last sequence was wrong (10071).
    Conflict,
    /// Another append with the same expectation is in flight (10164): repeat.
    InFlight,
    /// No answer; the outcome is unknown: repeat the identical bytes.
    Unknown(Fault),
    /// Not stored, and a repeat will not help until something changes (stream
    /// full, too large, no permission).
    Refused(Fault),
}

/// An event to be stored.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Append {
    /// Where: a [`Subject::Event`].
    pub subject: Subject,
    /// The event's own id (`Nats-Msg-Id`).
    pub id: EventId,
    /// Last stream sequence of the agent, over all its subjects; 0 for its
    /// first event.
    pub expect: StreamSeq,
    /// The stored form. At most `EVENT_BODY_BYTES_MAX`.
    pub bytes: Bytes,
}

/// An event as stored.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Recorded {
    /// Its sequence in the stream.
    pub seq: StreamSeq,
    /// When the bus stored it, by the bus's clock.
    pub time: Timestamp,
    /// Its subject.
    pub subject: Subject,
    /// The stored bytes, over which hashes go.
    pub bytes: Bytes,
}

/// Which events a reader wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventSelection {
    /// All of them.
    All,
    /// Those of one agent and its runs.
    Agent(AgentId),
    /// Those of one run.
    Run(AgentId, RunId),
}

/// Whether a read ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// After what was stored when the read began.
    Now,
    /// Never; what is stored later follows.
    Dropped,
}

/// Facts about a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamFacts {
    /// When it was created: another value means another stream.
    pub created: Timestamp,
    /// Sequence of the oldest message that is kept.
    pub first: StreamSeq,
    /// Sequence of the newest.
    pub last: StreamSeq,
    /// Bytes that it holds.
    pub bytes: u64,
    /// Bytes that it may hold; `None`: as many as there is room for.
    pub bytes_max: Option<u64>,
}

impl StreamFacts {
    /// How full it is, in hundredths of what it may hold; 0 without a limit.
    #[must_use]
    pub fn percent_full(&self) -> u64 {
        self.bytes_max.filter(|max| *max > 0).map_or(0, |max| self.bytes.saturating_mul(100) / max)
    }
}

/// Stream of stored events; a fault ends it, and the caller reads again from
/// where it stood.
pub type EventStream = BoxStream<'static, Result<Recorded, Fault>>;

/// The event store.
#[async_trait]
pub trait Events: Send + Sync {
    /// One attempt to store an event.
    async fn append(&self, append: &Append) -> Appended;
    /// The agent's last event, from the leader.
    ///
    /// # Errors
    /// [`Fault`] if nobody could say.
    async fn last(&self, agent: AgentId) -> Result<Option<Recorded>, Fault>;
    /// Events in order, from a stream sequence on (1 is the beginning).
    ///
    /// # Errors
    /// [`Fault`] if the read could not begin.
    async fn read(&self, selection: EventSelection, from: StreamSeq, until: Until) -> Result<EventStream, Fault>;
    /// Facts about the event stream.
    ///
    /// # Errors
    /// [`Fault`] if nobody could say.
    async fn event_facts(&self) -> Result<StreamFacts, Fault>;
}

/// A log frame to be stored.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct FrameAppend {
    /// Whose.
    pub agent: AgentId,
    /// Of which run; `None` for the agent's provisioning.
    pub run: Option<RunId>,
    /// Last stream sequence on this subject; 0 if there is none.
    pub expect: StreamSeq,
    /// Who writes.
    pub epoch: Epoch,
    /// The resume token after this frame, MessagePack.
    pub resume: Bytes,
    /// The encoded `LogFrame`.
    pub bytes: Bytes,
}

/// A log frame as stored.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RecordedFrame {
    /// Its sequence in the stream.
    pub seq: StreamSeq,
    /// When the bus stored it.
    pub time: Timestamp,
    /// What its writer said of it. None on a message that is no frame: whoever
    /// may publish on the subject can put anything there.
    pub mark: Option<FrameMark>,
    /// The encoded `LogFrame`.
    pub bytes: Bytes,
}

/// What the writer of a frame says of it, beside it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct FrameMark {
    /// Who wrote it.
    pub epoch: Epoch,
    /// The resume token after it, MessagePack; it can be decoded.
    pub resume: Bytes,
}

/// Stream of stored frames.
pub type FrameStream = BoxStream<'static, Result<RecordedFrame, Fault>>;

/// The log store.
#[async_trait]
pub trait Logs: Send + Sync {
    /// One attempt to store a frame. Never answers [`Appended::Duplicate`].
    async fn append_frame(&self, append: &FrameAppend) -> Appended;
    /// The last message on the run's subject, from the leader.
    ///
    /// # Errors
    /// [`Fault`] if nobody could say.
    async fn last_frame(&self, agent: AgentId, run: Option<RunId>) -> Result<Option<RecordedFrame>, Fault>;
    /// What is on the run's subject in order, from a stream sequence on.
    ///
    /// # Errors
    /// [`Fault`] if the read could not begin.
    async fn read_frames(
        &self,
        agent: AgentId,
        run: Option<RunId>,
        from: StreamSeq,
        until: Until,
    ) -> Result<FrameStream, Fault>;
    /// Facts about the log stream.
    ///
    /// # Errors
    /// [`Fault`] if nobody could say.
    async fn log_facts(&self) -> Result<StreamFacts, Fault>;
}

/// A lease's entry.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum LeaseEntry {
    /// The incarnation renewed it within its TTL.
    Live {
        /// Which node.
        node: NodeId,
        /// Its revision.
        revision: StreamSeq,
        /// When it was renewed, by the bus's clock.
        renewed: Timestamp,
    },
    /// Its TTL passed; the marker's revision.
    Expired(StreamSeq),
    /// Fenced for good; the tombstone's revision.
    Fenced(StreamSeq),
    /// Nothing under this key.
    Absent,
}

/// How an attempt to write a lease ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Leased {
    /// Written, at this revision.
    Written(StreamSeq),
    /// The revision was not the expected one: read the entry.
    Lost,
    /// No answer: try again, at once and often.
    Unknown(Fault),
}

/// The leases of nodes, keyed by incarnation.
#[async_trait]
pub trait Leases: Send + Sync {
    /// Writes the lease with its TTL: at revision 0 to create it, at its own
    /// last revision (or its expiry marker's) to renew it.
    async fn write_lease(&self, incarnation: Incarnation, node: &NodeId, expect: StreamSeq, ttl: Duration) -> Leased;
    /// Writes the permanent tombstone at the expiry marker's revision, or 0.
    async fn fence(&self, incarnation: Incarnation, expect: StreamSeq) -> Leased;
    /// One entry, from the leader.
    ///
    /// # Errors
    /// [`Fault`] if nobody could say.
    async fn lease(&self, incarnation: Incarnation) -> Result<LeaseEntry, Fault>;
    /// All entries that exist.
    ///
    /// # Errors
    /// [`Fault`] if nobody could say.
    async fn leases(&self) -> Result<Vec<(Incarnation, LeaseEntry)>, Fault>;
    /// Deletes a tombstone that no open agent names any more.
    ///
    /// # Errors
    /// [`Fault`] if it could not be deleted.
    async fn collect_tombstone(&self, incarnation: Incarnation, revision: StreamSeq) -> Result<(), Fault>;
    /// The bus's clock less ours, in microseconds, measured by one exchange.
    ///
    /// # Errors
    /// [`Fault`] if nobody could say.
    async fn clock_offset_micros(&self) -> Result<i64, Fault>;
}

/// A request that arrived on a command subject. Anybody may have sent it.
pub struct Request {
    /// The subject as it came; may be no subject of ours.
    pub subject: String,
    /// From `Content-Type`; `None` if the header names a format that is not
    /// spoken here.
    pub format: Option<Format>,
    /// The body as it came.
    pub body: Bytes,
    /// Answers it. `None` if there is no reply subject, or a hostile one (not
    /// an inbox): such a request gets no answer.
    pub reply: Option<Box<dyn Reply>>,
}

impl std::fmt::Debug for Request {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Request").field("subject", &self.subject).finish_non_exhaustive()
    }
}

/// The way back to who asked. Used once.
#[async_trait]
pub trait Reply: Send + Sync {
    /// Sends the answer; `error` sets the headers `Nats-Service-Error` and
    /// `Nats-Service-Error-Code`. Delivery is not proved.
    async fn send(self: Box<Self>, answer: Answer);
}

/// What is answered.
#[derive(Debug, Clone)]
pub struct Answer {
    /// How `body` is written.
    pub format: Format,
    /// The verb's answer, or an `ErrorBody`.
    pub body: Bytes,
    /// Code and text, if it is an error.
    pub error: Option<(u16, String)>,
}

/// Stream of requests; ends when the subscription does. Dropping it ends the
/// subscription.
pub type RequestStream = BoxStream<'static, Request>;

/// Why a request has no answer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RequestError {
    /// Nobody listens on that subject: no node owns the agent, or offers the
    /// harness.
    #[error("nobody answers on {0}")]
    NoResponders(String),
    /// Somebody may have taken it.
    #[error(transparent)]
    Fault(Fault),
}

/// Request and reply.
#[async_trait]
pub trait Commands: Send + Sync {
    /// Listens to the commands of a harness type, in the queue group of all
    /// nodes that offer it. Listed as a NATS service (`$SRV`).
    ///
    /// # Errors
    /// [`Fault`] if the subscription could not be made.
    async fn serve_harness(&self, harness: &HarnessType) -> Result<RequestStream, Fault>;
    /// Listens to the commands of one agent and its runs. When this returns,
    /// a request sent by anybody finds a responder (a round trip was waited
    /// for).
    ///
    /// # Errors
    /// [`Fault`] if the subscription could not be made.
    async fn serve_agent(&self, agent: AgentId) -> Result<RequestStream, Fault>;
    /// Asks, and waits at most `timeout`.
    ///
    /// # Errors
    /// [`RequestError`].
    async fn request(
        &self,
        subject: &Subject,
        format: Format,
        body: Bytes,
        timeout: Duration,
    ) -> Result<Answer, RequestError>;
    /// Publishes a heartbeat, without any promise.
    async fn heartbeat(&self, node: &NodeId, body: Bytes);
    /// Heartbeats as they come.
    ///
    /// # Errors
    /// [`Fault`] if the subscription could not be made.
    async fn heartbeats(&self) -> Result<BoxStream<'static, Bytes>, Fault>;
    /// How often the connection was lost since it was made.
    fn connections_lost(&self) -> u64;
    /// Ends the connection after what is buffered was sent.
    async fn drain(&self);
}

/// The whole port.
pub trait Bus: Events + Logs + Leases + Commands {}

impl<T: Events + Logs + Leases + Commands> Bus for T {}

/// A shared bus.
pub type SharedBus = Arc<dyn Bus>;
