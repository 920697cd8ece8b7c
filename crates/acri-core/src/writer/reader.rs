//! The reader of one run's log: frames in, log events out, each once, in order,
//! with whatever is missing said aloud.
//!
//! The driver reads the run's frames from [`Reader::start_from`] on and hands
//! each to [`Reader::push`]. After a fault it goes on with a new reader from the
//! last cursor that it passed on.
//!
//! - What counts is the log sequence. Frames of any epoch are taken: a former
//!   owner's frames became the ground on which the next one built. What is known
//!   already is skipped, so a frame that is stored twice is harmless.
//! - A hole in the log sequence is a [`LogItem::Gap`]: retention took it.
//! - A cursor names its frame by position and hash. If that frame is not there
//!   although retention cannot have taken it, the stream is another one, or was
//!   put back: a [`LogItem::Rewound`], and everything is read from the
//!   beginning, to be found by log sequence.

use acri::{
    StreamSeq,
    cursor::Cursor,
    id::{LogSeq, Sha256Digest},
    log::{LogEvent, LogFrame, decode},
};

/// Bytes at each end of a frame that a cursor's hash is of.
const HASHED_BYTES: usize = 8 * 1024;

/// What a reader must know about the stream, asked for when it begins: facts
/// that are older than its cursor would look like a stream that was put back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogStream {
    /// When it was created, in microseconds: [`Cursor::stream`].
    pub created: i64,
    /// The oldest message that is kept.
    pub first: StreamSeq,
    /// The newest.
    pub last: StreamSeq,
}

/// Where to begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Since {
    /// With the run's first event; if it is gone, with a gap.
    Start,
    /// With the first frame at or after this position, whatever came before.
    From(StreamSeq),
    /// Just after this event.
    After(Cursor),
}

/// A message on the run's subject.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Its sequence in the stream.
    pub seq: StreamSeq,
    /// Whether an owner of the run wrote it. If not it is no frame, whatever it
    /// holds.
    pub owned: bool,
    /// The encoded `LogFrame`.
    pub bytes: &'a [u8],
}

/// What a reader of a log gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LogItem {
    /// An event, and the position just after it.
    Event(LogEvent, Cursor),
    /// These events existed and are gone.
    Gap {
        /// The first that is missing.
        from: LogSeq,
        /// The last that is missing.
        to: LogSeq,
    },
    /// The stream is not the one that the cursor is from, or it was put back.
    /// Events up to this one are not repeated, and may not be those that were
    /// read before.
    Rewound {
        /// The last event that was read.
        after: LogSeq,
    },
    /// A frame that cannot be read. What it held is a gap before the next one.
    Malformed {
        /// Which.
        frame: StreamSeq,
        /// Why.
        detail: String,
    },
}

/// What to do after a frame was pushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Next {
    /// Push the frame after it.
    GoOn,
    /// Read again from [`Reader::start_from`], which has changed.
    Restart,
}

/// Reads one run's log.
#[derive(Debug, Clone)]
pub struct Reader {
    stream: LogStream,
    from: StreamSeq,
    /// The next event; none before the first frame of [`Since::From`].
    next: Option<LogSeq>,
    /// The cursor's frame, until it was looked at.
    unproved: Option<Cursor>,
    /// To be said before anything else.
    rewound: bool,
}

impl Reader {
    /// A reader that has read nothing yet.
    #[must_use]
    pub fn new(stream: LogStream, since: Since) -> Self {
        let fresh = Self { stream, from: stream.first, next: Some(LogSeq(1)), unproved: None, rewound: false };
        match since {
            Since::Start => fresh,
            Since::From(from) => Self { from, next: None, ..fresh },
            Since::After(cursor) => {
                let next = Some(LogSeq(cursor.sequence.0.saturating_add(1)));
                if cursor.stream != stream.created || cursor.frame > stream.last {
                    Self { next, rewound: true, ..fresh }
                } else if cursor.frame < stream.first {
                    Self { next, ..fresh }
                } else {
                    Self { from: cursor.frame, next, unproved: Some(cursor), ..fresh }
                }
            }
        }
    }

    /// The stream sequence at which to begin to read the run's frames.
    #[must_use]
    pub fn start_from(&self) -> StreamSeq {
        self.from
    }

    /// Takes the run's next frame in stream order and appends what it holds to
    /// `items`.
    pub fn push(&mut self, frame: Frame<'_>, items: &mut Vec<LogItem>) -> Next {
        let mut hash = None;
        if let Some(cursor) = self.unproved.take() {
            let found = hash_of(frame.bytes);
            if frame.seq != cursor.frame || found != cursor.hash {
                self.from = self.stream.first;
                self.rewound = true;
                return Next::Restart;
            }
            hash = Some(found);
        }
        if std::mem::take(&mut self.rewound) {
            let after = LogSeq(self.next.map_or(0, |next| next.0.saturating_sub(1)));
            items.push(LogItem::Rewound { after });
        }
        match decoded(frame) {
            Ok(decoded) => self.take(frame, decoded, hash, items),
            Err(detail) => items.push(LogItem::Malformed { frame: frame.seq, detail }),
        }
        Next::GoOn
    }

    fn take(&mut self, frame: Frame<'_>, decoded: LogFrame, hash: Option<[u8; 8]>, items: &mut Vec<LogItem>) {
        let next = self.next.unwrap_or(decoded.sequence);
        let behind = decoded.next_sequence();
        if behind <= next {
            self.next = Some(next);
            return;
        }
        if decoded.sequence > next {
            items.push(LogItem::Gap { from: next, to: LogSeq(decoded.sequence.0 - 1) });
        }
        let known = usize::try_from(next.0.saturating_sub(decoded.sequence.0)).unwrap_or(usize::MAX);
        let hash = hash.unwrap_or_else(|| hash_of(frame.bytes));
        items.reserve(decoded.events.len().saturating_sub(known));
        for (index, event) in (0..).zip(decoded.into_events()).skip(known) {
            let cursor =
                Cursor { stream: self.stream.created, frame: frame.seq, index, sequence: event.sequence, hash };
            items.push(LogItem::Event(event, cursor));
        }
        self.next = Some(behind);
    }
}

/// Of the frame's length and its two ends. Hashing the whole was half of what a
/// reader does, and nobody forges a frame against a reader's own position: the
/// frames of a stream that was put back differ in where they begin and end.
fn hash_of(bytes: &[u8]) -> [u8; 8] {
    let length = u64::try_from(bytes.len()).unwrap_or(u64::MAX).to_be_bytes();
    let ends = if bytes.len() <= 2 * HASHED_BYTES {
        Sha256Digest::of(bytes)
    } else {
        Sha256Digest::of(&bytes[..HASHED_BYTES]).chained(&bytes[bytes.len() - HASHED_BYTES..])
    };
    let Sha256Digest(digest) = ends.chained(&length);
    let mut hash = [0; 8];
    hash.copy_from_slice(&digest[..8]);
    hash
}

/// The frame, if its numbers make sense.
fn decoded(frame: Frame<'_>) -> Result<LogFrame, String> {
    if !frame.owned {
        return Err("no owner of the run wrote this message".to_owned());
    }
    let frame = decode::frame(frame.bytes).map_err(|error| error.to_string())?;
    let events = u32::try_from(frame.events.len()).map_err(|_| "too many events".to_owned())?;
    if frame.sequence.0 == 0 || frame.sequence.0.checked_add(u64::from(events) + 1).is_none() {
        return Err(format!("log sequence {} is out of range", frame.sequence));
    }
    Ok(frame)
}
