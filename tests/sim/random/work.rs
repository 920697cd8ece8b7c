//! What the actors do: they step the machines, carry out what those say, and
//! feed the results back. No rules of the domain.

use super::{
    node::{Asked, End, Owner, Pump, exited, mint},
    world::{World, fault},
};
use crate::{check, stage};
use acri::{StreamSeq, codec, event::FailReason, log::ResumeToken};
use acri_bus::{
    memory::fault::{self as bus_fault, Kind, Write},
    port::{Append, Appended, EventSelection, FrameAppend},
};
use acri_core::{
    appender::{Answer, Asker, Ctx, Effect, Halt, Input, Output, Report, Stored},
    writer::{self, Limits, SpoolRecord, Writer},
};
use std::collections::VecDeque;

type Result<T = ()> = std::result::Result<T, String>;

impl World {
    pub(crate) fn input(&mut self, at: usize, agent: usize, owner: &mut Owner, input: Input) -> Result {
        let now = self.now();
        let minted = &mut self.minted;
        let mut mint = || mint(minted);
        let outputs = owner.core.step(input, Ctx { now, events_percent: 0, mint: &mut mint });
        self.carry_out(at, agent, owner, outputs)
    }

    pub(crate) fn carry_out(&mut self, at: usize, agent: usize, owner: &mut Owner, outputs: Vec<Output>) -> Result {
        for output in outputs {
            match output {
                Output::Append { token, subject, id, expect, bytes, .. } => {
                    owner.append = Some((token, Append { subject, id, expect, bytes }));
                }
                Output::Reread { token, after } => owner.read = Some((token, after)),
                Output::Effect { token, run, effect } => {
                    self.effect_has_its_event(agent, run, &effect)?;
                    owner.effects.push(Asked { token, run, effect, done: None });
                }
                Output::Reply(asker, answer) => self.reply(at, agent, owner, asker, answer)?,
                Output::Derived(run, source) => {
                    if let Some(pump) = owner.pump.as_mut().filter(|pump| pump.run == run) {
                        pump.stored.push_back(source);
                    }
                }
                Output::Sealed(run) => {
                    let given_up = self.promises.was_given_up(self.agents[agent].id, run);
                    if self.holder(agent, run).is_alive() && !given_up {
                        return Err(format!("run {run} is sealed while its harness lives"));
                    }
                    owner.effects.retain(|asked| asked.run != run);
                    owner.pump = None;
                    (owner.session, owner.heard_exit) = (None, false);
                }
                Output::WakeAt(time) => owner.wake = Some(time),
                Output::Retired => owner.end = Some(End::Gone),
                Output::Halt(Halt::Fenced { .. } | Halt::NotOurs) => owner.end = Some(End::Gone),
                Output::Halt(Halt::HistoryLost) => owner.end = Some(End::Again { history_lost: true }),
                // The epoch that a backup took away was claimed again.
                Output::Halt(Halt::Bug(_)) if self.promises.spoiled.contains(&self.agents[agent].id) => {
                    owner.end = Some(End::Gone);
                }
                Output::Halt(Halt::Bug(what)) => return Err(format!("an appender halts: {what}")),
            }
        }
        Ok(())
    }

    /// No effect before its event.
    fn effect_has_its_event(&self, agent: usize, run: acri::RunId, effect: &Effect) -> Result {
        let id = self.agents[agent].id;
        let events = self.promises.events_of(id);
        let accepted = events.iter().any(|event| event.run == Some(run) && event.run_sequence.is_some());
        let stored = match effect {
            Effect::Stop { command, .. } | Effect::Kill { command, .. } => accepted && check::caused(events, *command),
            Effect::Attach { .. } | Effect::Spawn { .. } | Effect::Pump { .. } => accepted,
        };
        if stored || self.promises.spoiled.contains(&id) {
            return Ok(());
        }
        Err(format!("an effect before its event: {effect:?}"))
    }

    fn reply(&mut self, at: usize, agent: usize, owner: &mut Owner, asker: Asker, answer: Answer) -> Result {
        let Some(question) = owner.askers.remove(&asker) else {
            return Err(format!("{asker:?} is answered twice"));
        };
        if !self.nodes[at].lease.may_act(self.now()) {
            return Ok(());
        }
        self.answer_has_its_event(agent, question, &answer)?;
        if self.strikes(10) {
            self.count(fault::REPLY_LOST);
            return Ok(());
        }
        let spoiled = self.promises.spoiled.contains(&self.agents[agent].id);
        let known = &mut self.questions[question].answer;
        match (known.as_ref(), &answer) {
            (_, Answer::Refused(error)) if error.retryable => {}
            (Some(first @ (Answer::Started(_) | Answer::Stopping(_))), second) if !spoiled && first != second => {
                if !matches!(second, Answer::Refused(_)) {
                    return Err(format!("a repeat is answered {second:?}, first it was {first:?}"));
                }
                return Err(format!("a repeat is refused: {second:?}"));
            }
            (None, _) => *known = Some(answer),
            (Some(_), _) => {}
        }
        Ok(())
    }

