//! A world of one agent: an event store, a clock, ids, and one machine or
//! none.

use crate::{
    agent::Agent,
    appender::{Appender, Asker, Command, Creation, Ctx, Halt, Input, Me, Order, Output, Stored, Token, bug},
};
use acri::{
    AgentId, AgentSpec, CapabilitySet, CommandId, Epoch, Event, EventEnvelope, EventId, HarnessType, Incarnation,
    RunId, StreamSeq, Subject, Timestamp, codec, command::CreateAgent, event::AgentAssigned, id::Sha256Digest,
};
use bytes::Bytes;
use std::{collections::BTreeMap, time::Duration};
use uuid::Uuid;

/// The first moment.
pub(super) const START_MS: u64 = 1_764_500_000_000;

/// An append that is under way.
#[derive(Debug, Clone)]
pub(super) struct UnderWay {
    pub(super) token: Token,
    pub(super) subject: Subject,
    pub(super) expect: StreamSeq,
    pub(super) bytes: Bytes,
}

#[derive(Clone)]
pub(super) struct World {
    pub(super) now: Timestamp,
    pub(super) events_percent: u64,
    pub(super) machine: Option<Appender>,
    pub(super) store: Vec<(Subject, Stored)>,
    events: Vec<EventEnvelope>,
    pub(super) next_seq: u64,
    pub(super) append: Option<UnderWay>,
    pub(super) read: Option<(Token, StreamSeq)>,
    pub(super) spec: AgentSpec,
    commands: BTreeMap<String, CommandId>,
    minted: u128,
    owners: u64,
    askers: u64,
}

pub(super) fn harness() -> HarnessType {
    "process".parse().unwrap()
}

impl World {
    pub(super) fn new() -> Self {
        Self {
            now: Timestamp::from_micros(i64::try_from(START_MS).unwrap() * 1000),
            events_percent: 0,
            machine: None,
            store: Vec::new(),
            events: Vec::new(),
            next_seq: 10,
            append: None,
            read: None,
            spec: AgentSpec::new(harness(), vec!["true".to_owned()]),
            commands: BTreeMap::new(),
            minted: 0,
            owners: 0,
            askers: 0,
        }
    }

    pub(super) fn start() -> Timestamp {
        Timestamp::from_micros(i64::try_from(START_MS).unwrap() * 1000)
    }

    /// The command of this name; the first use mints it.
    pub(super) fn command_id(&mut self, name: &str) -> CommandId {
        let millis = u128::try_from(self.now.as_micros() / 1000).unwrap();
        let number = self.commands.len() as u128 + 1;
        *self
            .commands
            .entry(name.to_owned())
            .or_insert_with(|| CommandId::from_uuid(Uuid::from_u128((millis << 80) | (7 << 76) | (2 << 62) | number)))
    }

    pub(super) fn set_command_id(&mut self, name: &str, id: CommandId) {
        self.commands.insert(name.to_owned(), id);
    }

    pub(super) fn agent(&mut self) -> AgentId {
        let create = self.command_id("create");
        AgentId::derive(&harness(), create)
    }

    pub(super) fn run(&mut self, start: &str) -> RunId {
        let command = self.command_id(start);
        RunId::derive(self.agent(), command)
    }

    pub(super) fn asker(&mut self) -> Asker {
        self.askers += 1;
        Asker(self.askers)
    }

    fn me(&mut self) -> Me {
        self.owners += 1;
        let incarnation = Incarnation::from_uuid(Uuid::from_u128(u128::from(self.owners) << 64));
        Me { node: format!("node-{}", self.owners).parse().unwrap(), incarnation }
    }

    pub(super) fn command(&mut self, name: &str, order: Order) -> Command {
        Command { id: self.command_id(name), principal: "ann".to_owned(), expires: None, order }
    }

