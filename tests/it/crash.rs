//! A node that is killed at any moment: no line is lost, none comes twice, and
//! no command is carried out twice.

use crate::site;
use acri::{Payload, RunState};
use acri_client::Client;
use acri_tests::{
    Random, eventually,
    look::{ended, epochs, types, verified, written},
    rounds,
    site::{Chatty, Site, begin},
};
use std::{sync::Arc, time::Duration};
use tokio_util::sync::CancellationToken;

/// Gives commands all the while, by ids that are repeated as the client sees
/// fit; tells how many runs there were.
async fn command_on(site: Arc<Site>, client: Client, stop: CancellationToken) -> u64 {
    let mut runs = 0;
    while !stop.is_cancelled() {
        let agent = client.create(site.spec("echo \"$ACRI_TASK\"")).await.unwrap().agent;
        let run = client.start(agent, Payload::text(format!("task {runs}"))).await.unwrap().run;
        assert_eq!(ended(&client, agent, run).await.state, RunState::Completed);
        assert_eq!(written(&client, agent, run).await.out(), [format!("task {runs}")]);
        client.remove(agent, "done").await.unwrap();
        let starts = types(&client, agent).await;
        assert_eq!(starts.iter().filter(|name| *name == "run.accepted").count(), 1);
        assert_eq!(starts.iter().filter(|name| *name == "run.started").count(), 1);
        runs += 1;
    }
    runs
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_killed_at_a_hundred_random_moments_loses_no_line_and_repeats_none() {
    let mut random = Random::seeded();
    println!("ACRI_TEST_SEED={}", random.0);
    let rounds = rounds(100);
    let site = Arc::new(site().await);
    let mut node = site.node("n1").await;
    let client = site.client().await;
    let mut chatty = Vec::new();
    for (batch, pause) in [(4, "0.03"), (10, "0.05"), (1, "0.01"), (400, "0.4")] {
        chatty.push(Chatty::start(&site, &client, batch, pause).await);
    }
    let stop = CancellationToken::new();
    let commands = tokio::spawn(command_on(Arc::clone(&site), client.clone(), stop.clone()));
    for round in 0..rounds {
        // Not to wait for something: the moment is the experiment.
        tokio::time::sleep(Duration::from_micros(random.below(150_000))).await;
        node.kill9().await;
        if random.below(5) == 0 {
            // Killed once more while it starts.
            let mut short = site.spawn_node("n1", &site.server.url(), &[]);
            tokio::time::sleep(Duration::from_micros(random.below(60_000))).await;
            short.kill9().await;
        }
        node = site.node("n1").await;
        assert!(!commands.is_finished(), "commands failed in round {round}");
    }
    stop.cancel();
    assert!(commands.await.unwrap() > 0);
    let mut lines = 0;
    for one in &chatty {
        lines += one.finish(&client).await;
        let epochs = epochs(&client, one.agent).await;
        assert!(epochs.len() as u64 > rounds / 4, "{} epochs in {rounds} rounds", epochs.len());
    }
    assert!(lines as u64 > rounds, "{lines} lines");
    verified(&client).await;
    drop(node);
}

#[tokio::test]
async fn a_run_that_ends_while_no_node_lives_is_told_by_the_next_one() {
    let site = site().await;
    let mut node = site.node("n1").await;
    let client = site.client().await;
    let (agent, run) = site.run(&client, "echo up; while [ ! -e go ]; do sleep 0.01; done; echo over; exit 4").await;
    acri_tests::look::says(&client, agent, run, "up").await;
    node.kill9().await;
    let work = site.state_dir("n1").join(format!("node/processes/agents/{agent}/work/go"));
    std::fs::write(work, "").unwrap();
    let id = run.to_string();
    eventually("the program's end", || async {
        acri_tests::process::with_variable("ACRI_RUN", &id).is_empty().then_some(())
    })
    .await;
    let _node = site.node("n1").await;
    let status = ended(&client, agent, run).await;
    assert_eq!((status.state, status.exit.unwrap().code), (RunState::Failed, Some(4)));
    assert_eq!(written(&client, agent, run).await.out(), ["up", "over"]);
    verified(&client).await;
}

#[tokio::test]
async fn a_kill_that_the_holder_took_is_no_failure_though_the_node_died_of_it() {
    let site = site().await;
    let mut node = site.node("n1").await;
    let client = site.client().await;
    for _ in 0..5 {
        let (agent, run) = begin(&client, site.spec("echo up; exec sleep 600")).await;
        acri_tests::look::says(&client, agent, run, "up").await;
        let kill = tokio::spawn({
            let client = client.clone();
            async move { client.kill(agent, run, "now").await }
        });
        tokio::task::yield_now().await;
        node.kill9().await;
        node = site.node("n1").await;
        assert!(kill.await.unwrap().unwrap().proved);
        let status = ended(&client, agent, run).await;
        assert_eq!(status.termination, Some(acri::status::Termination::Killed));
    }
    verified(&client).await;
}
