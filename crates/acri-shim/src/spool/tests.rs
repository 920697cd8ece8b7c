//! Reading back what was written, and whatever else may lie in the files.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;

use super::{Append, HEADER_BYTES, Progress, Reader, Scratch, Stream, Writer, segment_name, segment_starts};
use crate::limits::RECORD_PAYLOAD_BYTES_MAX;
use crate::rundir::Files;

type Seen = (u64, u64, Stream, Vec<u8>);
type Payloads = Vec<(Stream, Vec<u8>)>;

fn written(segment_bytes: u64, records: &Payloads) -> (tempfile::TempDir, Writer) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut writer = Writer::create(dir.path(), segment_bytes).expect("begin a spool");
    for (stream, payload) in records {
        assert_eq!(writer.append(*stream, payload), Append::Done);
    }
    (dir, writer)
}

/// Reads to the end in batches; records as (offset, next, stream, payload).
fn read(dir: &Path, offset: u64, batch: usize) -> (Vec<Seen>, Progress) {
    let (mut reader, mut scratch, mut records) = (Reader::open(dir, offset), Scratch::default(), Vec::new());
    loop {
        let each = |r: super::RecordRef<'_>| records.push((r.offset, r.next, r.stream, r.payload.to_vec()));
        match reader.read_batch(&mut scratch, batch, each).expect("read") {
            Progress::More => {}
            other => return (records, other),
        }
    }
}

fn payloads() -> impl Strategy<Value = Payloads> {
    let stream = prop_oneof![Just(Stream::Stdout), Just(Stream::Stderr)];
    let payload = prop_oneof![
        9 => prop::collection::vec(any::<u8>(), 1..200),
        1 => any::<u8>().prop_map(|byte| vec![byte; RECORD_PAYLOAD_BYTES_MAX]),
    ];
    prop::collection::vec((stream, payload), 1..40)
}

#[test]
fn an_empty_directory_is_caught_up_at_0_and_bad_beyond() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    assert_eq!(read(dir.path(), 0, 100).1, Progress::CaughtUp);
    assert_eq!(read(dir.path(), 7, 100).1, Progress::BadTail { offset: 7 });
}

#[test]
fn releasing_deletes_whole_segments_only_and_a_reader_behind_is_told() {
    let records: Payloads = (0..20).map(|i| (Stream::Stdout, vec![i; 100])).collect();
    let (dir, mut writer) = written(280, &records);
    assert_eq!(segment_starts(dir.path()).expect("list"), [0, 280, 560, 840, 1120, 1400, 1680, 1960, 2240, 2520]);
    writer.release(600);
    assert_eq!(segment_starts(dir.path()).expect("list")[0], 560);
    writer.release(10);
    assert_eq!(writer.released(), 600);
    assert_eq!(read(dir.path(), 0, 1000).1, Progress::Gone { first: 560 });
    assert_eq!(read(dir.path(), 560, 1000).0.len(), 16);
    writer.release(u64::MAX);
    assert_eq!((writer.held(), writer.end()), (0, 2800));
    assert_eq!(segment_starts(dir.path()).expect("list"), [2800]);
    assert_eq!(writer.append(Stream::Stderr, b"after"), Append::Done);
    assert_eq!(read(dir.path(), 2800, 1000).0, [(2800, 2845, Stream::Stderr, b"after".to_vec())]);
}

#[test]
fn a_reader_that_waits_at_the_end_follows_the_writer_over_segments() {
    let (dir, mut writer) = written(100, &vec![(Stream::Stdout, vec![1; 90])]);
    let (mut reader, mut scratch, mut seen) = (Reader::open(dir.path(), 0), Scratch::default(), 0u64);
    for i in 0..50 {
        while reader.read_batch(&mut scratch, 1, |r| seen += u64::from(r.payload[0])).expect("read") == Progress::More {
        }
        assert_eq!((seen, reader.offset()), (i + 1, writer.end()));
        if i % 3 == 0 {
            writer.release(reader.offset());
        }
        assert_eq!(writer.append(Stream::Stdout, &[1; 90]), Append::Done);
    }
}