    fn with_ctx<T>(&mut self, act: impl FnOnce(&mut Option<Appender>, Ctx<'_>) -> T) -> T {
        let minted = &mut self.minted;
        let mut mint = || {
            *minted += 1;
            EventId::from_uuid(Uuid::from_u128(*minted))
        };
        act(&mut self.machine, Ctx { now: self.now, events_percent: self.events_percent, mint: &mut mint })
    }

    pub(super) fn create(&mut self, name: &str) -> Vec<Output> {
        let (me, asker, spec) = (self.me(), self.asker(), self.spec.clone());
        let command = self.command(name, Order::Create(CreateAgent { spec: spec.clone() }));
        let creation = Creation {
            harness: harness(),
            agent: self.agent(),
            spec,
            capabilities: CapabilitySet::none(harness()),
            working_directory: None,
        };
        self.drop_machine();
        let out = self.with_ctx(|machine, ctx| {
            let (made, out) = Appender::create(me, creation, asker, command, ctx);
            *machine = Some(made);
            out
        });
        self.note(&out);
        out
    }

    pub(super) fn adopt(&mut self, history_lost: bool) -> Result<Vec<Output>, Halt> {
        let me = self.me();
        let history: Vec<Stored> = self.store.iter().map(|(_, stored)| stored.clone()).collect();
        self.drop_machine();
        let nothing = || Halt::Bug("there is no event of this agent".to_owned());
        let agent = Agent::fold(&history).map_err(bug)?.ok_or_else(nothing)?;
        let out = self.with_ctx(|machine, ctx| {
            let (made, out) = Appender::adopt(me, agent, history_lost, ctx);
            *machine = Some(made);
            out
        });
        self.note(&out);
        Ok(out)
    }

    pub(super) fn drop_machine(&mut self) {
        self.machine = None;
        self.append = None;
        self.read = None;
    }

    pub(super) fn step(&mut self, input: Input) -> Vec<Output> {
        // What is asked beside the steps is answered as by a step.
        let question = if let Input::Command(asker, command) = &input
            && matches!(command.order, Order::Status(_))
        {
            Some((*asker, self.machine.as_ref().and_then(|made| made.ask(command, self.now))))
        } else {
            None
        };
        let out = self.with_ctx(|machine, ctx| machine.as_mut().map_or_else(Vec::new, |made| made.step(input, ctx)));
        if let Some((asker, Some(answer))) = question {
            assert_eq!(out.first(), Some(&Output::Reply(asker, answer)));
        }
        self.note(&out);
        out
    }

    fn note(&mut self, out: &[Output]) {
        for output in out {
            if let Output::Append { token, subject, expect, bytes, .. } = output {
                assert!(self.append.is_none() && self.read.is_none(), "one slot at a time");
                let (token, subject, expect, bytes) = (*token, subject.clone(), *expect, bytes.clone());
                self.append = Some(UnderWay { token, subject, expect, bytes });
            }
            if let Output::Reread { token, after } = output {
                assert!(self.append.is_none() && self.read.is_none(), "one slot at a time");
                self.read = Some((*token, *after));
            }
        }
    }

    pub(super) fn last(&self) -> StreamSeq {
        self.store.last().map_or(StreamSeq(0), |(_, stored)| stored.seq)
    }

    /// What the server does with an append: stored, at this sequence, if the
    /// expectation holds.
    pub(super) fn put(&mut self, append: &UnderWay) -> Option<StreamSeq> {
        if append.expect != self.last() {
            return None;
        }
        let seq = StreamSeq(self.next_seq);
        // Other agents share the stream.
        self.next_seq += 3;
        self.events.push(codec::from_msgpack(&append.bytes).unwrap());
        self.store.push((append.subject.clone(), Stored { seq, time: self.now, bytes: append.bytes.clone() }));
        Some(seq)
    }

    /// Answers the read that is under way from what is stored.
    pub(super) fn read(&mut self) -> Vec<Output> {
        let (token, after) = self.read.take().expect("a read is under way");
        let newer = self.store.iter().map(|(_, stored)| stored).filter(|stored| stored.seq > after).cloned().collect();
        let last = self.last();
        self.step(Input::Caught(token, newer, last))
    }

    /// What is stored, decoded.
    pub(super) fn envelopes(&self) -> &[EventEnvelope] {
        &self.events
    }

    /// The stream loses its last event.
    pub(super) fn roll_back(&mut self) {
        self.store.pop();
        self.events.pop();
    }

    /// Another owner's claim, stored at once.
    pub(super) fn foreign_claim(&mut self) {
        let epoch = self.envelopes().last().unwrap().epoch.next();
        let event = AgentAssigned { orphan_after_ms: 1000, node_lost_after_ms: 60_000 };
        self.foreign(None, epoch, event.into());
    }

    /// An event by somebody else, stored at once.
    pub(super) fn foreign(&mut self, run: Option<RunId>, epoch: Epoch, event: Event) {
        let envelopes = self.envelopes();
        let last = envelopes.last().unwrap().clone();
        let run_sequence = run.map(|run| {
            let before = envelopes.iter().filter(|event| event.run == Some(run)).count();
            acri::id::EventSeq(u64::try_from(before).unwrap() + 1)
        });
        self.minted += 1;
        let envelope = EventEnvelope {
            id: EventId::from_uuid(Uuid::from_u128(self.minted)),
            agent: last.agent,
            run,
            sequence: last.sequence.next(),
            run_sequence,
            time: last.time,
            node: last.node.clone(),
            incarnation: last.incarnation,
            epoch,
            cause: None,
            principal: None,
            source: None,
            prev: Some(Sha256Digest::of(&self.store.last().unwrap().1.bytes)),
            event,
        };
        let subject = Subject::Event(last.agent, run, envelope.event.type_name().to_owned());
        let append = UnderWay {
            token: Token(0),
            subject,
            expect: self.last(),
            bytes: codec::to_msgpack(&envelope).unwrap().into(),
        };
        self.put(&append);
    }

    pub(super) fn pass(&mut self, time: Duration) {
        self.now = self.now.plus(time);
    }
}
