//! Writes log frames without building them first.
//!
//! A node writes millions of log events a second and reads none of them back:
//! it encodes each as it is found and puts a frame's head before them later.
//! The bytes are those that [`codec::to_msgpack`](crate::codec::to_msgpack)
//! gives for the same [`LogFrame`](super::LogFrame); a test holds both together.

use super::{LogType, Origin, Stream};
use crate::{
    id::{AgentId, LogSeq, RunId},
    time::Timestamp,
};

/// A [`LogRecord`](super::LogRecord) that borrows its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordRef<'a> {
    /// When the harness wrote it.
    pub time: Timestamp,
    /// What it is.
    pub kind: LogType,
    /// Its payload: text if it is UTF-8, octets otherwise
    /// ([`Payload::of_output`](crate::Payload::of_output)).
    pub output: &'a [u8],
    /// Which output it came from.
    pub stream: Option<Stream>,
    /// How it came to be.
    pub origin: Origin,
    /// Which part of a line that was split.
    pub part: Option<u32>,
    /// Whether the line goes on in the next event of the same stream.
    pub more: bool,
}

/// Bytes that an event takes beyond its payload, at most.
pub const RECORD_EXTRA_BYTES_MAX: usize = 144;
/// Bytes that a frame takes beyond its events, at most.
pub const FRAME_EXTRA_BYTES_MAX: usize = 96;

/// Appends one event to `out`.
pub fn record_into(out: &mut Vec<u8>, record: &RecordRef<'_>) {
    out.reserve(record.output.len() + RECORD_EXTRA_BYTES_MAX);
    let fields = 3
        + u8::from(record.stream.is_some())
        + u8::from(!record.origin.is_passthrough())
        + u8::from(record.part.is_some())
        + u8::from(record.more);
    out.push(0x80 | fields);
    out.extend_from_slice(b"\xa4time");
    put_int(out, record.time.as_micros());
    out.extend_from_slice(b"\xa4type");
    put_str(out, record.kind.as_str());
    match std::str::from_utf8(record.output) {
        Ok(text) => {
            out.extend_from_slice(b"\xa7payload\x82\xa4type\xa4text\xa4text");
            put_str(out, text);
        }
        Err(_) => {
            out.extend_from_slice(b"\xa7payload\x82\xa4type\xa4text\xa6octets");
            put_bytes(out, record.output);
        }
    }
    if let Some(stream) = record.stream {
        out.extend_from_slice(b"\xa6stream");
        put_str(out, stream.as_str());
    }
    if !record.origin.is_passthrough() {
        out.extend_from_slice(b"\xa6origin");
        put_str(out, record.origin.as_str());
    }
    if let Some(part) = record.part {
        out.extend_from_slice(b"\xa4part");
        put_uint(out, u64::from(part));
    }
    if record.more {
        out.extend_from_slice(b"\xa4more\xc3");
    }
}

/// A whole frame of `count` events whose encoded forms are `events`, one after
/// the other.
#[must_use]
pub fn frame(agent: AgentId, run: Option<RunId>, sequence: LogSeq, count: u32, events: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(events.len() + FRAME_EXTRA_BYTES_MAX);
    out.push(if run.is_some() { 0x84 } else { 0x83 });
    out.extend_from_slice(b"\xa5agent");
    put_bytes(&mut out, agent.as_uuid().as_bytes());
    if let Some(run) = run {
        out.extend_from_slice(b"\xa3run");
        put_bytes(&mut out, run.as_uuid().as_bytes());
    }
    out.extend_from_slice(b"\xa8sequence");
    put_uint(&mut out, sequence.0);
    out.extend_from_slice(b"\xa6events");
    match (u8::try_from(count), u16::try_from(count)) {
        (Ok(count @ 0..16), _) => out.push(0x90 | count),
        (_, Ok(count)) => put(&mut out, 0xdc, count.to_be_bytes()),
        _ => put(&mut out, 0xdd, count.to_be_bytes()),
    }
    out.extend_from_slice(events);
    out
}

fn put<const N: usize>(out: &mut Vec<u8>, marker: u8, bytes: [u8; N]) {
    out.push(marker);
    out.extend_from_slice(&bytes);
}

fn put_uint(out: &mut Vec<u8>, value: u64) {
    if let Ok(value) = u8::try_from(value) {
        if value < 128 { out.push(value) } else { put(out, 0xcc, [value]) }
    } else if let Ok(value) = u16::try_from(value) {
        put(out, 0xcd, value.to_be_bytes());
    } else if let Ok(value) = u32::try_from(value) {
        put(out, 0xce, value.to_be_bytes());
    } else {
        put(out, 0xcf, value.to_be_bytes());
    }
}

