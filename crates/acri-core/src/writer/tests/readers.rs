//! What a reader makes of frames.

use super::world::{agent, run};
use crate::writer::reader::{Frame, LogItem, LogStream, Next, Reader, Since};
use acri::{
    Payload, StreamSeq, Timestamp, codec,
    cursor::Cursor,
    id::LogSeq,
    log::{LogFrame, LogRecord, LogType, Origin, Stream, decode},
};
use expect_test::{Expect, expect};

fn frame(first: u64, events: u64, word: &str) -> Vec<u8> {
    let event = |sequence: u64| LogRecord {
        time: Timestamp::from_micros(1),
        kind: LogType::Message,
        payload: Payload::text(format!("{word}{sequence}")),
        stream: Some(Stream::Stdout),
        origin: Origin::Passthrough,
        part: None,
        more: false,
    };
    let events = (first..first + events).map(event).collect();
    codec::to_msgpack(&LogFrame { agent: agent(), run: Some(run()), sequence: LogSeq(first), events }).unwrap()
}

struct Stored {
    created: i64,
    first: u64,
    last: u64,
    frames: Vec<(u64, Vec<u8>)>,
}

impl Stored {
    fn read(&self, since: Since) -> (String, Vec<Cursor>) {
        let facts = LogStream { created: self.created, first: StreamSeq(self.first), last: StreamSeq(self.last) };
        let mut reader = Reader::new(facts, since);
        let (mut shown, mut cursors) = (String::new(), Vec::new());
        'again: loop {
            shown += &format!("read from {}\n", reader.start_from());
            let from = reader.start_from();
            for (seq, bytes) in self.frames.iter().filter(|(seq, _)| StreamSeq(*seq) >= from) {
                let mut items = Vec::new();
                let next = reader.push(Frame { seq: StreamSeq(*seq), owned: true, bytes }, &mut items);
                for item in items {
                    shown += &match item {
                        LogItem::Event(event, cursor) => {
                            cursors.push(cursor);
                            format!("{} {}\n", event.sequence, String::from_utf8_lossy(event.payload.as_bytes()))
                        }
                        LogItem::Gap { from, to } => format!("gap {from} to {to}\n"),
                        LogItem::Rewound { after } => format!("rewound after {after}\n"),
                        LogItem::Malformed { frame, .. } => format!("malformed {frame}\n"),
                    };
                }
                if next == Next::Restart {
                    continue 'again;
                }
            }
            return (shown, cursors);
        }
    }

    fn check(&self, since: Since, expect: Expect) -> Vec<Cursor> {
        let (shown, cursors) = self.read(since);
        expect.assert_eq(&shown);
        cursors
    }
}

fn stored() -> Stored {
    Stored {
        created: 7,
        first: 1,
        last: 30,
        frames: vec![(10, frame(1, 2, "a")), (20, frame(3, 3, "b")), (30, frame(6, 1, "c"))],
    }
}

#[test]
fn a_reader_gets_each_event_once_and_goes_on_after_any_cursor() {
    let cursors = stored().check(
        Since::Start,
        expect![[r#"
        read from 1
        1 a1
        2 a2
        3 b3
        4 b4
        5 b5
        6 c6
    "#]],
    );
    for (index, cursor) in cursors.iter().enumerate() {
        let (_, rest) = stored().read(Since::After(*cursor));
        assert_eq!(rest, cursors[index + 1..]);
    }
}

#[test]
fn a_frame_that_is_stored_again_or_overlaps_is_skipped_by_log_sequence() {
    let mut twice = stored();
    twice.frames.insert(2, (21, frame(2, 3, "again")));
    twice.frames.insert(3, (22, frame(4, 4, "late")));
    twice.check(
        Since::Start,
        expect![[r#"
        read from 1
        1 a1
        2 a2
        3 b3
        4 b4
        5 b5
        6 late6
        7 late7
    "#]],
    );
}

#[test]
fn what_retention_took_is_a_gap() {
    let cursors = stored().check(
        Since::Start,
        expect![[r#"
        read from 1
        1 a1
        2 a2
        3 b3
        4 b4
        5 b5
        6 c6
    "#]],
    );
    let mut kept = stored();
    (kept.first, kept.frames) = (25, kept.frames.split_off(2));
    kept.check(
        Since::Start,
        expect![[r#"
        read from 25
        gap 1 to 5
        6 c6
    "#]],
    );
    kept.check(
        Since::After(cursors[0]),
        expect![[r#"
        read from 25
        gap 2 to 5
        6 c6
    "#]],
    );
    kept.check(
        Since::From(StreamSeq(15)),
        expect![[r#"
        read from 15
        6 c6
    "#]],
    );
}

#[test]
fn another_stream_under_the_same_name_is_read_by_log_sequence() {
    let (_, cursors) = stored().read(Since::Start);
    let mut other = stored();
    other.created = 8;
    other.check(
        Since::After(cursors[2]),
        expect![[r#"
        read from 1
        rewound after 3
        4 b4
        5 b5
        6 c6
    "#]],
    );
}

#[test]
fn a_stream_that_was_put_back_is_noticed_by_the_frame_that_is_not_there() {
    let (_, cursors) = stored().read(Since::Start);
    let mut changed = stored();
    changed.frames[1].1 = frame(3, 4, "B");
    changed.check(
        Since::After(cursors[2]),
        expect![[r#"
        read from 20
        read from 1
        rewound after 3
        4 B4
        5 B5
        6 B6
    "#]],
    );
    let mut moved = stored();
    moved.frames[1].0 = 19;
    moved.check(
        Since::After(cursors[2]),
        expect![[r#"
        read from 20
        read from 1
        rewound after 3
        4 b4
        5 b5
        6 c6
    "#]],
    );
    let mut shorter = stored();
    (shorter.last, shorter.frames) = (12, vec![(10, frame(1, 2, "a")), (12, frame(3, 5, "B"))]);
    shorter.check(
        Since::After(cursors[3]),
        expect![[r#"
        read from 1
        rewound after 4
        5 B5
        6 B6
        7 B7
    "#]],
    );
}

#[test]
fn bytes_that_are_no_frame_are_said_and_read_past() {
    let mut broken = stored();
    broken.frames[1].1.truncate(40);
    broken.check(
        Since::Start,
        expect![[r#"
        read from 1
        1 a1
        2 a2
        malformed 20
        gap 3 to 5
        6 c6
    "#]],
    );
    for sequence in [0, u64::MAX, u64::MAX - 1] {
        let mut event = stored();
        let mut frame = decode::frame(&event.frames[0].1).unwrap();
        frame.sequence = LogSeq(sequence);
        event.frames[0].1 = codec::to_msgpack(&frame).unwrap();
        assert!(event.read(Since::Start).0.contains("malformed 10\ngap 1 to 2\n"));
    }
}
