//! Durable log ingest: pipe → shim → node → stream acknowledged, from the
//! Start until `run.logs_sealed` is read; against one message per event with
//! 4,000 in flight. A raw message is the same event in the same encoding, made
//! beforehand, without the headers that would make it safe to repeat.

use super::{Scale, float};
use crate::{
    bed::{self, Bed},
    harness,
    table::{Row, Target},
};
use acri::{
    AgentId, Payload, RunId, Subject, Timestamp, codec,
    id::LogSeq,
    log::{LogEvent, LogType, Origin, Stream},
};
use acri_client::Client;
use anyhow::{Result, ensure};
use async_nats::jetstream::context::ContextBuilder;
use bytes::Bytes;
use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};
use uuid::Uuid;

pub(super) const LINE_BYTES: usize = 256;
const IN_FLIGHT: usize = 4_000;
/// The last of those in flight waits for all before it to be synced.
const ACK_MAX: Duration = Duration::from_secs(600);

pub(super) async fn measure(scale: &Scale, sync_always: bool) -> Result<Row> {
    let bed = Bed::new(sync_always).await?;
    let node = bed.node_process().await?;
    let client = bed.client().await?;
    let raw = bed.raw().await?;
    let (mut row, messages, lines) = if sync_always {
        let target = Target::TimesAtLeast(60.0);
        let row = Row::new("ingest of lines, `sync_interval: always`", "lines/s", target);
        (row, scale.of(IN_FLIGHT, 200), scale.of(600_000, 5_000))
    } else {
        let row = Row::new("ingest of lines", "lines/s", Target::TimesAtLeast(6.0));
        (row, scale.of(250_000, 5_000), scale.of(1_500_000, 20_000))
    };
    // Both are warm when they are measured.
    single(&raw, messages / 10).await?;
    framed(&client, lines / 10).await?;
    for _ in 0..scale.rounds {
        let raw_rate = single(&raw, messages).await?;
        let before = cpu_seconds(node.0.id());
        let ours = framed(&client, lines).await?;
        let node_cpu = cpu_seconds(node.0.id()) - before;
        row.notes.push(format!("the node used {:.2} s of processor for {:.2} s", node_cpu, float(lines) / ours));
        row.round(raw_rate, ours);
    }
    Ok(row)
}

/// Processor time of a process so far, in seconds.
pub(super) fn cpu_seconds(pid: u32) -> f64 {
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let behind_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks = behind_name.split_ascii_whitespace().skip(11).take(2);
    ticks.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / TICKS_PER_SECOND
}

/// A line as one stored event would carry it, and its subject, as long as that
/// of a run's log.
fn event() -> Result<(async_nats::Subject, Bytes)> {
    let (agent, run) = (AgentId::from_uuid(Uuid::now_v7()), RunId::from_uuid(Uuid::now_v7()));
    let event = LogEvent {
        agent,
        run: Some(run),
        sequence: LogSeq(1_000_000),
        time: Timestamp::from_micros(1_764_500_000_000_000),
        kind: LogType::Message,
        payload: Payload::text("x".repeat(LINE_BYTES - 1)),
        stream: Some(Stream::Stdout),
        origin: Origin::Passthrough,
        part: None,
        more: false,
    };
    let subject = Subject::Log(agent, Some(run)).to_string().replacen("acri.", "raw.", 1);
    Ok((subject.into(), codec::to_msgpack(&event)?.into()))
}

/// Messages a second, one an event.
pub(super) async fn single(client: &async_nats::Client, messages: usize) -> Result<f64> {
    let (_, _stream) = bed::raw_stream(client, "RAW", "raw.>").await?;
    let context = ContextBuilder::new().max_ack_inflight(IN_FLIGHT).ack_timeout(ACK_MAX).build(client.clone());
    let (subject, body) = event()?;
    let began = Instant::now();
    let mut waiting = VecDeque::with_capacity(IN_FLIGHT);
    for _ in 0..messages {
        if waiting.len() == IN_FLIGHT
            && let Some(oldest) = waiting.pop_front()
        {
            oldest.await?;
        }
        waiting.push_back(context.publish(subject.clone(), body.clone()).await?);
    }
    for acknowledgement in waiting {
        acknowledgement.await?;
    }
    Ok(float(messages) / began.elapsed().as_secs_f64())
}

/// Lines a second through the product.
pub(super) async fn framed(client: &Client, lines: usize) -> Result<f64> {
    let (count, size) = (lines.to_string(), LINE_BYTES.to_string());
    let spec = bed::own_program(&[harness::FLOOD, &count, &size])?;
    let agent = client.create(spec).await?.agent;
    let began = Instant::now();
    let run = client.start(agent, bed::task("")).await?.run;
    let stored = bed::sealed(client, agent, run).await?;
    let rate = float(lines) / began.elapsed().as_secs_f64();
    ensure!(stored == u64::try_from(lines)?, "{stored} of {lines} lines are stored");
    Ok(rate)
}
