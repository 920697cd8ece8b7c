//! The machines as numbered values. Each state of a machine is kept once, and
//! each step of it is made once, so a walk costs little more than looking up.

use super::plan::Plan;
use crate::stage::{self, Record};
use acri::{
    Event, EventId, StreamSeq,
    event::Source,
    id::{Epoch, LogSeq, Sha256Digest},
    log::ResumeToken,
};
use acri_bus::port::{Append, FrameAppend};
use acri_core::{
    agent::Agent as Folded,
    appender::{
        self, Answer, Appender, Asker, Command, Ctx, Effect, Halt, Input, Order, Output, Report, Stored, Token,
    },
    writer::{self, LastFrame, Limits, LogEnd, SpoolRecord, Writer},
};
use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
    rc::Rc,
};
use uuid::Uuid;

/// A number in one of the tables.
pub(crate) type Id = u32;

/// Values, each with a number.
#[derive(Debug)]
pub(crate) struct Table<T> {
    values: Vec<Rc<T>>,
    numbers: HashMap<Sha256Digest, Id>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { values: Vec::new(), numbers: HashMap::new() }
    }
}

impl<T> Table<T> {
    pub(crate) fn get(&self, id: Id) -> Rc<T> {
        Rc::clone(&self.values[id as usize])
    }

    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }

    /// The number of what has this key; `true` if it is new.
    pub(crate) fn put(&mut self, key: &str, value: impl FnOnce() -> T) -> (Id, bool) {
        let next = Id::try_from(self.values.len()).expect("a walk is not that large");
        let id = *self.numbers.entry(Sha256Digest::of(key.as_bytes())).or_insert(next);
        if id == next {
            self.values.push(Rc::new(value()));
        }
        (id, id == next)
    }

    pub(crate) fn put_shown(&mut self, value: T) -> Id
    where
        T: std::fmt::Debug,
    {
        self.put(&format!("{value:?}"), || value).0
    }
}

/// The effects of the run that a walk knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Kind {
    Attach,
    Stop,
    Pump,
}

impl Kind {
    pub(crate) const ALL: [Self; 3] = [Self::Attach, Self::Stop, Self::Pump];

    pub(crate) fn bit(self) -> u8 {
        1 << self as u8
    }

    pub(crate) fn of(effect: &Effect) -> Self {
        match effect {
            Effect::Attach { .. } => Self::Attach,
            Effect::Stop { .. } => Self::Stop,
            Effect::Pump { .. } => Self::Pump,
            Effect::Spawn { .. } | Effect::Kill { .. } => {
                unreachable!("the run has begun, and nobody kills it")
            }
        }
    }
}

/// An appender, and what it waits for.
#[derive(Debug, Clone)]
pub(crate) struct Owner {
    machine: Appender,
    minted: u64,
    pub(crate) append: Option<(Token, Append)>,
    pub(crate) read: Option<(Token, StreamSeq)>,
    pub(crate) effects: BTreeMap<Kind, Token>,
    pub(crate) halted: Option<Halt>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum OwnerIn {
    Stop,
    Started,
    Exited,
    StopDelivered,
    Derived(Source),
    LogsDone(LogSeq, Sha256Digest, bool),
    Stored(StreamSeq),
    Duplicate(StreamSeq),
    Conflict,
    Unknown,
    /// A leader read; the number is the bus's.
    Caught(Id),
    Done(Kind),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum OwnerOut {
    Effect(Kind),
    Reply(Answer),
    Derived(Source),
}

/// A writer's step, as it can be repeated.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum WriterIn {
    /// The number is that of a last frame.
    Last(Id),
    Record(usize),
    /// Mutants only: these records of one stream, as if they were one.
    Records(usize, usize),
    End,
    Derived(Source),
    Stored(StreamSeq),
    Conflict,
    Unknown,
    EpochOk,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum WriterOut {
    Derive(Source),
    /// The number is that of a token.
    Release(u64, Id),
    StepDown,
    Done(LogSeq, Sha256Digest, bool),
}

/// A writer, what it waits for, and how it came to be.
#[derive(Debug)]
pub(crate) struct Writing {
    machine: Writer,
    epoch: Epoch,
    /// Number of the token that the holder kept; none: it kept none.
    kept: Option<Id>,
    inputs: Vec<WriterIn>,
    pub(crate) publish: Option<(Token, FrameAppend)>,
    pub(crate) read: Option<Token>,
    check: Option<Token>,
    /// The frame that was sent last.
    pub(crate) sent: Option<FrameAppend>,
    /// Number of the last frame that it knows to be stored.
    pub(crate) base: Option<Id>,
}

impl Writing {
    pub(crate) fn wants(&self) -> Option<u64> {
        self.machine.wants_output()
    }

    pub(crate) fn checks(&self) -> bool {
        self.check.is_some()
    }
}

type Steps<In, Out> = HashMap<(Id, In), (Id, Rc<[Out]>)>;

/// All machines that a walk has met.
pub(crate) struct Machines {
    plan: Rc<Plan>,
    pub(crate) owners: Table<Owner>,
    owner_steps: Steps<OwnerIn, OwnerOut>,
    pub(crate) writers: Table<Writing>,
    writer_steps: Steps<WriterIn, WriterOut>,
    pub(crate) lasts: Table<LogEnd>,
    pub(crate) tokens: Table<ResumeToken>,
    questions: BTreeMap<Source, Event>,
}

fn read<'a>(record: &Record, spool_end: u64, bytes: &'a [u8]) -> SpoolRecord<'a> {
    SpoolRecord {
        spool_offset: record.offset,
        spool_end,
        stream: record.stream,
        stream_offset: record.stream_offset,
        time: record.time,
        bytes,
    }
}

