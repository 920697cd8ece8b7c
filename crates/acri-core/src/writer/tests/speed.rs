//! Prints how fast it goes; asserts nothing about it.

use super::world::{agent, run};
use crate::{
    appender::Token,
    writer::{
        Input, LogEnd, Output, SpoolRecord, Writer,
        reader::{Frame, LogStream, Next, Reader, Since},
    },
};
use acri::{StreamSeq, Timestamp, id::Epoch, log::Stream};
use bytes::Bytes;

const LINES: u64 = if cfg!(debug_assertions) { 4_000 } else { 200_000 };

#[expect(clippy::disallowed_methods, reason = "a measurement, not a rule")]
fn now() -> std::time::Instant {
    std::time::Instant::now()
}

fn written(records: &[u8]) -> Vec<Bytes> {
    let (mut writer, _) = Writer::new(agent(), run(), Epoch(1), None);
    let mut frames = Vec::new();
    writer.step(Input::Last(Token(1), LogEnd::default()));
    let mut waiting = None;
    let mut take = |outputs: Vec<Output>, waiting: &mut Option<Token>| {
        for output in outputs {
            if let Output::Publish { token, bytes, .. } = output {
                frames.push(bytes);
                *waiting = Some(token);
            }
        }
    };
    let mut offset = 0;
    for (index, bytes) in records.chunks(64 * 1024).enumerate() {
        let record = SpoolRecord {
            spool_offset: offset,
            spool_end: offset + bytes.len() as u64,
            stream: Stream::Stdout,
            stream_offset: offset,
            time: Timestamp::from_micros(1_764_500_000_000_000),
            bytes,
        };
        take(writer.step(Input::Output(record)), &mut waiting);
        offset = record.spool_end;
        if index % 8 == 7 {
            while writer.wants_output().is_none()
                && let Some(token) = waiting.take()
            {
                take(writer.step(Input::Stored(token, StreamSeq(1))), &mut waiting);
            }
        }
    }
    while let Some(token) = waiting.take() {
        take(writer.step(Input::Stored(token, StreamSeq(1))), &mut waiting);
    }
    frames
}

#[test]
fn throughput_is_printed() {
    let line = [[b'x'; 255].as_slice(), b"\n"].concat();
    let records = line.repeat(usize::try_from(LINES).unwrap());
    let begin = now();
    let frames = written(&records);
    let wrote = begin.elapsed();

    let facts = LogStream { created: 0, first: StreamSeq(1), last: StreamSeq(u64::MAX) };
    let mut reader = Reader::new(facts, Since::Start);
    let (mut items, mut events) = (Vec::new(), 0);
    let begin = now();
    for (seq, bytes) in (1..).map(StreamSeq).zip(&frames) {
        assert_eq!(reader.push(Frame { seq, owned: true, bytes }, &mut items), Next::GoOn);
        events += items.len() as u64;
        items.clear();
    }
    let read = begin.elapsed();
    assert_eq!(events, LINES);
    let rate = |elapsed: std::time::Duration| LINES as f64 / elapsed.as_secs_f64() / 1e6;
    println!(
        "{LINES} lines of 256 bytes in {} frames: written {:.2}, read {:.2} million/s",
        frames.len(),
        rate(wrote),
        rate(read)
    );
}