    /// No acknowledged command without its event.
    fn answer_has_its_event(&self, agent: usize, question: usize, answer: &Answer) -> Result {
        let id = self.agents[agent].id;
        if self.promises.spoiled.contains(&id) {
            return Ok(());
        }
        let events = self.promises.events_of(id);
        let command = self.questions[question].command.id;
        let kept = match answer {
            Answer::Created(_) | Answer::Started(_) | Answer::Stopping(_) | Answer::Removed(_) => {
                check::caused(events, command)
            }
            Answer::Killed(ack) if ack.proved => {
                let ended = |event: &acri::EventEnvelope| event.run == Some(ack.run) && event.event.is_terminal();
                let alive = self.holders.get(&(id, ack.run)).is_some_and(super::holder::Holder::is_alive);
                events.iter().any(ended) && (!alive || self.promises.was_given_up(id, ack.run))
            }
            Answer::Killed(_) | Answer::Status(_) | Answer::Refused(_) => true,
        };
        if kept { Ok(()) } else { Err(format!("an acknowledged command without its event: {answer:?}")) }
    }

    // ---- the bus

    fn kind(&mut self) -> Option<Kind> {
        if !self.strikes(5) {
            return None;
        }
        let kind = self.dice.pick(&Kind::ALL);
        self.count(match kind {
            Kind::AckLost => fault::ACK_LOST,
            Kind::NeverArrived => fault::NEVER,
            Kind::Late => fault::LATE,
            Kind::Twice => fault::TWICE,
            Kind::Full => fault::REFUSED,
            Kind::InFlight => fault::IN_FLIGHT,
        });
        Some(kind)
    }

    fn send(&mut self, at: usize, write: Write) -> Appended {
        if self.nodes[at].away {
            let detail = "the bus is away".to_owned();
            return Appended::Unknown(acri_bus::port::Fault::Unavailable { operation: "write", detail });
        }
        let kind = self.kind();
        bus_fault::apply(&mut self.bus, kind, write, &mut self.late)
    }

    pub(crate) fn append(&mut self, at: usize, owner: &mut Owner) {
        let Some((token, append)) = owner.append.clone() else { return };
        owner.answer = Some(match self.send(at, Write::Event(append)) {
            Appended::Stored(seq) => Input::Appended(token, seq),
            Appended::Duplicate(seq) => Input::Duplicate(token, seq),
            Appended::Conflict => Input::Conflict(token),
            Appended::InFlight | Appended::Unknown(_) => Input::Unknown(token),
            Appended::Refused(error) => {
                let code = acri::ErrorCode::ResourceExhausted;
                Input::Refused(token, acri::ErrorBody::new(code, error.to_string()))
            }
        });
    }

    pub(crate) fn reread(&mut self, at: usize, agent: usize, owner: &mut Owner) -> Result {
        let Some((token, after)) = owner.read.take() else { return Ok(()) };
        let input = if self.nodes[at].away || self.strikes(8) {
            self.count(fault::READ_FAILED);
            Input::ReadFailed(token)
        } else {
            let (stored, last) = self.history(agent, after);
            Input::Caught(token, stored, last)
        };
        self.input(at, agent, owner, input)
    }

    /// A leader read.
    pub(crate) fn history(&self, agent: usize, after: StreamSeq) -> (Vec<Stored>, StreamSeq) {
        let id = self.agents[agent].id;
        let selection = EventSelection::Agent(id);
        let stored = self.bus.read(&selection, after.next()).map(check::stored).collect();
        (stored, self.bus.last_seq(id))
    }

    // ---- effects

