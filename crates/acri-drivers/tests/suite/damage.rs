//! Run directories that somebody damaged or removed while their harness lives:
//! a Kill still ends it, and what is called lost is gone.

use super::{
    process::{Processes, best_tier, last_tier, second_tier, signal_shim, spec_of},
    process_only::{agent, all, driver, eventually, kill, owner, run, start, until},
};
use acri::{AgentSpec, event::FailReason};
use acri_drivers::driver::{Attached, Driver, Fault, Session};
use futures_util::future::join_all;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::{io, path::Path, sync::Arc};

const MARK: &str = "ACRI_TEST_TREE";
/// The shell, a child, and one that left its session.
const TREE: &str = "setsid sleep 100000 & sleep 100000 & echo up; wait";

type Damage = fn(&Path) -> io::Result<()>;
type Tier = (&'static str, fn() -> Processes);

fn spoil(dir: &Path, name: &str) -> io::Result<()> {
    std::fs::write(dir.join(name), b"\xc1 this is none of it")
}

const DAMAGES: &[(&str, Damage)] = &[
    ("directory removed", |dir| std::fs::remove_dir_all(dir)),
    ("all files removed", |dir| std::fs::read_dir(dir)?.try_for_each(|entry| std::fs::remove_file(entry?.path()))),
    ("meta damaged", |dir| spoil(dir, "meta")),
    ("meta removed", |dir| std::fs::remove_file(dir.join("meta"))),
    ("secret damaged", |dir| spoil(dir, "secret")),
    ("secret removed", |dir| std::fs::remove_file(dir.join("secret"))),
    ("owner damaged", |dir| spoil(dir, "owner")),
    ("token damaged", |dir| spoil(dir, "token")),
    ("exit damaged", |dir| spoil(dir, "exit")),
    ("socket removed", |dir| std::fs::remove_file(dir.join("socket"))),
    ("lock removed", |dir| std::fs::remove_file(dir.join("lock"))),
    ("meta and secret damaged", |dir| spoil(dir, "meta").and_then(|()| spoil(dir, "secret"))),
];

/// A running harness whose processes can be told from all others of the machine.
struct Harness {
    fixture: Processes,
    mark: String,
    session: Arc<dyn Session>,
}

impl Harness {
    async fn start(fixture: Processes) -> Self {
        // Unique on this machine, as its directory is.
        let mark = fixture.state.path().display().to_string();
        let mut spec: AgentSpec = spec_of(&["sh", "-c", TREE]);
        spec.environment.insert(MARK.to_owned(), mark.clone());
        let session = start(&driver(&fixture), 1, &spec).await;
        until(&*session, |text| text == "up\n").await;
        let harness = Self { fixture, mark, session };
        // The shell and two children, which may be on their way to be what they are.
        eventually(|| harness.alive().len() == 3).await;
        harness
    }

    /// Its processes that are no zombies.
    fn alive(&self) -> Vec<i32> {
        let wanted = format!("{MARK}={}", self.mark).into_bytes();
        let pids = std::fs::read_dir("/proc").unwrap().flatten();
        let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        // A zombie's environment is empty.
        let marked = |pid: &i32| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == wanted)
        };
        pids.filter(marked).collect()
    }
}

/// Tries every damage in every tier, all at once: some wait for what will not come.
async fn each(check: impl AsyncFn(Harness, String)) {
    let check = &check;
    let tiers: [Tier; 3] = [("best", best_tier), ("second", second_tier), ("last", last_tier)];
    let all = tiers.into_iter().flat_map(|tier| DAMAGES.iter().map(move |damage| (tier, damage)));
    join_all(all.map(|((tier, fixture), (what, damage))| async move {
        let harness = Harness::start(fixture()).await;
        damage(&harness.fixture.run_dir(agent(1), run(1))).unwrap();
        check(harness, format!("{what}, {tier} tier")).await;
    }))
    .await;
}