fn mint(owner: u64, minted: &mut u64) -> EventId {
    *minted += 1;
    EventId::from_uuid(Uuid::from_u128((u128::from(owner) << 64) | u128::from(*minted)))
}

impl Machines {
    pub(crate) fn new(plan: Rc<Plan>) -> Self {
        Self {
            plan,
            owners: Table::default(),
            owner_steps: HashMap::new(),
            writers: Table::default(),
            writer_steps: HashMap::new(),
            lasts: Table::default(),
            tokens: Table::default(),
            questions: BTreeMap::new(),
        }
    }

    fn keep(&mut self, owner: Owner) -> Id {
        let waits = (owner.append.is_some(), owner.read.is_some(), owner.effects.keys());
        let key = format!("{:?} {waits:?} {} {:?}", owner.machine.fingerprint(), owner.minted, owner.halted);
        self.owners.put(&key, || owner).0
    }

    /// The first owner: the agent is created, its run has begun.
    pub(crate) fn first(&mut self, mut append: impl FnMut(&Append) -> StreamSeq) -> Id {
        let plan = Rc::clone(&self.plan);
        let mut minted = 0;
        let creation = stage::creation(plan.create, plan.spec.clone());
        let order = Order::Create(acri::command::CreateAgent { spec: plan.spec.clone() });
        let command = plan.command(plan.create, order);
        let mut mint = || mint(0, &mut minted);
        let ctx = Ctx { now: plan.now, events_percent: 0, mint: &mut mint };
        let (mut machine, mut outputs) = Appender::create(plan.me(0), creation, Asker(0), command, ctx);
        let start = Order::Start(acri::command::StartRun { task: acri::Payload::text("") });
        let mut next = vec![
            Input::Report(plan.run, Report::Started(stage::begun())),
            Input::Command(Asker(1), plan.command(plan.start, start)),
        ];
        let mut effects = BTreeMap::new();
        loop {
            let mut inputs = Vec::new();
            for output in outputs {
                match output {
                    Output::Append { token, subject, id, expect, bytes, .. } => {
                        let seq = append(&Append { subject, id, expect, bytes });
                        inputs.push(Input::Appended(token, seq));
                    }
                    Output::Effect { token, effect: Effect::Spawn { .. }, .. } => {
                        inputs.push(Input::EffectDone(token));
                    }
                    Output::Effect { token, effect, .. } => {
                        effects.insert(Kind::of(&effect), token);
                    }
                    _ => {}
                }
            }
            if inputs.is_empty() {
                let Some(input) = next.pop() else { break };
                inputs.push(input);
            }
            outputs = Vec::new();
            for input in inputs {
                outputs.extend(machine.step(input, Ctx { now: plan.now, events_percent: 0, mint: &mut mint }));
            }
        }
        self.keep(Owner { machine, minted, append: None, read: None, effects, halted: None })
    }

    /// The next owner takes over from what is stored.
    pub(crate) fn adopt(&mut self, history: &[Stored]) -> Result<Id, String> {
        let mut minted = 0;
        let mut mint = || mint(1, &mut minted);
        let ctx = Ctx { now: self.plan.now, events_percent: 0, mint: &mut mint };
        let folded = Folded::fold(history).map_err(|error| format!("the taker cannot adopt: {error}"))?;
        let agent = folded.ok_or("the taker finds no event")?;
        let (machine, outputs) = Appender::adopt(self.plan.me(1), agent, false, ctx);
        let effects = BTreeMap::new();
        let mut owner = Owner { machine, minted, append: None, read: None, effects, halted: None };
        owner.note(outputs);
        Ok(self.keep(owner))
    }