    /// Carries an effect out, at its holder.
    pub(crate) fn perform(&mut self, at: usize, agent: usize, owner: &mut Owner, place: usize) -> Result {
        let Some(asked) = owner.effects.get(place) else { return Ok(()) };
        let (run, effect, now) = (asked.run, asked.effect.clone(), self.now());
        let (machine, incarnation) = (self.nodes[at].machine, self.nodes[at].me.incarnation);
        let local = self.agents[agent].local;
        let holder = self.holder(agent, run);
        // A local driver knows nothing of what is on another machine.
        let here = !local || holder.home.is_none_or(|home| home == machine);
        let mut reports = Vec::new();
        let outcome = match effect {
            Effect::Attach { .. } if owner.node_lost == Some(run) => {
                reports.push(Report::Lost(FailReason::NodeLost, "its node was silent for too long".to_owned()));
                Ok(())
            }
            Effect::Spawn { .. } if !here => return Err(format!("run {run} is begun on a second machine")),
            Effect::Attach { .. } | Effect::Kill { .. } | Effect::Stop { .. } if !here => Ok(()),
            Effect::Attach { epoch } => holder.claim((epoch, incarnation), now),
            Effect::Spawn { epoch, .. } => holder.start((epoch, incarnation), machine, now),
            Effect::Stop { command, epoch } => {
                if holder.stop((epoch, incarnation), command, now).is_ok() {
                    reports.push(Report::StopDelivered);
                }
                Ok(())
            }
            Effect::Kill { ref command, ref principal, ref reason, epoch } => {
                let record = (*command, principal.clone(), reason.clone());
                // A former owner's is refused.
                let _ = holder.kill((epoch, incarnation), record, now);
                Ok(())
            }
            Effect::Pump { .. } => Ok(()),
        };
        let begun = holder.begun > 0 && here;
        if outcome.is_err() {
            owner.end = Some(End::Again { history_lost: false });
            return Ok(());
        }
        match effect {
            Effect::Attach { .. } if !reports.is_empty() => reports.push(self.stored_log(agent, run)),
            Effect::Attach { .. } | Effect::Spawn { .. } if begun => {
                owner.session = Some(run);
                reports.push(Report::Started(stage::begun()));
            }
            Effect::Attach { .. } => {
                reports.push(Report::NeverStarted);
                if owner.core.state().run(run).is_some_and(|run| run.started) {
                    reports.push(self.stored_log(agent, run));
                }
            }
            Effect::Pump { epoch } => self.pump(agent, owner, run, epoch),
            Effect::Spawn { .. } | Effect::Stop { .. } | Effect::Kill { .. } => {}
        }
        if self.strikes(8) {
            // The driver tries again, as it heard nothing.
            self.count(fault::EFFECT_REPEATED);
            return Ok(());
        }
        if let Some(asked) = owner.effects.get_mut(place) {
            asked.done = Some(reports);
        }
        Ok(())
    }

    fn pump(&mut self, agent: usize, owner: &mut Owner, run: acri::RunId, epoch: acri::Epoch) {
        if owner.pump.is_some() {
            return;
        }
        let kept = self.holder(agent, run).kept.clone();
        let id = self.agents[agent].id;
        let (writer, outputs) = Writer::with(id, run, epoch, kept, Box::new(stage::Asks), Limits::default());
        let mut pump = Pump {
            run,
            epoch,
            writer,
            publish: None,
            answer: None,
            read: None,
            check: None,
            release: None,
            stored: VecDeque::new(),
        };
        for output in outputs {
            if let writer::Output::ReadLast { token, .. } = output {
                pump.read = Some(token);
            }
        }
        owner.pump = Some(pump);
    }

    /// What is stored of the log of a run that nobody can read any more.
    fn stored_log(&self, agent: usize, run: acri::RunId) -> Report {
        let frame = self.bus.last_frame(self.agents[agent].id, Some(run));
        let token = frame.map_or_else(ResumeToken::start, check::resume);
        let count = acri::id::LogSeq(token.next_sequence.0 - 1);
        Report::LogsDone { count, chain: token.chain, gap: true }
    }

    pub(crate) fn tell_effect(&mut self, at: usize, agent: usize, owner: &mut Owner, place: usize) -> Result {
        let asked = owner.effects.remove(place);
        self.input(at, agent, owner, Input::EffectDone(asked.token))?;
        for report in asked.done.unwrap_or_default() {
            self.input(at, agent, owner, Input::Report(asked.run, report))?;
        }
        Ok(())
    }

    pub(crate) fn hear_exit(&mut self, at: usize, agent: usize, owner: &mut Owner) -> Result {
        let Some(run) = owner.session else { return Ok(()) };
        let Some(exit) = self.holder(agent, run).exit.clone() else { return Ok(()) };
        owner.heard_exit = true;
        self.input(at, agent, owner, Input::Report(run, exited(&exit)))
    }

    // ---- the log

