use super::{
    Fixture,
    rig::{Read, Rig, command, kill, owner, read_all},
};
use crate::driver::{Attached, ChunkEnd, Exit, Fault, KillRequest};
use acri::event::{ExitStatus, FailReason};

const UP: &[&str] = &["say up", "idle"];

fn killed_by(exit: &Exit, request: &KillRequest) {
    let killed = exit.killed.as_ref().expect("the Kill is recorded");
    assert_eq!(
        (killed.command, &killed.principal, &killed.reason, killed.owner.epoch),
        (request.command, &request.principal, &request.reason, request.owner.epoch)
    );
    assert!(!exit.orphaned);
}

pub(super) async fn exit_codes_and_signals_are_told(fixture: &dyn Fixture) {
    for (step, code, signal) in [("exit 0", Some(0), None), ("exit 255", Some(255), None), ("signal 6", None, Some(6))]
    {
        let exit = Rig::new(fixture, &[step]).await.start(1).await.exit().await.unwrap();
        assert_eq!(exit.status, Some(ExitStatus { code, signal }), "{step}");
    }
}

pub(super) async fn a_kill_before_the_start_is_found_by_the_start(fixture: &dyn Fixture) {
    let mut rig = Rig::new(fixture, UP).await;
    let request = kill(1);
    rig.kill(request.clone()).await;
    for epoch in [1, 2] {
        let session = rig.start(epoch).await;
        let exit = session.exit().await.unwrap();
        killed_by(&exit, &request);
        assert_eq!(exit.status, None);
        let (read, end) = read_all(&*session).await;
        assert_eq!((read.records.len(), end), (0, ChunkEnd::Ended));
        rig.kill(kill(epoch)).await;
        rig.restart();
    }
}

pub(super) async fn a_kill_ends_a_running_harness(fixture: &dyn Fixture) {
    let rig = Rig::new(fixture, UP).await;
    let session = rig.start(1).await;
    Read::default().until(&*session, 3).await;
    let request = kill(1);
    rig.kill(request.clone()).await;
    let exit = session.exit().await.unwrap();
    killed_by(&exit, &request);
    assert_eq!(exit.status, Some(ExitStatus { code: None, signal: Some(9) }));
    let (read, end) = read_all(&*session).await;
    assert_eq!((read.text(), end), ("up\n", ChunkEnd::Ended));
}

pub(super) async fn a_kill_at_any_moment_of_the_start_is_found(fixture: &dyn Fixture) {
    for moment in 0..12 {
        let rig = Rig::new(fixture, UP).await;
        let request = kill(1);
        let killing = async {
            for _ in 0..1_u32 << moment {
                tokio::task::yield_now().await;
            }
            rig.kill(request.clone()).await;
        };
        let (session, ()) = tokio::join!(rig.start(1), killing);
        killed_by(&session.exit().await.unwrap(), &request);
        assert_eq!(read_all(&*session).await.1, ChunkEnd::Ended);
    }
}

pub(super) async fn a_kill_repeated_answers_again(fixture: &dyn Fixture) {
    let rig = Rig::new(fixture, UP).await;
    let session = rig.start(1).await;
    let request = kill(1);
    let kills = || rig.kill(request.clone());
    tokio::join!(kills(), kills(), kills());
    kills().await;
    rig.kill(kill(1)).await;
    killed_by(&session.exit().await.unwrap(), &request);
    kills().await;
}

pub(super) async fn a_kill_after_the_end_changes_nothing(fixture: &dyn Fixture) {
    let mut rig = Rig::new(fixture, &["exit 5"]).await;
    let session = rig.start(1).await;
    let before = session.exit().await.unwrap();
    rig.kill(kill(1)).await;
    rig.restart();
    rig.kill(kill(2)).await;
    let after = rig.attach(2).await.exit().await.unwrap();
    assert_eq!((before.status.unwrap().code, &before.killed), (Some(5), &None));
    assert_eq!(before, after);
}

