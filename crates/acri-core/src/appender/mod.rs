//! The sequencer of one agent's events: everything that PROTOCOL section 1 of
//! `docs/` asks, as a machine without IO.
//!
//! An actor owns one [`Appender`]. It turns whatever happens into an
//! [`Input`], calls [`Appender::step`], and carries out the [`Output`]s in
//! order. It decides nothing.
//!
//! One event is under way at a time (the *slot*). When it is settled, what
//! comes next is decided anew from the state: what is owed to a run, then
//! Kills, then derived events and other commands in turn.

mod advance;
mod message;
mod slot;
mod step;
#[cfg(test)]
mod tests;

pub use message::{Answer, Asker, Command, Creation, Effect, Halt, Input, Me, Order, Output, Report, Stored, Token};

use crate::agent::{
    Agent, FoldError,
    decide::{self, Draft},
    due::Seen,
};
use acri::{
    AgentId, Epoch, ErrorBody, Event, EventId, RunId, StreamSeq, Timestamp,
    command::KillAck,
    event::{AgentAssigned, AgentCreated, Source},
    id::Sha256Digest,
};
use slot::{Purpose, Slot};
use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

/// What the world lends to one step.
#[expect(missing_debug_implementations, reason = "it borrows a closure, which has nothing to show")]
pub struct Ctx<'a> {
    /// The bus's time, as the node knows it.
    pub now: Timestamp,
    /// How full the event stream is, in hundredths, as far as the node knows.
    pub events_percent: u64,
    /// Makes a fresh event id.
    pub mint: &'a mut dyn FnMut() -> EventId,
}

/// An event that is owed and was refused by the bus is tried again after this.
pub const REFUSED_RETRY: Duration = Duration::from_secs(5);
/// Derived events that wait for one agent. A writer waits for each of them, so
/// it never comes near; what is above is dropped and counted as stale.
pub const DERIVED_WAITING_MAX: usize = 4096;

/// The machine. Its whole state is plain data in a fixed order: equal
/// histories of inputs give equal machines.
#[derive(Debug, Clone, PartialEq)]
pub struct Appender {
    me: Me,
    agent: Agent,
    epoch: Epoch,
    life: Life,
    slot: Option<Slot>,
    tokens: u64,
    stale: u64,
    kills: VecDeque<(Asker, Command)>,
    commands: VecDeque<(Asker, Command)>,
    derived: VecDeque<(RunId, Source, Event)>,
    command_next: bool,
    killers: Vec<Killer>,
    seen: BTreeMap<RunId, Box<Seen>>,
    effects: BTreeMap<(RunId, EffectKind), Token>,
    retry_at: Option<Timestamp>,
    wish: Option<Timestamp>,
}

/// Where the machine is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    /// `agent.created` is not acknowledged.
    Creating,
    /// Our `agent.assigned` is not acknowledged.
    Claiming { history_lost: bool },
    /// It acts.
    Owner,
    /// The agent is removed.
    Retired,
    /// It has stopped acting.
    Halted,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum EffectKind {
    Attach,
    Spawn,
    Stop,
    Kill,
    Pump,
}

/// Who waits for the proof of a kill, and how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Killer {
    asker: Asker,
    run: RunId,
    until: Timestamp,
}

impl Appender {
    fn new(me: Me, agent: Agent, epoch: Epoch, life: Life) -> Self {
        Self {
            me,
            agent,
            epoch,
            life,
            slot: None,
            tokens: 0,
            stale: 0,
            kills: VecDeque::new(),
            commands: VecDeque::new(),
            derived: VecDeque::new(),
            command_next: false,
            killers: Vec::new(),
            seen: BTreeMap::new(),
            effects: BTreeMap::new(),
            retry_at: None,
            wish: None,
        }
    }

    /// Begins an agent: the first slot is `agent.created` at expected sequence
    /// 0 with epoch 1, which is also the first owner's claim.
    ///
    /// If the agent turns out to exist, by the same command: its handle is the
    /// answer, and [`Halt::NotOurs`] follows. It follows any refusal, too:
    /// there is then no agent to serve.
    pub fn create(me: Me, creation: Creation, asker: Asker, command: Command, ctx: Ctx<'_>) -> (Self, Vec<Output>) {
        let event = AgentCreated {
            spec: creation.spec.clone(),
            capabilities: creation.capabilities.clone(),
            working_directory: creation.working_directory.clone(),
        };
        let draft = Draft {
            run: None,
            cause: Some(command.id),
            principal: Some(command.principal.clone()),
            source: None,
            event: event.into(),
        };
        let agent = Agent::unborn(creation, &me, &command, ctx.now);
        let mut machine = Self::new(me, agent, Epoch(1), Life::Creating);
        let mut out = Vec::new();
        let refusal = decide::check_time(command.id, command.expires, ctx.now);
        let sent = match refusal {
            Ok(()) => machine.send(draft, Purpose::Command(asker, command), ctx, &mut out),
            Err(error) => Err(error),
        };
        if let Err(error) = sent {
            machine.refuse_creation(asker, error, &mut out);
        }
        (machine, out)
    }

