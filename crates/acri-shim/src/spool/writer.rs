//! The shim's side of the spool: appends whole records, rotates, releases.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate};

use super::{HEADER_BYTES, Header, Stream, segment_name, segment_starts};
use crate::sys;

/// What became of an append.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Append {
    /// Written whole.
    Done,
    /// The disk refused it; the file ends with the record before. Try again later with the same bytes.
    DiskRefused,
}

/// Appends records to the segment files of one run directory.
#[derive(Debug)]
pub(crate) struct Writer {
    dir: PathBuf,
    segment_bytes: u64,
    /// Start offsets of the segments that exist, ascending; the last one is written to.
    segments: Vec<u64>,
    active: File,
    end: u64,
    released: u64,
    streams: [u64; 2],
    /// A failed append left bytes behind the last whole record that could not be cut off yet.
    torn: bool,
    /// The last append was refused.
    refused: bool,
}

/// Size in bytes from which a wholly released active segment is given back at once.
const RECLAIM_BYTES: u64 = 1024 * 1024;

impl Writer {
    /// Begins an empty spool.
    pub(crate) fn create(dir: &Path, segment_bytes: u64) -> io::Result<Self> {
        let active = open_segment(dir, 0)?;
        Ok(Self {
            dir: dir.to_owned(),
            segment_bytes: segment_bytes.max(1),
            segments: vec![0],
            active,
            end: 0,
            released: 0,
            streams: [0; 2],
            torn: false,
            refused: false,
        })
    }

    /// Removes all segments: nothing was ever started here.
    pub(crate) fn discard(dir: &Path) {
        for start in segment_starts(dir).unwrap_or_default() {
            let _ = std::fs::remove_file(dir.join(segment_name(start)));
        }
    }

    /// The offset behind the last record.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// The offset below which the node has let go.
    pub(crate) fn released(&self) -> u64 {
        self.released
    }

    /// Bytes written and not released.
    pub(crate) fn held(&self) -> u64 {
        self.end - self.released
    }

    /// Payload bytes spooled of each stream.
    pub(crate) fn streams(&self) -> [u64; 2] {
        self.streams
    }

    /// Appends one record whole or not at all.
    pub(crate) fn append(&mut self, stream: Stream, payload: &[u8]) -> Append {
        match self.try_append(stream, payload) {
            Ok(()) => {
                self.refused = false;
                Append::Done
            }
            Err(_) => {
                self.torn = true;
                self.refused = true;
                self.mend();
                // What was let go of before may be all that ever is: nobody asks for more output than there is.
                self.give_back();
                Append::DiskRefused
            }
        }
    }

    fn try_append(&mut self, stream: Stream, payload: &[u8]) -> io::Result<()> {
        if !self.mend() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        if self.end - self.active_start() >= self.segment_bytes {
            self.rotate()?;
        }
        let header = Header {
            stream,
            len: payload.len(),
            stream_offset: self.streams[stream.index()],
            boot_ns: sys::boot_ns(),
            wall_ns: sys::wall_ns(),
        };
        let header = header.encode(payload);
        write_both(&mut self.active, &header, payload)?;
        self.end += to_u64(HEADER_BYTES + payload.len());
        self.streams[stream.index()] += to_u64(payload.len());
        Ok(())
    }

    /// Cuts off what a failed append left. False if the disk refuses even that.
    fn mend(&mut self) -> bool {
        if self.torn && self.active.set_len(self.end - self.active_start()).is_ok() {
            self.torn = false;
        }
        !self.torn
    }

    fn active_start(&self) -> u64 {
        self.segments.last().copied().unwrap_or(0)
    }

    fn rotate(&mut self) -> io::Result<()> {
        if !self.mend() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.active = open_segment(&self.dir, self.end)?;
        self.segments.push(self.end);
        Ok(())
    }

    /// Lets go of everything below `offset`: segments wholly below it are deleted. Never moves back, never beyond the end.
    pub(crate) fn release(&mut self, offset: u64) {
        self.released = self.released.max(offset.min(self.end));
        self.give_back();
    }

    fn give_back(&mut self) {
        // The active segment can go too when all of it is released and a new one can be begun: that is how a full disk
        // gets its last bytes back.
        let size = self.end - self.active_start();
        let worth_it = size >= self.segment_bytes.min(RECLAIM_BYTES) || (self.refused && size > 0);
        if self.released == self.end && worth_it {
            let _ = self.rotate();
        } else if self.refused && self.released < self.end && self.released > self.active_start() {
            // A line that is not at its end yet holds its record back, and with it the segment, and the disk has no room
            // for the rest of the line: the blocks before it are given back where the file system can do that.
            let below = self.released - self.active_start();
            let _ = fallocate(&self.active, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, below);
        }
        let whole = self.segments.windows(2).take_while(|pair| pair[1] <= self.released).count();
        for start in self.segments.drain(..whole) {
            let _ = std::fs::remove_file(self.dir.join(segment_name(start)));
        }
    }
}

fn open_segment(dir: &Path, start: u64) -> io::Result<File> {
    // Appending: after a cut the next write goes behind the last whole record without a seek.
    OpenOptions::new().create(true).truncate(false).append(true).mode(0o600).open(dir.join(segment_name(start)))
}

fn write_both(file: &mut File, header: &[u8], payload: &[u8]) -> io::Result<()> {
    let mut done = 0;
    while done < header.len() + payload.len() {
        let rest = [
            IoSlice::new(header.get(done..).unwrap_or(&[])),
            IoSlice::new(&payload[done.saturating_sub(header.len())..]),
        ];
        match file.write_vectored(&rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => done += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn to_u64(n: usize) -> u64 {
    u64::try_from(n).expect("usize fits u64 on Linux")
}
