//! An event stream without room, or one that may not be written to.

use crate::{site, site_with};
use acri::{ErrorBody, ErrorCode, Payload};
use acri_bus::local::User;
use acri_client::{Client, Error};
use acri_tests::{
    eventually,
    look::{heartbeat, says, sealed, types, verified},
    raw::Raw,
    site::Site,
};
use serde_json::Value;

/// Bytes of history that a stream has before it is made too small for more.
const TASK_BYTES: usize = 90 * 1024;

/// Changes one field of the event stream, as an operator does.
async fn reconfigure(site: &Site, field: &str, value: Value) {
    let mut raw = Raw::connect(&site.server.url()).await;
    let mut config = raw.api("STREAM.INFO.ACRI_EVENTS", &Value::Null).await["config"].take();
    config[field] = value;
    raw.api("STREAM.UPDATE.ACRI_EVENTS", &config).await;
}

/// Makes the event stream so small that it is this full.
async fn fill(site: &Site, client: &Client, percent: u64) {
    let bytes = client.bus().event_facts().await.unwrap().bytes;
    reconfigure(site, "max_bytes", (bytes * 100 / percent).into()).await;
}

#[tokio::test]
async fn a_nearly_full_event_stream_begins_nothing_and_lets_what_runs_end() {
    let site = site().await;
    let _node = site.node("n1").await;
    let client = site.client().await;
    let idle = client.create(site.spec(":")).await.unwrap().agent;
    for _ in 0..6 {
        let run = client.start(idle, Payload::text("x".repeat(TASK_BYTES))).await.unwrap().run;
        sealed(&client, idle, run).await;
    }
    let (agent, run) = site.run(&client, "echo up; exec sleep 1000").await;
    says(&client, agent, run, "up").await;
    fill(&site, &client, 91).await;
    // The node asks every few seconds. A heartbeat between two tries, or they
    // would fill what is left.
    let refused = eventually("a Create to be refused", || async {
        heartbeat(&client, "n1").await;
        client.create(site.spec(":")).await.err()
    })
    .await;
    let Error::Refused { body, .. } = &refused else { panic!("{refused:?}") };
    assert_eq!((body.code, body.retryable), (ErrorCode::ResourceExhausted, true));
    assert!(body.message.contains("ACRI_EVENTS is 9") && body.message.contains("90 %"), "{}", body.message);
    let refused = client.start(idle, Payload::text("")).await.unwrap_err();
    assert_eq!(refused.code(), ErrorCode::ResourceExhausted, "{refused}");
    assert!(refused.to_string().contains("ACRI_EVENTS is 9"), "{refused}");
    assert!(client.kill(agent, run, "enough").await.unwrap().proved);
    sealed(&client, agent, run).await;
    client.remove(agent, "done").await.unwrap();
    let told = types(&client, agent).await;
    assert!(told.ends_with(&["run.killed".into(), "run.logs_sealed".into(), "agent.removed".into()]), "{told:?}");
    fill(&site, &client, 50).await;
    eventually("a Start to be accepted", || async { client.start(idle, Payload::text("")).await.ok() }).await;
    verified(&client).await;
}

/// The body of a no, whose code is told.
fn refused<T: std::fmt::Debug>(outcome: Result<T, Error>) -> ErrorBody {
    match outcome {
        Err(Error::Refused { body, .. }) => body,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn an_append_to_a_full_stream_is_resource_exhausted_and_may_be_repeated() {
    let site = site().await;
    let _node = site.node("n1").await;
    let client = site.client().await;
    let agent = client.create(site.spec(":")).await.unwrap().agent;
    fill(&site, &client, 100).await;
    // A remove is not refused before the stream does it.
    let body = refused(client.remove(agent, "done").await);
    assert_eq!((body.code, body.retryable), (ErrorCode::ResourceExhausted, true));
    assert!(body.message.contains("maximum bytes exceeded") && body.message.contains("no room"), "{}", body.message);
    fill(&site, &client, 10).await;
    client.remove(agent, "done").await.unwrap();
}

#[tokio::test]
async fn an_append_that_is_larger_than_the_stream_takes_is_too_large() {
    let site = site().await;
    let _node = site.node("n1").await;
    let client = site.client().await;
    let agent = client.create(site.spec(":")).await.unwrap().agent;
    reconfigure(&site, "max_msg_size", 4096.into()).await;
    let body = refused(client.start(agent, Payload::text("x".repeat(TASK_BYTES))).await);
    assert_eq!((body.code, body.retryable), (ErrorCode::TooLarge, false));
    assert!(body.message.contains("10054") && body.message.contains("into a file"), "{}", body.message);
    client.start(agent, Payload::text("")).await.unwrap();
}

#[tokio::test]
async fn an_append_without_permission_is_a_failed_precondition_that_names_the_subject() {
    let user = User {
        name: "node".into(),
        password: "node".into(),
        permissions: "publish: { allow: [\">\"], deny: [\"acri.v1.event.*.*.*.agent.removed\"] }".into(),
    };
    let site = site_with(vec![user.clone()]).await;
    let client = site.client().await;
    let _node = site.node_with("n1", &site.server.url_of(&user), &[]).await;
    let agent = client.create(site.spec(":")).await.unwrap().agent;
    let body = refused(client.remove(agent, "done").await);
    assert_eq!((body.code, body.retryable), (ErrorCode::FailedPrecondition, false));
    let subject = format!("{agent}._.agent.removed");
    assert!(body.message.contains(&subject) && body.message.contains("must be allowed"), "{}", body.message);
    assert!(!client.status(agent, None).await.unwrap().removed);
}
