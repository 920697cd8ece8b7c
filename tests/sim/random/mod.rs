//! Random histories: nodes come and go, the bus fails in every way that it
//! can, and after each step everything that was promised is looked at. One
//! seed, one history.
//!
//! `ACRI_SIM_SEED` and `ACRI_SIM_RUNS` choose others. A history that breaks a
//! promise is left in two files: a copy of what was stored, for `acri verify
//! --file` and `acri replay --file`, and the list of what was done.

mod dice;
mod events;
mod file;
mod holder;
mod node;
mod promises;
mod turns;
mod work;
mod world;

use std::{
    fmt::Write as _,
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    time::{SystemTime, UNIX_EPOCH},
};
use world::{Counts, World, fault};

const RUNS: u64 = 300;
const FIRST_SEED: u64 = 1;

/// What was told of a history.
struct Told {
    counts: Counts,
    steps: usize,
    damaged: usize,
}

/// What a history did, or where its failure is told.
fn history(seed: u64) -> Result<Told, String> {
    let mut world = World::new(seed);
    let outcome = catch_unwind(AssertUnwindSafe(|| world.run()));
    let what = match outcome {
        Ok(Ok(())) => {
            let (counts, steps, damaged) = (world.counts, world.told.len(), world.promises.damaged.len());
            return Ok(Told { counts, steps, damaged });
        }
        Ok(Err(what)) => what,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
        }
    };
    let steps = world.told.len();
    let path = leave(&world, seed, &what);
    Err(format!("seed {seed}, step {steps}: {what}\n  acri replay --file {}", path.display()))
}

/// Leaves the files.
fn leave(world: &World, seed: u64, what: &str) -> PathBuf {
    let path = file::directory().join(format!("sim-{seed}.jsonl"));
    let mut text = format!("seed {seed}: {what}\n");
    for (number, (time, turn)) in (1..).zip(&world.told) {
        writeln!(text, "{number:>5} {time} {turn:?}").expect("a string takes everything");
    }
    file::write(&world.bus, &path).expect("the build directory can be written");
    fs::write(path.with_extension("turns.txt"), text).expect("the build directory can be written");
    path
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is no number: {text}")))
}

fn fresh() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is after 1970");
    u64::from(since.subsec_nanos()) ^ since.as_secs()
}

#[test]
fn whatever_fails_no_promise_is_broken() {
    let (seed, runs) = (number("ACRI_SIM_SEED"), number("ACRI_SIM_RUNS").unwrap_or(RUNS));
    let first = seed.unwrap_or(FIRST_SEED);
    let mut seeds: Vec<u64> = (0..runs).map(|run| first.wrapping_add(run)).collect();
    if seed.is_none() {
        let fresh = fresh();
        println!("a fresh seed: ACRI_SIM_SEED={fresh} ACRI_SIM_RUNS=1");
        seeds.push(fresh);
    }
    let (mut counts, mut steps, mut damaged, mut wrong) = (Counts::new(), 0, 0, Vec::new());
    for seed in &seeds {
        match history(*seed) {
            Ok(told) => {
                told.counts.into_iter().for_each(|(name, count)| *counts.entry(name).or_default() += count);
                steps += told.steps;
                damaged += told.damaged;
            }
            Err(what) => wrong.push(what),
        }
    }
    println!("{} histories, {steps} steps", seeds.len());
    for name in fault::ALL {
        println!("{:>8}  {name}", counts.get(name).copied().unwrap_or_default());
    }
    println!("{damaged:>8}  agents whose put-back history was continued wrongly, where owners do not compare");
    assert!(wrong.is_empty(), "{} of {} histories:\n{}", wrong.len(), seeds.len(), wrong.join("\n"));
    let missing: Vec<_> = fault::ALL.into_iter().filter(|name| !counts.contains_key(name)).collect();
    assert!(runs < RUNS || missing.is_empty(), "these faults never struck: {missing:?}");
}

#[test]
#[expect(clippy::disallowed_methods, reason = "it is the program that reads the file")]
fn what_a_failed_history_leaves_can_be_verified_and_stepped_through() {
    let mut world = World::new(FIRST_SEED);
    world.run().expect("this history is a good one");
    let agent = world.agents[0].id.to_string();
    let directory = tempfile::tempdir().expect("there is room");
    let path = directory.path().join("history.jsonl");
    file::write(&world.bus, &path).expect("there is room");
    let acri = |arguments: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_acri-under-test"));
        let output = command.args(arguments).arg("--file").arg(&path).output().expect("acri is built");
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{arguments:?}: {out}{err}");
        out.into_owned()
    };
    assert!(acri(&["verify"]).contains("intact"));
    assert!(acri(&["replay", &agent]).contains("agent.created"));
}
