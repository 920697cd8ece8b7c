//! The spool: what a harness wrote, as records in segment files.
//!
//! A spool *offset* is a position in bytes in the concatenation of all segment files, headers included. A segment is
//! named `spool-` and its start offset in twenty digits. A record is a header of [`HEADER_BYTES`] bytes, little-endian,
//! and its payload:
//!
//! ```text
//!  0  magic          4  "ACRS"
//!  4  version        1  1
//!  5  stream         1  1 stdout, 2 stderr
//!  6  reserved       2  0
//!  8  payload bytes  4  1 ..= 65536
//! 12  crc32c         4  over bytes 0..12 and 16..40 and the payload
//! 16  stream offset  8  position of this payload's first byte in its own stream
//! 24  boot time      8  CLOCK_BOOTTIME in ns, when it was read
//! 32  wall time      8  ns since the epoch, when it was read
//! ```
//!
//! There is no fsync: a reboot ends the harness too. The order between the streams is the order of reading.

mod reader;
#[cfg(test)]
mod tests;
mod writer;

pub use reader::{Progress, Reader, RecordRef, Scratch};
pub(crate) use writer::{Append, Writer};

use serde::{Deserialize, Serialize};

use crate::limits::RECORD_PAYLOAD_BYTES_MAX;

/// Bytes of a record's header.
pub const HEADER_BYTES: usize = 40;
/// Bytes of the largest record.
pub const RECORD_BYTES_MAX: usize = HEADER_BYTES + RECORD_PAYLOAD_BYTES_MAX;
const MAGIC: [u8; 4] = *b"ACRS";
const VERSION: u8 = 1;
const PREFIX: &str = "spool-";

/// Which of the harness's streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

impl Stream {
    /// Both, in order of their numbers.
    pub const ALL: [Self; 2] = [Self::Stdout, Self::Stderr];

    /// The number in a record: 1 or 2.
    pub fn number(self) -> u8 {
        match self {
            Self::Stdout => 1,
            Self::Stderr => 2,
        }
    }

    pub(crate) fn index(self) -> usize {
        usize::from(self.number() - 1)
    }

    fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Stdout),
            2 => Some(Self::Stderr),
            _ => None,
        }
    }
}

/// What a record's header says, its lengths checked, its checksum not yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) stream: Stream,
    pub(crate) len: usize,
    pub(crate) stream_offset: u64,
    pub(crate) boot_ns: u64,
    pub(crate) wall_ns: u64,
}

impl Header {
    /// The header's bytes for this payload, checksum included.
    pub(crate) fn encode(self, payload: &[u8]) -> [u8; HEADER_BYTES] {
        let mut bytes = [0u8; HEADER_BYTES];
        let len = u32::try_from(self.len).expect("a payload is at most 64 KiB");
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        bytes[5] = self.stream.number();
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.stream_offset.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.boot_ns.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.wall_ns.to_le_bytes());
        let crc = checksum(&bytes, payload);
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads a header, or says no if it cannot be one.
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let len = usize::try_from(u32_at(bytes, 8)).ok()?;
        let well_formed = bytes[0..4] == MAGIC && bytes[4] == VERSION && bytes[6..8] == [0, 0];
        if !well_formed || len == 0 || len > RECORD_PAYLOAD_BYTES_MAX {
            return None;
        }
        Some(Self {
            stream: Stream::from_number(bytes[5])?,
            len,
            stream_offset: u64_at(bytes, 16),
            boot_ns: u64_at(bytes, 24),
            wall_ns: u64_at(bytes, 32),
        })
    }
}

fn checksum(header: &[u8; HEADER_BYTES], payload: &[u8]) -> u32 {
    let crc = crc32c::crc32c(&header[0..12]);
    let crc = crc32c::crc32c_append(crc, &header[16..HEADER_BYTES]);
    crc32c::crc32c_append(crc, payload)
}

/// True if the header's checksum fits header and payload.
fn proved(header: &[u8; HEADER_BYTES], payload: &[u8]) -> bool {
    checksum(header, payload) == u32_at(header, 12)
}

fn u32_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | (u64::from(u32_at(bytes, at + 4)) << 32)
}

/// The file name of the segment that starts at this offset.
fn segment_name(start: u64) -> String {
    format!("{PREFIX}{start:020}")
}

/// The start offsets of a directory's segments, ascending.
fn segment_starts(dir: &std::path::Path) -> std::io::Result<Vec<u64>> {
    let mut starts = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let name = entry?.file_name();
        let digits = name.to_str().and_then(|name| name.strip_prefix(PREFIX)).filter(|digits| digits.len() == 20);
        if let Some(start) = digits.and_then(|digits| digits.parse().ok()) {
            starts.push(start);
        }
    }
    starts.sort_unstable();
    Ok(starts)
}