#[test]
fn a_reader_beside_a_busy_writer_sees_every_record_once() {
    const RECORDS: u32 = 30_000;
    let dir = tempfile::tempdir().expect("a temporary directory");
    let _alive = Files::lock(dir.path()).expect("lock").expect("nobody else");
    let mut writer = Writer::create(dir.path(), 700).expect("begin a spool");
    let released = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for i in 0..RECORDS {
                let mut payload = vec![7; 4 + (i as usize * 31) % 300];
                payload[..4].copy_from_slice(&i.to_le_bytes());
                assert_eq!(writer.append(Stream::Stdout, &payload), Append::Done);
                writer.release(released.load(Ordering::Relaxed));
            }
        });
        let (mut reader, mut scratch, mut expected) = (Reader::open(dir.path(), 0), Scratch::default(), 0);
        while expected < RECORDS {
            let each = |r: super::RecordRef<'_>| {
                assert_eq!(r.payload[..4], expected.to_le_bytes());
                expected += 1;
            };
            let progress = reader.read_batch(&mut scratch, 2000, each).expect("read");
            assert!(matches!(progress, Progress::More | Progress::CaughtUp), "{progress:?} at {expected}");
            released.store(reader.offset(), Ordering::Relaxed);
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn what_was_written_is_read_in_batches_of_any_size(
        records in payloads(), segment in 1u64..5000, batch in 1usize..300_000,
    ) {
        let (dir, writer) = written(segment, &records);
        let (seen, progress) = read(dir.path(), 0, batch);
        prop_assert_eq!(progress, Progress::CaughtUp);
        let end = seen.last().map_or(0, |r| r.1);
        prop_assert_eq!(end, writer.end());
        let middle = seen[seen.len() / 2].0;
        prop_assert_eq!(read(dir.path(), middle, batch).0.len(), seen.len() - seen.len() / 2);
        let plain: Payloads = seen.into_iter().map(|(_, _, stream, payload)| (stream, payload)).collect();
        prop_assert!(plain == records);
    }

    /// No shim lives here, so damage is final: every record before it is handed out unchanged, none behind it.
    #[test]
    fn damage_is_never_handed_out(
        records in payloads(), segment in 200u64..3000, at in any::<prop::sample::Index>(), bit in 0u8..8,
    ) {
        let (dir, writer) = written(segment, &records);
        let whole = read(dir.path(), 0, 1 << 20).0;
        let at = at.index(usize::try_from(writer.end()).expect("small")) as u64;
        let starts = segment_starts(dir.path()).expect("list");
        let start = *starts.iter().rev().find(|s| **s <= at).expect("a segment");
        let path = dir.path().join(segment_name(start));
        let mut bytes = std::fs::read(&path).expect("read");
        bytes[usize::try_from(at - start).expect("small")] ^= 1 << bit;
        std::fs::write(&path, bytes).expect("write");
        let hit = whole.iter().position(|r| r.0 <= at && at < r.1).expect("a record");
        let (seen, progress) = read(dir.path(), 0, 1 << 20);
        prop_assert_eq!(progress, Progress::BadTail { offset: whole[hit].0 });
        prop_assert!(seen == whole[..hit]);
    }

    #[test]
    fn a_cut_ends_with_the_last_whole_record(records in payloads(), cut in any::<prop::sample::Index>()) {
        let (dir, writer) = written(u64::MAX, &records);
        let whole = read(dir.path(), 0, 1 << 20).0;
        let len = cut.index(usize::try_from(writer.end()).expect("small")) as u64;
        let file = std::fs::OpenOptions::new().write(true).open(dir.path().join(segment_name(0))).expect("open");
        file.set_len(len).expect("cut");
        let kept: Vec<_> = whole.into_iter().filter(|r| r.1 <= len).collect();
        let end = kept.last().map_or(0, |r| r.1);
        let (seen, progress) = read(dir.path(), 0, 5000);
        prop_assert!(seen == kept);
        let expected = if end == len { Progress::CaughtUp } else { Progress::BadTail { offset: end } };
        prop_assert_eq!(progress, expected);
    }

    #[test]
    fn garbage_is_neither_read_nor_costs_memory(
        files in prop::collection::vec((0u64..5000, prop::collection::vec(any::<u8>(), 0..300)), 0..5), offset in 0u64..6000,
    ) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        for (start, mut bytes) in files {
            // Often something that begins like a record and promises much.
            if bytes.len() > HEADER_BYTES && bytes[0].is_multiple_of(2) {
                bytes[..8].copy_from_slice(b"ACRS\x01\x01\0\0");
            }
            std::fs::write(dir.path().join(segment_name(start)), bytes).expect("write");
        }
        let (seen, progress) = read(dir.path(), offset, 1 << 20);
        prop_assert!(seen.is_empty());
        prop_assert!(progress != Progress::More);
    }
}
