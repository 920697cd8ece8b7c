use super::{
    Fixture,
    rig::{Read, Rig, command, kill, owner, read_all},
};
use crate::driver::{Attached, ChunkEnd};
use acri::RunId;

const ONCE: &[&str] = &["say once", "wait go", "say twice", "exit 0"];

pub(super) async fn a_repeated_start_finds_the_harness_started(fixture: &dyn Fixture) {
    let rig = Rig::new(fixture, ONCE).await;
    let (first, second) = (rig.start(1).await, rig.start(1).await);
    rig.let_go("go").await;
    let (read, end) = read_all(&*second).await;
    assert_eq!((read.text(), end), ("once\ntwice\n", ChunkEnd::Ended));
    assert_eq!(first.exit().await.unwrap(), second.exit().await.unwrap());
    let after = rig.start(1).await;
    assert_eq!(read_all(&*after).await.0.text(), "once\ntwice\n");
}

pub(super) async fn a_start_after_a_node_crash_finds_the_harness_started(fixture: &dyn Fixture) {
    let mut rig = Rig::new(fixture, ONCE).await;
    drop(rig.start(1).await);
    rig.restart();
    let session = rig.start(2).await;
    rig.let_go("go").await;
    assert_eq!(read_all(&*session).await.0.text(), "once\ntwice\n");
    assert_eq!(session.exit().await.unwrap().status.unwrap().code, Some(0));
}

pub(super) async fn starts_at_the_same_time_start_one_harness(fixture: &dyn Fixture) {
    let rig = Rig::new(fixture, ONCE).await;
    let (first, second, third) = tokio::join!(rig.start(1), rig.start(1), rig.start(1));
    rig.let_go("go").await;
    for session in [first, second, third] {
        assert_eq!(read_all(&*session).await.0.text(), "once\ntwice\n");
    }
}

pub(super) async fn a_start_that_nobody_waits_for_is_found_by_the_next(fixture: &dyn Fixture) {
    let rig = Rig::new(fixture, ONCE).await;
    tokio::select! {
        biased;
        _ = rig.try_start(1) => {}
        () = std::future::ready(()) => {}
    }
    let session = rig.start(1).await;
    rig.let_go("go").await;
    assert_eq!(read_all(&*session).await.0.text(), "once\ntwice\n");
}

pub(super) async fn a_run_that_was_never_started_is_told_as_such(fixture: &dyn Fixture) {
    let rig = Rig::new(fixture, ONCE).await;
    let attached = rig.driver.attach(rig.agent, rig.run, owner(1)).await.unwrap();
    assert!(matches!(attached, Attached::NeverStarted), "{attached:?}");
    // Asking changed nothing: it can still be started.
    drop(rig.start(1).await);
    rig.end(1).await;
}

pub(super) async fn a_scan_finds_a_run_whose_kill_switch_works(fixture: &dyn Fixture) {
    let mut rig = Rig::new(fixture, &["say up", "idle"]).await;
    drop(rig.start(1).await);
    rig.restart();
    let held = rig.driver.scan().await;
    let held = held.into_iter().find(|held| (held.agent, held.run) == (rig.agent, rig.run)).expect("it is found");
    let request = kill(1);
    held.kill_switch.kill(request.clone()).await.unwrap();
    let killed = rig.attach(2).await.exit().await.unwrap().killed.expect("the Kill is recorded");
    assert_eq!((killed.command, killed.principal, killed.reason), (request.command, request.principal, request.reason));
}

pub(super) async fn what_is_forgotten_was_never_started(fixture: &dyn Fixture) {
    let rig = Rig::new(fixture, &["say over"]).await;
    let session = rig.start(1).await;
    session.exit().await.unwrap();
    let mut read = Read::default();
    read.until(&*session, 5).await;
    for _ in 0..2 {
        rig.driver.forget(rig.agent, rig.run).await;
    }
    let attached = rig.driver.attach(rig.agent, rig.run, owner(1)).await.unwrap();
    assert!(matches!(attached, Attached::NeverStarted), "{attached:?}");
    rig.driver.forget(rig.agent, RunId::derive(rig.agent, command())).await;
    for _ in 0..2 {
        rig.driver.remove(rig.agent).await;
    }
}
