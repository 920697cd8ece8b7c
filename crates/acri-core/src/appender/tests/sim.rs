//! A world with a harness in it: effects are carried out truthfully, and what
//! must always be true is asserted at every output.

use super::world::{UnderWay, World};
use crate::appender::{Answer, Effect, Halt, Input, Order, Output, Report, Token};
use acri::{
    CommandId, Epoch, ErrorBody, ErrorCode, Event, Payload, RunId,
    command::{KillRun, OnExpiry, RemoveAgent, StartRun, StopRun},
    event::{EscalationRaised, ExitStatus, FailReason, RunResumed, RunStarted, RunWaiting, Source, WaitReason},
    id::{LogSeq, Sha256Digest},
    log::Stream,
};
use std::{collections::BTreeMap, time::Duration};

type Record = (CommandId, String, String);

/// What is true of a run, whoever looks.
#[derive(Debug, Clone, Default)]
pub(super) struct Harness {
    begun: bool,
    latch: Option<Record>,
    exit: Option<(ExitStatus, Option<Record>)>,
    orphaned: bool,
    /// Its holder died without a word.
    lost: bool,
    claimed: Epoch,
    written: u64,
    /// The machine spawned it and was not told since that it never began.
    spawned: bool,
    /// The machine of this life is in contact with it, and publishes.
    session: bool,
    pumped: bool,
}

#[derive(Clone)]
pub(super) struct Sim {
    pub(super) world: World,
    pub(super) harnesses: BTreeMap<RunId, Harness>,
    pub(super) effects: Vec<(Token, RunId, Effect)>,
    zombie: Option<UnderWay>,
    lost: bool,
    runs: Vec<String>,
    named: u32,
    pub(super) told: Vec<String>,
}

impl Sim {
    pub(super) fn new() -> Self {
        let mut sim = Self {
            world: World::new(),
            harnesses: BTreeMap::new(),
            effects: Vec::new(),
            zombie: None,
            lost: false,
            runs: Vec::new(),
            named: 0,
            told: Vec::new(),
        };
        let out = sim.world.create("create");
        sim.take(out);
        sim.bus("ack");
        sim
    }

    /// With a run that has started and is published.
    pub(super) fn running() -> Self {
        let mut sim = Self::new();
        sim.command("start", false);
        for _ in 0..2 {
            sim.bus("ack");
            sim.perform(0, false);
        }
        assert!(sim.harnesses.values().all(|harness| harness.pumped));
        sim
    }

    fn name(&mut self, kind: &str) -> String {
        self.named += 1;
        format!("{kind}{}", self.named)
    }

    /// The open run, or else the one whose Start was given last.
    fn last_run(&mut self) -> Option<RunId> {
        if let Some(run) = self.world.machine.as_ref().and_then(crate::appender::Appender::open_run) {
            return Some(run);
        }
        let name = self.runs.last()?.clone();
        Some(self.world.run(&name))
    }

    pub(super) fn give(&mut self, input: Input) {
        let out = self.world.step(input);
        self.take(out);
    }

    /// A command by a fresh id, or a repeat of the newest of its kind.
    pub(super) fn command(&mut self, kind: &str, again: bool) {
        let name = if again && self.named > 0 { format!("{kind}{}", self.named) } else { self.name(kind) };
        let run = self.last_run().unwrap_or_else(|| RunId::from_uuid(uuid::Uuid::nil()));
        let order = match kind {
            "start" => {
                if !self.runs.contains(&name) {
                    self.runs.push(name.clone());
                }
                Order::Start(StartRun { task: Payload::text("t") })
            }
            "stop" => {
                Order::Stop(run, StopRun { reason: "s".to_owned(), grace_ms: Some(4000), on_expiry: OnExpiry::Kill })
            }
            "keep" => {
                Order::Stop(run, StopRun { reason: "s".to_owned(), grace_ms: Some(2000), on_expiry: OnExpiry::Keep })
            }
            "kill" => Order::Kill(run, KillRun { reason: "k".to_owned() }),
            "remove" => Order::Remove(RemoveAgent { reason: String::new() }),
            _ => Order::Status(None),
        };
        let command = self.world.command(&name, order);
        let asker = self.world.asker();
        self.give(Input::Command(asker, command));
    }

    pub(super) fn bus(&mut self, how: &str) {
        if self.world.read.is_some() {
            let out = if how == "drop" {
                let (token, _) = self.world.read.take().unwrap();
                self.world.step(Input::ReadFailed(token))
            } else {
                self.world.read()
            };
            return self.take(out);
        }
        let Some(append) = self.world.append.take() else { return };
        let stored = matches!(how, "ack" | "lose" | "dup" | "hidden").then(|| self.world.put(&append)).flatten();
        self.give(match (how, stored) {
            ("ack", Some(seq)) => Input::Appended(append.token, seq),
            ("dup", Some(seq)) => Input::Duplicate(append.token, seq),
            ("lose" | "drop", _) => Input::Unknown(append.token),
            ("refuse", _) => Input::Refused(append.token, ErrorBody::new(ErrorCode::Unavailable, "full")),
            _ => Input::Conflict(append.token),
        });
    }

