//! Appending and reading log frames.

use super::{BusFactory, Outcome, agent, all, arrives, case_list, ensure, run_id, stored, text};
use crate::port::{Appended, FrameAppend, FrameMark, Until};
use acri::{AgentId, RunId, StreamSeq, codec, id::Epoch, limits::FRAME_MESSAGE_BYTES_MAX, log::ResumeToken};
use bytes::Bytes;

case_list! { false:
    a_frame_is_stored_only_after_the_one_before_it,
    frames_of_other_runs_are_not_in_the_way,
    a_frame_keeps_its_epoch_and_token,
    the_last_frame_is_known_at_once,
    after_retention_the_log_begins_at_zero_again,
    a_frame_at_the_limit_is_stored_and_a_larger_one_is_refused,
    frames_are_read_once_and_in_order,
    a_log_that_is_followed_goes_on,
    an_agents_own_log_is_apart_from_its_runs,
}

/// What the headers of a frame take of the limit, at most.
const HEADERS_BYTES: usize = 8 * 1024;

fn frame(agent: AgentId, run: Option<RunId>, expect: StreamSeq, epoch: u64, bytes: impl Into<Bytes>) -> FrameAppend {
    let token = ResumeToken { spool_offset: epoch << 32 | 0xff0a, ..ResumeToken::start() };
    let resume = codec::to_msgpack(&token).unwrap_or_default().into();
    FrameAppend { agent, run, expect, epoch: Epoch(epoch), resume, bytes: bytes.into() }
}

async fn a_frame_is_stored_only_after_the_one_before_it(factory: &dyn BusFactory) -> Outcome {
    let (bus, agent, run) = (factory.client().await, agent(), Some(run_id()));
    let first = stored(bus.append_frame(&frame(agent, run, StreamSeq(0), 1, "first")).await)?;
    // A repeat, and a second one in flight: both rest on what is no longer the last.
    for bytes in ["first", "second"] {
        let answer = bus.append_frame(&frame(agent, run, StreamSeq(0), 1, bytes)).await;
        ensure!(answer == Appended::Conflict, "{bytes:?} at 0, after {first}: {answer:?}");
    }
    let ahead = bus.append_frame(&frame(agent, run, first.next().next(), 1, "third")).await;
    ensure!(ahead == Appended::Conflict, "a frame ahead of the one before it: {ahead:?}");
    stored(bus.append_frame(&frame(agent, run, first, 1, "second")).await).map(drop)
}

async fn frames_of_other_runs_are_not_in_the_way(factory: &dyn BusFactory) -> Outcome {
    let (bus, agent, one, other) = (factory.client().await, agent(), Some(run_id()), Some(run_id()));
    let first = stored(bus.append_frame(&frame(agent, one, StreamSeq(0), 1, "one")).await)?;
    stored(bus.append_frame(&frame(agent, other, StreamSeq(0), 1, "other")).await)?;
    stored(bus.append_frame(&frame(agent, one, first, 1, "one again")).await).map(drop)
}

async fn a_frame_keeps_its_epoch_and_token(factory: &dyn BusFactory) -> Outcome {
    let (bus, agent, run) = (factory.client().await, agent(), Some(run_id()));
    let append = frame(agent, run, StreamSeq(0), 77, vec![0, 1, 2, 0xff]);
    let seq = stored(bus.append_frame(&append).await)?;
    let last = bus.last_frame(agent, run).await.map_err(|fault| text(&fault))?.ok_or("no last frame")?;
    let mark = Some(FrameMark { epoch: append.epoch, resume: append.resume.clone() });
    let same = last.seq == seq && last.mark == mark && last.bytes == append.bytes;
    ensure!(same, "{last:?} of {append:?}");
    let read = bus.read_frames(agent, run, StreamSeq(1), Until::Now).await.map_err(|fault| text(&fault))?;
    let read = all(read).await?;
    ensure!(read == [last], "{read:?}");
    Ok(())
}

async fn the_last_frame_is_known_at_once(factory: &dyn BusFactory) -> Outcome {
    let (writer, reader, agent, run) = (factory.client().await, factory.client().await, agent(), Some(run_id()));
    let none = reader.last_frame(agent, run).await.map_err(|fault| text(&fault))?;
    ensure!(none.is_none(), "{none:?} before the first");
    let mut expect = StreamSeq(0);
    for number in 0..30 {
        expect = stored(writer.append_frame(&frame(agent, run, expect, number, format!("{number}"))).await)?;
        let last = reader.last_frame(agent, run).await.map_err(|fault| text(&fault))?;
        ensure!(last.as_ref().is_some_and(|last| last.seq == expect), "after {expect} was stored: {last:?}");
    }
    Ok(())
}

