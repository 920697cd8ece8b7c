//! Reads log frames as fast as they are written.
//!
//! A reader replays millions of log events a second, and a general decoder
//! matches names and buffers where the order of a frame's fields is known.
//! Whatever is not exactly as [`encode`](super::encode) writes it is left to
//! [`codec::from_msgpack`], which decides alone what is a frame and what is
//! not; a test holds both together.

use super::{LogFrame, LogRecord, LogType, Origin, Stream, packed};
use crate::{
    codec,
    id::{AgentId, LogSeq, RunId},
    payload::Payload,
    time::Timestamp,
};
use uuid::Uuid;

/// Bytes of the smallest record: bounds what a count makes us reserve.
const RECORD_BYTES_MIN: usize = 32;

/// Reads exactly one frame, in its stored form ([`packed`]).
///
/// # Errors
/// Those of [`packed::unpack`] and of [`codec::from_msgpack`].
pub fn frame(stored: &[u8]) -> Result<LogFrame, codec::Error> {
    let bytes = packed::unpack(stored)?;
    as_written(&bytes).map_or_else(|| codec::from_msgpack(&bytes), Ok)
}

/// The frame, if it is in the form that we write.
fn as_written(bytes: &[u8]) -> Option<LogFrame> {
    let mut rest = Rest(bytes);
    let has_run = match rest.byte()? {
        0x84 => true,
        0x83 => false,
        _ => return None,
    };
    let agent = AgentId::from_uuid(rest.expect(b"\xa5agent")?.uuid()?);
    let run = if has_run { Some(RunId::from_uuid(rest.expect(b"\xa3run")?.uuid()?)) } else { None };
    let sequence = LogSeq(rest.expect(b"\xa8sequence")?.uint()?);
    let count = rest.expect(b"\xa6events")?.array()?;
    let mut events = Vec::with_capacity(count.min(rest.0.len() / RECORD_BYTES_MIN));
    for _ in 0..count {
        events.push(record(&mut rest)?);
    }
    rest.0.is_empty().then_some(LogFrame { agent, run, sequence, events })
}

fn record(rest: &mut Rest<'_>) -> Option<LogRecord> {
    let fields = rest.byte()?.checked_sub(0x80).filter(|fields| (3..=7).contains(fields))?;
    let time = Timestamp::from_micros(rest.expect(b"\xa4time")?.int()?);
    let kind = kind(rest.expect(b"\xa4type")?.text()?)?;
    rest.expect(b"\xa7payload\x82\xa4type\xa4text")?;
    let payload = if rest.skip(b"\xa4text") {
        Payload::text(std::str::from_utf8(rest.text()?).ok()?)
    } else {
        let octets = rest.expect(b"\xa6octets")?.octets()?;
        // Text in octets is not what we write.
        match std::str::from_utf8(octets) {
            Ok(_) => return None,
            Err(_) => Payload::Octets { octets: octets.to_vec() },
        }
    };
    let mut read = 3;
    let (mut stream, mut origin, mut part, mut more) = (None, Origin::default(), None, false);
    if read < fields && rest.skip(b"\xa6stream") {
        read += 1;
        stream = Some(stream_of(rest.text()?)?);
    }
    if read < fields && rest.skip(b"\xa6origin") {
        read += 1;
        origin = origin_of(rest.text()?)?;
    }
    if read < fields && rest.skip(b"\xa4part") {
        read += 1;
        part = Some(u32::try_from(rest.uint()?).ok()?);
    }
    if read < fields && rest.skip(b"\xa4more\xc3") {
        read += 1;
        more = true;
    }
    (read == fields).then_some(LogRecord { time, kind, payload, stream, origin, part, more })
}

fn kind(name: &[u8]) -> Option<LogType> {
    use LogType::{Error, Message, ReasoningStep, ToolCall, ToolResult};
    [Message, ToolCall, ToolResult, ReasoningStep, Error].into_iter().find(|kind| kind.as_str().as_bytes() == name)
}

fn stream_of(name: &[u8]) -> Option<Stream> {
    [Stream::Stdout, Stream::Stderr].into_iter().find(|stream| stream.as_str().as_bytes() == name)
}

fn origin_of(name: &[u8]) -> Option<Origin> {
    [Origin::Native, Origin::Parsed, Origin::Passthrough].into_iter().find(|origin| origin.as_str().as_bytes() == name)
}

