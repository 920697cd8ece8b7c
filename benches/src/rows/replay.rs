//! Replay: a run's log through the client, against an ordered consumer of
//! single events.

use super::{
    Scale, float,
    ingest::{LINE_BYTES, single},
};
use crate::{
    bed::{self, Bed},
    harness,
    table::{Row, Target},
};
use acri_client::{LogItem, Since};
use anyhow::{Context as _, Result, ensure};
use async_nats::jetstream::{self, consumer::push};
use futures_util::StreamExt as _;
use std::time::Instant;

pub(super) async fn measure(scale: &Scale) -> Result<Row> {
    let (messages, lines) = (scale.of(250_000, 5_000), scale.of(1_500_000, 20_000));
    let bed = Bed::new(false).await?;
    let node = bed.node_process().await?;
    let (client, raw) = (bed.client().await?, bed.raw().await?);
    single(&raw, messages).await?;
    let (count, size) = (lines.to_string(), LINE_BYTES.to_string());
    let spec = bed::own_program(&[harness::FLOOD, &count, &size])?;
    let agent = client.create(spec).await?.agent;
    let run = client.start(agent, bed::task("")).await?.run;
    bed::sealed(&client, agent, run).await?;
    drop(node);
    let mut row = Row::new("replay to a reader", "events/s", Target::TimesAtLeast(6.0));
    for _ in 0..scale.rounds {
        let raw_rate = ordered(&raw, messages).await?;
        let began = Instant::now();
        let mut read = 0;
        let mut batches = client.log_batches(agent, run, Since::Start, false);
        while let Some(items) = batches.next().await {
            read += items?.iter().filter(|item| matches!(item, LogItem::Event(..))).count();
        }
        let ours = float(read) / began.elapsed().as_secs_f64();
        ensure!(read == lines, "{read} of {lines} lines were read");
        row.round(raw_rate, ours);
    }
    Ok(row)
}

async fn ordered(client: &async_nats::Client, messages: usize) -> Result<f64> {
    let context = jetstream::new(client.clone());
    let stream = context.get_stream("RAW").await?;
    let began = Instant::now();
    let config = push::OrderedConfig { deliver_subject: client.new_inbox(), ..push::OrderedConfig::default() };
    let mut events = stream.create_consumer(config).await?.messages().await?;
    for _ in 0..messages {
        events.next().await.context("the consumer ended")??;
    }
    Ok(float(messages) / began.elapsed().as_secs_f64())
}
