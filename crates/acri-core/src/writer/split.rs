//! One stream's bytes to lines and parts of lines.

use super::SpoolRecord;
use acri::{
    Timestamp,
    log::{ParserState, StreamPosition},
};

/// Capacity that an empty buffer keeps: a node has thousands of runs.
const KEPT_BYTES: usize = 64 * 1024;
/// Continuation bytes of the longest UTF-8 character.
const CONTINUATION_MAX: usize = 3;

/// A line, or a part of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece<'a> {
    /// The bytes, without LF.
    pub(super) bytes: &'a [u8],
    /// When the first byte was read.
    pub(super) time: Timestamp,
    /// Which part; `None` for a whole line.
    pub(super) part: Option<u32>,
    /// Whether the line goes on.
    pub(super) more: bool,
    /// Position of the first byte in the stream.
    pub(super) start: u64,
    /// Position behind the last byte, and behind LF.
    pub(super) end: u64,
    /// Spool offset of the record that holds the byte at `end`.
    pub(super) spool: u64,
}

/// Which record a byte came from.
#[derive(Debug, Clone, Copy)]
struct Origin {
    spool: u64,
    time: Timestamp,
}

/// Holds the beginning of one line at most, or of one part.
#[derive(Debug, Default)]
pub(super) struct Splitter {
    line_bytes_max: usize,
    /// Position in the stream of the next byte to be taken.
    next: u64,
    /// Number of the part that is being read.
    part: u32,
    held: Vec<u8>,
    /// Origins of held bytes, by the position from which they hold: of the first
    /// byte, and of those that a cut may leave over.
    origins: Vec<(usize, Origin)>,
}

impl Splitter {
    pub(super) fn new(line_bytes_max: usize, position: StreamPosition) -> Self {
        assert!(line_bytes_max >= 8, "a part must hold any character");
        let part = match position.parser {
            ParserState::Plain => 0,
            ParserState::InsideLine { part } => part,
        };
        Self { line_bytes_max, next: position.published, part, ..Self::default() }
    }

    /// Spool offset of the first byte that is held.
    pub(super) fn held_from(&self) -> Option<u64> {
        self.origins.first().map(|(_, origin)| origin.spool)
    }

    #[cfg(test)]
    pub(super) fn held_bytes(&self) -> usize {
        self.held.capacity()
    }

    /// Position of the next byte that is not taken.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Takes a record of this stream. What of it was taken before is skipped;
    /// a hole before it ends the line.
    pub(super) fn feed(&mut self, record: &SpoolRecord<'_>, mut each: impl FnMut(Piece<'_>)) {
        if record.stream_offset > self.next {
            self.finish(record.spool_offset, &mut each);
            self.next = record.stream_offset;
        }
        let skipped = usize::try_from(self.next - record.stream_offset).unwrap_or(usize::MAX);
        let mut rest = record.bytes.get(skipped..).unwrap_or_default();
        let here = Origin { spool: record.spool_offset, time: record.time };
        while !rest.is_empty() {
            let room = self.line_bytes_max - self.held.len();
            let window = &rest[..rest.len().min(room + 1)];
            let Some(at) = memchr::memchr(b'\n', window) else {
                self.hold(window, here);
                rest = &rest[window.len()..];
                if window.len() > room {
                    self.cut(&mut each);
                }
                continue;
            };
            let start = self.next - wide(self.held.len());
            let (line, time) = match self.origins.first() {
                None => (&window[..at], here.time),
                Some((_, first)) => {
                    self.held.extend_from_slice(&window[..at]);
                    (self.held.as_slice(), first.time)
                }
            };
            rest = &rest[at + 1..];
            self.next += wide(at + 1);
            let spool = if rest.is_empty() { record.spool_end } else { record.spool_offset };
            let part = (self.part > 0).then_some(self.part);
            each(Piece { bytes: line, time, part, more: false, start, end: self.next, spool });
            self.part = 0;
            self.forget();
        }
    }

    /// The stream ends here, the spool at `spool`: gives out what is held.
    pub(super) fn finish(&mut self, spool: u64, mut each: impl FnMut(Piece<'_>)) {
        if let Some((_, first)) = self.origins.first() {
            let start = self.next - wide(self.held.len());
            let part = (self.part > 0).then_some(self.part);
            each(Piece { bytes: &self.held, time: first.time, part, more: false, start, end: self.next, spool });
        }
        self.part = 0;
        self.forget();
    }

    fn hold(&mut self, bytes: &[u8], from: Origin) {
        let at = self.held.len();
        self.held.extend_from_slice(bytes);
        self.next += wide(bytes.len());
        if at == 0 || self.held.len() > self.line_bytes_max - CONTINUATION_MAX {
            self.origins.push((at, from));
        }
    }

    /// Gives out a part. One byte more than the limit is held.
    fn cut(&mut self, each: &mut impl FnMut(Piece<'_>)) {
        let limit = self.line_bytes_max;
        let boundary = |at: &usize| self.held[*at] & 0xc0 != 0x80;
        // No boundary in reach: it is no UTF-8, and any cut is as good.
        let at = (limit - CONTINUATION_MAX..=limit).rev().find(boundary).unwrap_or(limit);
        let origin_of = |at: usize| self.origins.iter().rev().find(|(from, _)| *from <= at).map(|(_, origin)| *origin);
        let (Some(first), Some(left)) = (origin_of(0), origin_of(at)) else {
            unreachable!("bytes are held, so their origins are known");
        };
        let left_over = wide(self.held.len() - at);
        each(Piece {
            bytes: &self.held[..at],
            time: first.time,
            part: Some(self.part),
            more: true,
            start: self.next - wide(self.held.len()),
            end: self.next - left_over,
            spool: left.spool,
        });
        self.part = self.part.saturating_add(1);
        self.held.drain(..at);
        self.origins.clear();
        self.origins.push((0, left));
    }

    fn forget(&mut self) {
        self.origins.clear();
        if self.held.capacity() > KEPT_BYTES {
            self.held = Vec::new();
        } else {
            self.held.clear();
        }
    }
}

fn wide(bytes: usize) -> u64 {
    u64::try_from(bytes).expect("a length in memory fits 64 bits")
}
