//! What happened: the facts that an agent and its runs consist of.
//!
//! The eleven types of the spec keep their names; the others extend them. A
//! type that this version does not know is kept as it came
//! ([`Event::Unknown`]) and skipped by a fold.

use crate::{
    capability::CapabilitySet,
    codec::Format,
    command::OnExpiry,
    id::{AgentId, CommandId, Epoch, EventId, EventSeq, Incarnation, LogSeq, NodeId, RunId, Sha256Digest},
    log::Stream,
    payload::Payload,
    spec::AgentSpec,
    time::Timestamp,
    value::Value,
};
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, Visitor},
};
use std::fmt;

/// Where in the harness's output an event was found. State keeps the highest
/// per stream; output that is parsed again yields nothing at or below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Source {
    /// Which stream.
    pub stream: Stream,
    /// Byte offset in that stream, of the record's first byte.
    pub offset: u64,
    /// Which event of that record.
    #[serde(default)]
    pub index: u32,
}

/// One event as stored: `Nats-Msg-Id` is its `id`, its subject is
/// `acri.v1.event.<shard>.<agent>.<run or _>.<type>`.
#[derive(Debug, Clone, PartialEq)]
pub struct EventEnvelope {
    /// Minted once for this body.
    pub id: EventId,
    /// Whose event.
    pub agent: AgentId,
    /// Of which run; `None` for the agent's own.
    pub run: Option<RunId>,
    /// Position in the agent's history, from 1.
    pub sequence: EventSeq,
    /// Position in the run's history, from 1; `None` for the agent's own.
    pub run_sequence: Option<EventSeq>,
    /// When it was decided, by the bus's clock as the node knows it.
    pub time: Timestamp,
    /// Who decided.
    pub node: NodeId,
    /// Which start of that node.
    pub incarnation: Incarnation,
    /// As which owner.
    pub epoch: Epoch,
    /// The command that caused it.
    pub cause: Option<CommandId>,
    /// Who gave that command.
    pub principal: Option<String>,
    /// Where in the harness's output it was found.
    pub source: Option<Source>,
    /// SHA-256 of the stored bytes of the agent's previous event; `None` for
    /// the first.
    pub prev: Option<Sha256Digest>,
    /// What happened.
    pub event: Event,
}

#[derive(Serialize)]
struct WireOut<'a> {
    id: EventId,
    agent: AgentId,
    #[serde(skip_serializing_if = "Option::is_none")]
    run: Option<RunId>,
    sequence: EventSeq,
    #[serde(skip_serializing_if = "Option::is_none")]
    run_sequence: Option<EventSeq>,
    time: Timestamp,
    node: &'a NodeId,
    incarnation: Incarnation,
    epoch: Epoch,
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<CommandId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    principal: &'a Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<Source>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prev: Option<Sha256Digest>,
    r#type: &'a str,
    data: DataOut<'a>,
}

impl Serialize for EventEnvelope {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        WireOut {
            id: self.id,
            agent: self.agent,
            run: self.run,
            sequence: self.sequence,
            run_sequence: self.run_sequence,
            time: self.time,
            node: &self.node,
            incarnation: self.incarnation,
            epoch: self.epoch,
            cause: self.cause,
            principal: &self.principal,
            source: self.source,
            prev: self.prev,
            r#type: self.event.type_name(),
            data: DataOut(&self.event),
        }
        .serialize(serializer)
    }
}

/// The names of the envelope's fields on the wire; others are passed by.
#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Field {
    Id,
    Agent,
    Run,
    Sequence,
    RunSequence,
    Time,
    Node,
    Incarnation,
    Epoch,
    Cause,
    Principal,
    Source,
    Prev,
    Type,
    Data,
    #[serde(other)]
    Other,
}

impl<'de> Deserialize<'de> for EventEnvelope {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let format = if deserializer.is_human_readable() { Format::Json } else { Format::MessagePack };
        deserializer.deserialize_map(EnvelopeVisitor(format))
    }
}

