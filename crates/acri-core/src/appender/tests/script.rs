//! The language of the scripts, one thing that happens a line. Commands and
//! runs have names; a run has the name of its Start.
//!
//! ```text
//! create | start r1 [task] | stop s1 r1 500ms [keep] | kill k1 r1 | remove x | status [r1]
//! +500ms                         time passes, then a tick
//! r1 started | notstarted | neverstarted | exit 0 | exit sig 9 | exit 0 killed k9 | exit orphaned | exit ?
//! r1 lost [node] | stopdelivered | ask out 5 | wait out 6 | resume out 7 | logs 3 [gap]
//! hold, go                       the bus stops answering by itself; goes on
//! ack, lose, drop, dup, conflict, refuse, read, readfail     how the bus answers, once
//! crash, adopt, adopt lost, claimed, late r1, rollback, done, stale
//! ```

use super::{words, world::World};
use crate::appender::{Input, Order, Output, Report, Token};
use acri::{
    ErrorBody, ErrorCode, Event, Payload, codec,
    command::{CreateAgent, KillRun, OnExpiry, RemoveAgent, StartRun, StopRun},
    event::{EscalationRaised, ExitStatus, FailReason, RunResumed, RunStarted, RunWaiting, Source, WaitReason},
    id::{LogSeq, Sha256Digest},
    log::Stream,
};
use std::time::Duration;

pub(super) struct Player {
    pub(super) world: World,
    hold: bool,
    effects: Vec<Token>,
}

/// Plays a script and tells what happened, line by line. `agent` as first
/// line stands for a Create that goes well.
pub(super) fn play(script: &str) -> String {
    let mut player = Player::new();
    let mut told = String::new();
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if line == "agent" {
            player.line("create");
            continue;
        }
        let said = player.line(line);
        told.push_str(&format!("{line} -> {}\n", said.join("; ")));
    }
    let report = crate::check::verify(&player.world.store);
    for problem in report.problems {
        told.push_str(&format!("PROBLEM at {}: {}\n", problem.seq, problem.what));
    }
    told
}

impl Player {
    pub(super) fn new() -> Self {
        Self { world: World::new(), hold: false, effects: Vec::new() }
    }