async fn after_retention_the_log_begins_at_zero_again(factory: &dyn BusFactory) -> Outcome {
    let (bus, agent, run) = (factory.client().await, agent(), Some(run_id()));
    let first = stored(bus.append_frame(&frame(agent, run, StreamSeq(0), 1, "first")).await)?;
    factory.drop_frames(agent, run).await;
    let last = bus.last_frame(agent, run).await.map_err(|fault| text(&fault))?;
    ensure!(last.is_none(), "{last:?} after its removal");
    let answer = bus.append_frame(&frame(agent, run, first, 1, "second")).await;
    ensure!(answer == Appended::Conflict, "at the sequence of a removed frame: {answer:?}");
    let second = stored(bus.append_frame(&frame(agent, run, StreamSeq(0), 1, "second")).await)?;
    ensure!(second > first, "sequence {second} after {first}");
    Ok(())
}

async fn a_frame_at_the_limit_is_stored_and_a_larger_one_is_refused(factory: &dyn BusFactory) -> Outcome {
    let (bus, agent, run) = (factory.client().await, agent(), Some(run_id()));
    let body = Bytes::from(vec![0x5a; FRAME_MESSAGE_BYTES_MAX - HEADERS_BYTES]);
    let seq = stored(bus.append_frame(&frame(agent, run, StreamSeq(0), 1, body.clone())).await)?;
    let answer = bus.append_frame(&frame(agent, run, seq, 1, vec![0; FRAME_MESSAGE_BYTES_MAX + 1])).await;
    ensure!(matches!(answer, Appended::Refused(_)), "above the limit: {answer:?}");
    let last = bus.last_frame(agent, run).await.map_err(|fault| text(&fault))?;
    ensure!(last.is_some_and(|last| last.bytes == body), "the last frame has another body");
    // Several at the limit, so that a reader has to ask more than once.
    let mut expect = seq;
    for _ in 0..4 {
        expect = stored(bus.append_frame(&frame(agent, run, expect, 1, body.clone())).await)?;
    }
    let read = bus.read_frames(agent, run, StreamSeq(1), Until::Now).await.map_err(|fault| text(&fault))?;
    let read = all(read).await?;
    ensure!(read.len() == 5 && read.iter().all(|frame| frame.bytes == body), "{} large frames of 5", read.len());
    Ok(())
}

async fn frames_are_read_once_and_in_order(factory: &dyn BusFactory) -> Outcome {
    let (bus, agent, one, other) = (factory.client().await, agent(), Some(run_id()), Some(run_id()));
    let (mut first, mut second, mut seqs) = (StreamSeq(0), StreamSeq(0), Vec::new());
    for number in 0..60 {
        first = stored(bus.append_frame(&frame(agent, one, first, 1, format!("{number}"))).await)?;
        second = stored(bus.append_frame(&frame(agent, other, second, 1, "other")).await)?;
        seqs.push(first);
    }
    for from in [StreamSeq(1), seqs[20]] {
        let expected: Vec<_> = seqs.iter().copied().filter(|seq| *seq >= from).collect();
        let read = bus.read_frames(agent, one, from, Until::Now).await.map_err(|fault| text(&fault))?;
        let found: Vec<_> = all(read).await?.into_iter().map(|frame| frame.seq).collect();
        ensure!(found == expected, "from {from}: {found:?}");
    }
    Ok(())
}

async fn a_log_that_is_followed_goes_on(factory: &dyn BusFactory) -> Outcome {
    let (writer, reader, agent, run) = (factory.client().await, factory.client().await, agent(), Some(run_id()));
    // It begins before there is anything.
    let mut read = reader.read_frames(agent, run, StreamSeq(1), Until::Dropped).await.map_err(|fault| text(&fault))?;
    let mut expect = StreamSeq(0);
    for number in 0..5 {
        expect = stored(writer.append_frame(&frame(agent, run, expect, 1, format!("{number}"))).await)?;
        let found = arrives(&mut read, "a frame").await?.map_err(|fault| text(&fault))?;
        ensure!(found.seq == expect, "{found:?}, and {expect} was stored");
    }
    Ok(())
}

async fn an_agents_own_log_is_apart_from_its_runs(factory: &dyn BusFactory) -> Outcome {
    let (bus, agent, run) = (factory.client().await, agent(), Some(run_id()));
    stored(bus.append_frame(&frame(agent, run, StreamSeq(0), 1, "of the run")).await)?;
    stored(bus.append_frame(&frame(agent, None, StreamSeq(0), 1, "of the agent")).await)?;
    let read = bus.read_frames(agent, None, StreamSeq(1), Until::Now).await.map_err(|fault| text(&fault))?;
    let read = all(read).await?;
    ensure!(read.len() == 1 && read[0].bytes == "of the agent".as_bytes(), "{read:?}");
    Ok(())
}