/// Reads an envelope in one pass where its type stands before its data, as it
/// is written here; data that comes first is kept as a [`Value`] meanwhile.
struct EnvelopeVisitor(Format);

impl<'de> Visitor<'de> for EnvelopeVisitor {
    type Value = EventEnvelope;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an event")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<EventEnvelope, A::Error> {
        let (mut id, mut agent, mut run, mut sequence, mut run_sequence) = (None, None, None, None, None);
        let (mut time, mut node, mut incarnation, mut epoch) = (None, None, None, None);
        let (mut cause, mut principal, mut source, mut prev) = (None, None, None, None);
        let (mut type_name, mut data, mut early) = (None::<String>, None, None);
        while let Some(field) = map.next_key()? {
            match field {
                Field::Id => once(&mut map, "id", &mut id)?,
                Field::Agent => once(&mut map, "agent", &mut agent)?,
                Field::Run => once(&mut map, "run", &mut run)?,
                Field::Sequence => once(&mut map, "sequence", &mut sequence)?,
                Field::RunSequence => once(&mut map, "run_sequence", &mut run_sequence)?,
                Field::Time => once(&mut map, "time", &mut time)?,
                Field::Node => once(&mut map, "node", &mut node)?,
                Field::Incarnation => once(&mut map, "incarnation", &mut incarnation)?,
                Field::Epoch => once(&mut map, "epoch", &mut epoch)?,
                Field::Cause => once(&mut map, "cause", &mut cause)?,
                Field::Principal => once(&mut map, "principal", &mut principal)?,
                Field::Source => once(&mut map, "source", &mut source)?,
                Field::Prev => once(&mut map, "prev", &mut prev)?,
                Field::Type => once(&mut map, "type", &mut type_name)?,
                Field::Data if data.is_some() || early.is_some() => return Err(A::Error::duplicate_field("data")),
                Field::Data => match &type_name {
                    Some(type_name) => data = Some(map.next_value_seed(DataOf(type_name))?),
                    None => early = Some(map.next_value()?),
                },
                Field::Other => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        let type_name = needed("type", type_name)?;
        let event = match (data, early) {
            (Some(event), _) => event,
            (None, Some(data)) => Event::of_parts(self.0, type_name, data).map_err(A::Error::custom)?,
            (None, None) => return Err(A::Error::missing_field("data")),
        };
        Ok(EventEnvelope {
            id: needed("id", id)?,
            agent: needed("agent", agent)?,
            run: run.flatten(),
            sequence: needed("sequence", sequence)?,
            run_sequence: run_sequence.flatten(),
            time: needed("time", time)?,
            node: needed("node", node)?,
            incarnation: needed("incarnation", incarnation)?,
            epoch: needed("epoch", epoch)?,
            cause: cause.flatten(),
            principal: principal.flatten(),
            source: source.flatten(),
            prev: prev.flatten(),
            event,
        })
    }
}

fn once<'de, A: MapAccess<'de>, T: Deserialize<'de>>(
    map: &mut A,
    name: &'static str,
    slot: &mut Option<T>,
) -> Result<(), A::Error> {
    if slot.is_some() {
        return Err(A::Error::duplicate_field(name));
    }
    *slot = Some(map.next_value()?);
    Ok(())
}

fn needed<T, E: serde::de::Error>(name: &'static str, value: Option<T>) -> Result<T, E> {
    value.ok_or_else(|| E::missing_field(name))
}

/// Reads the data of this type of event.
struct DataOf<'a>(&'a str);