fn put_int(out: &mut Vec<u8>, value: i64) {
    if let Ok(value) = u64::try_from(value) {
        put_uint(out, value);
    } else if let Ok(value) = i8::try_from(value) {
        if value >= -32 { out.extend_from_slice(&value.to_be_bytes()) } else { put(out, 0xd0, value.to_be_bytes()) }
    } else if let Ok(value) = i16::try_from(value) {
        put(out, 0xd1, value.to_be_bytes());
    } else if let Ok(value) = i32::try_from(value) {
        put(out, 0xd2, value.to_be_bytes());
    } else {
        put(out, 0xd3, value.to_be_bytes());
    }
}

fn put_str(out: &mut Vec<u8>, text: &str) {
    match length(text.len()) {
        length @ 0..32 => out.push(0xa0 | length.to_be_bytes()[3]),
        length => put_length(out, 0xd9, length),
    }
    out.extend_from_slice(text.as_bytes());
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_length(out, 0xc4, length(bytes.len()));
    out.extend_from_slice(bytes);
}

/// The marker for eight bits of length, or one of the two after it.
fn put_length(out: &mut Vec<u8>, marker: u8, length: u32) {
    let bytes = length.to_be_bytes();
    if length < 1 << 8 {
        put(out, marker, [bytes[3]]);
    } else if length < 1 << 16 {
        put(out, marker + 1, [bytes[2], bytes[3]]);
    } else {
        put(out, marker + 2, bytes);
    }
}

fn length(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("a part of a line is far below 4 GiB")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Payload, codec,
        log::{LogFrame, LogRecord},
    };
    use proptest::prelude::*;

    fn record_of(record: &RecordRef<'_>) -> LogRecord {
        LogRecord {
            time: record.time,
            kind: record.kind,
            payload: Payload::of_output(record.output.to_vec()),
            stream: record.stream,
            origin: record.origin,
            part: record.part,
            more: record.more,
        }
    }

    fn same(sequence: LogSeq, run: Option<RunId>, records: &[RecordRef<'_>]) {
        let agent = AgentId::from_uuid(uuid::uuid!("cf41a647-18b5-8a70-a2c4-ea39ba67efe6"));
        let mut events = Vec::new();
        for record in records {
            let before = events.len();
            record_into(&mut events, record);
            let extra = events.len() - before - record.output.len();
            assert!(extra <= RECORD_EXTRA_BYTES_MAX, "{extra}");
        }
        let bytes = frame(agent, run, sequence, u32::try_from(records.len()).unwrap(), &events);
        assert!(bytes.len() - events.len() <= FRAME_EXTRA_BYTES_MAX);
        let built = LogFrame { agent, run, sequence, events: records.iter().map(record_of).collect() };
        assert_eq!(bytes, codec::to_msgpack(&built).unwrap());
        assert_eq!(codec::from_msgpack::<LogFrame>(&bytes).unwrap(), built);
    }

    fn kinds() -> impl Strategy<Value = LogType> {
        use LogType::{Error, Message, ReasoningStep, ToolCall, ToolResult};
        proptest::sample::select(vec![ToolCall, ToolResult, ReasoningStep, Message, Error])
    }

    type Made = (i64, LogType, Vec<u8>, Option<Stream>, Origin, Option<u32>, bool);

    fn made() -> impl Strategy<Value = Made> {
        let output = prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..40),
            "[a-zé☃]{0,40}".prop_map(String::into_bytes),
            proptest::sample::select(vec![31, 32, 255, 256, 65_535, 65_536])
                .prop_flat_map(|length| any::<u8>().prop_map(move |byte| vec![byte; length])),
        ];
        let time = prop_oneof![any::<i64>(), -70_000..70_000_i64, -300..300_i64];
        let stream = proptest::option::of(proptest::sample::select(vec![Stream::Stdout, Stream::Stderr]));
        let origin = proptest::sample::select(vec![Origin::Native, Origin::Parsed, Origin::Passthrough]);
        let part = proptest::option::of(prop_oneof![any::<u32>(), 0..300_u32]);
        (time, kinds(), output, stream, origin, part, any::<bool>())
    }

    proptest! {
        #[test]
        fn a_frame_written_in_pieces_is_the_frame_that_the_codec_writes(
            made in proptest::collection::vec(made(), 0..20),
            sequence in any::<u64>(),
            run in proptest::option::of(any::<u128>()),
        ) {
            let records: Vec<_> = made.iter().map(|(time, kind, output, stream, origin, part, more)| RecordRef {
                time: Timestamp::from_micros(*time),
                kind: *kind,
                output,
                stream: *stream,
                origin: *origin,
                part: *part,
                more: *more,
            }).collect();
            same(LogSeq(sequence), run.map(|run| RunId::from_uuid(uuid::Uuid::from_u128(run))), &records);
        }
    }

    #[test]
    fn a_frame_of_very_many_events_is_the_one_that_the_codec_writes() {
        let record = RecordRef {
            time: Timestamp::from_micros(1),
            kind: LogType::Message,
            output: b"",
            stream: None,
            origin: Origin::Passthrough,
            part: None,
            more: false,
        };
        for count in [15, 16, 65_535, 65_536] {
            same(LogSeq(1), None, &vec![record; count]);
        }
    }
}
