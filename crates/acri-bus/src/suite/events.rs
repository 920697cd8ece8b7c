//! Appending and reading events.

use super::{
    BusFactory, Outcome, agent, all, arrives, case_list, chain, ensure, event, event_of, run_id, stored, text,
};
use crate::port::{Appended, EventSelection, Until};
use acri::{EventId, StreamSeq, limits::EVENT_BODY_BYTES_MAX};
use bytes::Bytes;
use futures_util::StreamExt as _;

case_list! { false:
    the_first_event_of_an_agent_is_stored_once,
    a_stale_expectation_is_refused,
    the_check_covers_every_run_of_the_agent,
    another_agent_is_not_touched,
    an_exact_repeat_is_no_second_event,
    a_used_id_never_stores_another_body,
    the_last_event_is_known_at_once,
    an_agent_without_events_has_no_last,
    a_body_at_the_limit_is_stored_and_one_byte_more_is_refused,
    a_subject_that_is_no_event_is_refused,
    a_read_gives_everything_once_and_in_order,
    a_read_of_one_run_gives_only_that,
    a_read_begins_where_it_is_told,
    a_read_of_nothing_ends,
    a_read_that_ends_leaves_out_what_came_later,
    a_read_that_follows_goes_on,
    read_and_last_agree,
    the_facts_of_the_stream_move,
}

async fn the_first_event_of_an_agent_is_stored_once(factory: &dyn BusFactory) -> Outcome {
    let (one, other) = (factory.client().await, factory.client().await);
    for _ in 0..20 {
        let agent = agent();
        let (left, right) = (event(agent, StreamSeq(0), "left"), event(agent, StreamSeq(0), "right"));
        let (left, right) = tokio::join!(one.append(&left), other.append(&right));
        let won = [&left, &right].iter().filter(|answer| matches!(answer, Appended::Stored(_))).count();
        let lost =
            [&left, &right].iter().filter(|answer| matches!(answer, Appended::Conflict | Appended::InFlight)).count();
        ensure!(won == 1 && lost == 1, "{left:?} and {right:?}");
    }
    Ok(())
}

async fn a_stale_expectation_is_refused(factory: &dyn BusFactory) -> Outcome {
    let (bus, agent) = (factory.client().await, agent());
    let seqs = chain(&bus, agent, None, StreamSeq(0), 3).await?;
    for stale in [StreamSeq(0), seqs[0], seqs[1], seqs[2].next()] {
        let answer = bus.append(&event(agent, stale, "stale")).await;
        ensure!(answer == Appended::Conflict, "expected sequence {stale} of {seqs:?}: {answer:?}");
    }
    let last = bus.last(agent).await.map_err(|fault| text(&fault))?;
    ensure!(last.as_ref().map(|last| last.seq) == Some(seqs[2]), "the last event is {last:?}");
    Ok(())
}

async fn the_check_covers_every_run_of_the_agent(factory: &dyn BusFactory) -> Outcome {
    let (bus, agent, old, new) = (factory.client().await, agent(), run_id(), run_id());
    let first = stored(bus.append(&event(agent, StreamSeq(0), "created")).await)?;
    let second = stored(bus.append(&event_of(agent, Some(old), "run.accepted", first, "old")).await)?;
    let fence = stored(bus.append(&event(agent, second, "assigned")).await)?;
    // A former owner, who does not know of the fence: in his run, in a new one, for the agent.
    for (run, kind) in [(Some(old), "run.started"), (Some(new), "run.accepted"), (None, "agent.removed")] {
        let answer = bus.append(&event_of(agent, run, kind, second, "late")).await;
        ensure!(answer == Appended::Conflict, "{kind} of the former owner: {answer:?}");
    }
    stored(bus.append(&event_of(agent, Some(new), "run.accepted", fence, "new")).await).map(drop)
}

async fn another_agent_is_not_touched(factory: &dyn BusFactory) -> Outcome {
    let (bus, one, other) = (factory.client().await, agent(), agent());
    let first = stored(bus.append(&event(one, StreamSeq(0), "one")).await)?;
    stored(bus.append(&event(other, StreamSeq(0), "other")).await)?;
    stored(bus.append(&event(one, first, "one again")).await).map(drop)
}

async fn an_exact_repeat_is_no_second_event(factory: &dyn BusFactory) -> Outcome {
    let (bus, agent) = (factory.client().await, agent());
    let append = event(agent, StreamSeq(0), "once");
    let seq = stored(bus.append(&append).await)?;
    for _ in 0..3 {
        let answer = bus.append(&append).await;
        let fine = answer == Appended::Conflict || answer == Appended::Duplicate(seq);
        ensure!(fine, "the repeat of what is at {seq}: {answer:?}");
    }
    let last = bus.last(agent).await.map_err(|fault| text(&fault))?;
    ensure!(
        last.as_ref().is_some_and(|last| last.seq == seq && last.bytes == append.bytes),
        "the last event is {last:?}"
    );
    let read = bus.read(EventSelection::Agent(agent), StreamSeq(1), Until::Now).await.map_err(|fault| text(&fault))?;
    let events = all(read).await?;
    ensure!(events.len() == 1, "{} events of one", events.len());
    Ok(())
}