    /// `history` answers a leader read: everything after a sequence, and the last.
    pub(crate) fn step_owner(
        &mut self,
        id: Id,
        node: u64,
        input: &OwnerIn,
        history: impl FnOnce(StreamSeq) -> (Vec<Stored>, StreamSeq),
    ) -> (Id, Rc<[OwnerOut]>) {
        if let Some(known) = self.owner_steps.get(&(id, input.clone())) {
            return known.clone();
        }
        let mut owner = Owner::clone(&self.owners.get(id));
        let real = owner.input(input, &self.plan, &self.questions, history);
        let mut minted = owner.minted;
        let mut mint = || mint(node, &mut minted);
        let outputs = owner.machine.step(real, Ctx { now: self.plan.now, events_percent: 0, mint: &mut mint });
        owner.minted = minted;
        let outs: Rc<[OwnerOut]> = owner.note(outputs).into();
        let next = self.keep(owner);
        self.owner_steps.insert((id, input.clone()), (next, Rc::clone(&outs)));
        (next, outs)
    }

    /// A writer begins. `kept` is the number of the holder's token.
    pub(crate) fn begin(&mut self, epoch: Epoch, kept: Option<Id>) -> Id {
        let writing = self.fresh(epoch, kept);
        self.keep_writer(writing)
    }

    fn fresh(&self, epoch: Epoch, kept: Option<Id>) -> Writing {
        let token = kept.map(|id| ResumeToken::clone(&self.tokens.get(id)));
        let plan = &self.plan;
        let (machine, outputs) =
            Writer::with(plan.agent, plan.run, epoch, token, Box::new(stage::Asks), Limits::default());
        let mut writing = Writing {
            machine,
            epoch,
            kept,
            inputs: Vec::new(),
            publish: None,
            read: None,
            check: None,
            sent: None,
            base: None,
        };
        for output in outputs {
            if let writer::Output::ReadLast { token, .. } = output {
                writing.read = Some(token);
            }
        }
        writing
    }

    fn keep_writer(&mut self, writing: Writing) -> Id {
        let key = format!("{:?} {:?} {:?}", writing.machine.fingerprint(), writing.base, writing.kept);
        self.writers.put(&key, || writing).0
    }

    pub(crate) fn step_writer(&mut self, id: Id, input: &WriterIn) -> (Id, Rc<[WriterOut]>) {
        if let Some(known) = self.writer_steps.get(&(id, input.clone())) {
            return known.clone();
        }
        let from = self.writers.get(id);
        let inputs = from.inputs.iter().chain([input]);
        let (next, outs) = self.replayed(from.epoch, from.kept, inputs);
        self.writer_steps.insert((id, input.clone()), (next, Rc::clone(&outs)));
        (next, outs)
    }

    /// A writer that has lived through these inputs, and what it said last.
    pub(crate) fn replayed<'a>(
        &mut self,
        epoch: Epoch,
        kept: Option<Id>,
        inputs: impl Iterator<Item = &'a WriterIn>,
    ) -> (Id, Rc<[WriterOut]>) {
        let mut writing = self.fresh(epoch, kept);
        let mut outs = Vec::new();
        for input in inputs {
            outs = self.feed(&mut writing, input);
        }
        (self.keep_writer(writing), outs.into())
    }

    fn feed(&mut self, writing: &mut Writing, input: &WriterIn) -> Vec<WriterOut> {
        let plan = Rc::clone(&self.plan);
        let waits = "only what is waited for is answered";
        let mut base = None;
        let together: Vec<u8>;
        let real = match input {
            WriterIn::Last(id) => {
                base = Some(*id);
                let last = LogEnd::clone(&self.lasts.get(*id));
                writer::Input::Last(writing.read.take().expect(waits), last)
            }
            WriterIn::Record(at) => {
                let record = &plan.spool[*at];
                writer::Input::Output(read(record, record.end, &record.bytes))
            }
            WriterIn::Records(from, to) => {
                let records = &plan.spool[*from..*to];
                together = records.iter().flat_map(|record| record.bytes.clone()).collect();
                let end = records.last().map_or(0, |record| record.end);
                writer::Input::Output(read(&records[0], end, &together))
            }
            WriterIn::End => writer::Input::EndOfOutput { at: plan.spool_end(), torn: false },
            WriterIn::Derived(source) => writer::Input::Derived(*source),
            WriterIn::Stored(seq) => {
                let (token, frame) = writing.publish.take().expect(waits);
                let last = LogEnd { seq: *seq, frame: LastFrame::of(writing.epoch, &frame.resume) };
                assert!(last.frame.is_some(), "it is a token");
                base = Some(self.lasts.put_shown(last));
                writer::Input::Stored(token, *seq)
            }
            WriterIn::Conflict => writer::Input::Conflict(writing.publish.take().expect(waits).0),
            WriterIn::Unknown => writer::Input::Unknown(writing.publish.take().expect(waits).0),
            WriterIn::EpochOk => writer::Input::EpochOk(writing.check.take().expect(waits)),
        };
        let outputs = writing.machine.step(real);
        writing.inputs.push(input.clone());
        writing.base = base.or(writing.base);
        outputs.into_iter().filter_map(|output| self.note(writing, output)).collect()
    }

    fn note(&mut self, writing: &mut Writing, output: writer::Output) -> Option<WriterOut> {
        let plan = Rc::clone(&self.plan);
        match output {
            writer::Output::Derive(source, event) => {
                self.questions.insert(source, *event);
                return Some(WriterOut::Derive(source));
            }
            writer::Output::Publish { token, expect, bytes, resume, .. } => {
                let (agent, run, epoch) = (plan.agent, Some(plan.run), writing.epoch);
                let resume = plan.mutant.token(resume);
                let frame = FrameAppend { agent, run, expect, epoch, resume, bytes };
                writing.sent = Some(frame.clone());
                writing.publish = Some((token, frame));
            }
            writer::Output::ReadLast { token, .. } => writing.read = Some(token),
            writer::Output::CheckEpoch { token, .. } => writing.check = Some(token),
            writer::Output::Release { spool_offset, resume } => {
                let token = acri::codec::from_msgpack(&resume).expect("it is a token");
                return Some(WriterOut::Release(spool_offset, self.tokens.put_shown(token)));
            }
            writer::Output::StepDown(_) => return Some(WriterOut::StepDown),
            writer::Output::Done { count, chain, gap } => {
                return Some(WriterOut::Done(count, chain, gap));
            }
        }
        None
    }
}

