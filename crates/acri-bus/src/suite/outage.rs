//! A bus that crashes and comes back.

use super::{
    ARRIVAL_TIMEOUT, BusFactory, LOOK_EVERY, Outcome, agent, all, arrives, case_list, chain, ensure, event, run_id,
    stored, text,
};
use crate::port::{Answer, Append, Appended, EventSelection, FrameAppend, RequestError, SharedBus, Until};
use acri::{StreamSeq, Subject, codec::Format, id::Epoch, subject::AgentVerb};
use bytes::Bytes;
use futures_util::StreamExt as _;
use std::time::Duration;

/// How long an append may stay unsettled, a change of leader included.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(30);

case_list! { true:
    acknowledged_events_outlive_a_crash,
    an_append_while_the_bus_is_away_is_unknown,
    a_repeat_after_a_crash_is_settled_once,
    a_follower_misses_nothing_over_a_crash,
    a_follower_of_a_log_misses_nothing_over_crashes,
    an_owner_is_found_again_after_a_crash,
}

/// One writer and one follower of one agent, for some time, whatever happens
/// to the bus meanwhile; says how many events it were.
///
/// # Errors
/// What was lost, doubled or out of order.
pub async fn chain_and_follow(factory: &dyn BusFactory, time: Duration) -> Result<usize, String> {
    let (writer, reader, agent) = (factory.client().await, factory.client().await, agent());
    let mut read =
        reader.read(EventSelection::Agent(agent), StreamSeq(1), Until::Dropped).await.map_err(|fault| text(&fault))?;
    let write = async {
        let (begun, mut seqs) = (tokio::time::Instant::now(), vec![StreamSeq(0)]);
        while begun.elapsed() < time {
            let append = event(agent, seqs[seqs.len() - 1], format!("{}", seqs.len() - 1));
            seqs.push(settled(&writer, &append).await?);
        }
        Ok::<_, String>(seqs.split_off(1))
    };
    let mut found = Vec::new();
    let follow = async {
        loop {
            match read.next().await {
                Some(Ok(event)) => found.push(event),
                Some(Err(fault)) => return text(&fault),
                None => return "the follower ended".to_owned(),
            }
        }
    };
    let seqs = tokio::select! {
        seqs = write => seqs?,
        ended = follow => return Err(ended),
    };
    while found.len() < seqs.len() {
        found.push(arrives(&mut read, "an event").await?.map_err(|fault| text(&fault))?);
    }
    let same = found.iter().map(|event| event.seq).eq(seqs.iter().copied());
    ensure!(same, "{} events were stored, and others were read", seqs.len());
    let counted = found.iter().enumerate().all(|(at, event)| event.bytes == format!("{at}").as_bytes());
    ensure!(counted, "an event was stored twice or not at all");
    Ok(seqs.len())
}

