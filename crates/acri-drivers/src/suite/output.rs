use super::{
    Fixture,
    rig::{BATCH_BYTES, Read, Rig, owner, read_all},
};
use crate::driver::ChunkEnd;
use bytes::Bytes;

fn flood(lines: usize, line_bytes: usize) -> Vec<u8> {
    (0..lines).flat_map(|number| format!("{number:0width$}\n", width = line_bytes - 1).into_bytes()).collect()
}

pub(super) async fn output_is_exact_in_each_stream(fixture: &dyn Fixture) {
    let script = ["say a  b", "err c", "raw 00ff0d0a80", "say", "err d", "ask q1 why not?", "flood 100 16", "exit 0"];
    let rig = Rig::new(fixture, &script).await;
    let (read, end) = read_all(&*rig.start(1).await).await;
    let stdout = [&b"a  b\n\x00\xff\r\n\x80\n!ask q1 why not?\n"[..], &flood(100, 16)].concat();
    assert_eq!((read.stdout, read.stderr, end), (stdout, b"c\nd\n".to_vec(), ChunkEnd::Ended));
}

pub(super) async fn output_is_read_again_from_any_offset_not_released(fixture: &dyn Fixture) {
    let script = ["say a", "wait 1", "err b", "wait 2", "say c", "wait 3", "say d", "exit 0"];
    let rig = Rig::new(fixture, &script).await;
    let session = rig.start(1).await;
    for name in ["1", "2", "3"] {
        rig.let_go(name).await;
    }
    session.exit().await.unwrap();
    let (all, end) = read_all(&*session).await;
    assert_eq!((all.text(), end), ("a\nc\nd\n", ChunkEnd::Ended));
    for (index, record) in all.records.iter().enumerate() {
        // The least that can be asked for still gives one record.
        let chunk = session.output(record.spool_offset, 1).await.unwrap();
        assert_eq!(chunk.records.first(), Some(record));
        assert_eq!(chunk.next, all.records.get(index + chunk.records.len()).map_or(all.next, |next| next.spool_offset));
    }
    let past = session.output(all.next, 1).await.unwrap();
    assert_eq!((past.records.len(), past.next, past.end), (0, all.next, ChunkEnd::Ended));
}

pub(super) async fn output_goes_on_after_a_release(fixture: &dyn Fixture) {
    let mut rig = Rig::new(fixture, &["flood 1000 256", "wait go", "flood 1000 256", "exit 0"]).await;
    let session = rig.start(1).await;
    let mut read = Read::default();
    read.until(&*session, 1000 * 256).await;
    session.release(owner(1), read.next, Bytes::from_static(b"t")).await.unwrap();
    // A repeat, and one that comes late, take nothing back.
    session.release(owner(1), read.next, Bytes::from_static(b"t")).await.unwrap();
    session.release(owner(1), 0, Bytes::from_static(b"t")).await.unwrap();
    rig.restart();
    let session = rig.attach(2).await;
    rig.let_go("go").await;
    assert_eq!(read.until_the_end(&*session, BATCH_BYTES).await, ChunkEnd::Ended);
    assert_eq!(read.stdout, [flood(1000, 256), flood(1000, 256)].concat());
}

pub(super) async fn a_reader_that_has_caught_up_is_woken(fixture: &dyn Fixture) {
    let rig = Rig::new(fixture, &["wait 1", "say a", "wait 2", "say b", "wait 3", "exit 0"]).await;
    let session = rig.start(1).await;
    let mut read = Read::default();
    for (name, bytes) in [("1", 2), ("2", 4)] {
        // Whoever waits comes first.
        let (_, ()) = tokio::join!(read.until(&*session, bytes), rig.let_go(name));
    }
    let (end, ()) = tokio::join!(read.until_the_end(&*session, BATCH_BYTES), rig.let_go("3"));
    assert_eq!((read.text(), end), ("a\nb\n", ChunkEnd::Ended));
}

pub(super) async fn the_end_is_told_when_all_output_can_be_read(fixture: &dyn Fixture) {
    let rig = Rig::new(fixture, &["flood 5000 64", "err last", "exit 4"]).await;
    let session = rig.start(1).await;
    let exit = session.exit().await.unwrap();
    assert_eq!((exit.status.unwrap().code, exit.killed, exit.orphaned), (Some(4), None, false));
    let (read, end) = read_all(&*session).await;
    assert_eq!((read.stdout.len(), read.stderr, end), (5000 * 64, b"last\n".to_vec(), ChunkEnd::Ended));
}

pub(super) async fn a_harness_that_wrote_nothing_ends_without_output(fixture: &dyn Fixture) {
    let rig = Rig::new(fixture, &["exit 0"]).await;
    let (read, end) = read_all(&*rig.start(1).await).await;
    assert_eq!((read.records.len(), read.next, end), (0, 0, ChunkEnd::Ended));
}

pub(super) async fn a_flood_larger_than_a_batch_comes_whole(fixture: &dyn Fixture) {
    let rig = Rig::new(fixture, &["flood 20000 200", "exit 0"]).await;
    let (read, end) = read_all(&*rig.start(1).await).await;
    assert_eq!(end, ChunkEnd::Ended);
    assert!(read.stdout == flood(20_000, 200), "the flood is not what was written");
}
