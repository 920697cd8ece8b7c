//! Status against request/reply; Start against request/reply with one
//! acknowledged publish before the reply.

use super::{Scale, float};
use crate::{
    bed::{self, Bed, Threads},
    load::many,
    table::{Row, Target, median},
};
use acri::AgentStatus;
use anyhow::{Context as _, Result, ensure};
use async_nats::jetstream;
use bytes::Bytes;
use futures_util::StreamExt as _;
use std::time::{Duration, Instant};

/// Bytes of the raw request and reply: about those of a Status and its answer.
const REQUEST_BYTES: usize = 96;
const REPLY_BYTES: usize = 256;
const CREATES_AT_ONCE: usize = 32;

fn micros(took: Duration) -> f64 {
    took.as_secs_f64() * 1e6
}

/// Answers requests on a connection and in a runtime of its own, as a node
/// does; publishes each first, if that is asked.
async fn responder(url: String, stored: bool) -> Result<Threads> {
    let threads = Threads::new()?;
    let (ready, standing) = tokio::sync::oneshot::channel();
    threads.spawn(async move {
        let client = bed::raw(&url).await?;
        let mut requests = client.subscribe("bench.ask").await?;
        client.flush().await?;
        let context = jetstream::new(client.clone());
        let _ = ready.send(());
        while let Some(request) = requests.next().await {
            if stored {
                context.publish("raw.started", request.payload).await?.await?;
            }
            let inbox = request.reply.context("a request without a way back")?;
            client.publish(inbox, Bytes::from(vec![b'y'; REPLY_BYTES])).await?;
        }
        Ok::<_, anyhow::Error>(())
    });
    standing.await?;
    Ok(threads)
}

async fn ask(client: &async_nats::Client) -> Result<f64> {
    let body = Bytes::from(vec![b'x'; REQUEST_BYTES]);
    let began = Instant::now();
    let reply = client.request("bench.ask", body).await?;
    let took = began.elapsed();
    ensure!(reply.payload.len() == REPLY_BYTES, "an answer of another length");
    Ok(micros(took))
}

pub(super) async fn status(scale: &Scale) -> Result<Row> {
    let (turns, each) = (scale.of(20, 2), scale.of(100, 20));
    let bed = Bed::new(false).await?;
    let node = bed.node("node", bed::scripted_driver(&bed::world())).await?;
    let responder = responder(bed.url(), false).await?;
    let (client, raw) = (bed.client().await?, bed.raw().await?);
    let agent = client.create(bed::scripted_spec()).await?.agent;
    client.start(agent, bed::task("idle")).await?;
    let mut row = Row::new("Status, p50", "µs", Target::TimesAtMost(1.5));
    for _ in 0..scale.rounds {
        let (mut theirs, mut ours) = (Vec::new(), Vec::new());
        for _ in 0..turns {
            for _ in 0..each {
                theirs.push(ask(&raw).await?);
            }
            for _ in 0..each {
                let began = Instant::now();
                client.status(agent, None).await?;
                ours.push(micros(began.elapsed()));
            }
        }
        row.round(median(&theirs), median(&ours));
    }
    drop(responder);
    node.leave().await?;
    Ok(row)
}

pub(super) async fn start(scale: &Scale) -> Result<Row> {
    let (turns, each) = (scale.of(10, 2), scale.of(40, 5));
    let bed = Bed::new(false).await?;
    let node = bed.node("node", bed::scripted_driver(&bed::world())).await?;
    let (client, raw) = (bed.client().await?, bed.raw().await?);
    bed::raw_stream(&raw, "RAW", "raw.>").await?;
    let responder = responder(bed.url(), true).await?;
    let mut row = Row::new("Start acknowledged, p50", "µs", Target::TimesAtMost(1.5));
    for _ in 0..scale.rounds {
        let made = &client;
        let mut agents =
            many(turns * each, CREATES_AT_ONCE, |_| async move { Ok(made.create(bed::scripted_spec()).await?.agent) })
                .await?;
        let (mut theirs, mut ours) = (Vec::new(), Vec::new());
        for _ in 0..turns {
            for _ in 0..each {
                theirs.push(ask(&raw).await?);
            }
            for agent in agents.drain(..each) {
                let began = Instant::now();
                let run = client.start(agent, bed::task("exit 0")).await?.run;
                ours.push(micros(began.elapsed()));
                let open = |status: AgentStatus| status.run.is_none_or(|run| !run.sealed);
                while open(client.status(agent, Some(run)).await?) {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        }
        row.notes.push(format!("{} Starts in the round", float(turns * each)));
        row.round(median(&theirs), median(&ours));
    }
    row.notes.truncate(1);
    drop(responder);
    node.leave().await?;
    Ok(row)
}
