//! The one event under way: sent, repeated, looked for, settled.

use super::{Answer, Appender, Asker, Command, Ctx, Halt, Life, Order, Output, REFUSED_RETRY, Stored, Token, bug};
use crate::agent::{
    Agent,
    decide::{self, Decided, Draft},
    decode,
    due::Seen,
};
use acri::{
    ErrorBody, ErrorCode, Event, EventEnvelope, EventId, RunId, StreamSeq, Subject, Timestamp, codec,
    event::Source,
    id::EventSeq,
    limits::{EVENT_BODY_BYTES_MAX, KILL_PROOF_MAX},
};
use bytes::Bytes;

/// An event that was sent and is not settled. Only its own storing, or proof
/// that it can never be stored, ends it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Slot {
    pub(super) token: Token,
    pub(super) purpose: Purpose,
    id: EventId,
    subject: Subject,
    expect: StreamSeq,
    bytes: Bytes,
    time: Timestamp,
    attempt: u32,
    /// Some attempt's outcome is unknown: a later refusal proves nothing.
    unsure: bool,
    reading: bool,
}

/// What the event under way is for.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Purpose {
    Claim,
    Command(Asker, Command),
    Derived(RunId, Source, Event),
    Owed,
}

impl Appender {
    /// Puts an event into the free slot.
    pub(super) fn send(
        &mut self,
        draft: Draft,
        purpose: Purpose,
        ctx: Ctx<'_>,
        out: &mut Vec<Output>,
    ) -> Result<(), ErrorBody> {
        let creating = self.life == Life::Creating;
        let last = *self.agent.last();
        let run_sequence = draft.run.map(|run| self.agent.run(run).map_or(EventSeq(1), |run| run.sequence.next()));
        let time = ctx.now.max(last.time);
        let envelope = EventEnvelope {
            id: (ctx.mint)(),
            agent: self.agent.id(),
            run: draft.run,
            sequence: last.sequence.next(),
            run_sequence,
            time,
            node: self.me.node.clone(),
            incarnation: self.me.incarnation,
            epoch: self.epoch,
            cause: draft.cause,
            principal: draft.principal,
            source: draft.source,
            prev: (!creating).then_some(last.digest),
            event: draft.event,
        };
        let bytes =
            codec::to_msgpack(&envelope).map_err(|error| ErrorBody::new(ErrorCode::Internal, error.to_string()))?;
        if bytes.len() > EVENT_BODY_BYTES_MAX {
            return Err(too_large(bytes.len(), &envelope.event));
        }
        let subject = Subject::Event(envelope.agent, envelope.run, envelope.event.type_name().to_owned());
        let (id, expect, token) = (envelope.id, last.seq, self.token());
        let bytes = Bytes::from(bytes);
        let slot = Slot { token, purpose, id, subject, expect, bytes, time, attempt: 0, unsure: false, reading: false };
        out.push(slot.append());
        self.slot = Some(slot);
        Ok(())
    }

    /// The slot that this result is for; a stale one is counted.
    fn taken(&mut self, token: Token, reading: bool) -> Option<Slot> {
        let slot = self.slot.take_if(|slot| slot.token == token && slot.reading == reading);
        if slot.is_none() {
            self.stale += 1;
        }
        slot
    }

    pub(super) fn appended(&mut self, token: Token, seq: StreamSeq, now: Timestamp, out: &mut Vec<Output>) {
        if let Some(slot) = self.taken(token, false) {
            let stored = Stored { seq, time: slot.time, bytes: slot.bytes.clone() };
            match self.fold(&stored) {
                Ok(()) => self.settle(slot.purpose, now, out),
                Err(why) => self.halt_with(slot, why, out),
            }
        }
    }

    /// The outcome is unknown: the identical bytes again.
    pub(super) fn unknown(&mut self, token: Token, out: &mut Vec<Output>) {
        if let Some(slot) = self.taken(token, false) {
            self.repeat(Slot { unsure: true, ..slot }, out);
        }
    }

    /// A conflict, or a claim that it is stored already: a leader read tells.
    pub(super) fn look(&mut self, token: Token, out: &mut Vec<Output>) {
        if let Some(slot) = self.taken(token, false) {
            self.reread(slot, out);
        }
    }

    pub(super) fn read_failed(&mut self, token: Token, out: &mut Vec<Output>) {
        if let Some(slot) = self.taken(token, true) {
            self.reread(slot, out);
        }
    }

