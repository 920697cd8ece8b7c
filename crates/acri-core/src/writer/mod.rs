//! The log writer of one run: turns what a harness wrote into log frames, each
//! stored once and in order, whatever crashes and whoever owned the run before.
//!
//! The driver reads the spool from [`Writer::wants_output`], calls
//! [`Writer::step`] with whatever happens, carries out the [`Output`]s in
//! order, and then lets it [`Writer::prepare`]. It decides nothing. [`reader`]
//! is the other end.
//!
//! ```text
//!   spool record ─ split ─ pending ─ frame in flight ─ stored ─ release
//!                    └ derived event ─ its agent's history ┘ (before the frame that covers it)
//! ```
//!
//! The rules, and what they keep from happening:
//! 1. One frame is in flight. It is repeated byte for byte until it is known to
//!    be stored; a repeat that had grown would lose bytes. What comes in
//!    meanwhile makes the next frame larger.
//! 2. Any refusal: first the agent's epoch is checked, then the run's last frame
//!    is read from the leader. It is ours: stored. It goes further than what we
//!    built on, a former owner's late frame: everything pending is dropped, and
//!    the spool is read again from that frame's token. It is of a newer epoch:
//!    we are fenced.
//! 3. A frame is published only when the events derived from it are stored.
//!    Otherwise a crash between the two would lose a question, or ask it twice.
//! 4. A token is enough to go on. Records that come again are cut at what is
//!    published of their stream, so one that is half published is not doubled.
//!
//! How output becomes log events:
//! - A line ends before LF. LF is not in the text; a CR before it is, since it
//!   is what the harness wrote.
//! - A line of more than the line limit becomes parts, `part` counting from 0,
//!   all but the last with `more`. A part ends between two characters where the
//!   line is UTF-8.
//! - What is not UTF-8 is kept as octets, for each line or part on its own.
//! - A line waits for its LF, the limit, or the end of the output, however long
//!   that takes. What the end cuts off is an event like any other, `more` false;
//!   the log does not tell that its LF is missing.
//! - The time of a line, or part, is that of the record that holds its first
//!   byte. Lines are in the order in which they were completed, so the order
//!   between the streams is that of the spool.

mod machine;
mod pending;
pub mod reader;
mod split;
#[cfg(test)]
mod tests;

pub use machine::Writer;

use crate::appender::Token;
use acri::{
    Event, StreamSeq, Timestamp, codec,
    event::Source,
    id::{Epoch, LogSeq, Sha256Digest},
    limits,
    log::{ResumeToken, Stream, encode},
};
use bytes::Bytes;
use std::fmt;

/// A record of the spool: what was read from one stream at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpoolRecord<'a> {
    /// Where it begins in the spool.
    pub spool_offset: u64,
    /// Where the next one begins.
    pub spool_end: u64,
    /// Which stream.
    pub stream: Stream,
    /// Position of its first byte in that stream.
    pub stream_offset: u64,
    /// When it was read from the harness.
    pub time: Timestamp,
    /// What was read.
    pub bytes: &'a [u8],
}

/// What is last on the run's subject as the leader has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogEnd {
    /// The sequence of the last message, whoever wrote it: a frame is stored
    /// only after it. 0 if there is none.
    pub seq: StreamSeq,
    /// The last frame that an owner wrote; none if there is none.
    pub frame: Option<LastFrame>,
}

/// What an owner said of a frame that it wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastFrame {
    /// Who wrote it.
    pub epoch: Epoch,
    /// Its token.
    pub token: ResumeToken,
}

impl LastFrame {
    /// What stands beside a stored frame: the epoch, and the token as
    /// MessagePack. None if that is no token: no owner wrote this message, and
    /// the frame before it is the last one.
    #[must_use]
    pub fn of(epoch: Epoch, resume: &[u8]) -> Option<Self> {
        let token = codec::from_msgpack(resume).ok()?;
        Some(Self { epoch, token })
    }
}

