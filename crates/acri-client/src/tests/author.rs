//! Writes a history as a node would.

use crate::{Client, Limits};
use acri::{
    AgentId, AgentSpec, CapabilitySet, CommandId, Event, EventEnvelope, EventId, Incarnation, NodeId, Payload, RunId,
    StreamSeq, Subject, Timestamp, codec,
    event::{AgentCreated, ExitStatus, RunAccepted, RunCompleted, RunLogsSealed, RunStarted},
    id::{Epoch, EventSeq, LogSeq, Sha256Digest},
    log::{LogFrame, LogRecord, LogType, Origin, ResumeToken, Stream},
};
use acri_bus::{
    memory::MemoryBus,
    port::{Append, Appended, Events as _, FrameAppend, Leased, Leases as _, Logs as _},
};
use std::{sync::Arc, time::Duration};
use uuid::Uuid;

pub(super) const RUN_COMMAND: Uuid = uuid::uuid!("01936f5e-8a00-7000-8000-00000000000b");

pub(super) struct Author {
    pub(super) bus: MemoryBus,
    pub(super) agent: AgentId,
    pub(super) run: RunId,
    node: NodeId,
    incarnation: Incarnation,
    sequence: u64,
    run_sequence: u64,
    last: StreamSeq,
    prev: Option<Sha256Digest>,
    next_log: u64,
    last_frame: StreamSeq,
}

/// Waits that suit a test whose time is tokio's.
pub(super) fn limits() -> Limits {
    Limits {
        command_deadline: Duration::from_secs(5),
        attempt_timeout: Duration::from_secs(1),
        query_attempt_timeout: Duration::from_secs(1),
        ..Limits::default()
    }
}

impl Author {
    /// An agent with a started run.
    pub(super) async fn begin() -> Self {
        let command = CommandId::from_uuid(uuid::uuid!("01936f5e-8a00-7000-8000-00000000000a"));
        let agent = AgentId::derive(&"process".parse().unwrap(), command);
        let run = RunId::derive(agent, CommandId::from_uuid(RUN_COMMAND));
        let mut author = Self {
            bus: MemoryBus::new(),
            agent,
            run,
            node: "node-1".parse().unwrap(),
            incarnation: Incarnation::from_uuid(Uuid::from_u128(9)),
            sequence: 0,
            run_sequence: 0,
            last: StreamSeq(0),
            prev: None,
            next_log: 1,
            last_frame: StreamSeq(0),
        };
        let harness: acri::HarnessType = "process".parse().unwrap();
        let spec = AgentSpec::new(harness.clone(), vec!["true".into()]);
        let capabilities = CapabilitySet::none(harness);
        author.own(AgentCreated { spec, capabilities, working_directory: None }, Some(command)).await;
        let start = Some(CommandId::from_uuid(RUN_COMMAND));
        author.of_run(RunAccepted { task: Payload::text("") }, start).await;
        author.of_run(RunStarted { tree_control: None, isolation: None, pid: None }, None).await;
        author
    }

    /// A client of its own, with faults of its own.
    pub(super) fn client(&self) -> (Client, MemoryBus) {
        let bus = self.bus.another();
        (Client::with_limits(Arc::new(bus.clone()), "tester".into(), limits()), bus)
    }

    pub(super) async fn lease(&self) {
        let written = self.bus.write_lease(self.incarnation, &self.node, StreamSeq(0), Duration::from_secs(15)).await;
        assert!(matches!(written, Leased::Written(_)), "{written:?}");
    }

    pub(super) async fn own(&mut self, event: impl Into<Event>, cause: Option<CommandId>) {
        self.append(event.into(), None, cause).await;
    }

    pub(super) async fn of_run(&mut self, event: impl Into<Event>, cause: Option<CommandId>) {
        self.run_sequence += 1;
        self.append(event.into(), Some(self.run), cause).await;
    }

    async fn append(&mut self, event: Event, run: Option<RunId>, cause: Option<CommandId>) {
        self.sequence += 1;
        let id = EventId::from_uuid(Uuid::from_u128(0x1000 + u128::from(self.sequence)));
        let subject = Subject::Event(self.agent, run, event.type_name().to_owned());
        let envelope = EventEnvelope {
            id,
            agent: self.agent,
            run,
            sequence: EventSeq(self.sequence),
            run_sequence: run.map(|_| EventSeq(self.run_sequence)),
            time: Timestamp::from_micros(1_764_500_000_000_000),
            node: self.node.clone(),
            incarnation: self.incarnation,
            epoch: Epoch(1),
            cause,
            principal: cause.map(|_| "tester".to_owned()),
            source: None,
            prev: self.prev,
            event,
        };
        let bytes = codec::to_msgpack(&envelope).unwrap();
        self.prev = Some(Sha256Digest::of(&bytes));
        let append = Append { subject, id, expect: self.last, bytes: bytes.into() };
        match self.bus.append(&append).await {
            Appended::Stored(seq) => self.last = seq,
            other => panic!("{other:?}"),
        }
    }

    /// A frame of these lines.
    pub(super) async fn write(&mut self, lines: &[&str]) {
        let record = |line: &&str| LogRecord {
            time: Timestamp::from_micros(1_764_500_000_000_000),
            kind: LogType::Message,
            payload: Payload::text(*line),
            stream: Some(Stream::Stdout),
            origin: Origin::Passthrough,
            part: None,
            more: false,
        };
        let frame = LogFrame {
            agent: self.agent,
            run: Some(self.run),
            sequence: LogSeq(self.next_log),
            events: lines.iter().map(record).collect(),
        };
        self.next_log += u64::try_from(lines.len()).unwrap();
        let token = ResumeToken { next_sequence: LogSeq(self.next_log), ..ResumeToken::start() };
        let append = FrameAppend {
            agent: self.agent,
            run: Some(self.run),
            expect: self.last_frame,
            epoch: Epoch(1),
            resume: codec::to_msgpack(&token).unwrap().into(),
            bytes: codec::to_msgpack(&frame).unwrap().into(),
        };
        match self.bus.append_frame(&append).await {
            Appended::Stored(seq) => self.last_frame = seq,
            other => panic!("{other:?}"),
        }
    }

    pub(super) async fn complete(&mut self) {
        let exit = Some(ExitStatus { code: Some(0), signal: None });
        self.of_run(RunCompleted { exit }, None).await;
    }

    pub(super) async fn seal(&mut self) {
        let count = LogSeq(self.next_log - 1);
        self.of_run(RunLogsSealed { count, chain: Sha256Digest::default(), gap: false }, None).await;
    }
}