    pub(super) fn line(&mut self, line: &str) -> Vec<String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let mut said = Vec::new();
        let out = self.act(&words, &mut said);
        self.tell(&out, &mut said);
        while !self.hold {
            let out = if self.world.append.is_some() {
                self.bus("ack")
            } else if self.world.read.is_some() {
                self.world.read()
            } else {
                break;
            };
            self.tell(&out, &mut said);
        }
        said
    }

    fn act(&mut self, words: &[&str], said: &mut Vec<String>) -> Vec<Output> {
        match words {
            ["create"] if self.world.machine.is_none() => self.world.create("create"),
            ["create", "again"] => self.world.create("create"),
            ["hold"] => {
                self.hold = true;
                Vec::new()
            }
            ["go"] => {
                self.hold = false;
                Vec::new()
            }
            ["crash"] => {
                self.world.drop_machine();
                Vec::new()
            }
            ["adopt", rest @ ..] => match self.world.adopt(!rest.is_empty()) {
                Ok(out) => out,
                Err(halt) => {
                    said.push(words::halt(&halt));
                    Vec::new()
                }
            },
            ["claimed"] => {
                self.world.foreign_claim();
                Vec::new()
            }
            ["late", run] => {
                let run = self.world.run(run);
                let epoch = self.world.envelopes().last().unwrap().epoch;
                let event = EscalationRaised { escalation: "late".to_owned(), question: "late".to_owned() };
                self.world.foreign(Some(run), epoch, event.into());
                Vec::new()
            }
            ["rollback"] => {
                self.world.roll_back();
                Vec::new()
            }
            ["stale"] => {
                let before = self.world.machine.as_ref().unwrap().stale_count();
                let out = self.world.step(Input::Appended(Token(0), self.world.last()));
                said.push(format!("stale +{}", self.world.machine.as_ref().unwrap().stale_count() - before));
                out
            }
            ["done"] => {
                let effects = std::mem::take(&mut self.effects);
                effects.into_iter().flat_map(|token| self.world.step(Input::EffectDone(token))).collect()
            }
            ["read"] => self.world.read(),
            ["readfail"] => {
                let (token, _) = self.world.read.take().unwrap();
                self.world.step(Input::ReadFailed(token))
            }
            [word @ ("ack" | "lose" | "drop" | "dup" | "conflict" | "refuse")] => self.bus(word),
            ["full", percent] => {
                self.world.events_percent = percent.parse().unwrap();
                Vec::new()
            }
            [time] if time.starts_with('+') => {
                self.world.pass(millis(&time[1..]));
                self.world.step(Input::Tick)
            }
            [verb @ ("create" | "start" | "stop" | "kill" | "remove" | "status"), rest @ ..] => {
                self.command(verb, rest)
            }
            [run, rest @ ..] => {
                let run = self.world.run(run);
                let report = self.report(rest);
                self.world.step(Input::Report(run, report))
            }
            [] => Vec::new(),
        }
    }

    /// The bus answers the append that is under way, in this manner.
    pub(super) fn bus(&mut self, how: &str) -> Vec<Output> {
        let append = self.world.append.take().expect("an append is under way");
        let stored = matches!(how, "ack" | "lose" | "dup").then(|| self.world.put(&append)).flatten();
        let input = match (how, stored) {
            ("ack", Some(seq)) => Input::Appended(append.token, seq),
            ("dup", Some(seq)) => Input::Duplicate(append.token, seq),
            ("lose" | "drop", _) => Input::Unknown(append.token),
            ("refuse", _) => {
                Input::Refused(append.token, ErrorBody::new(ErrorCode::ResourceExhausted, "the stream is full"))
            }
            _ => Input::Conflict(append.token),
        };
        self.world.step(input)
    }

    fn command(&mut self, verb: &str, rest: &[&str]) -> Vec<Output> {
        let (name, order) = match (verb, rest) {
            ("create", [name]) => (*name, Order::Create(CreateAgent { spec: self.world.spec.clone() })),
            ("start", [name, task @ ..]) => (*name, Order::Start(StartRun { task: Payload::text(task.join(" ")) })),
            ("stop", [name, run, grace, rest @ ..]) => {
                let grace_ms = Some(u64::try_from(millis(grace).as_millis()).unwrap());
                let on_expiry = if rest.is_empty() { OnExpiry::Kill } else { OnExpiry::Keep };
                (*name, Order::Stop(self.world.run(run), StopRun { reason: format!("{name}!"), grace_ms, on_expiry }))
            }
            ("kill", [name, run]) => (*name, Order::Kill(self.world.run(run), KillRun { reason: format!("{name}!") })),
            ("remove", [name]) => (*name, Order::Remove(RemoveAgent { reason: "done".to_owned() })),
            ("status", [run]) => ("status", Order::Status(Some(self.world.run(run)))),
            _ => ("status", Order::Status(None)),
        };
        let command = self.world.command(name, order);
        let asker = self.world.asker();
        self.world.step(Input::Command(asker, command))
    }

    fn report(&mut self, words: &[&str]) -> Report {
        let derived = |stream: &str, offset: &str, event: Event| {
            let stream = if stream == "out" { Stream::Stdout } else { Stream::Stderr };
            Report::Derived(Source { stream, offset: offset.parse().unwrap(), index: 0 }, event)
        };
        match words {
            ["started"] => Report::Started(RunStarted { tree_control: None, isolation: None, pid: None }),
            ["notstarted"] => Report::NotStarted(FailReason::SpawnFailed, "no such program".to_owned()),
            ["neverstarted"] => Report::NeverStarted,
            ["exit", rest @ ..] => self.exit(rest),
            ["lost", "node"] => Report::Lost(FailReason::NodeLost, "it was silent".to_owned()),
            ["lost"] => Report::Lost(FailReason::HarnessLost, "its holder is gone".to_owned()),
            ["stopdelivered"] => Report::StopDelivered,
            ["ask", stream, offset] => derived(
                stream,
                offset,
                EscalationRaised { escalation: "e".to_owned(), question: "why?".to_owned() }.into(),
            ),
            ["wait", stream, offset] => derived(stream, offset, RunWaiting { reason: WaitReason::ToolCall }.into()),
            ["resume", stream, offset] => derived(stream, offset, RunResumed {}.into()),
            ["logs", count, rest @ ..] => Report::LogsDone {
                count: LogSeq(count.parse().unwrap()),
                chain: Sha256Digest::of(b"log"),
                gap: !rest.is_empty(),
            },
            other => panic!("no such line: {other:?}"),
        }
    }

    fn exit(&mut self, words: &[&str]) -> Report {
        let (status, rest) = match words {
            ["sig", signal, rest @ ..] => {
                (Some(ExitStatus { code: None, signal: Some(signal.parse().unwrap()) }), rest)
            }
            ["?" | "orphaned", ..] => (None, words),
            [code, rest @ ..] => (Some(ExitStatus { code: Some(code.parse().unwrap()), signal: None }), rest),
            [] => (None, words),
        };
        let killed = match rest {
            ["killed", name] => Some((self.world.command_id(name), "ann".to_owned(), format!("{name}!"))),
            _ => None,
        };
        Report::Exited { status, killed, orphaned: rest.contains(&"orphaned") }
    }

    fn tell(&mut self, out: &[Output], said: &mut Vec<String>) {
        let start = World::start();
        for output in out {
            said.push(match output {
                Output::Append { bytes, attempt, .. } => {
                    let event = words::event(&codec::from_msgpack(bytes).unwrap(), start);
                    if *attempt == 0 { event } else { format!("again #{attempt} {event}") }
                }
                Output::Reread { after, .. } => format!("reread after {after}"),
                Output::Effect { effect, token, .. } => {
                    self.effects.push(*token);
                    words::effect(effect)
                }
                Output::Reply(asker, answer) => {
                    format!("[{}] {}", asker.0, words::answer(answer, start))
                }
                Output::Derived(_, source) => format!("derived {}", source.offset),
                Output::Sealed(_) => "sealed".to_owned(),
                Output::WakeAt(time) => format!("wake {}ms", time.since(start).as_millis()),
                Output::Retired => "retired".to_owned(),
                Output::Halt(halt) => words::halt(halt),
            });
        }
    }
}

fn millis(text: &str) -> Duration {
    Duration::from_millis(text.trim_end_matches("ms").parse().unwrap())
}
