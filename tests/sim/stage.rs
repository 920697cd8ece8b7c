//! What both kinds of simulation stand on: names, a harness that asks
//! questions in its output, and what must come out of it.

use acri::{
    AgentId, AgentSpec, CapabilitySet, CommandId, Event, HarnessType, Incarnation, NodeId, RunId, Timestamp,
    event::{EscalationRaised, ExitStatus, RunStarted, Source},
    log::Stream,
};
use acri_core::{
    appender::{Creation, Me},
    writer::Parser,
};
use uuid::Uuid;

/// The first moment, in milliseconds.
pub(crate) const START_MS: u64 = 1_764_500_000_000;
/// What a record costs in the spool beside its bytes.
pub(crate) const RECORD_OVERHEAD: u64 = 40;

pub(crate) fn at_millis(millis: u64) -> Timestamp {
    Timestamp::from_micros(i64::try_from(millis * 1000).expect("a time of this century"))
}

pub(crate) fn harness() -> HarnessType {
    "process".parse().expect("a name")
}

/// A UUIDv7 of this moment.
pub(crate) fn command_id(millis: u64, number: u64) -> CommandId {
    let number = u128::from(number);
    CommandId::from_uuid(Uuid::from_u128((u128::from(millis) << 80) | (7 << 76) | (2 << 62) | number))
}

pub(crate) fn agent_id(create: CommandId) -> AgentId {
    AgentId::derive(&harness(), create)
}

pub(crate) fn run_id(create: CommandId, start: CommandId) -> RunId {
    RunId::derive(agent_id(create), start)
}

pub(crate) fn spec() -> AgentSpec {
    AgentSpec::new(harness(), vec!["true".to_owned()])
}

pub(crate) fn creation(create: CommandId, spec: AgentSpec) -> Creation {
    Creation {
        harness: harness(),
        agent: agent_id(create),
        spec,
        capabilities: CapabilitySet::none(harness()),
        working_directory: None,
    }
}

pub(crate) fn incarnation(number: u64) -> Incarnation {
    Incarnation::from_uuid(Uuid::from_u128(u128::from(number) << 64))
}

pub(crate) fn node(name: &str) -> NodeId {
    name.parse().expect("a name")
}

pub(crate) fn me(name: &str, number: u64) -> Me {
    Me { node: node(name), incarnation: incarnation(number) }
}

pub(crate) fn begun() -> RunStarted {
    RunStarted { tree_control: None, isolation: None, pid: None }
}

pub(crate) fn succeeded() -> ExitStatus {
    ExitStatus { code: Some(0), signal: None }
}

/// A line `!ask QUESTION` asks.
#[derive(Debug)]
pub(crate) struct Asks;

impl Parser for Asks {
    fn derive(&self, _: Stream, line: &[u8], events: &mut Vec<Event>) {
        events.extend(question(line));
    }
}

fn question(line: &[u8]) -> Option<Event> {
    let question = String::from_utf8_lossy(line.strip_prefix(b"!ask ")?).into_owned();
    Some(EscalationRaised { escalation: question.clone(), question }.into())
}

/// One record of a spool.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Record {
    pub(crate) offset: u64,
    pub(crate) end: u64,
    pub(crate) stream: Stream,
    pub(crate) stream_offset: u64,
    pub(crate) time: Timestamp,
    pub(crate) bytes: Vec<u8>,
}

/// The harness writes.
pub(crate) fn write(spool: &mut Vec<Record>, stream: Stream, bytes: &[u8], time: Timestamp) {
    let before = spool.iter().rev().find(|record| record.stream == stream);
    let stream_offset = before.map_or(0, |record| record.stream_offset + long(record.bytes.len()));
    let offset = spool.last().map_or(0, |record| record.end);
    let end = offset + RECORD_OVERHEAD + long(bytes.len());
    spool.push(Record { offset, end, stream, stream_offset, time, bytes: bytes.to_vec() });
}

pub(crate) fn long(length: usize) -> u64 {
    u64::try_from(length).expect("a length in memory fits 64 bits")
}

/// What must come out of a spool: told byte by byte, without the splitter.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Expected {
    /// Log events, in order.
    pub(crate) log: Vec<(Stream, Vec<u8>)>,
    /// Questions, in order of their lines.
    pub(crate) derived: Vec<Source>,
}

impl Expected {
    /// `ended`: the lines without an end are given out, too.
    pub(crate) fn of(spool: &[Record], ended: bool) -> Self {
        let mut expected = Self::default();
        let mut held: Vec<(Stream, u64, Vec<u8>)> = Vec::new();
        for record in spool {
            for (at, byte) in (record.stream_offset..).zip(&record.bytes) {
                let of = held.iter().position(|(stream, ..)| *stream == record.stream);
                let of = of.unwrap_or_else(|| {
                    held.push((record.stream, at, Vec::new()));
                    held.len() - 1
                });
                if *byte == b'\n' {
                    let (stream, from, line) = held.remove(of);
                    expected.give(stream, from, line);
                } else {
                    held[of].2.push(*byte);
                }
            }
        }
        if ended {
            held.into_iter().for_each(|(stream, from, line)| expected.give(stream, from, line));
        }
        expected
    }

    fn give(&mut self, stream: Stream, offset: u64, line: Vec<u8>) {
        if question(&line).is_some() {
            self.derived.push(Source { stream, offset, index: 0 });
        }
        self.log.push((stream, line));
    }
}