pub(super) async fn a_kill_works_while_the_runtime_is_blocked(fixture: &dyn Fixture) {
    let rig = Rig::new(fixture, UP).await;
    let session = rig.start(1).await;
    let (switch, request) = (rig.driver.kill_switch(rig.agent, rig.run), kill(1));
    let killing = request.clone();
    let control = std::thread::spawn(move || {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be made");
        runtime.block_on(switch.kill(killing))
    });
    // This thread runs the session's runtime, and nothing on it moves now.
    control.join().expect("the kill does not panic").unwrap();
    killed_by(&session.exit().await.unwrap(), &request);
}

pub(super) async fn a_kill_that_nobody_waits_for_still_kills(fixture: &dyn Fixture) {
    let rig = Rig::new(fixture, UP).await;
    let session = rig.start(1).await;
    let request = kill(1);
    tokio::select! {
        biased;
        () = rig.kill(request.clone()) => {}
        () = std::future::ready(()) => {}
    }
    killed_by(&session.exit().await.unwrap(), &request);
}

pub(super) async fn a_stop_ends_a_harness_that_listens(fixture: &dyn Fixture) {
    let rig = Rig::new(fixture, &["on stop exit 7", "say up", "idle"]).await;
    let session = rig.start(1).await;
    Read::default().until(&*session, 3).await;
    let stop = command();
    session.stop(owner(1), stop).await.unwrap();
    session.stop(owner(1), stop).await.unwrap();
    let exit = session.exit().await.unwrap();
    assert_eq!((exit.status.unwrap().code, exit.killed), (Some(7), None));
    session.stop(owner(1), stop).await.unwrap();
}

pub(super) async fn a_stop_ends_a_harness_that_knows_nothing_of_it(fixture: &dyn Fixture) {
    let rig = Rig::new(fixture, UP).await;
    let session = rig.start(1).await;
    session.stop(owner(1), command()).await.unwrap();
    assert_eq!(session.exit().await.unwrap().status.unwrap().signal, Some(15));
}

pub(super) async fn a_stop_that_is_ignored_leaves_the_kill(fixture: &dyn Fixture) {
    let rig = Rig::new(fixture, &["ignore stop", "say up", "wait go", "say still", "idle"]).await;
    let session = rig.start(1).await;
    let mut read = Read::default();
    read.until(&*session, 3).await;
    session.stop(owner(1), command()).await.unwrap();
    rig.let_go("go").await;
    read.until(&*session, 9).await;
    let request = kill(1);
    rig.kill(request.clone()).await;
    killed_by(&session.exit().await.unwrap(), &request);
    assert_eq!(read_all(&*session).await.0.text(), "up\nstill\n");
}

pub(super) async fn a_holder_that_died_leaves_what_it_spooled_and_no_end(fixture: &dyn Fixture) {
    let mut rig = Rig::new(fixture, UP).await;
    let session = rig.start(1).await;
    let mut read = Read::default();
    read.until(&*session, 3).await;
    // The reader waits already when it happens.
    let (end, ()) = tokio::join!(read.until_the_end(&*session, 1024), fixture.crash(rig.agent, rig.run));
    assert_eq!((read.text(), end), ("up\n", ChunkEnd::Torn));
    rig.restart();
    for session in [session, rig.attach(2).await] {
        let exit = session.exit().await;
        assert!(matches!(exit, Err(Fault::Broken { .. })), "{exit:?}");
        assert_eq!(session.lost_reason(), FailReason::HarnessLost);
        let (read, end) = read_all(&*session).await;
        assert_eq!((read.text(), end), ("up\n", ChunkEnd::Torn));
    }
    rig.kill(kill(2)).await;
}

pub(super) async fn a_run_of_which_nothing_is_left_is_lost(fixture: &dyn Fixture) {
    let rig = Rig::new(fixture, UP).await;
    let session = rig.start(1).await;
    Read::default().until(&*session, 3).await;
    fixture.lose(rig.agent, rig.run).await;
    let attached = rig.driver.attach(rig.agent, rig.run, owner(2)).await.unwrap();
    assert!(matches!(attached, Attached::Lost { reason: FailReason::HarnessLost, .. }), "{attached:?}");
    // And it is not started again.
    if let Ok(session) = rig.try_start(2).await {
        assert!(session.exit().await.is_err());
    }
}