    /// Certainly not stored, unless an earlier attempt's outcome is unknown:
    /// then only that event can settle the slot.
    pub(super) fn refused(&mut self, token: Token, error: ErrorBody, now: Timestamp, out: &mut Vec<Output>) {
        let Some(slot) = self.taken(token, false) else { return };
        if slot.unsure {
            return self.repeat(slot, out);
        }
        match slot.purpose {
            Purpose::Command(asker, _) if self.life == Life::Creating => self.refuse_creation(asker, error, out),
            Purpose::Command(asker, _) => out.push(Output::Reply(asker, Answer::Refused(error))),
            Purpose::Derived(run, source, event) => {
                self.derived.push_front((run, source, event));
                self.retry_at = Some(now.plus(REFUSED_RETRY));
            }
            Purpose::Claim | Purpose::Owed => self.retry_at = Some(now.plus(REFUSED_RETRY)),
        }
    }

    fn repeat(&mut self, mut slot: Slot, out: &mut Vec<Output>) {
        slot.token = self.token();
        slot.attempt = slot.attempt.saturating_add(1);
        slot.reading = false;
        out.push(slot.append());
        self.slot = Some(slot);
    }

    fn reread(&mut self, mut slot: Slot, out: &mut Vec<Output>) {
        slot.token = self.token();
        slot.reading = true;
        out.push(Output::Reread { token: slot.token, after: slot.expect });
        self.slot = Some(slot);
    }

    /// Stops; the slot is kept for the sake of its asker.
    fn halt_with(&mut self, slot: Slot, why: Halt, out: &mut Vec<Output>) {
        self.slot = Some(slot);
        self.halt(why, out);
    }

    /// What a leader read shows decides about the slot.
    pub(super) fn caught(
        &mut self,
        token: Token,
        stored: &[Stored],
        last: StreamSeq,
        now: Timestamp,
        out: &mut Vec<Output>,
    ) {
        let Some(slot) = self.taken(token, true) else { return };
        if last < slot.expect {
            return self.halt_with(slot, Halt::HistoryLost, out);
        }
        let new: Vec<&Stored> = stored.iter().filter(|stored| stored.seq > slot.expect).collect();
        match new.last() {
            None if last == slot.expect => return self.repeat(slot, out),
            Some(newest) if newest.seq == last => {}
            // Not the whole of it: something came while it was read.
            _ => return self.reread(slot, out),
        }
        match self.judge(&slot, &new) {
            Err(why) => self.halt_with(slot, why, out),
            Ok(Found::Ours) => self.settle(slot.purpose, now, out),
            Ok(Found::Dead) => self.decide_anew(slot.purpose),
            Ok(Found::Foreign(agent)) => self.answer_for_another(slot.purpose, &agent, out),
        }
    }

    /// Folds what is new, if it is for us to fold.
    fn judge(&mut self, slot: &Slot, new: &[&Stored]) -> Result<Found, Halt> {
        let mut events = Vec::with_capacity(new.len());
        for stored in new {
            events.push(decode(stored).map_err(bug)?);
        }
        let ours = events.iter().position(|event| event.id == slot.id);
        if let Some(at) = ours
            && new[at].bytes != slot.bytes
        {
            return Err(Halt::Bug(format!("event {} is stored with other bytes than were sent", slot.id)));
        }
        if self.life == Life::Creating && ours.is_none() {
            let history = new.iter().copied();
            let agent = Agent::fold(history).map_err(bug)?;
            return agent.map(|agent| Found::Foreign(Box::new(agent))).ok_or(Halt::NotOurs);
        }
        let foreign = || events.iter().enumerate().filter(|(at, _)| Some(*at) != ours).map(|(_, event)| event);
        let newest = foreign().map(|event| event.epoch).max();
        let unclaimed = matches!(slot.purpose, Purpose::Claim) && ours.is_none();
        if let Some(by) = newest.filter(|epoch| *epoch > self.epoch || (unclaimed && *epoch == self.epoch)) {
            return Err(Halt::Fenced { by });
        }
        if let Some(event) = foreign().find(|event| event.epoch == self.epoch) {
            return Err(Halt::Bug(format!("event {} bears epoch {} and is not ours", event.id, self.epoch)));
        }
        for stored in new {
            self.fold(stored)?;
        }
        Ok(if ours.is_some() { Found::Ours } else { Found::Dead })
    }

    fn fold(&mut self, stored: &Stored) -> Result<(), Halt> {
        if self.life == Life::Creating && self.agent.last().sequence == EventSeq(0) {
            self.agent = Agent::first(stored).map_err(bug)?;
            return Ok(());
        }
        self.agent.evolve(stored).map_err(bug)
    }