macro_rules! events {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// What happened, by type. The data of each type is the struct of the
        /// same name.
        #[derive(Debug, Clone, PartialEq)]
        #[expect(clippy::large_enum_variant, reason = "an event is decoded, folded and dropped; few are kept")]
        pub enum Event {
            $($(#[$doc])* $variant($variant),)*
            /// A type that this version does not know, kept as it came.
            Unknown {
                /// The type's name on the wire.
                type_name: String,
                /// Its data.
                data: Value,
            },
        }

        /// The names of all event types that this version knows.
        pub const TYPE_NAMES: &[&str] = &[$($name),*];

        impl Event {
            /// The name of the type on the wire and in the subject.
            #[must_use]
            pub fn type_name(&self) -> &str {
                match self {
                    $(Self::$variant(_) => $name,)*
                    Self::Unknown { type_name, .. } => type_name,
                }
            }

            /// Where the data came before its type.
            fn of_parts(
                format: Format,
                type_name: String,
                data: Value,
            ) -> Result<Self, crate::codec::Error> {
                match type_name.as_str() {
                    $($name => {
                        let bytes = crate::codec::encode(format, &data)?;
                        crate::codec::decode(format, &bytes).map(Self::$variant)
                    })*
                    _ => Ok(Self::Unknown { type_name, data }),
                }
            }
        }

        $(impl From<$variant> for Event {
            fn from(data: $variant) -> Self {
                Self::$variant(data)
            }
        })*

        impl<'de> DeserializeSeed<'de> for DataOf<'_> {
            type Value = Event;

            fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Event, D::Error> {
                match self.0 {
                    $($name => $variant::deserialize(deserializer).map(Event::$variant),)*
                    type_name => {
                        let data = Value::deserialize(deserializer)?;
                        Ok(Event::Unknown { type_name: type_name.to_owned(), data })
                    }
                }
            }
        }

        struct DataOut<'a>(&'a Event);

        impl Serialize for DataOut<'_> {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                match self.0 {
                    $(Event::$variant(data) => data.serialize(serializer),)*
                    Event::Unknown { data, .. } => data.serialize(serializer),
                }
            }
        }
    };
}

events! {
    /// The agent exists; its first event, and its first owner's claim.
    AgentCreated = "agent.created",
    /// Another owner took the agent; the epoch is the envelope's.
    AgentAssigned = "agent.assigned",
    /// The agent was given up; its last event.
    AgentRemoved = "agent.removed",
    /// A Start was accepted; the run is pending.
    RunAccepted = "run.accepted",
    /// The harness has begun.
    RunStarted = "run.started",
    /// The run is blocked.
    RunWaiting = "run.waiting",
    /// The run is no longer blocked.
    RunResumed = "run.resumed",
    /// A Stop was accepted.
    RunStopRequested = "run.stop_requested",
    /// A Stop's grace is over and the run goes on.
    RunStopExpired = "run.stop_expired",
    /// A Kill was accepted.
    RunKillRequested = "run.kill_requested",
    /// The run ended with proved success.
    RunCompleted = "run.completed",
    /// The run ended within the grace of a Stop.
    RunStopped = "run.stopped",
    /// The run ended otherwise.
    RunFailed = "run.failed",
    /// The run was killed and its process tree is proved gone.
    RunKilled = "run.killed",
    /// The run's log is complete; nothing follows for this run.
    RunLogsSealed = "run.logs_sealed",
    /// The harness asks something.
    EscalationRaised = "escalation.raised",
}

/// Data of `agent.created`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentCreated {
    /// The spec as accepted.
    pub spec: AgentSpec,
    /// What the harness can do on the creating node.
    pub capabilities: CapabilitySet,
    /// Absolute working directory in force, for harnesses that have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_directory: Option<String>,
}

/// Data of `agent.assigned`. Node, incarnation and epoch are the envelope's;
/// the two times are what the holder and observers go by from now on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentAssigned {
    /// See [`AgentSpec::orphan_after_ms`](crate::AgentSpec).
    pub orphan_after_ms: u64,
    /// See [`AgentSpec::node_lost_after_ms`](crate::AgentSpec).
    pub node_lost_after_ms: u64,
}

/// Data of `agent.removed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentRemoved {
    /// Why.
    #[serde(default)]
    pub reason: String,
}

/// Data of `run.accepted`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunAccepted {
    /// The task.
    pub task: Payload,
}

