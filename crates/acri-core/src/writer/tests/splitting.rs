//! Lines, parts, characters, memory.

use super::world::{Record, expected};
use crate::writer::{
    SpoolRecord,
    split::{Piece, Splitter},
};
use acri::{
    Timestamp,
    limits::LOG_LINE_BYTES_MAX,
    log::{Stream, StreamPosition},
};
use expect_test::{Expect, expect};

/// Records are given as text between `/`.
fn check(limit: usize, records: &str, expect: Expect) {
    let mut splitter = Splitter::new(limit, StreamPosition::default());
    let mut shown = String::new();
    let mut each = |piece: Piece<'_>| {
        let text =
            std::str::from_utf8(piece.bytes).map_or_else(|_| format!("{:?}", piece.bytes), |text| format!("{text:?}"));
        let part = piece.part.map_or(String::new(), |part| format!(" part {part}"));
        let more = if piece.more { " more" } else { "" };
        let (start, end, time, spool) = (piece.start, piece.end, piece.time.as_micros(), piece.spool);
        shown += &format!("{text}{part}{more}: {start}..{end} at {time}, then record {spool}\n");
    };
    let (mut offset, mut index) = (0, 0);
    for text in records.split('/') {
        let bytes = text.as_bytes();
        splitter.feed(
            &SpoolRecord {
                spool_offset: index,
                spool_end: index + 1,
                stream: Stream::Stdout,
                stream_offset: offset,
                time: Timestamp::from_micros(i64::try_from(index).unwrap()),
                bytes,
            },
            &mut each,
        );
        (offset, index) = (offset + text.len() as u64, index + 1);
    }
    splitter.finish(index, &mut each);
    expect.assert_eq(&shown);
}

#[test]
fn a_line_ends_before_its_line_feed_and_keeps_its_carriage_return() {
    check(
        20,
        "one\r\n\ntwo\n",
        expect![[r#"
        "one\r": 0..5 at 0, then record 0
        "": 5..6 at 0, then record 0
        "two": 6..10 at 0, then record 1
    "#]],
    );
}

#[test]
fn a_line_over_many_records_has_the_time_of_its_first_byte() {
    check(
        20,
        "a/b/c\nd/e/\n",
        expect![[r#"
        "abc": 0..4 at 0, then record 2
        "de": 4..7 at 2, then record 5
    "#]],
    );
}

#[test]
fn what_the_end_cuts_off_is_an_event_of_its_own() {
    check(
        20,
        "a\nb",
        expect![[r#"
        "a": 0..2 at 0, then record 0
        "b": 2..3 at 0, then record 1
    "#]],
    );
}

#[test]
fn a_line_of_exactly_the_limit_is_whole_and_one_byte_more_makes_two_parts() {
    check(
        8,
        "12345678\n12345678/9\n",
        expect![[r#"
        "12345678": 0..9 at 0, then record 0
        "12345678" part 0 more: 9..17 at 0, then record 1
        "9" part 1: 17..19 at 1, then record 2
    "#]],
    );
    check(
        8,
        "1234567890123456\n",
        expect![[r#"
        "12345678" part 0 more: 0..8 at 0, then record 0
        "90123456" part 1: 8..17 at 0, then record 1
    "#]],
    );
    check(
        8,
        "12345678",
        expect![[r#"
        "12345678": 0..8 at 0, then record 1
    "#]],
    );
}

#[test]
fn a_part_ends_between_two_characters_and_needs_the_record_of_what_is_left() {
    check(
        8,
        "123456/é/é/\n",
        expect![[r#"
        "123456é" part 0 more: 0..8 at 0, then record 2
        "é" part 1: 8..11 at 2, then record 4
    "#]],
    );
    check(
        8,
        "1234567/é\n",
        expect![[r#"
        "1234567" part 0 more: 0..7 at 0, then record 1
        "é" part 1: 7..10 at 1, then record 2
    "#]],
    );
    check(
        8,
        "12345𝄞\n",
        expect![[r#"
        "12345" part 0 more: 0..5 at 0, then record 0
        "𝄞" part 1: 5..10 at 0, then record 1
    "#]],
    );
}

#[test]
fn bytes_that_are_no_characters_are_split_all_the_same() {
    let mut splitter = Splitter::new(8, StreamPosition::default());
    let mut parts = Vec::new();
    let record = SpoolRecord {
        spool_offset: 0,
        spool_end: 1,
        stream: Stream::Stdout,
        stream_offset: 0,
        time: Timestamp::default(),
        bytes: &[0x80; 20],
    };
    splitter.feed(&record, |piece| parts.push((piece.bytes.len(), piece.more)));
    splitter.finish(1, |piece| parts.push((piece.bytes.len(), piece.more)));
    assert_eq!(parts, [(8, true), (8, true), (4, false)]);
}

#[test]
fn a_hole_in_a_stream_ends_the_line_before_it() {
    let mut splitter = Splitter::new(20, StreamPosition::default());
    let mut lines = Vec::new();
    for (offset, bytes) in [(0, "ab"), (7, "cd\n")] {
        let record = SpoolRecord {
            spool_offset: offset,
            spool_end: offset + 1,
            stream: Stream::Stdout,
            stream_offset: offset,
            time: Timestamp::default(),
            bytes: bytes.as_bytes(),
        };
        splitter.feed(&record, |piece| lines.push((piece.start, piece.end, piece.bytes.to_vec())));
    }
    assert_eq!(lines, [(0, 2, b"ab".to_vec()), (7, 10, b"cd".to_vec())]);
}

#[test]
fn output_without_a_line_feed_holds_one_part_in_memory() {
    let mut splitter = Splitter::new(LOG_LINE_BYTES_MAX, StreamPosition::default());
    let chunk = vec![b'x'; 64 * 1024];
    let (mut given, mut offset) = (0, 0);
    for index in 0..160 {
        let record = SpoolRecord {
            spool_offset: index,
            spool_end: index + 1,
            stream: Stream::Stdout,
            stream_offset: offset,
            time: Timestamp::default(),
            bytes: &chunk,
        };
        splitter.feed(&record, |piece| given += piece.bytes.len() as u64);
        offset += 64 * 1024;
        assert!(splitter.held_bytes() <= 4 * LOG_LINE_BYTES_MAX, "{}", splitter.held_bytes());
        assert!(offset - given <= LOG_LINE_BYTES_MAX as u64);
    }
}

#[test]
fn the_parts_of_text_are_text_and_make_the_line_again() {
    let line = "aé☃𝄞".repeat(40);
    for limit in 8..30 {
        let bytes = format!("{line}\n").into_bytes();
        let time = Timestamp::default();
        let stream = Stream::Stdout;
        let record = Record { offset: 0, end: 1, stream, stream_offset: 0, time, bytes: bytes.clone() };
        let (events, _) = expected(&[record], limit);
        let mut joined = String::new();
        let mut splitter = Splitter::new(limit, StreamPosition::default());
        let record = SpoolRecord {
            spool_offset: 0,
            spool_end: 1,
            stream: Stream::Stdout,
            stream_offset: 0,
            time: Timestamp::default(),
            bytes: &bytes,
        };
        let mut parts = 0;
        splitter.feed(&record, |piece| {
            joined += std::str::from_utf8(piece.bytes).unwrap();
            parts += 1;
        });
        assert_eq!((joined, parts), (line.clone(), events.len()));
    }
}