/// What happens to the writer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input<'a> {
    /// A record of the spool. One that is not at [`Writer::wants_output`], or
    /// comes when far too much is pending, is ignored and asked for again.
    Output(SpoolRecord<'a>),
    /// No more records will ever come. Ignored unless everything before `at` was
    /// taken; then `wants_output` asks for the rest, and this is to come again.
    EndOfOutput {
        /// Offset behind the last whole record.
        at: u64,
        /// Whether bytes after it could not be read.
        torn: bool,
    },
    /// The spool was removed up to this offset before it was read: output is
    /// lost.
    OutputGone {
        /// The first record that still exists.
        first: u64,
    },
    /// The event derived from this source is stored, or was before.
    Derived(Source),
    /// The frame was stored at this sequence.
    Stored(Token, StreamSeq),
    /// The expected sequence was wrong.
    Conflict(Token),
    /// The outcome is unknown, or another attempt is in flight: repeat.
    Unknown(Token),
    /// The frame was certainly not stored (stream full, too large).
    Refused(Token),
    /// The answer to [`Output::ReadLast`].
    Last(Token, LogEnd),
    /// The answer to [`Output::CheckEpoch`]: the agent is still ours.
    EpochOk(Token),
    /// [`Output::ReadLast`] or [`Output::CheckEpoch`] got no answer: ask again.
    ReadFailed(Token),
}

/// What the writer wants done.
#[derive(Debug, Clone, PartialEq)]
pub enum Output {
    /// Append this event, found at this source, unless the agent's history has
    /// one at or after that source already; answer with [`Input::Derived`].
    /// Comes in order for each stream, and once from each owner.
    Derive(Source, Box<Event>),
    /// Store this frame on the run's subject. A repeat has identical bytes.
    Publish {
        /// Comes back with the outcome.
        token: Token,
        /// The run's last sequence; 0 if nothing is there.
        expect: StreamSeq,
        /// The encoded `LogFrame`.
        bytes: Bytes,
        /// The token after it, MessagePack.
        resume: Bytes,
        /// How many log events it holds.
        events: usize,
        /// How many attempts came before: the driver waits longer each time.
        attempt: u32,
    },
    /// Read from the leader what is last on the run's subject.
    ReadLast {
        /// Comes back with the answer.
        token: Token,
        /// How many attempts came before.
        attempt: u32,
    },
    /// Something was refused: find out by a leader read whether the agent still
    /// has our epoch. If not, drop the writer.
    CheckEpoch {
        /// Comes back with the answer.
        token: Token,
        /// How many attempts came before.
        attempt: u32,
    },
    /// The spool may be removed up to here; its holder keeps the token, for
    /// when retention has removed the last frame.
    Release {
        /// The first offset that is still needed.
        spool_offset: u64,
        /// The token of the last stored frame, MessagePack.
        resume: Bytes,
    },
    /// A frame of this newer epoch is stored: we are fenced. Nothing follows.
    StepDown(Epoch),
    /// All output is stored. Nothing follows.
    Done {
        /// How many log events the run has.
        count: LogSeq,
        /// The chain over its frames.
        chain: Sha256Digest,
        /// Whether output is known to be missing.
        gap: bool,
    },
}

/// Finds events in lines that were not split.
///
/// The same line must give the same events each time, on any node: output is
/// parsed again after a crash, and what was derived before is known only by its
/// place.
pub trait Parser: fmt::Debug + Send {
    /// Appends the events that follow from this line, without its LF.
    fn derive(&self, stream: Stream, line: &[u8], events: &mut Vec<Event>);
}

/// Plain output: nothing follows from it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Plain;

impl Parser for Plain {
    fn derive(&self, _: Stream, _: &[u8], _: &mut Vec<Event>) {}
}

/// How much a writer takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes in a line before it is split; at least 8.
    pub line_bytes_max: usize,
    /// Encoded bytes of the events in a frame, unless it holds only one.
    pub frame_bytes_max: usize,
    /// Encoded bytes that wait, above which no more output is wanted.
    pub pending_bytes_wanted: usize,
    /// Encoded bytes that wait, above which output that comes all the same is
    /// ignored. One record more may be added to it in encoded form.
    pub pending_bytes_max: usize,
    /// Derived events that wait for their acknowledgement.
    pub derived_in_flight_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            line_bytes_max: limits::LOG_LINE_BYTES_MAX,
            frame_bytes_max: limits::FRAME_BYTES_MAX,
            pending_bytes_wanted: 3 * limits::FRAME_BYTES_MAX / 2,
            pending_bytes_max: 6 * limits::FRAME_BYTES_MAX,
            derived_in_flight_max: 64,
        }
    }
}

// A part of a line alone in a frame is the largest message there is; its token
// takes some hundred bytes of header.
const _: () = assert!(
    limits::LOG_LINE_BYTES_MAX + encode::RECORD_EXTRA_BYTES_MAX + encode::FRAME_EXTRA_BYTES_MAX + 4096
        < limits::FRAME_MESSAGE_BYTES_MAX
);