/// Data of `run.started`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunStarted {
    /// How the process tree is held: `cgroup`, `pidns`, `subreaper`. Missing
    /// where the harness is no local process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tree_control: Option<String>,
    /// What keeps the harness from the node's own files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub isolation: Option<String>,
    /// Process id of the harness on its node, for a human's eyes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

/// What a run waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitReason {
    /// A tool call.
    ToolCall,
    /// An answer to its question.
    Clarification,
    /// A resource.
    Resource,
    /// It is held by an injection.
    Paused,
}

impl WaitReason {
    /// The name on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ToolCall => "tool_call",
            Self::Clarification => "clarification",
            Self::Resource => "resource",
            Self::Paused => "paused",
        }
    }
}

/// Data of `run.waiting`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunWaiting {
    /// For what.
    pub reason: WaitReason,
}

/// Data of `run.resumed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunResumed {}

/// Data of `run.stop_requested`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunStopRequested {
    /// Why.
    pub reason: String,
    /// When the grace is over.
    pub deadline: Timestamp,
    /// What happens then.
    #[serde(default)]
    pub on_expiry: OnExpiry,
}

/// Data of `run.stop_expired`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunStopExpired {}

/// Data of `run.kill_requested`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunKillRequested {
    /// Why.
    pub reason: String,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ExitStatus {
    /// Its exit code, unless a signal ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<i32>,
    /// The signal that ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
}

/// Data of `run.completed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunCompleted {
    /// How its process ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<ExitStatus>,
}

/// What is kept for the next Start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Checkpoint {
    /// The harness saved one.
    Native,
    /// None.
    None,
}

/// Data of `run.stopped`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunStopped {
    /// The reason of the Stop.
    pub reason: String,
    /// What is kept.
    pub checkpoint: Checkpoint,
    /// How its process ended: the final status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<ExitStatus>,
}

/// Why a run failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailReason {
    /// The process ended with another status than 0, or by a signal that
    /// nobody asked for.
    Exit,
    /// The harness could not be started: no such program, no permission, no
    /// such directory.
    SpawnFailed,
    /// It did not begin in time.
    StartTimedOut,
    /// Its holder is gone and with it what it was doing.
    HarnessLost,
    /// No owner spoke to its holder for `orphan_after`; the holder killed it.
    Orphaned,
    /// Its node was silent for `node_lost_after`.
    NodeLost,
    /// Its machine was restarted.
    MachineRestarted,
    /// The event stream lost acknowledged events.
    HistoryLost,
}

impl FailReason {
    /// The name on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Exit => "exit",
            Self::SpawnFailed => "spawn_failed",
            Self::StartTimedOut => "start_timed_out",
            Self::HarnessLost => "harness_lost",
            Self::Orphaned => "orphaned",
            Self::NodeLost => "node_lost",
            Self::MachineRestarted => "machine_restarted",
            Self::HistoryLost => "history_lost",
        }
    }
}

/// Data of `run.failed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunFailed {
    /// Why.
    pub reason: FailReason,
    /// In words.
    #[serde(default)]
    pub message: String,
    /// How its process ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<ExitStatus>,
}

/// Why a run was killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KillCause {
    /// By a Kill.
    Requested,
    /// By a Stop whose grace expired.
    GraceExpired,
}

/// Data of `run.killed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunKilled {
    /// By what.
    pub cause: KillCause,
    /// The reason that was given.
    pub reason: String,
    /// How its process ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<ExitStatus>,
}

/// Data of `run.logs_sealed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunLogsSealed {
    /// How many log events the run has.
    pub count: LogSeq,
    /// The chain over all its frames.
    pub chain: Sha256Digest,
    /// Whether output is known to be missing (a torn spool, a lost machine).
    #[serde(default)]
    pub gap: bool,
}

/// Data of `escalation.raised`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EscalationRaised {
    /// The harness's own name for the question, unique in the run.
    pub escalation: String,
    /// The question.
    pub question: String,
}

