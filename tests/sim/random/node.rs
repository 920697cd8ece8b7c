//! A node: one incarnation of one machine, its lease, and the agents that it
//! owns. Plain data; what it does is in [`super::work`] and [`super::turns`].

use super::holder::Exit;
use acri::{
    EventId, Incarnation, RunId, StreamSeq, Timestamp,
    event::Source,
    id::Epoch,
    limits::{LEASE_STOP_AFTER, LEASE_TTL},
    log::ResumeToken,
};
use acri_bus::port::{Append, FrameAppend};
use acri_core::{
    appender::{Appender, Asker, Effect, Input, Me, Report, Token},
    writer::{self, Writer},
};
use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

pub(crate) struct Node {
    pub(crate) machine: usize,
    pub(crate) me: Me,
    pub(crate) life: Life,
    /// The bus cannot be reached from here.
    pub(crate) away: bool,
    /// Steps that it does after a pause without a look at its lease: it had
    /// looked just before.
    pub(crate) unaware: u32,
    /// The bus was put back under it.
    pub(crate) cut: bool,
    pub(crate) lease: Lease,
    /// By the agent's number.
    pub(crate) owners: BTreeMap<usize, Owner>,
    /// Agents to be adopted anew, and whether their history was lost.
    pub(crate) again: BTreeMap<usize, bool>,
    /// Since when an incarnation is seen silent.
    pub(crate) silence: BTreeMap<Incarnation, Timestamp>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    Runs,
    Paused,
    Dead,
}

/// As the lease's keeper has it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lease {
    pub(crate) revision: StreamSeq,
    pub(crate) created: bool,
    pub(crate) fenced: bool,
    pub(crate) sent: Option<Timestamp>,
    valid_until: Option<Timestamp>,
    held_since: Option<Timestamp>,
}

impl Lease {
    pub(crate) fn may_act(&self, now: Timestamp) -> bool {
        !self.fenced && self.valid_until.is_some_and(|until| now < until)
    }

    pub(crate) fn renewed(&mut self, revision: StreamSeq, now: Timestamp) {
        if !self.may_act(now) {
            self.held_since = Some(now);
        }
        (self.revision, self.created) = (revision, true);
        (self.sent, self.valid_until) = (Some(now), Some(now.plus(LEASE_STOP_AFTER)));
    }

    pub(crate) fn broken(&mut self, now: Timestamp) {
        self.held_since = Some(now);
    }

    /// Whether it may conclude anything from another one's silence.
    pub(crate) fn may_judge(&self, now: Timestamp) -> bool {
        self.may_act(now) && self.held_since.is_some_and(|since| now.since(since) >= LEASE_TTL)
    }
}

/// An effect that was asked for.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) token: Token,
    pub(crate) run: RunId,
    pub(crate) effect: Effect,
    /// What is reported of it, once it is done.
    pub(crate) done: Option<Vec<Report>>,
}

/// One agent's actor, with the actor of its open run.
pub(crate) struct Owner {
    pub(crate) core: Appender,
    pub(crate) append: Option<(Token, Append)>,
    /// The bus's answer to it, on its way.
    pub(crate) answer: Option<Input>,
    pub(crate) read: Option<(Token, StreamSeq)>,
    pub(crate) effects: Vec<Asked>,
    pub(crate) wake: Option<Timestamp>,
    /// Who asked, by the number of the question.
    pub(crate) askers: BTreeMap<Asker, usize>,
    pub(crate) next_asker: u64,
    /// The run whose harness it is in contact with.
    pub(crate) session: Option<RunId>,
    pub(crate) heard_exit: bool,
    pub(crate) pump: Option<Pump>,
    /// The run whose harness only another node can reach.
    pub(crate) node_lost: Option<RunId>,
    pub(crate) end: Option<End>,
}

/// Why an actor ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Gone,
    /// It failed, and is replaced.
    Again {
        history_lost: bool,
    },
}

impl Owner {
    pub(crate) fn new(core: Appender, node_lost: Option<RunId>) -> Self {
        Self {
            core,
            append: None,
            answer: None,
            read: None,
            effects: Vec::new(),
            wake: None,
            askers: BTreeMap::new(),
            next_asker: 0,
            session: None,
            heard_exit: false,
            pump: None,
            node_lost,
            end: None,
        }
    }

    pub(crate) fn ask(&mut self, question: usize) -> Asker {
        let asker = Asker(self.next_asker);
        self.next_asker += 1;
        self.askers.insert(asker, question);
        asker
    }
}

/// The task that publishes one run's output.
pub(crate) struct Pump {
    pub(crate) run: RunId,
    pub(crate) epoch: Epoch,
    pub(crate) writer: Writer,
    pub(crate) publish: Option<(Token, FrameAppend)>,
    pub(crate) answer: Option<writer::Input<'static>>,
    pub(crate) read: Option<Token>,
    pub(crate) check: Option<Token>,
    pub(crate) release: Option<(u64, ResumeToken)>,
    /// Stored sources of which the writer has not heard.
    pub(crate) stored: VecDeque<Source>,
}

pub(crate) fn exited(exit: &Exit) -> Report {
    Report::Exited { status: Some(exit.status), killed: exit.killed.clone(), orphaned: exit.orphaned }
}

pub(crate) fn mint(minted: &mut u64) -> EventId {
    *minted += 1;
    EventId::from_uuid(uuid::Uuid::from_u128(u128::from(*minted)))
}

/// A node renews its lease this often.
pub(crate) const RENEW_EVERY: Duration = acri::limits::LEASE_RENEW_EVERY;
