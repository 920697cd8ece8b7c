//! What must be true of everything that is stored, whoever wrote it. None of
//! it asks a machine.

use crate::stage::Expected;
use acri::{
    AgentId, CommandId, Epoch, Event, EventEnvelope, RunId, StreamSeq, codec,
    id::{LogSeq, Sha256Digest},
    log::ResumeToken,
};
use acri_bus::{
    memory::State,
    port::{EventSelection, RecordedFrame},
};
use acri_core::{
    appender::Stored,
    check,
    writer::{
        LastFrame, LogEnd,
        reader::{Frame, LogItem, LogStream, Next, Reader, Since},
    },
};

pub(crate) fn stored(recorded: &acri_bus::port::Recorded) -> Stored {
    Stored { seq: recorded.seq, time: recorded.time, bytes: recorded.bytes.clone() }
}

/// The events of one agent, decoded.
pub(crate) fn events(bus: &State, agent: AgentId) -> Vec<EventEnvelope> {
    bus.read(&EventSelection::Agent(agent), StreamSeq(1))
        .map(|recorded| codec::from_msgpack(&recorded.bytes).expect("what is stored is an event"))
        .collect()
}

/// Chains, sequences, epochs, ends and seals of all agents.
pub(crate) fn histories(bus: &State) -> Result<(), String> {
    let all = bus.read(&EventSelection::All, StreamSeq(1));
    let mut verifier = check::Verifier::default();
    for recorded in all {
        verifier.push(&recorded.subject, &stored(recorded));
    }
    match verifier.finish().problems.first() {
        None => Ok(()),
        Some(problem) => Err(format!("event at {}: {}", problem.seq, problem.what)),
    }
}

/// What a run's log holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Log {
    pub(crate) count: LogSeq,
    pub(crate) chain: Sha256Digest,
    pub(crate) spool_offset: u64,
}

/// How a reader reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reading<'a> {
    /// As the protocol says: it skips sequences that it has.
    Right,
    /// It drops what these frames hold.
    Without(&'a [StreamSeq]),
}

fn frames(bus: &State, agent: AgentId, run: RunId) -> Vec<&RecordedFrame> {
    bus.read_frames(agent, Some(run), StreamSeq(1)).collect()
}

/// No log record lost, doubled or out of order for a reader; nor for one that
/// begins anew behind any record.
pub(crate) fn log(
    bus: &State,
    agent: AgentId,
    run: RunId,
    expected: &Expected,
    reading: Reading<'_>,
) -> Result<Log, String> {
    let mut frames = frames(bus, agent, run);
    let token = chained(&frames, ResumeToken::start())?;
    if let Reading::Without(dropped) = reading {
        frames.retain(|frame| !dropped.contains(&frame.seq));
    }
    let facts = bus.log_facts();
    let facts = LogStream { created: facts.created.as_micros(), first: facts.first, last: facts.last };
    let read = read(facts, &frames, Since::Start)?;
    if read.len() > expected.log.len() {
        return Err(format!("{} log records, of {}", read.len(), expected.log.len()));
    }
    for ((sequence, (event, _)), (stream, line)) in (1..).zip(&read).zip(&expected.log) {
        if event.sequence != LogSeq(sequence) {
            return Err(format!("log record {} where {sequence} was expected", event.sequence));
        }
        if event.stream != Some(*stream) || event.payload.as_bytes() != line.as_slice() {
            let found = String::from_utf8_lossy(event.payload.as_bytes()).into_owned();
            let line = String::from_utf8_lossy(line);
            return Err(format!("log record {sequence} is {found:?}, expected {line:?}"));
        }
    }
    for (place, (_, cursor)) in read.iter().enumerate() {
        let rest = self::read(facts, &frames, Since::After(*cursor))?;
        if rest.len() != read.len() - place - 1 {
            return Err(format!("after record {} a reader finds {}", place + 1, rest.len()));
        }
    }
    Ok(Log { count: LogSeq(token.next_sequence.0 - 1), chain: token.chain, spool_offset: token.spool_offset })
}

