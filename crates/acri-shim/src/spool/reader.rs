//! The node's side of the spool: reads whole, proved records from an offset on.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use super::{HEADER_BYTES, Header, RECORD_BYTES_MAX, Stream, proved, segment_name, segment_starts};
use crate::rundir;

/// Bytes read from a file at once.
const CHUNK_BYTES: usize = 512 * 1024;

/// One record, its payload borrowed from the read buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordRef<'a> {
    /// Spool offset of the record's header.
    pub offset: u64,
    /// Spool offset behind the record: where reading goes on.
    pub next: u64,
    /// The stream it was read from.
    pub stream: Stream,
    /// Position of the payload's first byte in that stream.
    pub stream_offset: u64,
    /// CLOCK_BOOTTIME in nanoseconds when it was read.
    pub boot_ns: u64,
    /// Wall time in nanoseconds since the epoch when it was read.
    pub wall_ns: u64,
    /// 1 to 65536 bytes.
    pub payload: &'a [u8],
}

/// What a batch came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The budget is used up; there may be more.
    More,
    /// Everything that is written whole has been read. If the shim lives, more may come.
    CaughtUp,
    /// What follows at this offset is not a whole valid record and never will be: the shim is gone, or later data
    /// proves it. Everything before it was handed out.
    BadTail {
        /// Offset of the first byte that cannot be read.
        offset: u64,
    },
    /// The reader's offset has been released and deleted.
    Gone {
        /// The first offset that still exists.
        first: u64,
    },
}

/// A read buffer that can serve many readers, one at a time. It grows once, to about half a MiB.
#[derive(Debug, Default)]
pub struct Scratch(Vec<u8>);

/// Reads one spool. Holds a descriptor and no buffer, so that a node can have thousands.
#[derive(Debug)]
pub struct Reader {
    dir: PathBuf,
    offset: u64,
    segment: Option<Segment>,
}

#[derive(Debug)]
struct Segment {
    file: File,
    start: u64,
}

/// Why a chunk did not go on.
enum Stop {
    /// At the end of the file, between two records.
    Clean,
    /// In a record that is not whole or not valid.
    Broken,
}

impl Reader {
    /// A reader at `offset`, which must be 0 or the `next` of a record. Nothing is opened yet.
    pub fn open(dir: &Path, offset: u64) -> Self {
        Self { dir: dir.to_owned(), offset, segment: None }
    }

    /// Where the next record is expected.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Hands out whole records after the offset until about `max_bytes` of the spool are read (always at least one
    /// record if there is one). Errors are those of the file system; nothing is lost by one.
    pub fn read_batch(
        &mut self,
        scratch: &mut Scratch,
        max_bytes: usize,
        mut each: impl FnMut(RecordRef<'_>),
    ) -> io::Result<Progress> {
        let mut budget = max_bytes.max(1);
        loop {
            if let Some(progress) = self.locate()? {
                return Ok(progress);
            }
            let before = self.offset;
            let stop = self.read_chunk(scratch, budget, &mut each)?;
            let read = usize::try_from(self.offset - before).unwrap_or(usize::MAX);
            budget = budget.saturating_sub(read);
            if budget == 0 {
                return Ok(Progress::More);
            }
            if read > 0 {
                continue;
            }
            match stop {
                Stop::Clean => {
                    if !self.advance_segment()? {
                        return self.at_the_end();
                    }
                }
                Stop::Broken => return self.judge_tail(scratch, &mut each),
            }
        }
    }

    /// Opens the segment that holds the offset. Some: there is none, and what that means.
    fn locate(&mut self) -> io::Result<Option<Progress>> {
        if self.segment.is_some() {
            return Ok(None);
        }
        let starts = segment_starts(&self.dir)?;
        let Some(start) = starts.iter().rev().find(|start| **start <= self.offset) else {
            return Ok(Some(match starts.first() {
                Some(first) => Progress::Gone { first: *first },
                None if self.offset == 0 => Progress::CaughtUp,
                None => Progress::BadTail { offset: self.offset },
            }));
        };
        let file = match File::open(self.dir.join(segment_name(*start))) {
            Ok(file) => file,
            // Released between the listing and now: look again.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Some(Progress::More));
            }
            Err(error) => return Err(error),
        };
        if file.metadata()?.len() < self.offset - start && !rundir::alive(&self.dir)? {
            return Ok(Some(Progress::BadTail { offset: self.offset }));
        }
        self.segment = Some(Segment { file, start: *start });
        Ok(None)
    }

