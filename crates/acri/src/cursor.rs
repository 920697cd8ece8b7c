//! Where a reader of a log stands.

use crate::id::{LogSeq, StreamSeq};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use std::{fmt, str::FromStr};

/// A position in a run's log, just after one event. Opaque text to others.
///
/// It holds the stream's incarnation, the frame's stream sequence, the index
/// in the frame, the log sequence and eight bytes of the frame's hash: enough
/// to go on exactly after the event, and to notice a restored stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor {
    /// Seconds and more of the stream's creation, in microseconds: another
    /// value means another stream under the same name.
    pub stream: i64,
    /// The frame's sequence in that stream.
    pub frame: StreamSeq,
    /// Which event of that frame.
    pub index: u32,
    /// Its log sequence.
    pub sequence: LogSeq,
    /// The first eight bytes of the frame's SHA-256.
    pub hash: [u8; 8],
}

/// Text that is no cursor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a cursor of this version")]
pub struct Error;

const VERSION: u8 = 1;
const LENGTH: usize = 1 + 8 + 8 + 4 + 8 + 8;

impl fmt::Display for Cursor {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut bytes = Vec::with_capacity(LENGTH);
        bytes.push(VERSION);
        bytes.extend(self.stream.to_be_bytes());
        bytes.extend(self.frame.0.to_be_bytes());
        bytes.extend(self.index.to_be_bytes());
        bytes.extend(self.sequence.0.to_be_bytes());
        bytes.extend(self.hash);
        formatter.write_str(&URL_SAFE_NO_PAD.encode(bytes))
    }
}

impl FromStr for Cursor {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| Error)?;
        if bytes.len() != LENGTH || bytes[0] != VERSION {
            return Err(Error);
        }
        let eight = |at: usize| <[u8; 8]>::try_from(&bytes[at..at + 8]).map_err(|_| Error);
        let four = <[u8; 4]>::try_from(&bytes[17..21]).map_err(|_| Error)?;
        Ok(Self {
            stream: i64::from_be_bytes(eight(1)?),
            frame: StreamSeq(u64::from_be_bytes(eight(9)?)),
            index: u32::from_be_bytes(four),
            sequence: LogSeq(u64::from_be_bytes(eight(21)?)),
            hash: eight(29)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_read_back_and_anything_else_is_refused() {
        let cursor = Cursor {
            stream: 1_764_500_000_000_001,
            frame: StreamSeq(77),
            index: 3,
            sequence: LogSeq(900),
            hash: [1, 2, 3, 4, 5, 6, 7, 8],
        };
        let text = cursor.to_string();
        assert_eq!(text.parse::<Cursor>().unwrap(), cursor);
        for bad in ["", "AA", &text[1..], &format!("{text}A"), "💥"] {
            assert_eq!(bad.parse::<Cursor>(), Err(Error), "{bad:?}");
        }
    }
}
