use std::path::PathBuf;

use acri_shim::spool::{Progress, Stream};
use acri_shim::wire::{Body, Kill, Op, Release};
use acri_shim::{ExitReason, Limits};

use crate::support::{OWNER, Place, Run, make_private, read_all, skipped, until};

/// Every stream's records lie one behind the other, in the spool and in their own stream.
fn assert_contiguous(run: &Run) {
    let mut at = 0;
    let mut streams = [0u64; 2];
    for record in run.records() {
        assert_eq!(record.offset, at);
        at = record.next;
        let own = &mut streams[usize::from(record.stream.number() - 1)];
        assert_eq!(record.stream_offset, *own);
        *own += record.payload.len() as u64;
    }
}

#[test]
fn both_streams_are_spooled_exactly_and_count_their_own_bytes() {
    let script = "i=0; while [ $i -lt 300 ]; do echo out $i; echo err $i >&2; i=$((i+1)); done";
    let mut run = Run::start(script);
    let exit = run.finished();
    let lines = |word: &str| (0..300).map(|i| format!("{word} {i}\n")).collect::<String>().into_bytes();
    assert_eq!(run.stream(Stream::Stdout), lines("out"));
    assert_eq!(run.stream(Stream::Stderr), lines("err"));
    assert_eq!((exit.stdout_bytes, exit.stderr_bytes), (lines("out").len() as u64, lines("err").len() as u64));
    assert_contiguous(&run);
    assert_eq!(run.records().last().expect("records").next, exit.spool_end);
    assert_eq!((exit.code, exit.signal), (Some(0), None));
}

#[test]
fn ten_binary_megabytes_without_a_newline_cross_segments_unchanged() {
    let place = Place::new();
    let path = place.state.path().join("blob");
    let mut seed = 1u32;
    let blob: Vec<u8> = (0..10 << 20)
        .map(|_| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 24) as u8
        })
        .collect();
    std::fs::write(&path, &blob).expect("write");
    let mut launch = place.launch("cat blob; exit 7");
    launch.limits = Limits { segment_bytes: 1 << 20, ..Limits::default() };
    let mut run = Run::try_launch(place, &launch).expect("start");
    let exit = run.finished();
    assert_eq!(exit.code, Some(7));
    assert!(run.stream(Stream::Stdout) == blob, "the bytes differ");
    assert_contiguous(&run);
    let segments = std::fs::read_dir(run.dir()).expect("list").flatten();
    assert!(segments.filter(|e| e.file_name().to_string_lossy().starts_with("spool-")).count() >= 10);
}

#[test]
fn a_full_spool_blocks_the_harness_and_a_release_lets_it_go_on() {
    let limits = Limits { spool_bytes_max: 1 << 20, segment_bytes: 256 << 10, ..Limits::default() };
    let script = "head -c 8000000 /dev/zero; echo done >&2";
    let mut run = Run::launch(script, |launch| launch.limits = limits);
    let mut client = run.client();
    let (mut total, mut offset, mut times_full) = (0, 0, 0);
    while total < 8_000_000 {
        let full = until("the spool is full or all is read", || match client.call(Op::Status) {
            Ok(Body::Status(s)) => (s.spool_full || s.stdout_bytes == 8_000_000).then_some(Some(s)),
            _ => Some(None),
        });
        // The end came, and the rest was drained beyond the limit.
        let Some(full) = full else { break };
        times_full += u32::from(full.spool_full);
        assert!(!full.spool_full || full.spool_end - full.released <= (1 << 20) + (64 << 10) + 40);
        let (records, progress) = read_all(run.dir(), offset);
        assert_eq!(progress, Progress::CaughtUp);
        let out = records.iter().filter(|r| r.stream == Stream::Stdout);
        total += out.map(|r| r.payload.len()).sum::<usize>();
        offset = records.last().map_or(offset, |r| r.next);
        let release = Release { epoch: OWNER.epoch, offset, token: b"resume here".to_vec() };
        let Ok(answer) = client.call(Op::Release(release)) else { break };
        assert!(matches!(answer, Body::Released(r) if r.offset == offset && r.token_saved), "{answer:?}");
    }
    let exit = run.finished();
    assert!(times_full >= 4, "full {times_full} times");
    assert_eq!((exit.stdout_bytes, exit.stderr_bytes), (8_000_000, 5));
    assert_eq!(run.scan().token.as_deref(), Some(&b"resume here"[..]));
    assert!(matches!(read_all(run.dir(), 0).1, Progress::Gone { first } if first > 0));
}