    /// Reads one chunk and hands out its whole records.
    fn read_chunk(
        &mut self,
        scratch: &mut Scratch,
        budget: usize,
        each: &mut impl FnMut(RecordRef<'_>),
    ) -> io::Result<Stop> {
        let Some(segment) = &self.segment else { return Ok(Stop::Clean) };
        let want = budget.saturating_add(RECORD_BYTES_MAX).min(CHUNK_BYTES);
        if scratch.0.len() < want {
            scratch.0.resize(want, 0);
        }
        let got = read_at(&segment.file, &mut scratch.0[..want], self.offset - segment.start)?;
        let mut rest = &scratch.0[..got];
        let full = got == want;
        let mut taken = 0;
        while taken < budget {
            let Some((header, body)) = rest.split_first_chunk::<HEADER_BYTES>() else { break };
            let Some(fields) = Header::decode(header) else { return Ok(Stop::Broken) };
            let Some(payload) = body.get(..fields.len) else { break };
            if !proved(header, payload) {
                return Ok(Stop::Broken);
            }
            let size = HEADER_BYTES + fields.len;
            let next = self.offset + u64::try_from(size).unwrap_or(u64::MAX);
            each(RecordRef {
                offset: self.offset,
                next,
                stream: fields.stream,
                stream_offset: fields.stream_offset,
                boot_ns: fields.boot_ns,
                wall_ns: fields.wall_ns,
                payload,
            });
            self.offset = next;
            taken += size;
            rest = &rest[size..];
        }
        Ok(if rest.is_empty() || full { Stop::Clean } else { Stop::Broken })
    }

    /// At the end of a segment: goes over to the next one if it exists. A segment is final once its successor exists.
    fn advance_segment(&mut self) -> io::Result<bool> {
        let Some(segment) = &self.segment else { return Ok(false) };
        if segment.start == self.offset {
            return Ok(false);
        }
        match File::open(self.dir.join(segment_name(self.offset))) {
            Ok(file) => {
                if segment.file.metadata()?.len() == self.offset - segment.start {
                    self.segment = Some(Segment { file, start: self.offset });
                }
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// At the end of what was read, and no successor was there a moment ago.
    fn at_the_end(&self) -> io::Result<Progress> {
        let Some(own) = &self.segment else { return Ok(Progress::More) };
        let starts = segment_starts(&self.dir)?;
        let later = starts.iter().find(|start| **start >= self.offset && **start != own.start);
        let Some(later) = later else { return Ok(Progress::CaughtUp) };
        // A later segment means that ours is final, so its length is: it may have grown between the read and the listing.
        if *later == self.offset || own.file.metadata()?.len() > self.offset - own.start {
            return Ok(Progress::More);
        }
        // Segments follow each other without holes: what was between here and the later one has been deleted, or lost.
        if starts.binary_search(&own.start).is_err() {
            Ok(Progress::Gone { first: *later })
        } else {
            Ok(Progress::BadTail { offset: self.offset })
        }
    }

    /// A record that is not whole: still being written if the shim lives, otherwise the end.
    fn judge_tail(&mut self, scratch: &mut Scratch, each: &mut impl FnMut(RecordRef<'_>)) -> io::Result<Progress> {
        let followed = segment_starts(&self.dir)?.iter().any(|start| *start > self.offset);
        if rundir::alive(&self.dir)? && !followed {
            return Ok(Progress::CaughtUp);
        }
        // The shim may have finished the record and ended between the read and the look: read once more.
        let before = self.offset;
        let stop = self.read_chunk(scratch, 1, each)?;
        if self.offset > before {
            return Ok(Progress::More);
        }
        Ok(match stop {
            Stop::Clean => Progress::More,
            Stop::Broken => Progress::BadTail { offset: self.offset },
        })
    }
}

/// Reads until the buffer is full or the file ends.
fn read_at(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    let mut got = 0;
    while got < buffer.len() {
        match file.read_at(&mut buffer[got..], at + u64::try_from(got).unwrap_or(0)) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}