impl Event {
    /// Whether this event ends its run.
    #[must_use]
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::RunCompleted(_) | Self::RunStopped(_) | Self::RunFailed(_) | Self::RunKilled(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec;
    use std::collections::BTreeMap;
    use uuid::uuid;

    fn envelope(event: Event) -> EventEnvelope {
        EventEnvelope {
            id: EventId::from_uuid(uuid!("01936f5e-8a00-7000-8000-000000000001")),
            agent: AgentId::from_uuid(uuid!("01936f5e-8a00-8000-8000-000000000002")),
            run: None,
            sequence: EventSeq(1),
            run_sequence: None,
            time: Timestamp::from_micros(1_764_500_000_000_000),
            node: "node-1".parse().unwrap(),
            incarnation: Incarnation::from_uuid(uuid!("01936f5e-8a00-8000-8000-000000000003")),
            epoch: Epoch(1),
            cause: None,
            principal: None,
            source: Some(Source { stream: Stream::Stdout, offset: 3, index: 0 }),
            prev: Some(Sha256Digest::of(b"x")),
            event,
        }
    }

    #[test]
    fn an_event_survives_both_formats() {
        let event = envelope(RunFailed { reason: FailReason::Exit, message: "status 3".into(), exit: None }.into());
        for format in [Format::MessagePack, Format::Json] {
            let bytes = codec::encode(format, &event).unwrap();
            assert_eq!(codec::decode::<EventEnvelope>(format, &bytes).unwrap(), event, "{format:?}");
        }
    }

    #[test]
    fn an_unknown_type_is_kept_with_its_data_bytes_included() {
        let data = Value::Map([("bytes".to_owned(), Value::Bytes(vec![0, 159]))].into());
        let event = envelope(Event::Unknown { type_name: "run.teleported".into(), data });
        let bytes = codec::to_msgpack(&event).unwrap();
        let again: EventEnvelope = codec::from_msgpack(&bytes).unwrap();
        assert_eq!(again, event);
        assert_eq!(codec::to_msgpack(&again).unwrap(), bytes);
    }

    #[test]
    fn a_known_type_with_data_that_does_not_fit_is_an_error() {
        let event = envelope(Event::Unknown { type_name: "run.failed".into(), data: Value::Map([].into()) });
        let bytes = codec::to_msgpack(&event).unwrap();
        assert!(codec::from_msgpack::<EventEnvelope>(&bytes).is_err());
    }

    #[test]
    fn fields_are_taken_in_any_order_once_and_others_are_passed_by() {
        let event = envelope(RunFailed { reason: FailReason::Exit, message: "status 3".into(), exit: None }.into());
        let bytes = codec::encode(Format::Json, &event).unwrap();
        let fields: BTreeMap<String, serde_json::Value> = serde_json::from_slice(&bytes).unwrap();
        // In the order of the alphabet the data comes long before its type.
        let sorted = serde_json::to_string(&fields).unwrap();
        assert!(sorted.find("\"data\"") < sorted.find("\"type\""));
        let read = |text: &str| codec::decode::<EventEnvelope>(Format::Json, text.as_bytes());
        assert_eq!(read(&sorted).unwrap(), event);
        assert_eq!(read(&sorted.replacen('{', "{\"later\":[1],", 1)).unwrap(), event);
        for field in fields.keys() {
            let doubled = sorted.replacen('{', &format!("{{\"{field}\":{},", fields[field]), 1);
            assert!(read(&doubled).unwrap_err().to_string().contains("duplicate field"), "{field}");
            let mut fewer = fields.clone();
            fewer.remove(field);
            let optional = ["prev", "source"].contains(&field.as_str());
            assert_eq!(read(&serde_json::to_string(&fewer).unwrap()).is_ok(), optional, "without {field}");
        }
    }

    #[test]
    fn exactly_the_four_terminal_types_end_a_run() {
        let killed = Event::from(RunKilled { cause: KillCause::Requested, reason: String::new(), exit: None });
        assert!(killed.is_terminal());
        assert!(!Event::from(RunStopExpired {}).is_terminal());
    }
}