    pub(crate) fn write(&mut self, at: usize, agent: usize, owner: &mut Owner, input: writer::Input<'_>) -> Result {
        let Some(pump) = &mut owner.pump else { return Ok(()) };
        let (run, epoch, id) = (pump.run, pump.epoch, self.agents[agent].id);
        let mut reports = Vec::new();
        for output in pump.writer.step(input) {
            match output {
                writer::Output::Derive(source, event) => reports.push(Report::Derived(source, *event)),
                writer::Output::Publish { token, expect, bytes, resume, .. } => {
                    pump.publish =
                        Some((token, FrameAppend { agent: id, run: Some(run), expect, epoch, resume, bytes }));
                }
                writer::Output::ReadLast { token, .. } => pump.read = Some(token),
                writer::Output::CheckEpoch { token, .. } => pump.check = Some(token),
                writer::Output::Release { spool_offset, resume } => {
                    let token: ResumeToken = codec::from_msgpack(&resume).map_err(|error| error.to_string())?;
                    pump.release = Some((spool_offset, token));
                }
                writer::Output::StepDown(_) => owner.end = Some(End::Again { history_lost: false }),
                writer::Output::Done { count, chain, gap } => reports.push(Report::LogsDone { count, chain, gap }),
            }
        }
        pump.writer.prepare();
        for report in reports {
            self.input(at, agent, owner, Input::Report(run, report))?;
        }
        Ok(())
    }

    pub(crate) fn publish(&mut self, at: usize, owner: &mut Owner) {
        let Some((token, frame)) = owner.pump.as_ref().and_then(|pump| pump.publish.clone()) else { return };
        let answer = match self.send(at, Write::Frame(frame)) {
            Appended::Stored(seq) => writer::Input::Stored(token, seq),
            Appended::Conflict => writer::Input::Conflict(token),
            Appended::Duplicate(_) | Appended::InFlight | Appended::Unknown(_) => writer::Input::Unknown(token),
            Appended::Refused(_) => writer::Input::Refused(token),
        };
        if let Some(pump) = &mut owner.pump {
            pump.answer = Some(answer);
        }
    }

    pub(crate) fn ask_for_the_log(&mut self, at: usize, agent: usize, owner: &mut Owner) -> Result {
        let Some(pump) = &mut owner.pump else { return Ok(()) };
        let (run, epoch, id) = (pump.run, pump.epoch, self.agents[agent].id);
        let (read, checked) = (pump.read.take(), pump.check.take());
        let Some(token) = read.or(checked) else { return Ok(()) };
        if self.nodes[at].away || self.strikes(8) {
            self.count(fault::READ_FAILED);
            return self.write(at, agent, owner, writer::Input::ReadFailed(token));
        }
        if read.is_some() {
            let last = self.bus.last_frame(id, Some(run)).map(check::last).unwrap_or_default();
            return self.write(at, agent, owner, writer::Input::Last(token, last));
        }
        let newest = check::events(&self.bus, id).pop();
        let incarnation = self.nodes[at].me.incarnation;
        if newest.is_some_and(|event| event.epoch == epoch && event.incarnation == incarnation) {
            return self.write(at, agent, owner, writer::Input::EpochOk(token));
        }
        owner.end = Some(End::Again { history_lost: false });
        Ok(())
    }

    /// Reads the next record of the spool, or finds its end.
    pub(crate) fn read_output(&mut self, at: usize, agent: usize, owner: &mut Owner) -> Result {
        let Some((run, offset)) = owner.pump.as_ref().and_then(|pump| Some((pump.run, pump.writer.wants_output()?)))
        else {
            return Ok(());
        };
        let incarnation = self.nodes[at].me.incarnation;
        let holder = self.holder(agent, run);
        if offset < holder.released {
            if holder.claimed == Some((owner.core.epoch(), incarnation)) {
                return Err(format!("output at {offset} was removed before it was read"));
            }
            owner.end = Some(End::Again { history_lost: false });
            return Ok(());
        }
        let record = holder.spool.iter().find(|record| record.offset == offset).cloned();
        let end = (holder.exit.is_some() && offset == holder.spool_end()).then_some(offset);
        match (record, end) {
            (Some(record), _) => {
                let record = SpoolRecord {
                    spool_offset: record.offset,
                    spool_end: record.end,
                    stream: record.stream,
                    stream_offset: record.stream_offset,
                    time: record.time,
                    bytes: &record.bytes,
                };
                self.write(at, agent, owner, writer::Input::Output(record))
            }
            (None, Some(end)) => self.write(at, agent, owner, writer::Input::EndOfOutput { at: end, torn: false }),
            (None, None) => Ok(()),
        }
    }
}