    /// The machine dies; its append may still land.
    pub(super) fn crash(&mut self) {
        if self.world.append.is_some() {
            self.zombie = self.world.append.take();
        }
        self.world.drop_machine();
        self.effects.clear();
        for harness in self.harnesses.values_mut() {
            (harness.session, harness.pumped) = (false, false);
        }
    }

    pub(super) fn land(&mut self) {
        if let Some(zombie) = self.zombie.take() {
            self.world.put(&zombie);
        }
    }

    pub(super) fn adopt(&mut self) {
        self.crash();
        let lost = std::mem::take(&mut self.lost);
        let out = self.world.adopt(lost).expect("what machines wrote can be folded");
        self.take(out);
    }

    pub(super) fn pass(&mut self, millis: u64) {
        self.world.pass(Duration::from_millis(millis));
        self.give(Input::Tick);
    }

    /// The harness ends by itself.
    pub(super) fn exit(&mut self, code: i32) {
        let Some(run) = self.last_run() else { return };
        let harness = self.harnesses.entry(run).or_default();
        if harness.begun && harness.exit.is_none() {
            harness.exit = Some((ExitStatus { code: Some(code), signal: None }, None));
            if harness.session {
                self.report_exit(run);
            }
        }
    }

    /// The harness is ended for want of an owner, or its holder dies.
    pub(super) fn perish(&mut self, lost: bool) {
        let Some(run) = self.last_run() else { return };
        let harness = self.harnesses.entry(run).or_default();
        if harness.begun && harness.exit.is_none() {
            harness.exit = Some((ExitStatus { code: None, signal: Some(9) }, None));
            (harness.orphaned, harness.lost) = (!lost, lost);
            if harness.session {
                self.report_exit(run);
            }
        }
    }

    /// The harness says something, or a former saying is read again.
    pub(super) fn derive(&mut self, again: bool, kind: u8) {
        let Some(run) = self.last_run() else { return };
        let harness = self.harnesses.entry(run).or_default();
        if !harness.pumped {
            return;
        }
        harness.written += u64::from(!again);
        let source = Source { stream: Stream::Stdout, offset: harness.written, index: 0 };
        let event: Event = match kind % 3 {
            0 => EscalationRaised { escalation: "e".to_owned(), question: "?".to_owned() }.into(),
            1 => RunWaiting { reason: WaitReason::ToolCall }.into(),
            _ => RunResumed {}.into(),
        };
        self.give(Input::Report(run, Report::Derived(source, event)));
    }

    pub(super) fn logs(&mut self) {
        for run in self.harnesses.keys().copied().collect::<Vec<_>>() {
            let harness = &self.harnesses[&run];
            if harness.pumped && harness.exit.is_some() {
                let done = Report::LogsDone { count: LogSeq(1), chain: Sha256Digest::default(), gap: false };
                self.give(Input::Report(run, done));
            }
        }
    }

    fn report_exit(&mut self, run: RunId) {
        let Some((status, killed)) = self.harnesses[&run].exit.clone() else { return };
        self.give(Input::Report(run, Report::Exited { status: Some(status), killed, orphaned: false }));
    }

    /// Carries out the effect at this place in the list; `fails`: it comes to
    /// nothing, if it is one that may.
    pub(super) fn perform(&mut self, index: usize, fails: bool) {
        if self.effects.is_empty() {
            return;
        }
        let (token, run, effect) = self.effects.remove(index % self.effects.len());
        let harness = self.harnesses.entry(run).or_default();
        match effect {
            Effect::Attach { .. } | Effect::Pump { .. } if fails => {
                self.effects.push((token, run, effect));
                return;
            }
            Effect::Attach { epoch } => {
                assert!(epoch > harness.claimed, "an adoption bumps the epoch");
                harness.claimed = epoch;
                harness.session = harness.begun;
                if !harness.begun {
                    harness.spawned = false;
                    self.give(Input::Report(run, Report::NeverStarted));
                } else {
                    if !harness.lost {
                        self.give(Input::Report(run, Report::Started(begun())));
                    }
                    self.report_exit(run);
                }
            }
            Effect::Spawn { .. } => {
                if !harness.begun && (fails || harness.latch.is_some()) {
                    self.give(Input::Report(run, Report::NotStarted(FailReason::SpawnFailed, "no".to_owned())));
                } else {
                    // A driver finds what a repeat has begun already.
                    harness.begun = true;
                    harness.session = true;
                    self.give(Input::Report(run, Report::Started(begun())));
                    self.report_exit(run);
                }
            }
            Effect::Stop { .. } => {
                if !fails && harness.begun && harness.exit.is_none() {
                    self.give(Input::Report(run, Report::StopDelivered));
                }
            }
            Effect::Kill { command, principal, reason, .. } => {
                if !fails {
                    let record = (command, principal, reason);
                    let latch = harness.latch.get_or_insert(record).clone();
                    if harness.begun && harness.exit.is_none() {
                        harness.exit = Some((ExitStatus { code: None, signal: Some(9) }, Some(latch)));
                    }
                    if harness.session {
                        self.report_exit(run);
                    }
                }
            }
            Effect::Pump { .. } => harness.pumped = true,
        }
        self.give(Input::EffectDone(token));
    }

