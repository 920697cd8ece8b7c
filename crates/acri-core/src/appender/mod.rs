//! The sequencer of one agent's events: everything that PROTOCOL section 1 of
//! `docs/` asks, as a machine without IO.
//!
//! An actor owns one [`Appender`]. It turns whatever happens into an
//! [`Input`], calls [`Appender::step`], and carries out the [`Output`]s in
//! order. It decides nothing.

mod message;

pub use message::{
    Answer, Asker, Command, Creation, Effect, Halt, Input, Me, Order, Output, Report, Stored, Token,
};

use crate::agent::Agent;
use acri::{AgentId, Epoch, EventId, RunId, StreamSeq, Timestamp};

/// What the world lends to one step.
#[expect(missing_debug_implementations, reason = "it borrows a closure, which has nothing to show")]
pub struct Ctx<'a> {
    /// The bus's time, as the node knows it.
    pub now: Timestamp,
    /// Makes a fresh event id.
    pub mint: &'a mut dyn FnMut() -> EventId,
}

/// The machine. `Clone` and `==` compare everything, so that a walk over its
/// states can be written.
#[derive(Debug, Clone, PartialEq)]
pub struct Appender {
    me: Me,
    agent: Agent,
}

impl Appender {
    /// Begins an agent: the first slot is `agent.created` at expected sequence
    /// 0 with epoch 1, which is also the first owner's claim.
    ///
    /// If the agent turns out to exist, by the same command: its handle is the
    /// answer, and [`Halt::NotOurs`] follows; likewise after any refusal.
    pub fn create(me: Me, creation: Creation, asker: Asker, command: Command, ctx: Ctx<'_>) -> (Self, Vec<Output>) {
        let _ = (me, creation, asker, command, ctx);
        unimplemented!()
    }

    /// Takes an agent over: `history` is all of its stored events, in order.
    /// The first slot is `agent.assigned` with the next epoch; nothing else
    /// happens before it is acknowledged. Then every open run is attached to.
    ///
    /// `history_lost`: the stream lost acknowledged events, so what the open
    /// run did is unknown and it ends as `run.failed{history_lost}`.
    ///
    /// # Errors
    /// [`Halt::Bug`] if the history cannot be folded or has no event.
    pub fn adopt(me: Me, history: &[Stored], history_lost: bool, ctx: Ctx<'_>) -> Result<(Self, Vec<Output>), Halt> {
        let _ = (me, history, history_lost, ctx);
        unimplemented!()
    }

    /// Takes in what happened and tells what is to be done, in order.
    pub fn step(&mut self, input: Input, ctx: Ctx<'_>) -> Vec<Output> {
        let _ = (input, ctx);
        Vec::new()
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
        self.agent.owner().epoch
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

    /// How many results bore a token that was no longer waited for.
    #[must_use]
    pub fn stale_count(&self) -> u64 {
        0
    }

    /// Gives up whatever waits, for a shutdown or a lost lease: the askers,
    /// who get no answer.
    pub fn abandon(&mut self) -> Vec<Asker> {
        Vec::new()
    }
}