impl Owner {
    pub(crate) fn epoch(&self) -> Epoch {
        self.machine.epoch()
    }

    fn input(
        &mut self,
        input: &OwnerIn,
        plan: &Plan,
        questions: &BTreeMap<Source, Event>,
        history: impl FnOnce(StreamSeq) -> (Vec<Stored>, StreamSeq),
    ) -> Input {
        let waits = "only what is waited for is answered";
        let report = |report| Input::Report(plan.run, report);
        match input {
            OwnerIn::Stop => {
                let stop = plan.command(plan.stop, Order::Stop(plan.run, plan.stop_run()));
                Input::Command(Asker(2), stop)
            }
            OwnerIn::Started => report(Report::Started(stage::begun())),
            OwnerIn::Exited => {
                report(Report::Exited { status: Some(stage::succeeded()), killed: None, orphaned: false })
            }
            OwnerIn::StopDelivered => report(Report::StopDelivered),
            OwnerIn::Derived(source) => report(Report::Derived(*source, questions[source].clone())),
            OwnerIn::LogsDone(count, chain, gap) => {
                report(Report::LogsDone { count: *count, chain: *chain, gap: *gap })
            }
            OwnerIn::Stored(seq) => Input::Appended(self.append.take().expect(waits).0, *seq),
            OwnerIn::Duplicate(seq) => Input::Duplicate(self.append.take().expect(waits).0, *seq),
            OwnerIn::Conflict => Input::Conflict(self.append.take().expect(waits).0),
            OwnerIn::Unknown => Input::Unknown(self.append.take().expect(waits).0),
            OwnerIn::Caught(_) => {
                let (token, after) = self.read.take().expect(waits);
                let (stored, last) = history(after);
                Input::Caught(token, stored, last)
            }
            OwnerIn::Done(kind) => Input::EffectDone(self.effects.remove(kind).expect(waits)),
        }
    }

    fn note(&mut self, outputs: Vec<Output>) -> Vec<OwnerOut> {
        let mut outs = Vec::new();
        for output in outputs {
            match output {
                Output::Append { token, subject, id, expect, bytes, .. } => {
                    let append = Append { subject, id, expect, bytes };
                    assert!(self.append.replace((token, append)).is_none(), "one slot at a time");
                }
                Output::Reread { token, after } => self.read = Some((token, after)),
                Output::Effect { token, effect, .. } => {
                    self.effects.insert(Kind::of(&effect), token);
                    outs.push(OwnerOut::Effect(Kind::of(&effect)));
                }
                Output::Reply(_, answer) => outs.push(OwnerOut::Reply(answer)),
                Output::Derived(_, source) => outs.push(OwnerOut::Derived(source)),
                Output::Halt(halt) => self.halted = Some(halt),
                Output::Sealed(_) | Output::WakeAt(_) | Output::Retired => {}
            }
        }
        outs
    }
}

impl Plan {
    fn command(&self, id: acri::CommandId, order: Order) -> Command {
        Command { id, principal: "ann".to_owned(), expires: None, order }
    }

    fn me(&self, node: u64) -> appender::Me {
        stage::me(["a", "b"][usize::try_from(node).expect("two nodes")], node + 1)
    }
}