/// What is not read yet. Each read is `None` if something else stands there.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn skip(&mut self, bytes: &[u8]) -> bool {
        match self.0.strip_prefix(bytes) {
            Some(rest) => {
                self.0 = rest;
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, bytes: &[u8]) -> Option<&mut Self> {
        self.skip(bytes).then_some(self)
    }

    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn fixed<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (first, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(first)
    }

    fn length(&mut self, bytes: u8) -> Option<usize> {
        match bytes {
            1 => Some(usize::from(self.byte()?)),
            2 => Some(usize::from(u16::from_be_bytes(self.fixed()?))),
            _ => usize::try_from(u32::from_be_bytes(self.fixed()?)).ok(),
        }
    }

    fn uuid(&mut self) -> Option<Uuid> {
        Some(Uuid::from_bytes(self.expect(b"\xc4\x10")?.fixed()?))
    }

    fn uint(&mut self) -> Option<u64> {
        Some(match self.byte()? {
            small @ 0..0x80 => u64::from(small),
            0xcc => u64::from(self.byte()?),
            0xcd => u64::from(u16::from_be_bytes(self.fixed()?)),
            0xce => u64::from(u32::from_be_bytes(self.fixed()?)),
            0xcf => u64::from_be_bytes(self.fixed()?),
            _ => return None,
        })
    }

    fn int(&mut self) -> Option<i64> {
        match self.0.first()? {
            // Before 1970: rare enough for the general decoder.
            0xd0..=0xd3 | 0xe0..=0xff => None,
            _ => i64::try_from(self.uint()?).ok(),
        }
    }

    fn array(&mut self) -> Option<usize> {
        match self.byte()? {
            small @ 0x90..0xa0 => Some(usize::from(small & 0x0f)),
            0xdc => self.length(2),
            0xdd => self.length(4),
            _ => None,
        }
    }

    fn text(&mut self) -> Option<&'a [u8]> {
        let length = match self.byte()? {
            small @ 0xa0..0xc0 => usize::from(small & 0x1f),
            0xd9 => self.length(1)?,
            0xda => self.length(2)?,
            0xdb => self.length(4)?,
            _ => return None,
        };
        self.bytes(length)
    }

    fn octets(&mut self) -> Option<&'a [u8]> {
        let length = match self.byte()? {
            0xc4 => self.length(1)?,
            0xc5 => self.length(2)?,
            0xc6 => self.length(4)?,
            _ => return None,
        };
        self.bytes(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::encode::{self, RecordRef};
    use proptest::prelude::*;

    fn written(outputs: &[Vec<u8>], part: Option<u32>, stream: Option<Stream>) -> Vec<u8> {
        let agent = AgentId::from_uuid(uuid::uuid!("cf41a647-18b5-8a70-a2c4-ea39ba67efe6"));
        let mut events = Vec::new();
        for output in outputs {
            let record = RecordRef {
                time: Timestamp::from_micros(1_764_500_000_000_000),
                kind: LogType::Message,
                output,
                stream,
                origin: Origin::Passthrough,
                part,
                more: part.is_some(),
            };
            encode::record_into(&mut events, &record);
        }
        let count = u32::try_from(outputs.len()).unwrap();
        encode::frame(agent, None, LogSeq(7), count, &events)
    }

    #[test]
    fn a_frame_as_we_write_it_takes_the_fast_way_and_gives_what_the_codec_gives() {
        let outputs = [b"a line".to_vec(), vec![0xff, 0], vec![b'x'; 70_000], Vec::new()];
        for (part, stream) in [(None, Some(Stream::Stderr)), (Some(300), None), (None, None)] {
            let bytes = written(&outputs, part, stream);
            assert_eq!(as_written(&bytes), Some(codec::from_msgpack(&bytes).unwrap()));
        }
    }

    proptest! {
        #[test]
        fn a_frame_with_any_byte_changed_or_cut_off_is_what_the_codec_says_it_is(
            outputs in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 0..6),
            part in proptest::option::of(any::<u32>()),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
            cut in any::<prop::sample::Index>(),
        ) {
            let bytes = written(&outputs, part, Some(Stream::Stdout));
            let mut changed = bytes.clone();
            let place = at.index(bytes.len());
            changed[place] = byte;
            let short = &bytes[..cut.index(bytes.len())];
            for bytes in [bytes.as_slice(), &changed, short, &[bytes.as_slice(), &[0xc0]].concat()] {
                let expected = codec::from_msgpack::<LogFrame>(bytes).ok();
                prop_assert_eq!(frame(bytes).ok(), expected);
            }
        }
    }
}
