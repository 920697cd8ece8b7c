//! What the program does when a node says nothing.

use crate::site;
use acri_tests::{raw::Raw, within};
use serde_json::Value;
use std::{
    process::Stdio,
    time::{Duration, Instant},
};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Far below the 30 s after which a command is given up, far above what a slow
/// machine adds.
const SOON: Duration = Duration::from_secs(15);

#[tokio::test]
async fn the_status_of_a_frozen_nodes_run_comes_from_the_history_soon_and_says_so() {
    let site = site().await;
    let node = site.node("n1").await;
    let client = site.client().await;
    let (agent, run) = site.run(&client, "echo up; while :; do sleep 0.02; done").await;
    acri_tests::look::says(&client, agent, run, "up").await;
    node.pause().await;
    let begun = Instant::now();
    let output = site.acri(&["status", &run.to_string(), "-o", "json"]).await;
    let waited = begun.elapsed();
    node.resume();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let told: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&told["run"]["run"], &told["run"]["state"]), (&run.to_string().into(), &"running".into()));
    assert!(text(&output.stderr).contains("node n1 does not answer"), "{}", text(&output.stderr));
    assert!(waited < SOON, "{waited:?}");
    let output = site.acri(&["status", &run.to_string()]).await;
    assert_eq!(text(&output.stderr), "", "the node itself answers again");
}

#[tokio::test]
async fn a_create_that_died_with_its_node_is_soon_asked_of_another() {
    let site = site().await;
    let mut first = site.node("n1").await;
    first.pause().await;
    let mut listener = Raw::connect(&site.server.url()).await;
    listener.subscribe("acri.v1.cmd.harness.process.create").await;
    let mut command = site.command();
    command.args(["--nats", &site.server.url(), "create", "-o", "json", "--", "true"]);
    let create = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("the program under test");
    // The server gives each request to a listener and to the one node there is.
    listener.next().await;
    drop(listener);
    first.kill9().await;
    let _second = site.node("n2").await;
    let begun = Instant::now();
    let output = within("the create", create.wait_with_output()).await.expect("the program under test");
    assert!(output.status.success());
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
}