async fn a_used_id_never_stores_another_body(factory: &dyn BusFactory) -> Outcome {
    let (bus, agent) = (factory.client().await, agent());
    let first = event(agent, StreamSeq(0), "first");
    let seq = stored(bus.append(&first).await)?;
    let mut second = event(agent, seq, "second");
    second.id = first.id;
    let answer = bus.append(&second).await;
    ensure!(answer == Appended::Duplicate(seq), "a used id with another body: {answer:?}");
    let last = bus.last(agent).await.map_err(|fault| text(&fault))?;
    ensure!(last.as_ref().is_some_and(|last| last.bytes == first.bytes), "the last event is {last:?}");
    second.id = EventId::from_uuid(uuid::Uuid::new_v4());
    stored(bus.append(&second).await).map(drop)
}

async fn the_last_event_is_known_at_once(factory: &dyn BusFactory) -> Outcome {
    let (writer, reader, agent) = (factory.client().await, factory.client().await, agent());
    let mut expect = StreamSeq(0);
    for number in 0..50 {
        expect = stored(writer.append(&event(agent, expect, format!("{number}"))).await)?;
        let last = reader.last(agent).await.map_err(|fault| text(&fault))?;
        ensure!(last.as_ref().is_some_and(|last| last.seq == expect), "after {expect} was stored: {last:?}");
    }
    Ok(())
}

async fn an_agent_without_events_has_no_last(factory: &dyn BusFactory) -> Outcome {
    let bus = factory.client().await;
    let last = bus.last(agent()).await.map_err(|fault| text(&fault))?;
    ensure!(last.is_none(), "{last:?}");
    Ok(())
}

async fn a_body_at_the_limit_is_stored_and_one_byte_more_is_refused(factory: &dyn BusFactory) -> Outcome {
    let (bus, agent) = (factory.client().await, agent());
    let body = Bytes::from(vec![0xa5; EVENT_BODY_BYTES_MAX]);
    let seq = stored(bus.append(&event(agent, StreamSeq(0), body.clone())).await)?;
    let answer = bus.append(&event(agent, seq, vec![0; EVENT_BODY_BYTES_MAX + 1])).await;
    ensure!(matches!(answer, Appended::Refused(_)), "one byte above the limit: {answer:?}");
    let last = bus.last(agent).await.map_err(|fault| text(&fault))?;
    ensure!(last.is_some_and(|last| last.bytes == body), "another body than was stored");
    Ok(())
}

async fn a_subject_that_is_no_event_is_refused(factory: &dyn BusFactory) -> Outcome {
    let (bus, agent) = (factory.client().await, agent());
    let mut append = event(agent, StreamSeq(0), "misplaced");
    append.subject = acri::Subject::Log(agent, None);
    let answer = bus.append(&append).await;
    ensure!(matches!(answer, Appended::Refused(_)), "{answer:?}");
    Ok(())
}

async fn a_read_gives_everything_once_and_in_order(factory: &dyn BusFactory) -> Outcome {
    let (bus, one, other) = (factory.client().await, agent(), agent());
    // More than one pull, of two agents in turn.
    let (mut first, mut second, mut seqs) = (StreamSeq(0), StreamSeq(0), Vec::new());
    for number in 0..700 {
        first = stored(bus.append(&event(one, first, format!("{number}"))).await)?;
        seqs.push(first);
        if number % 7 == 0 {
            second = stored(bus.append(&event(other, second, "between")).await)?;
        }
    }
    let read = bus.read(EventSelection::Agent(one), StreamSeq(1), Until::Now).await.map_err(|fault| text(&fault))?;
    let events = all(read).await?;
    let found: Vec<_> = events.iter().map(|event| event.seq).collect();
    ensure!(found == seqs, "{} events, and {} were stored", found.len(), seqs.len());
    ensure!(events.iter().enumerate().all(|(at, event)| event.bytes == format!("{at}").as_bytes()), "other bodies");
    let read = bus.read(EventSelection::All, seqs[0], Until::Now).await.map_err(|fault| text(&fault))?;
    let everything: Vec<_> = all(read).await?.into_iter().map(|event| event.seq).collect();
    ensure!(everything.windows(2).all(|pair| pair[0] < pair[1]), "not in stream order");
    ensure!(seqs.iter().all(|seq| everything.binary_search(seq).is_ok()), "a hole in the read of everything");
    Ok(())
}

