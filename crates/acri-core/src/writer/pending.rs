//! What is split and not yet in a frame: events in their encoded form.

use super::split::Piece;
use acri::{
    AgentId, Event, RunId,
    event::Source,
    id::LogSeq,
    log::{
        LogType, Origin, ParserState, ResumeToken, Stream, StreamPosition,
        encode::{self, RecordRef},
        packed,
    },
};
use bytes::Bytes;
use std::collections::{BTreeMap, VecDeque};

/// What a token must say once this event is published, and all before it.
#[derive(Debug)]
struct Entry {
    /// Bytes up to the end of this event, of all that were ever added.
    end: u64,
    stream: Stream,
    position: StreamPosition,
    spool: u64,
}

/// An event found in the line of a pending log event.
#[derive(Debug)]
struct Derived {
    sequence: LogSeq,
    source: Source,
    /// Taken when it is sent; none from the start if its history has it.
    event: Option<Event>,
}

/// A frame that was cut.
#[derive(Debug)]
pub(super) struct Cut {
    pub(super) bytes: Bytes,
    pub(super) token: ResumeToken,
    pub(super) events: usize,
}

#[derive(Debug)]
pub(super) struct Pending {
    /// Sequence of the next event to be added.
    next: LogSeq,
    encoded: Vec<u8>,
    /// Bytes that were cut off in front, of all that were ever added.
    cut_off: u64,
    entries: VecDeque<Entry>,
    derived: VecDeque<Derived>,
    /// How many of `derived` are sent, or need not be.
    sent: usize,
    /// Highest source that was sent.
    sent_to: BTreeMap<Stream, Source>,
    /// Sources that were sent and have no answer.
    under_way: Vec<Source>,
    /// Highest source that is known to be stored.
    stored: BTreeMap<Stream, Source>,
}

impl Pending {
    /// Nothing is pending behind this token.
    pub(super) fn after(token: &ResumeToken) -> Self {
        Self {
            next: token.next_sequence,
            encoded: Vec::new(),
            cut_off: 0,
            entries: VecDeque::new(),
            derived: VecDeque::new(),
            sent: 0,
            sent_to: BTreeMap::new(),
            under_way: Vec::new(),
            stored: token.sources.clone(),
        }
    }