#[test]
fn a_full_disk_loses_nothing() {
    let place = Place::new();
    let Some(disk) = SmallDisk::mount(&place) else { return };
    let dir = disk.run_dir();
    let mut launch = place.launch("head -c 5000000 /dev/urandom | tee copy; exit 0");
    launch.dir = dir.clone();
    let mut run = Run::try_launch(Place { dir: dir.clone(), state: place.state }, &launch).expect("start");
    let mut client = run.client();
    let (mut offset, mut seen, mut refusals) = (0, Vec::new(), 0);
    while let Ok(Body::Status(status)) = client.call(Op::Status) {
        let (records, _) = read_all(&dir, offset);
        seen.extend(records.iter().flat_map(|r| r.payload.clone()));
        offset = records.last().map_or(offset, |r| r.next);
        if status.disk_refuses {
            refusals += 1;
            let release = Release { epoch: OWNER.epoch, offset, token: vec![1; 1000] };
            if client.call(Op::Release(release)).is_err() {
                break;
            }
        }
    }
    let exit = run.finished();
    seen.extend(read_all(&dir, offset).0.iter().flat_map(|r| r.payload.clone()));
    assert!(refusals > 0, "the disk was never full");
    assert_eq!(exit.stdout_bytes, 5_000_000);
    let copy = std::fs::read(run.place.state.path().join("copy")).expect("the copy");
    assert!(seen == copy, "the bytes differ");
}

#[test]
fn a_kill_on_a_full_disk_is_recorded_and_done_at_once() {
    let place = Place::new();
    let Some(disk) = SmallDisk::mount(&place) else { return };
    let dir = disk.run_dir();
    let mut launch = place.launch("trap '' TERM; setsid yes & yes");
    launch.dir = dir.clone();
    let mut run = Run::try_launch(Place { dir: dir.clone(), state: place.state }, &launch).expect("start");
    let mut client = run.client();
    let filled = until("the disk is full", || match client.call(Op::Status) {
        Ok(Body::Status(status)) => status.disk_refuses.then_some(status),
        other => panic!("{other:?}"),
    });
    let kill = Kill { epoch: OWNER.epoch, reason: "full".to_owned(), ..Kill::default() };
    let Ok(Body::Killed(killed)) = client.call(Op::Kill(kill)) else { panic!("not killed") };
    assert!(killed.processes >= 2, "{killed:?}");
    assert_eq!(run.scan().kill.expect("recorded").reason, "full");
    assert!(run.scan().alive, "what was read is still to be spooled");
    // The rest of the output needs room: released bytes are given back until the exit can be recorded.
    let mut offset = read_all(&dir, 0).0.last().expect("records").next;
    assert!(offset <= filled.spool_end);
    while let Ok(answer) = client.call(Op::Release(Release { epoch: OWNER.epoch, offset, token: Vec::new() })) {
        assert!(matches!(answer, Body::Released(_)), "{answer:?}");
        offset = read_all(&dir, offset).0.last().map_or(offset, |r| r.next);
    }
    let exit = run.finished();
    assert_eq!(exit.reason, ExitReason::Killed);
    assert_eq!(read_all(&dir, offset).0.last().map_or(offset, |r| r.next), exit.spool_end);
}

/// A disk of one MiB, for as long as this lives.
struct SmallDisk(PathBuf);

impl SmallDisk {
    /// `None`, and a word about it, if that is not permitted.
    fn mount(place: &Place) -> Option<Self> {
        let at = place.state.path().join("small");
        std::fs::create_dir(&at).expect("create");
        let mounted =
            rustix::mount::mount("tmpfs", &at, "tmpfs", rustix::mount::MountFlags::empty(), Some(c"size=1m,mode=700"));
        if let Err(error) = mounted {
            skipped(&format!("mount a small disk: {error}"));
            return None;
        }
        Some(Self(at))
    }

    fn run_dir(&self) -> PathBuf {
        let dir = self.0.join("run");
        make_private(&dir);
        dir
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn a_torn_tail_is_waited_for_while_the_shim_lives_and_reported_when_it_is_gone() {
    use std::io::Write as _;
    let mut run = Run::start("echo one; read x; sleep 1000");
    run.until_says("one");
    let end = run.records().last().expect("a record").next;
    let segment = run.dir().join(format!("spool-{:020}", 0));
    let mut file = std::fs::OpenOptions::new().append(true).open(segment).expect("open");
    file.write_all(b"ACRS\x01\x01").expect("tear");
    assert_eq!(read_all(run.dir(), 0).1, Progress::CaughtUp);
    run.spawned.child.kill().expect("kill the shim");
    run.spawned.child.wait().expect("reap the shim");
    let (records, progress) = read_all(run.dir(), 0);
    assert_eq!((records.len(), progress), (1, Progress::BadTail { offset: end }));
}