#[tokio::test]
async fn a_kill_is_proved_only_when_nothing_lives_whatever_became_of_the_run_directory() {
    each(async |harness, what| {
        let killed = driver(&harness.fixture).kill_switch(agent(1), run(1)).kill(kill(1)).await;
        assert_eq!(killed, Ok(()), "{what}");
        assert_eq!(harness.alive(), Vec::<i32>::new(), "{what}: alive after a proof");
    })
    .await;
}

#[tokio::test]
async fn a_run_that_is_called_lost_after_its_directory_was_damaged_is_gone() {
    each(async |harness, what| {
        let next = driver(&harness.fixture);
        let attached = next.attach(agent(1), run(1), owner(2)).await;
        match &attached {
            // Still in reach, and its output with it.
            Ok(Attached::Session(_)) => next.kill_switch(agent(1), run(1)).kill(kill(2)).await.unwrap(),
            Ok(Attached::Lost { reason, .. }) => assert_eq!(*reason, FailReason::HarnessLost, "{what}"),
            Ok(Attached::NeverStarted) => {}
            Err(Fault::Unreachable { .. } | Fault::Broken { .. }) => {
                while let Err(fault) = next.give_up(agent(1), run(1), owner(2)).await {
                    assert!(matches!(fault, Fault::Unreachable { .. }), "{what}: {fault}");
                }
            }
            Err(fault) => panic!("{what}: {fault}"),
        }
        assert_eq!(harness.alive(), Vec::<i32>::new(), "{what}: {attached:?}");
    })
    .await;
}

#[tokio::test]
async fn a_living_run_whose_meta_is_damaged_is_attached_and_read_on() {
    let harness = Harness::start(best_tier()).await;
    let dir = harness.fixture.run_dir(agent(1), run(1));
    spoil(&dir, "meta").unwrap();
    let next = driver(&harness.fixture);
    let attached = next.attach(agent(1), run(1), owner(2)).await;
    let Ok(Attached::Session(session)) = attached else { panic!("{attached:?}") };
    session.contact(owner(2)).await.unwrap();
    next.kill_switch(agent(1), run(1)).kill(kill(2)).await.unwrap();
    assert_eq!(all(&*session).await, "up\n");
    assert_eq!(session.exit().await.unwrap().killed.map(|kill| kill.command), Some(kill(2).command));
}

#[tokio::test]
async fn a_session_whose_directory_is_removed_tells_no_end_before_there_is_one() {
    let harness = Harness::start(best_tier()).await;
    std::fs::remove_dir_all(harness.fixture.run_dir(agent(1), run(1))).unwrap();
    let driver = driver(&harness.fixture);
    driver.kill_switch(agent(1), run(1)).kill(kill(1)).await.unwrap();
    assert!(matches!(harness.session.exit().await, Err(Fault::Broken { .. })));
    assert_eq!(harness.alive(), Vec::<i32>::new());
}

#[tokio::test]
async fn what_a_dead_shim_held_is_not_called_gone_where_nothing_names_it() {
    let harness = Harness::start(last_tier()).await;
    let dir = harness.fixture.run_dir(agent(1), run(1));
    // The main process dies with the shim; in this tier its children do not.
    spoil(&dir, "kill").unwrap();
    let meta = std::fs::read(dir.join("meta")).unwrap();
    signal_shim(&dir, Signal::KILL);
    harness.session.exit().await.unwrap();
    spoil(&dir, "meta").unwrap();
    let driver = driver(&harness.fixture);
    let killed = driver.kill_switch(agent(1), run(1)).kill(kill(1)).await;
    assert!(matches!(killed, Err(Fault::Unreachable { .. })), "{killed:?}");
    std::fs::write(dir.join("meta"), meta).unwrap();
    driver.kill_switch(agent(1), run(1)).kill(kill(1)).await.unwrap();
    // What the last tier cannot promise (see the driver's documentation) is not left to the machine.
    for pid in harness.alive() {
        let pidfd = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
        assert!(harness.alive().contains(&pid));
        pidfd_send_signal(&pidfd, Signal::KILL).unwrap();
    }
}