    /// The same, but keeps what is known of derived events: those under way are
    /// not sent again, their answers are still to come.
    pub(super) fn restart(&mut self, token: &ResumeToken) {
        let before = std::mem::replace(self, Self::after(token));
        (self.sent_to, self.under_way) = (before.sent_to, before.under_way);
        for source in before.stored.into_values() {
            raise(&mut self.stored, source);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes that wait.
    pub(super) fn bytes(&self) -> usize {
        self.encoded.len()
    }

    /// Adds a log event. `spool` is the lowest offset that is needed once it is
    /// published.
    pub(super) fn add(&mut self, stream: Stream, piece: &Piece<'_>, spool: u64) {
        let before = self.encoded.len();
        encode::record_into(
            &mut self.encoded,
            &RecordRef {
                time: piece.time,
                kind: LogType::Message,
                output: piece.bytes,
                stream: Some(stream),
                origin: Origin::Passthrough,
                part: piece.part,
                more: piece.more,
            },
        );
        let parser = match piece.part {
            Some(part) if piece.more => ParserState::InsideLine { part: part.saturating_add(1) },
            _ => ParserState::Plain,
        };
        let start = self.entries.back().map_or(self.cut_off, |entry| entry.end);
        self.entries.push_back(Entry {
            end: start + u64::try_from(self.encoded.len() - before).expect("a length fits 64 bits"),
            stream,
            position: StreamPosition { published: piece.end, parser },
            spool,
        });
        self.next = self.next.next();
    }

    /// Adds events that follow from the log event added next.
    pub(super) fn add_derived(&mut self, stream: Stream, piece: &Piece<'_>, events: &mut Vec<Event>) {
        for (index, event) in (0..).zip(events.drain(..)) {
            let source = Source { stream, offset: piece.start, index };
            let known = reaches(&self.stored, source) || reaches(&self.sent_to, source);
            let event = (!known).then_some(event);
            self.derived.push_back(Derived { sequence: self.next, source, event });
        }
    }

    /// Events up to this source are stored.
    pub(super) fn derived(&mut self, source: Source) {
        raise(&mut self.stored, source);
        self.under_way.retain(|sent| sent.stream != source.stream || *sent > source);
    }

    /// Events to be sent, so that no more than `max` are under way.
    pub(super) fn derive(&mut self, max: usize, mut each: impl FnMut(Source, Event)) {
        while self.under_way.len() < max
            && let Some(derived) = self.derived.get_mut(self.sent)
        {
            self.sent += 1;
            if let Some(event) = derived.event.take() {
                raise(&mut self.sent_to, derived.source);
                self.under_way.push(derived.source);
                each(derived.source, event);
            }
        }
    }

    /// Whether a frame cut now would be as large as any cut later.
    pub(super) fn is_frame_full(&self, bytes_max: usize) -> bool {
        self.encoded.len() >= bytes_max && self.derived.iter().all(|derived| reaches(&self.stored, derived.source))
    }

    /// Takes a frame's worth of events off the front: as many as fit in
    /// `bytes_max`, but one at least, and none whose derived events are not
    /// stored. `base` is the token before them.
    pub(super) fn cut(&mut self, agent: AgentId, run: RunId, base: &ResumeToken, bytes_max: usize) -> Option<Cut> {
        let open = self.derived.iter().find(|derived| !reaches(&self.stored, derived.source));
        let free = open.map_or(u64::MAX, |derived| derived.sequence.0 - base.next_sequence.0);
        let reach = self.cut_off.saturating_add(u64::try_from(bytes_max).unwrap_or(u64::MAX));
        let fitting = self.entries.partition_point(|entry| entry.end <= reach).max(1);
        let events = fitting.min(self.entries.len()).min(usize::try_from(free).unwrap_or(usize::MAX));
        let last = self.entries.get(events.checked_sub(1)?)?;
        let (end, spool_offset) = (last.end, last.spool);

        let mut token = base.clone();
        token.spool_offset = spool_offset;
        token.next_sequence = LogSeq(base.next_sequence.0 + u64::try_from(events).ok()?);
        let mut positions = [None; 2];
        for entry in self.entries.drain(..events) {
            positions[slot(entry.stream)] = Some(entry.position);
        }
        for stream in STREAMS {
            if let Some(position) = positions[slot(stream)] {
                token.streams.insert(stream, position);
            }
        }
        while let Some(derived) = self.derived.pop_front_if(|derived| derived.sequence < token.next_sequence) {
            self.sent = self.sent.saturating_sub(1);
            raise(&mut token.sources, derived.source);
        }

        let length = usize::try_from(end - self.cut_off).expect("it is in memory");
        let count = u32::try_from(events).expect("an event takes a byte and more, and a frame is small");
        let frame = encode::frame(agent, Some(run), base.next_sequence, count, &self.encoded[..length]);
        let bytes = packed::pack(frame);
        if length == self.encoded.len() && self.encoded.capacity() <= 2 * bytes_max {
            self.encoded.clear();
        } else {
            self.encoded = self.encoded.split_off(length);
        }
        self.cut_off = end;
        token.chain = base.chain.chained(&bytes);
        Some(Cut { bytes: bytes.into(), token, events })
    }
}

fn reaches(highest: &BTreeMap<Stream, Source>, source: Source) -> bool {
    highest.get(&source.stream).is_some_and(|highest| source <= *highest)
}

fn raise(highest: &mut BTreeMap<Stream, Source>, source: Source) {
    let highest = highest.entry(source.stream).or_insert(source);
    *highest = source.max(*highest);
}

/// Both streams, in the order of their slots.
pub(super) const STREAMS: [Stream; 2] = [Stream::Stdout, Stream::Stderr];

/// Where a stream's part of an array is.
pub(super) fn slot(stream: Stream) -> usize {
    match stream {
        Stream::Stdout => 0,
        Stream::Stderr => 1,
    }
}
