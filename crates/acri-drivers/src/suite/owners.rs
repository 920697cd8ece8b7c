use super::{
    Fixture,
    rig::{Rig, command, kill, owner, read_all},
};
use crate::driver::{Fault, Session};
use acri::id::Epoch;
use bytes::Bytes;

async fn refused(session: &dyn Session, epoch: u64) {
    let stale = |result: Result<(), Fault>, what: &str| {
        assert!(matches!(result, Err(Fault::Stale(Epoch(2)))), "{what} by epoch {epoch} gives {result:?}");
    };
    stale(session.stop(owner(epoch), command()).await, "stop");
    stale(session.release(owner(epoch), 0, Bytes::from_static(b"x")).await, "release");
    stale(session.contact(owner(epoch)).await, "contact");
}

pub(super) async fn attach_claims_and_an_older_owner_is_refused(fixture: &dyn Fixture) {
    let mut rig = Rig::new(fixture, &["say up", "wait go", "exit 0"]).await;
    let old = rig.start(1).await;
    old.contact(owner(1)).await.unwrap();
    let former = rig.driver.clone();
    rig.restart();
    let new = rig.attach(2).await;
    refused(&*old, 1).await;
    refused(&*new, 1).await;
    new.contact(owner(2)).await.unwrap();
    for driver in [former, rig.driver.clone()] {
        let again = driver.attach(rig.agent, rig.run, owner(1)).await;
        assert!(matches!(again, Err(Fault::Stale(Epoch(2)))), "{again:?}");
    }
    // A repeat of the claim is one.
    rig.attach(2).await.contact(owner(2)).await.unwrap();
    rig.let_go("go").await;
    // The older owner's Stop did not reach it.
    assert_eq!(new.exit().await.unwrap().status.unwrap().code, Some(0));
}

pub(super) async fn an_older_owner_is_refused_after_the_end_too(fixture: &dyn Fixture) {
    let mut rig = Rig::new(fixture, &["exit 0"]).await;
    rig.start(1).await.exit().await.unwrap();
    rig.restart();
    let session = rig.attach(2).await;
    refused(&*session, 1).await;
    session.stop(owner(2), command()).await.unwrap();
    session.contact(owner(2)).await.unwrap();
    let again = rig.driver.attach(rig.agent, rig.run, owner(1)).await;
    assert!(matches!(again, Err(Fault::Stale(Epoch(2)))), "{again:?}");
}

pub(super) async fn a_kill_by_an_older_owner_is_refused(fixture: &dyn Fixture) {
    let mut rig = Rig::new(fixture, &["wait go", "exit 0"]).await;
    drop(rig.start(1).await);
    let former = rig.driver.kill_switch(rig.agent, rig.run);
    rig.restart();
    let session = rig.attach(2).await;
    for switch in [former, rig.driver.kill_switch(rig.agent, rig.run)] {
        let killed = switch.kill(kill(1)).await;
        assert!(matches!(killed, Err(Fault::Stale(Epoch(2)))), "{killed:?}");
    }
    rig.let_go("go").await;
    let exit = session.exit().await.unwrap();
    assert_eq!((exit.killed, exit.status.unwrap().code), (None, Some(0)));
}

pub(super) async fn the_resume_token_outlives_the_node(fixture: &dyn Fixture) {
    let mut rig = Rig::new(fixture, &["say a", "wait go", "exit 0"]).await;
    let session = rig.start(1).await;
    assert_eq!(session.resume_token().await.unwrap(), None);
    session.release(owner(1), 0, Bytes::from_static(b"while it lives")).await.unwrap();
    rig.restart();
    let session = rig.attach(2).await;
    assert_eq!(session.resume_token().await.unwrap().as_deref(), Some(&b"while it lives"[..]));
    rig.let_go("go").await;
    session.exit().await.unwrap();
    let (read, _) = read_all(&*session).await;
    session.release(owner(2), read.next, Bytes::from_static(b"after its end")).await.unwrap();
    rig.restart();
    let session = rig.attach(3).await;
    assert_eq!(session.resume_token().await.unwrap().as_deref(), Some(&b"after its end"[..]));
}
