//! Restart with open runs: from the new node's connect until the last of its
//! agents answers a Status, against one ordered read of the same events and
//! one acknowledged append an agent.

use super::Scale;
use crate::{
    bed::{self, Bed},
    load::many,
    table::{Row, Target},
};
use acri::{
    AgentId, CommandId, Subject,
    codec::{self, Format},
    command::{Envelope, GetStatus},
    subject::AgentVerb,
};
use acri_bus::port::SharedBus;
use acri_client::Client;
use anyhow::{Context as _, Result};
use async_nats::{
    HeaderMap,
    header::NATS_EXPECTED_LAST_SUBJECT_SEQUENCE,
    jetstream::{self, consumer::push},
};
use bytes::Bytes;
use futures_util::StreamExt as _;
use std::time::{Duration, Instant};

/// Events of one agent: its creation, four each of the runs that ended, and
/// those of the open one.
const EVENTS: usize = 50;
const EVENTS_OF_A_RUN: usize = 4;
/// Statuses that are asked at once.
const AT_ONCE: usize = 64;
/// Until an agent that nobody owned yet is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(5);
/// Bytes of an appended event: about those of an adoption.
const EVENT_BYTES: usize = 300;

pub(super) async fn measure(scale: &Scale) -> Result<Row> {
    let agents = scale.of(2_000, 20);
    let bed = Bed::new(false).await?;
    let world = bed::world();
    let mut node = bed.node("node", bed::scripted_driver(&world)).await?;
    let (client, bus, raw) = (bed.client().await?, bed.bus().await?, bed.raw().await?);
    let ids = populate(&client, agents).await?;
    let mut row = Row::new("restart with open runs", "ms", Target::TimesAtMost(2.0));
    for _ in 0..scale.rounds {
        node.leave().await?;
        let (events, read, appended) = read_and_append(&raw, agents).await?;
        let began = Instant::now();
        let restarting = bed.node("node", bed::scripted_driver(&world));
        let (restarted, first) = tokio::join!(restarting, answered(&bus, &ids, began));
        node = restarted?;
        let first = first?;
        let ours = began.elapsed();
        row.notes.push(format!(
            "{events} events; raw {} ms to read and {} ms to append; ours {} ms to the first answer",
            read.as_millis(),
            appended.as_millis(),
            first.as_millis()
        ));
        row.round((read + appended).as_secs_f64() * 1e3, ours.as_secs_f64() * 1e3);
    }
    node.leave().await?;
    Ok(row)
}

/// Agents with a history, each with an idle run.
async fn populate(client: &Client, agents: usize) -> Result<Vec<AgentId>> {
    let ended = (EVENTS - 1) / EVENTS_OF_A_RUN - 1;
    many(agents, 128, |_| async move {
        let agent = client.create(bed::scripted_spec()).await?.agent;
        for _ in 0..ended {
            started(client, agent, "exit 0").await?;
        }
        started(client, agent, "idle").await?;
        Ok(agent)
    })
    .await
}

/// Starts a run as soon as the one before is sealed.
async fn started(client: &Client, agent: AgentId, script: &str) -> Result<()> {
    let patience = Instant::now();
    loop {
        match client.start(agent, bed::task(script)).await {
            Ok(_) => return Ok(()),
            Err(acri_client::Error::Refused { .. }) if patience.elapsed().as_secs() < 20 => {
                tokio::time::sleep(ASK_AGAIN).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

async fn read_and_append(client: &async_nats::Client, agents: usize) -> Result<(u64, Duration, Duration)> {
    let (context, _) = bed::raw_stream(client, "RAW", "raw.>").await?;
    let stream: jetstream::stream::Stream = context.get_stream("ACRI_EVENTS").await?;
    let last = stream.get_info().await?.state.messages;
    let began = Instant::now();
    let config = push::OrderedConfig { deliver_subject: client.new_inbox(), ..push::OrderedConfig::default() };
    let mut events = stream.create_consumer(config).await?.messages().await?;
    for _ in 0..last {
        events.next().await.context("the consumer ended")??;
    }
    let read = began.elapsed();
    drop(events);
    let (began, context) = (Instant::now(), &context);
    many(agents, agents, |at| async move {
        let mut headers = HeaderMap::new();
        headers.insert(NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, "0");
        headers.insert("Nats-Msg-Id", uuid::Uuid::from_u128(u128::try_from(at)?).to_string());
        let body = Bytes::from(vec![b'x'; EVENT_BYTES]);
        context.publish_with_headers(format!("raw.{at}"), headers, body).await?.await?;
        Ok(())
    })
    .await?;
    Ok((last, read, began.elapsed()))
}

/// Asks each agent until its owner answers; tells when the first did. Not
/// through the client, which answers from the events where no owner is.
async fn answered(bus: &SharedBus, ids: &[AgentId], began: Instant) -> Result<Duration> {
    ask(bus, ids[0]).await?;
    let first = began.elapsed();
    many(ids.len(), AT_ONCE, |at| ask(bus, ids[at])).await?;
    Ok(first)
}

async fn ask(bus: &SharedBus, agent: AgentId) -> Result<()> {
    let subject = Subject::Agent(agent, AgentVerb::Status);
    let envelope = Envelope {
        id: CommandId::from_uuid(uuid::Uuid::now_v7()),
        principal: "bench".to_owned(),
        expires: None,
        data: GetStatus {},
    };
    let body = Bytes::from(codec::to_msgpack(&envelope)?);
    let patience = Duration::from_secs(2);
    loop {
        match bus.request(&subject, Format::MessagePack, body.clone(), patience).await {
            Ok(answer) if answer.error.is_none() => return Ok(()),
            _ => tokio::time::sleep(ASK_AGAIN).await,
        }
    }
}
