//! A bus that crashes, or is away for longer than a lease.

use crate::site;
use acri::{Payload, RunState};
use acri_tests::{
    Random,
    look::{ended, verified, written},
    rounds,
    site::{Chatty, SHORT_LEASE, SHORT_LEASE_TTL},
};
use std::time::Duration;

async fn a_new_run_works(site: &acri_tests::site::Site, client: &acri_client::Client) {
    let agent = client.create(site.spec("echo \"$ACRI_TASK\"")).await.unwrap().agent;
    let run = client.start(agent, Payload::text("again")).await.unwrap().run;
    assert_eq!(ended(client, agent, run).await.state, RunState::Completed);
    assert_eq!(written(client, agent, run).await.out(), ["again"]);
}

#[tokio::test]
async fn a_bus_killed_under_load_and_started_again_has_lost_nothing() {
    let mut random = Random::seeded();
    println!("ACRI_TEST_SEED={}", random.0);
    let mut site = site().await;
    let mut node = site.node("n1").await;
    let client = site.client().await;
    let mut chatty = Vec::new();
    for (batch, pause) in [(4, "0.02"), (300, "0.2")] {
        chatty.push(Chatty::start(&site, &client, batch, pause).await);
    }
    for _ in 0..rounds(10) {
        // The moment is the experiment.
        tokio::time::sleep(Duration::from_micros(random.below(300_000))).await;
        site.server.kill9().await.unwrap();
        tokio::time::sleep(Duration::from_micros(random.below(100_000))).await;
        site.server.restart().await.unwrap();
    }
    a_new_run_works(&site, &client).await;
    for one in &chatty {
        one.finish(&client).await;
    }
    verified(&client).await;
    assert!(node.lives(), "{}", node.log());
}

#[tokio::test]
async fn bus_and_node_killed_together_come_back_to_the_same_history() {
    let mut random = Random::seeded();
    println!("ACRI_TEST_SEED={}", random.0);
    let mut site = site().await;
    let mut node = site.node("n1").await;
    let client = site.client().await;
    let chatty = Chatty::start(&site, &client, 20, "0.02").await;
    for _ in 0..rounds(5) {
        tokio::time::sleep(Duration::from_micros(random.below(200_000))).await;
        let (_, bus) = tokio::join!(node.kill9(), site.server.kill9());
        bus.unwrap();
        site.server.restart().await.unwrap();
        node = site.node("n1").await;
    }
    chatty.finish(&client).await;
    verified(&client).await;
}

#[tokio::test]
async fn a_bus_that_is_away_for_longer_than_the_lease_ends_no_run() {
    let mut site = site().await;
    let url = site.server.url();
    let mut one = site.node_with("n1", &url, &SHORT_LEASE).await;
    let mut other = site.node_with("n2", &url, &SHORT_LEASE).await;
    let client = site.client().await;
    let mut chatty = Vec::new();
    for _ in 0..3 {
        chatty.push(Chatty::start(&site, &client, 5, "0.02").await);
    }
    site.server.kill9().await.unwrap();
    tokio::time::sleep(SHORT_LEASE_TTL * 2).await;
    site.server.restart().await.unwrap();
    a_new_run_works(&site, &client).await;
    // And once more by silence: connections stay, and nothing answers.
    site.server.pause().await;
    tokio::time::sleep(SHORT_LEASE_TTL * 2).await;
    site.server.resume();
    a_new_run_works(&site, &client).await;
    for run in &chatty {
        run.finish(&client).await;
    }
    verified(&client).await;
    assert!(one.lives() && other.lives(), "{}\n{}", one.log(), other.log());
}