    fn has(&self, run: RunId, test: impl Fn(&acri::EventEnvelope) -> bool) -> bool {
        self.world.envelopes().iter().any(|event| event.run == Some(run) && test(event))
    }

    fn caused(&self, command: CommandId) -> bool {
        self.world.envelopes().iter().any(|event| event.cause == Some(command))
    }

    fn take(&mut self, out: Vec<Output>) {
        for (at, output) in out.iter().enumerate() {
            match output {
                Output::Effect { token, run, effect } => {
                    self.check_effect(*run, effect);
                    self.effects.push((*token, *run, effect.clone()));
                }
                Output::Reply(_, answer) => self.check_answer(answer),
                Output::Sealed(run) => {
                    assert!(self.has(*run, |event| matches!(event.event, Event::RunLogsSealed(_))));
                    self.effects.retain(|(_, of, _)| of != run);
                }
                Output::Derived(run, source) => {
                    let written = self.harnesses[run].written;
                    assert!(source.offset <= written);
                }
                Output::Halt(halt) => {
                    assert_eq!(at + 1, out.len(), "a halt is the last");
                    assert!(!matches!(halt, Halt::Bug(_)), "{halt:?}");
                    self.lost = matches!(halt, Halt::HistoryLost);
                    return self.crash();
                }
                Output::Append { .. } | Output::Reread { .. } | Output::WakeAt(_) | Output::Retired => {}
            }
        }
    }

    fn check_effect(&mut self, run: RunId, effect: &Effect) {
        assert!(self.has(run, |event| matches!(event.event, Event::RunAccepted(_))), "{effect:?} before run.accepted");
        match effect {
            Effect::Spawn { .. } => {
                let harness = self.harnesses.entry(run).or_default();
                assert!(!harness.spawned, "spawned twice");
                harness.spawned = true;
            }
            Effect::Stop { command, .. } | Effect::Kill { command, .. } => {
                assert!(self.caused(*command), "{effect:?} before its event");
            }
            Effect::Attach { .. } | Effect::Pump { .. } => {}
        }
    }

    fn check_answer(&mut self, answer: &Answer) {
        match answer {
            Answer::Started(handle) => {
                assert!(self.has(handle.run, |event| matches!(event.event, Event::RunAccepted(_))))
            }
            Answer::Stopping(ack) => assert!(self.has(ack.run, |event| {
                matches!(&event.event, Event::RunStopRequested(data) if data.deadline == ack.deadline)
            })),
            Answer::Killed(ack) if ack.proved => {
                assert!(self.has(ack.run, |event| event.event.is_terminal()));
                assert!(self.harnesses.get(&ack.run).is_none_or(|harness| !harness.begun || harness.exit.is_some()));
            }
            Answer::Removed(_) => {
                let last = self.world.envelopes().last().unwrap();
                assert!(matches!(last.event, Event::AgentRemoved(_)));
            }
            Answer::Created(_) | Answer::Killed(_) | Answer::Status(_) | Answer::Refused(_) => {}
        }
        self.told.push(format!("{answer:?}"));
    }

    /// Everything works from now on, and somebody ends the run: it must come
    /// to its end, once, and be sealed.
    pub(super) fn finish(&mut self) {
        for round in 0..200 {
            if self.world.machine.is_none() {
                self.adopt();
            }
            while self.world.append.is_some() || self.world.read.is_some() {
                self.bus("ack");
            }
            if self.world.machine.as_ref().is_some_and(|machine| {
                let owns = machine.state().owner().epoch == machine.epoch() || machine.state().removed();
                owns && machine.open_run().is_none()
            }) {
                break;
            }
            while !self.effects.is_empty() {
                self.perform(0, false);
            }
            if round % 5 == 4 {
                self.command("kill", false);
            }
            self.logs();
            self.pass(1000);
        }
        self.check_history();
    }

    fn check_history(&self) {
        let report = crate::check::verify(&self.world.store);
        assert_eq!(report.problems, []);
        let events = self.world.envelopes();
        let runs =
            events.iter().filter(|event| matches!(event.event, Event::RunAccepted(_))).filter_map(|event| event.run);
        for run in runs {
            let of_run = || events.iter().filter(|event| event.run == Some(run));
            assert_eq!(of_run().filter(|event| event.event.is_terminal()).count(), 1, "one end of run {run}");
            assert_eq!(of_run().filter(|event| matches!(event.event, Event::RunLogsSealed(_))).count(), 1);
            let mut sources: Vec<Source> = of_run().filter_map(|event| event.source).collect();
            let derived = sources.len();
            sources.dedup();
            assert_eq!((derived, sources.is_sorted()), (sources.len(), true), "each source once, in order");
        }
    }
}

fn begun() -> RunStarted {
    RunStarted { tree_control: None, isolation: None, pid: None }
}