    /// Takes an agent over, as folded from all of its stored events.
    /// The first slot is `agent.assigned` with the next epoch; nothing else
    /// happens before it is acknowledged. Then every open run is attached to.
    /// A removed agent is not claimed: [`Output::Retired`].
    ///
    /// `history_lost`: the stream lost acknowledged events, so what the open
    /// run did is unknown and it ends as `run.failed{history_lost}`.
    #[must_use]
    pub fn adopt(me: Me, agent: Agent, history_lost: bool, ctx: Ctx<'_>) -> (Self, Vec<Output>) {
        let epoch = agent.owner().epoch.next();
        let mut machine = Self::new(me, agent, epoch, Life::Claiming { history_lost });
        let mut out = Vec::new();
        machine.advance(ctx, &mut out);
        (machine, out)
    }

    /// The event that claims the agent.
    fn claim(&self) -> Draft {
        let spec = self.agent.spec();
        let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let event = AgentAssigned {
            orphan_after_ms: millis(spec.orphan_after()),
            node_lost_after_ms: millis(spec.node_lost_after()),
        };
        Draft { run: None, cause: None, principal: None, source: None, event: event.into() }
    }

    /// The agent as folded. Before a creation is acknowledged: as it will be.
    #[must_use]
    pub fn state(&self) -> &Agent {
        &self.agent
    }

    /// The agent's id.
    #[must_use]
    pub fn agent_id(&self) -> AgentId {
        self.agent.id()
    }

    /// Our epoch, acknowledged or not.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The agent's last stream sequence that is known.
    #[must_use]
    pub fn last_seq(&self) -> StreamSeq {
        self.agent.last().seq
    }

    /// The run that is not sealed.
    #[must_use]
    pub fn open_run(&self) -> Option<RunId> {
        self.agent.open_run().map(|run| run.id)
    }

    /// How many results bore a token that was no longer waited for, and
    /// reports a run that was not open.
    #[must_use]
    pub fn stale_count(&self) -> u64 {
        self.stale
    }

    /// Whether a result with this token would be taken in.
    #[must_use]
    pub fn awaits(&self, token: Token) -> bool {
        self.slot.as_ref().is_some_and(|slot| slot.token == token) || self.effects.values().any(|held| *held == token)
    }

    /// A digest of all that decides what this machine will do: two machines
    /// with the same one behave alike, up to the names of their tokens.
    #[must_use]
    pub fn fingerprint(&self) -> Sha256Digest {
        let mut plain = self.clone();
        plain.tokens = 0;
        plain.stale = 0;
        if let Some(slot) = &mut plain.slot {
            slot.token = Token(0);
        }
        plain.effects.values_mut().for_each(|token| *token = Token(0));
        Sha256Digest::of(format!("{plain:?}").as_bytes())
    }

    /// Gives up whatever waits, for a shutdown or a lost lease, and stops
    /// acting: the askers, who get no answer from here.
    pub fn abandon(&mut self) -> Vec<Asker> {
        self.life = Life::Halted;
        let waiting = self.kills.drain(..).chain(self.commands.drain(..)).map(|(asker, _)| asker);
        let mut askers: Vec<Asker> = waiting.collect();
        askers.extend(self.killers.drain(..).map(|killer| killer.asker));
        if let Some(Slot { purpose: Purpose::Command(asker, _), .. }) = self.slot.take() {
            askers.push(asker);
        }
        self.derived.clear();
        askers
    }

    fn token(&mut self) -> Token {
        self.tokens += 1;
        Token(self.tokens)
    }

    fn halt(&mut self, why: Halt, out: &mut Vec<Output>) {
        self.life = Life::Halted;
        out.push(Output::Halt(why));
    }

    fn refuse_creation(&mut self, asker: Asker, error: ErrorBody, out: &mut Vec<Output>) {
        self.slot = None;
        out.push(Output::Reply(asker, Answer::Refused(error)));
        self.halt(Halt::NotOurs, out);
    }

    fn kill_ack(&self, run: RunId) -> KillAck {
        self.agent.run(run).map_or(KillAck { run, proved: false }, crate::agent::Run::kill_ack)
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn bug(error: FoldError) -> Halt {
    Halt::Bug(error.to_string())
}