    /// The event is stored and folded.
    fn settle(&mut self, purpose: Purpose, now: Timestamp, out: &mut Vec<Output>) {
        self.retry_at = None;
        match purpose {
            Purpose::Claim => {
                let history_lost = matches!(self.life, Life::Claiming { history_lost: true });
                self.life = Life::Owner;
                let open = self.agent.runs().values().filter(|run| run.is_open());
                self.seen = open.map(|run| (run.id, Box::new(Seen::adopted(run, history_lost, now)))).collect();
            }
            Purpose::Command(asker, command) => {
                if self.life == Life::Creating {
                    self.life = Life::Owner;
                    out.push(Output::Reply(asker, Answer::Created(self.agent.handle())));
                } else {
                    self.acknowledge(asker, &command, now, out);
                }
            }
            Purpose::Derived(run, source, _) => out.push(Output::Derived(run, source)),
            Purpose::Owed => self.sweep(out),
        }
    }

    /// The answer follows from the state with the command's event in it.
    fn acknowledge(&mut self, asker: Asker, command: &Command, now: Timestamp, out: &mut Vec<Output>) {
        match decide::known(&self.agent, command) {
            Some(Ok(Decided::Known(answer))) => out.push(Output::Reply(asker, answer)),
            Some(Ok(Decided::Awaits(run))) => self.wait_for_end(asker, run, now, out),
            Some(Ok(Decided::Append(_)) | Err(_)) | None => {
                let why = format!("command {} is stored and not remembered", command.id);
                return self.halt(Halt::Bug(why), out);
            }
        }
        match &command.order {
            Order::Start(_) => {
                if let Some(run) = self.agent.last_run() {
                    self.seen.insert(run.id, Box::default());
                }
            }
            Order::Remove(_) => {
                self.life = Life::Retired;
                out.push(Output::Retired);
            }
            Order::Create(_) | Order::Stop(..) | Order::Kill(..) | Order::Status(_) => {}
        }
    }

    /// Somebody waits for the end of a run that is killed.
    pub(super) fn wait_for_end(&mut self, asker: Asker, run: RunId, now: Timestamp, out: &mut Vec<Output>) {
        if self.killers.len() >= acri::limits::COMMANDS_WAITING_MAX {
            out.push(Output::Reply(asker, Answer::Killed(self.kill_ack(run))));
        } else {
            self.killers.push(super::Killer { asker, run, until: now.plus(KILL_PROOF_MAX) });
        }
    }

    /// Forgets what was seen of runs that are sealed.
    fn sweep(&mut self, out: &mut Vec<Output>) {
        let agent = &self.agent;
        let sealed: Vec<RunId> =
            self.seen.keys().copied().filter(|run| agent.run(*run).is_none_or(|run| run.sealed)).collect();
        for run in sealed {
            self.seen.remove(&run);
            self.effects.retain(|(of, _), _| *of != run);
            out.push(Output::Sealed(run));
        }
    }

    /// The slot is dead: a predecessor's event stands where it would have
    /// stood. Its body is dropped; what it was for is decided anew.
    fn decide_anew(&mut self, purpose: Purpose) {
        match purpose {
            Purpose::Command(asker, command) if matches!(command.order, Order::Kill(..)) => {
                self.kills.push_front((asker, command));
            }
            Purpose::Command(asker, command) => {
                self.command_next = false;
                self.commands.push_front((asker, command));
            }
            Purpose::Derived(run, source, event) => self.derived.push_front((run, source, event)),
            Purpose::Claim => self.epoch = self.epoch.max(self.agent.owner().epoch.next()),
            Purpose::Owed => {}
        }
    }

    /// Create found the agent: the same command made it, or another.
    fn answer_for_another(&mut self, purpose: Purpose, agent: &Agent, out: &mut Vec<Output>) {
        if let Purpose::Command(asker, command) = purpose {
            let answer = match decide::known(agent, &command) {
                Some(Ok(Decided::Known(answer))) => answer,
                Some(Err(error)) => Answer::Refused(error),
                Some(Ok(_)) | None => Answer::Refused(decide::already_there(agent)),
            };
            out.push(Output::Reply(asker, answer));
        }
        self.halt(Halt::NotOurs, out);
    }
}

enum Found {
    Ours,
    Dead,
    Foreign(Box<Agent>),
}

impl Slot {
    fn append(&self) -> Output {
        Output::Append {
            token: self.token,
            subject: self.subject.clone(),
            id: self.id,
            expect: self.expect,
            bytes: self.bytes.clone(),
            attempt: self.attempt,
        }
    }
}

fn too_large(bytes: usize, event: &Event) -> ErrorBody {
    let field = match event.type_name() {
        "agent.created" => "spec",
        "run.accepted" => "task",
        _ => "reason",
    };
    let text = format!("field `{field}` makes an event of {bytes} bytes, more than {EVENT_BODY_BYTES_MAX}");
    ErrorBody { field: Some(field.to_owned()), ..ErrorBody::new(ErrorCode::TooLarge, text) }
}
