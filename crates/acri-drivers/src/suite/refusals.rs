use super::{
    Fixture,
    rig::{Rig, command},
};
use acri::{AgentId, ErrorCode, Payload, limits::PROCESS_TASK_BYTES_MAX};

pub(super) async fn specs_that_cannot_be_run_are_refused_with_their_field(fixture: &dyn Fixture) {
    let driver = fixture.driver();
    for refused in fixture.refused() {
        let agent = AgentId::derive(driver.harness(), command());
        let error = driver.create(agent, &refused.spec).await.expect_err(refused.why).0;
        assert_eq!((error.code, error.field.as_deref()), (refused.code, Some(refused.field)), "{}", refused.why);
        assert!(error.message.contains(refused.field), "{}: {}", refused.why, error.message);
    }
}

pub(super) async fn a_create_repeated_finds_what_the_first_made(fixture: &dyn Fixture) {
    let rig = Rig::new(fixture, &["exit 0"]).await;
    assert_eq!(rig.driver.create(rig.agent, &rig.spec).await.unwrap(), rig.provisioned);
}

pub(super) async fn tasks_that_are_too_large_or_no_text_are_refused(fixture: &dyn Fixture) {
    let rig = Rig::new(fixture, &["exit 0"]).await;
    let check = |task: Payload| rig.driver.check_task(&rig.spec, &task).map_err(|refusal| refusal.0);
    assert_eq!(check(Payload::text("x".repeat(PROCESS_TASK_BYTES_MAX))), Ok(()));
    for (task, code) in [
        (Payload::text("x".repeat(PROCESS_TASK_BYTES_MAX + 1)), ErrorCode::TooLarge),
        (Payload::Octets { octets: vec![0xff] }, ErrorCode::Unsupported),
    ] {
        let error = check(task).unwrap_err();
        assert_eq!((error.code, error.field.as_deref()), (code, Some("task")));
    }
}
