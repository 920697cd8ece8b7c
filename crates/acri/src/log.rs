//! What a harness said: log events, and the frames that carry them.

use crate::{
    event::Source,
    id::{AgentId, LogSeq, RunId, Sha256Digest},
    payload::Payload,
    time::Timestamp,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

pub mod decode;
pub mod encode;
pub mod packed;

/// Which output of a local harness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

impl Stream {
    /// The name on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }
}

/// The five types of the spec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogType {
    /// The harness calls a tool.
    ToolCall,
    /// A tool answered.
    ToolResult,
    /// The harness thinks aloud.
    ReasoningStep,
    /// The harness says something, or its process wrote a line.
    Message,
    /// Something went wrong.
    Error,
}

impl LogType {
    /// The name on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ToolCall => "tool_call",
            Self::ToolResult => "tool_result",
            Self::ReasoningStep => "reasoning_step",
            Self::Message => "message",
            Self::Error => "error",
        }
    }
}

/// How a log event came to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// The harness wrote it as such.
    Native,
    /// The driver made it out of another form.
    Parsed,
    /// Plain output, wrapped.
    #[default]
    Passthrough,
}

impl Origin {
    /// The name on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Parsed => "parsed",
            Self::Passthrough => "passthrough",
        }
    }

    fn is_passthrough(&self) -> bool {
        *self == Self::Passthrough
    }
}

/// A log event within its frame: run and sequence are the frame's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogRecord {
    /// When the harness wrote it.
    pub time: Timestamp,
    /// What it is.
    #[serde(rename = "type")]
    pub kind: LogType,
    /// Its payload.
    pub payload: Payload,
    /// Which output it came from; missing where the harness has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<Stream>,
    /// How it came to be; missing means `passthrough`.
    #[serde(default, skip_serializing_if = "Origin::is_passthrough")]
    pub origin: Origin,
    /// Which part of a line that was split, from 0; missing for a whole line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<u32>,
    /// Whether the line goes on in the next event of the same stream.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub more: bool,
}

/// One stored message of `acri.v1.log.<shard>.<agent>.<run>`: consecutive log
/// events of one run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogFrame {
    /// Whose.
    pub agent: AgentId,
    /// Of which run; missing for the agent's provisioning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunId>,
    /// Sequence of the first event; the others follow without a hole.
    pub sequence: LogSeq,
    /// The events.
    pub events: Vec<LogRecord>,
}

/// A log event as a reader sees it (spec, section 2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEvent {
    /// Whose.
    pub agent: AgentId,
    /// Of which run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunId>,
    /// Position in the run's log, from 1, without a hole.
    pub sequence: LogSeq,
    /// When the harness wrote it.
    pub time: Timestamp,
    /// What it is.
    #[serde(rename = "type")]
    pub kind: LogType,
    /// Its payload.
    pub payload: Payload,
    /// Which output it came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<Stream>,
    /// How it came to be.
    #[serde(default)]
    pub origin: Origin,
    /// Which part of a line that was split, from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<u32>,
    /// Whether the line goes on in the next event of the same stream.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub more: bool,
}

impl LogFrame {
    /// The sequence after the last event.
    #[must_use]
    pub fn next_sequence(&self) -> LogSeq {
        LogSeq(self.sequence.0 + u64::try_from(self.events.len()).unwrap_or(u64::MAX))
    }

    /// The events as readers see them.
    pub fn into_events(self) -> impl Iterator<Item = LogEvent> {
        let (agent, run, first) = (self.agent, self.run, self.sequence.0);
        self.events.into_iter().zip(first..).map(move |(record, sequence)| LogEvent {
            agent,
            run,
            sequence: LogSeq(sequence),
            time: record.time,
            kind: record.kind,
            payload: record.payload,
            stream: record.stream,
            origin: record.origin,
            part: record.part,
            more: record.more,
        })
    }
}

/// Where the splitter of one stream stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ParserState {
    /// Between lines.
    #[default]
    Plain,
    /// Inside a line of which `part` parts are published.
    InsideLine {
        /// Number of the next part.
        part: u32,
    },
}

/// How far one stream is published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StreamPosition {
    /// Bytes of the stream that are in stored frames.
    pub published: u64,
    /// Where the splitter stood behind them.
    pub parser: ParserState,
}

/// Everything that the next owner needs to go on after a frame: in its header
/// `Acri-Resume`, as base64 of MessagePack.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ResumeToken {
    /// How far each stream is published. A missing stream: nothing of it.
    #[serde(default)]
    pub streams: BTreeMap<Stream, StreamPosition>,
    /// Lowest offset in the spool whose record is not wholly published.
    pub spool_offset: u64,
    /// Sequence of the next log event, counted from 1.
    pub next_sequence: LogSeq,
    /// Highest source of a derived event, per stream.
    #[serde(default)]
    pub sources: BTreeMap<Stream, Source>,
    /// SHA-256 chained over all frames of the run up to this one.
    pub chain: Sha256Digest,
}

impl ResumeToken {
    /// The token before the first frame.
    #[must_use]
    pub fn start() -> Self {
        Self { next_sequence: LogSeq(1), ..Self::default() }
    }
}

/// Names of the headers of a log frame.
pub mod header {
    /// Epoch of the owner who wrote the frame, in decimal.
    pub const EPOCH: &str = "Acri-Epoch";
    /// The [`ResumeToken`](super::ResumeToken) after this frame.
    pub const RESUME: &str = "Acri-Resume";
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec;

    #[test]
    fn a_token_survives_and_its_chain_depends_on_every_frame() {
        let mut token = ResumeToken::start();
        token
            .streams
            .insert(Stream::Stdout, StreamPosition { published: 3, parser: ParserState::InsideLine { part: 1 } });
        let bytes = codec::to_msgpack(&token).unwrap();
        assert_eq!(codec::from_msgpack::<ResumeToken>(&bytes).unwrap(), token);
        assert_ne!(token.chain.chained(b"a").chained(b"b"), token.chain.chained(b"b").chained(b"a"));
    }

    #[test]
    fn a_whole_line_of_256_bytes_costs_less_than_96_bytes_more() {
        let record = LogRecord {
            time: Timestamp::from_micros(1_764_500_000_000_000),
            kind: LogType::Message,
            payload: Payload::text("x".repeat(256)),
            stream: Some(Stream::Stdout),
            origin: Origin::Passthrough,
            part: None,
            more: false,
        };
        let bytes = codec::to_msgpack(&record).unwrap();
        assert!(bytes.len() < 256 + 96, "{}", bytes.len());
    }
}