/// The token of the last of these frames, each of which must follow the one
/// before it.
pub(crate) fn chained(frames: &[&RecordedFrame], before: ResumeToken) -> Result<ResumeToken, String> {
    let mut token = before;
    for frame in frames {
        let next = resume(frame);
        if next.chain != token.chain.chained(&frame.bytes) {
            return Err(format!("frame {} does not follow the one before it", frame.seq));
        }
        token = next;
    }
    Ok(token)
}

type Read = Vec<(acri::log::LogEvent, acri::cursor::Cursor)>;

fn read(facts: LogStream, frames: &[&RecordedFrame], since: Since) -> Result<Read, String> {
    let mut reader = Reader::new(facts, since);
    let (mut items, mut read) = (Vec::new(), Vec::new());
    let from = reader.start_from();
    for frame in frames.iter().filter(|frame| frame.seq >= from) {
        let frame = Frame { seq: frame.seq, owned: frame.mark.is_some(), bytes: &frame.bytes };
        if reader.push(frame, &mut items) == Next::Restart {
            return Err(format!("a cursor's frame {} is another one", frame.seq));
        }
    }
    for item in items {
        match item {
            LogItem::Event(event, cursor) => read.push((event, cursor)),
            other => return Err(format!("a reader got {other:?}")),
        }
    }
    Ok(read)
}

/// What a writer is told of the run's last frame.
pub(crate) fn last(frame: &RecordedFrame) -> LogEnd {
    let mark = frame.mark.as_ref().expect("an owner wrote it");
    LogEnd { seq: frame.seq, frame: LastFrame::of(mark.epoch, &mark.resume) }
}

pub(crate) fn resume(frame: &RecordedFrame) -> ResumeToken {
    last(frame).frame.expect("what is stored is a token").token
}

/// Each derived event once, none that was not said, each before the frame that
/// covers it.
pub(crate) fn derived(
    bus: &State,
    agent: AgentId,
    run: RunId,
    events: &[EventEnvelope],
    expected: &Expected,
) -> Result<(), String> {
    let mut found = Vec::new();
    for event in events.iter().filter(|event| event.run == Some(run)) {
        let Some(source) = event.source else { continue };
        if !expected.derived.contains(&source) {
            return Err(format!("an event from {source:?}, where there was none"));
        }
        if found.contains(&source) {
            return Err(format!("the event from {source:?} a second time"));
        }
        found.push(source);
    }
    for frame in frames(bus, agent, run) {
        let covered = resume(frame).streams;
        for source in &expected.derived {
            let published = covered.get(&source.stream).is_some_and(|position| position.published > source.offset);
            if published && !found.contains(source) {
                return Err(format!("frame {} covers {source:?}, whose event is not stored", frame.seq));
            }
        }
    }
    Ok(())
}

/// The seal tells the truth.
pub(crate) fn seal(run: RunId, events: &[EventEnvelope], log: Log, may_have_gap: bool) -> Result<(), String> {
    for event in events.iter().filter(|event| event.run == Some(run)) {
        if let Event::RunLogsSealed(seal) = &event.event
            && ((seal.count, seal.chain) != (log.count, log.chain) || (seal.gap && !may_have_gap))
        {
            return Err(format!("sealed with {seal:?}, while the log is {log:?}"));
        }
    }
    Ok(())
}

/// Whether the history has the event that this command caused.
pub(crate) fn caused(events: &[EventEnvelope], command: CommandId) -> bool {
    events.iter().any(|event| event.cause == Some(command))
}

/// The newest epoch that is claimed, and whether its owner has decided
/// anything since.
pub(crate) fn epoch(events: &[EventEnvelope]) -> (Epoch, bool) {
    let newest = events.last().map_or(Epoch(0), |event| event.epoch);
    let decided = events.iter().any(|event| event.epoch == newest && !matches!(event.event, Event::AgentAssigned(_)));
    (newest, decided)
}

pub(crate) fn is_sealed(run: RunId, events: &[EventEnvelope]) -> bool {
    events.iter().any(|event| event.run == Some(run) && matches!(event.event, Event::RunLogsSealed(_)))
}