async fn a_read_of_one_run_gives_only_that(factory: &dyn BusFactory) -> Outcome {
    let (bus, agent, one, other) = (factory.client().await, agent(), run_id(), run_id());
    let first = chain(&bus, agent, Some(one), StreamSeq(0), 4).await?;
    let between = chain(&bus, agent, Some(other), first[3], 4).await?;
    let after = chain(&bus, agent, Some(one), between[3], 2).await?;
    let read =
        bus.read(EventSelection::Run(agent, one), StreamSeq(1), Until::Now).await.map_err(|fault| text(&fault))?;
    let found: Vec<_> = all(read).await?.into_iter().map(|event| event.seq).collect();
    ensure!(found == [first, after].concat(), "{found:?}");
    Ok(())
}

async fn a_read_begins_where_it_is_told(factory: &dyn BusFactory) -> Outcome {
    let (bus, agent) = (factory.client().await, agent());
    let seqs = chain(&bus, agent, None, StreamSeq(0), 5).await?;
    for (from, expected) in [(seqs[2], &seqs[2..]), (seqs[4], &seqs[4..]), (seqs[4].next(), &[][..])] {
        let read = bus.read(EventSelection::Agent(agent), from, Until::Now).await.map_err(|fault| text(&fault))?;
        let found: Vec<_> = all(read).await?.into_iter().map(|event| event.seq).collect();
        ensure!(found == expected, "from {from}: {found:?}, and {expected:?} was expected");
    }
    Ok(())
}

async fn a_read_of_nothing_ends(factory: &dyn BusFactory) -> Outcome {
    let bus = factory.client().await;
    for from in [StreamSeq(0), StreamSeq(1), StreamSeq(1_000_000_000)] {
        let read = bus.read(EventSelection::Agent(agent()), from, Until::Now).await.map_err(|fault| text(&fault))?;
        let found = all(read).await?;
        ensure!(found.is_empty(), "from {from}: {found:?}");
    }
    Ok(())
}

async fn a_read_that_ends_leaves_out_what_came_later(factory: &dyn BusFactory) -> Outcome {
    let (bus, agent) = (factory.client().await, agent());
    let seqs = chain(&bus, agent, None, StreamSeq(0), 3).await?;
    let mut read =
        bus.read(EventSelection::Agent(agent), StreamSeq(1), Until::Now).await.map_err(|fault| text(&fault))?;
    let first = arrives(&mut read, "the first event").await?.map_err(|fault| text(&fault))?;
    ensure!(first.seq == seqs[0], "{first:?}");
    stored(bus.append(&event(agent, seqs[2], "later")).await)?;
    let rest: Vec<_> = all(read).await?.into_iter().map(|event| event.seq).collect();
    ensure!(rest == seqs[1..], "{rest:?}, and {:?} were there", &seqs[1..]);
    Ok(())
}

async fn a_read_that_follows_goes_on(factory: &dyn BusFactory) -> Outcome {
    let (writer, reader, agent) = (factory.client().await, factory.client().await, agent());
    let mut seqs = chain(&writer, agent, None, StreamSeq(0), 3).await?;
    let mut read =
        reader.read(EventSelection::Agent(agent), seqs[1], Until::Dropped).await.map_err(|fault| text(&fault))?;
    for (number, _) in (0..6).enumerate() {
        if number >= 2 {
            let more = stored(writer.append(&event(agent, seqs[seqs.len() - 1], "more")).await)?;
            seqs.push(more);
        }
        let found = arrives(&mut read, "an event").await?.map_err(|fault| text(&fault))?;
        ensure!(found.seq == seqs[number + 1], "{found:?} at place {number} of {seqs:?}");
    }
    let early = tokio::time::timeout(super::ABSENCE_TIMEOUT, read.next()).await;
    ensure!(early.is_err(), "a follower ended or got what was not stored: {early:?}");
    Ok(())
}

async fn read_and_last_agree(factory: &dyn BusFactory) -> Outcome {
    let (bus, agent) = (factory.client().await, agent());
    chain(&bus, agent, Some(run_id()), StreamSeq(0), 3).await?;
    let read = bus.read(EventSelection::Agent(agent), StreamSeq(1), Until::Now).await.map_err(|fault| text(&fault))?;
    let last_read = all(read).await?.pop();
    let last = bus.last(agent).await.map_err(|fault| text(&fault))?;
    ensure!(last.is_some() && last == last_read, "{last:?} and {last_read:?}");
    Ok(())
}

async fn the_facts_of_the_stream_move(factory: &dyn BusFactory) -> Outcome {
    let (bus, agent) = (factory.client().await, agent());
    let before = bus.event_facts().await.map_err(|fault| text(&fault))?;
    let seqs = chain(&bus, agent, None, StreamSeq(0), 2).await?;
    let after = bus.event_facts().await.map_err(|fault| text(&fault))?;
    ensure!(after.created == before.created, "{before:?}, then {after:?}");
    ensure!(after.bytes > before.bytes, "{before:?}, then {after:?}");
    ensure!(after.last >= seqs[1] && after.first <= seqs[0], "{after:?} does not hold {seqs:?}");
    Ok(())
}