/// Repeats identical bytes until they are settled, as the protocol has it.
async fn settled(bus: &SharedBus, append: &Append) -> Result<StreamSeq, String> {
    let mut unsettled = None;
    let repeat = async {
        loop {
            match bus.append(append).await {
                Appended::Stored(seq) => return Ok(seq),
                answer @ (Appended::Unknown(_) | Appended::InFlight) => unsettled = Some(answer),
                Appended::Conflict | Appended::Duplicate(_) => {
                    let Subject::Event(agent, ..) = &append.subject else {
                        return Err("no event".to_owned());
                    };
                    match bus.last(*agent).await {
                        Ok(Some(last)) if last.bytes == append.bytes => return Ok(last.seq),
                        Ok(last) => return Err(format!("a conflict, and the last is {last:?}")),
                        Err(fault) => unsettled = Some(Appended::Unknown(fault)),
                    }
                }
                Appended::Refused(fault) => return Err(text(&fault)),
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    match tokio::time::timeout(SETTLE_TIMEOUT, repeat).await {
        Ok(outcome) => outcome,
        Err(_) => Err(format!("an append was not settled within {SETTLE_TIMEOUT:?}: {unsettled:?}")),
    }
}

async fn acknowledged_events_outlive_a_crash(factory: &dyn BusFactory) -> Outcome {
    let (bus, agent) = (factory.client().await, agent());
    let seqs = chain(&bus, agent, None, StreamSeq(0), 50).await?;
    factory.crash().await;
    factory.restore().await;
    let next = event(agent, seqs[49], "after");
    let after = settled(&bus, &next).await?;
    let read = bus.read(EventSelection::Agent(agent), StreamSeq(1), Until::Now).await.map_err(|fault| text(&fault))?;
    let found: Vec<_> = all(read).await?.into_iter().map(|event| event.seq).collect();
    ensure!(found == [seqs, vec![after]].concat(), "{found:?}");
    Ok(())
}

async fn an_append_while_the_bus_is_away_is_unknown(factory: &dyn BusFactory) -> Outcome {
    let (bus, agent) = (factory.client().await, agent());
    let first = stored(bus.append(&event(agent, StreamSeq(0), "first")).await)?;
    factory.crash().await;
    let append = event(agent, first, "away");
    let frame = FrameAppend {
        agent,
        run: None,
        expect: StreamSeq(0),
        epoch: Epoch(1),
        resume: Bytes::new(),
        bytes: Bytes::new(),
    };
    let subject = Subject::Agent(agent, AgentVerb::Status);
    let asked = bus.request(&subject, Format::Json, Bytes::new(), Duration::from_millis(200));
    let (answer, framed, last, asked) =
        tokio::join!(bus.append(&append), bus.append_frame(&frame), bus.last(agent), asked);
    ensure!(matches!(answer, Appended::Unknown(_)), "{answer:?}");
    ensure!(matches!(framed, Appended::Unknown(_)), "{framed:?}");
    ensure!(last.is_err(), "{last:?} without a bus");
    ensure!(matches!(asked, Err(RequestError::Fault(_))), "{asked:?}: absence is not the proof that nobody owns it");
    factory.restore().await;
    settled(&bus, &append).await.map(drop)
}

async fn a_repeat_after_a_crash_is_settled_once(factory: &dyn BusFactory) -> Outcome {
    let (bus, agent) = (factory.client().await, agent());
    let append = event(agent, StreamSeq(0), "once");
    let seq = stored(bus.append(&append).await)?;
    factory.crash().await;
    factory.restore().await;
    // As if the acknowledgement had been lost with the crash.
    let again = settled(&bus, &append).await?;
    ensure!(again == seq, "{seq}, and then {again}");
    let read = bus.read(EventSelection::Agent(agent), StreamSeq(1), Until::Now).await.map_err(|fault| text(&fault))?;
    let found = all(read).await?;
    ensure!(found.len() == 1, "{found:?}");
    Ok(())
}

async fn a_follower_misses_nothing_over_a_crash(factory: &dyn BusFactory) -> Outcome {
    let (writer, reader, agent) = (factory.client().await, factory.client().await, agent());
    let mut seqs = chain(&writer, agent, None, StreamSeq(0), 5).await?;
    let mut read =
        reader.read(EventSelection::Agent(agent), StreamSeq(1), Until::Dropped).await.map_err(|fault| text(&fault))?;
    let mut at = 0;
    for round in 0..3 {
        // Some are read, some are not, and some are written before the reader is back.
        while at < seqs.len() - 2 {
            let found = arrives(&mut read, "an event").await?.map_err(|fault| text(&fault))?;
            ensure!(found.seq == seqs[at], "round {round}: {found:?} at place {at} of {seqs:?}");
            at += 1;
        }
        factory.crash().await;
        factory.restore().await;
        for number in 0..5 {
            let append = event(agent, seqs[seqs.len() - 1], format!("{round} {number}"));
            seqs.push(settled(&writer, &append).await?);
        }
    }
    for (place, seq) in seqs.iter().enumerate().skip(at) {
        let found = arrives(&mut read, "an event").await?.map_err(|fault| text(&fault))?;
        ensure!(found.seq == *seq, "{found:?} at place {place} of {seqs:?}");
    }
    Ok(())
}

async fn a_follower_of_a_log_misses_nothing_over_crashes(factory: &dyn BusFactory) -> Outcome {
    let (writer, reader, agent, run) = (factory.client().await, factory.client().await, agent(), Some(run_id()));
    let mut read = reader.read_frames(agent, run, StreamSeq(1), Until::Dropped).await.map_err(|fault| text(&fault))?;
    let mut expect = StreamSeq(0);
    for number in 0_u32..12 {
        if number % 4 == 2 {
            factory.crash().await;
            factory.restore().await;
        }
        let bytes = Bytes::from(number.to_be_bytes().to_vec());
        let append = FrameAppend { agent, run, expect, epoch: Epoch(1), resume: Bytes::from_static(b"r"), bytes };
        let store = async {
            loop {
                match writer.append_frame(&append).await {
                    Appended::Stored(seq) => return Ok(seq),
                    Appended::Conflict => match writer.last_frame(agent, run).await {
                        Ok(Some(last)) if last.bytes == append.bytes => return Ok(last.seq),
                        Ok(last) => return Err(format!("a conflict, and the last is {last:?}")),
                        Err(_) => {}
                    },
                    Appended::Unknown(_) | Appended::InFlight => {}
                    other => return Err(format!("{other:?}")),
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        expect =
            tokio::time::timeout(ARRIVAL_TIMEOUT, store).await.map_err(|_| "a frame was not settled".to_owned())??;
        // Every other one is read at once, the rest after the next crash.
        if number % 2 == 1 {
            for wanted in [number - 1, number] {
                let found = arrives(&mut read, "a frame").await?.map_err(|fault| text(&fault))?;
                ensure!(found.bytes == wanted.to_be_bytes().as_slice(), "{found:?}, and number {wanted} was next");
            }
        }
    }
    Ok(())
}

async fn an_owner_is_found_again_after_a_crash(factory: &dyn BusFactory) -> Outcome {
    let (owner, client, agent) = (factory.client().await, factory.client().await, agent());
    let mut requests = owner.serve_agent(agent).await.map_err(|fault| text(&fault))?;
    factory.crash().await;
    factory.restore().await;
    let subject = Subject::Agent(agent, AgentVerb::Status);
    let serve = async {
        loop {
            let request = arrives(&mut requests, "a request").await?;
            if let Some(reply) = request.reply {
                reply.send(Answer { format: Format::Json, body: Bytes::from_static(b"here"), error: None }).await;
            }
        }
    };
    let asked = async {
        // Its subscription is back only after its connection is.
        while client.request(&subject, Format::Json, Bytes::new(), Duration::from_secs(1)).await.is_err() {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    tokio::select! {
        outcome = serve => outcome,
        found = tokio::time::timeout(ARRIVAL_TIMEOUT, asked) => found.map_err(|_| "nobody is found".to_owned()),
    }
}
