use std::time::{Duration, Instant};

use acri_shim::spool::{Progress, Reader, Scratch};
use acri_shim::wire::{Body, Kill, Op};

use crate::support::{OWNER, Place, Run, tiers, until};

/// Proportional set size of a process in KiB.
fn pss_kib(pid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let line = text.lines().find(|line| line.starts_with("Pss:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// The shim and its forked stages: the guardian or the init.
fn own_processes(shim: i32) -> Vec<i32> {
    let list = std::fs::read_to_string(format!("/proc/{shim}/task/{shim}/children")).unwrap_or_default();
    let children = list.split_whitespace().map(|word| word.parse().expect("a number"));
    let ours = |pid: &i32| std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|n| n.starts_with("acri-"));
    std::iter::once(shim).chain(children.filter(ours)).collect()
}

#[test]
fn many_shims_are_small() {
    for &tier in tiers() {
        let runs: Vec<Run> = (0..30).map(|_| Run::in_tier(tier, "echo up; exec sleep 1000")).collect();
        runs[29].until_says("up");
        let pids = runs.iter().map(|run| i32::try_from(run.spawned.shim_pid()).expect("small"));
        let sizes: Vec<u64> = pids.map(|pid| own_processes(pid).into_iter().filter_map(pss_kib).sum()).collect();
        if sizes.contains(&0) {
            println!("skipped: not permitted to look at the shims");
            return;
        }
        let mean = sizes.iter().sum::<u64>() / 30;
        println!("{tier:?}: mean PSS {mean} KiB with its stages");
        assert!(mean <= 2560, "mean PSS {mean} KiB");
    }
}

#[test]
fn an_idle_shim_uses_no_time() {
    for &tier in tiers() {
        let run = Run::in_tier(tier, "echo up; exec sleep 1000");
        run.until_says("up");
        let switches = || {
            let text = std::fs::read_to_string(format!("/proc/{}/status", run.spawned.shim_pid())).expect("status");
            let lines = text.lines().filter(|line| line.contains("ctxt_switches"));
            lines.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum::<u64>()
        };
        let ticks = || {
            let text = std::fs::read_to_string(format!("/proc/{}/stat", run.spawned.shim_pid())).expect("stat");
            let fields: Vec<u64> = text
                .rsplit(')')
                .next()
                .expect("fields")
                .split_whitespace()
                .skip(11)
                .take(2)
                .map(|field| field.parse().expect("a number"))
                .collect();
            fields.iter().sum::<u64>()
        };
        let (before, began) = ((switches(), ticks()), Instant::now());
        until("half a second has passed", || (began.elapsed().as_millis() > 500).then_some(()));
        let after = (switches(), ticks());
        assert!(after.0 - before.0 < 20 && after.1 - before.1 < 5, "{tier:?}: {before:?} -> {after:?}");
    }
}

#[test]
#[ignore = "a measurement: run it alone and in release"]
fn speed_of_spooling_reading_and_killing() {
    let place = Place::new();
    let mut launch = place.launch("head -c 1000000000 /dev/zero");
    launch.limits.spool_bytes_max = 1 << 31;
    let began = Instant::now();
    let mut run = Run::try_launch(place, &launch).expect("start");
    println!("started in {:?}", began.elapsed());
    run.finished();
    println!("spooled 1 GB in {:?}", began.elapsed());
    let (mut reader, mut scratch, mut bytes) = (Reader::open(run.dir(), 0), Scratch::default(), 0);
    let began = Instant::now();
    while reader.read_batch(&mut scratch, 1 << 22, |r| bytes += r.payload.len()).expect("read") == Progress::More {}
    println!("read {bytes} bytes in {:?}", began.elapsed());
    for &tier in tiers() {
        let mut starts = Duration::ZERO;
        let mut took: Vec<u64> = (0..30)
            .map(|_| {
                let began = Instant::now();
                let mut run = Run::in_tier(tier, "sleep 1000 & sleep 1000 & echo up; wait");
                starts += began.elapsed();
                run.until_says("up");
                let kill = Kill { epoch: OWNER.epoch, ..Kill::default() };
                let Ok(Body::Killed(killed)) = run.client().call(Op::Kill(kill)) else { panic!("not killed") };
                run.finished();
                killed.took_us
            })
            .collect();
        took.sort_unstable();
        println!("{tier:?}: kill to proof {} us median, {} us worst of 30", took[15], took[29]);
        println!("{tier:?}: start {:?} mean", starts / 30);
    }
}
