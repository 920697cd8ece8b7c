//! What befalls the world: time, leases, takeovers, crashes, and clients.

use super::{
    node::{Lease, Life, Node, Owner, RENEW_EVERY, mint},
    turns::{Kind, Turn},
    world::{Question, World, fault},
};
use crate::stage;
use acri::{
    Epoch, Event, Payload, RunId, StreamSeq,
    command::{CreateAgent, KillRun, OnExpiry, RemoveAgent, StartRun, StopRun},
    event::AgentRemoved,
    id::Sha256Digest,
    limits::LEASE_TTL,
};
use acri_bus::port::{LeaseEntry, Leased};
use acri_core::{
    agent::Agent as Folded,
    appender::{Appender, Asker, Command, Ctx, Input, Order, Stored},
};
use std::collections::{BTreeMap, BTreeSet};

type Result<T = ()> = std::result::Result<T, String>;

fn name(machine: usize) -> &'static str {
    ["n0", "n1"][machine]
}

impl World {
    // ---- nodes

    /// A process begins on a machine whose last one is dead: it may fence its
    /// predecessor at once.
    pub(crate) fn boot(&mut self, machine: usize) {
        if let Some(before) = self.nodes.iter().rfind(|node| node.machine == machine) {
            let incarnation = before.me.incarnation;
            let expect = match self.bus.lease(incarnation) {
                LeaseEntry::Live { revision, .. } | LeaseEntry::Expired(revision) => Some(revision),
                LeaseEntry::Absent => Some(StreamSeq(0)),
                LeaseEntry::Fenced(_) => None,
            };
            if let Some(expect) = expect {
                self.bus.fence(incarnation, expect);
            }
        }
        self.nodes.push(Node {
            machine,
            me: stage::me(name(machine), stage::long(self.nodes.len()) + 1),
            life: Life::Runs,
            away: false,
            unaware: 0,
            cut: false,
            lease: Lease::default(),
            owners: BTreeMap::new(),
            again: BTreeMap::new(),
            silence: BTreeMap::new(),
        });
        self.renew(self.nodes.len() - 1);
    }

    /// What the holders of a machine that comes up have: of a run that was
    /// given up meanwhile the output is owed; of any other nothing is.
    pub(crate) fn take_back(&mut self, machine: usize) -> Result {
        let at = self.nodes.len() - 1;
        for (id, run) in self.holders.keys().copied().collect::<Vec<_>>() {
            let Some(agent) = self.agents.iter().position(|agent| agent.id == id && agent.local) else { continue };
            if self.holders[&(id, run)].home != Some(machine) {
                continue;
            }
            let newest = self.promises.events_of(id).last().map(|event| event.node.clone());
            if self.promises.open_run(id) != Some(run) {
                let (now, nobody) = (self.now(), (Epoch(u64::MAX), self.nodes[at].me.incarnation));
                let record = (stage::command_id(0, 0), "node".to_owned(), "it was given up".to_owned());
                if let Some(holder) = self.holders.get_mut(&(id, run)) {
                    let _ = holder.kill(nobody, record, now);
                }
            } else if newest.as_ref() != Some(&self.nodes[at].me.node) {
                self.adopt(at, agent, false)?;
            }
        }
        Ok(())
    }

    fn die(&mut self, at: usize) {
        self.nodes[at].life = Life::Dead;
        self.nodes[at].again.clear();
        for owner in std::mem::take(&mut self.nodes[at].owners).into_values() {
            self.bury(owner);
        }
    }

    pub(crate) fn take_fault(&mut self, turn: Turn) {
        match turn {
            Turn::Crash(at) => {
                let effects = || self.nodes[at].owners.values().flat_map(|owner| &owner.effects);
                let (before, after) =
                    (effects().any(|asked| asked.done.is_none()), effects().any(|asked| asked.done.is_some()));
                self.count(fault::CRASH);
                if before {
                    self.count(fault::CRASH_BEFORE_EFFECT);
                }
                if after {
                    self.count(fault::CRASH_AFTER_EFFECT);
                }
                self.die(at);
            }
            Turn::Pause(at) => self.nodes[at].life = Life::Paused,
            Turn::Resume(at) => {
                self.nodes[at].life = Life::Runs;
                self.nodes[at].unaware = if self.nodes[at].cut { 0 } else { 4 };
            }
            Turn::Outage(at) => {
                self.count(fault::OUTAGE);
                self.nodes[at].away = true;
                if self.dice.one_in(2) {
                    self.nodes.iter_mut().for_each(|node| node.away = true);
                }
            }
            Turn::Return(at) => self.nodes[at].away = false,
            Turn::Land => self.land(),
            Turn::RollBack(events) => self.roll_back(events),
            _ => unreachable!("no fault"),
        }
    }

    fn land(&mut self) {
        let Some(write) = self.late.pop_front() else { return };
        let before = (self.bus.event_facts().last, self.bus.log_facts().last);
        write.apply(&mut self.bus);
        if before != (self.bus.event_facts().last, self.bus.log_facts().last) {
            self.count(fault::LATE_OLD);
        }
    }

    /// A backup is restored: the server was down for it, so nothing that was
    /// on its way survives, and nobody sends any more without a look at his
    /// lease. (Who does can hit a sequence that came again: the compare-and-set
    /// cannot know.)
    fn roll_back(&mut self, events: u64) {
        let mut put_back = self.bus.clone();
        let last = self.bus.event_facts().last.0.saturating_sub(events);
        put_back.truncate_events(StreamSeq(last));
        // An agent that is gone altogether is another story.
        let known = self
            .agents
            .iter()
            .all(|agent| self.bus.last_seq(agent.id) == StreamSeq(0) || put_back.last_seq(agent.id) > StreamSeq(0));
        if known && last < self.bus.event_facts().last.0 {
            self.count(fault::ROLLED_BACK);
            self.bus = put_back;
            self.late.clear();
            for node in &mut self.nodes {
                (node.unaware, node.cut) = (0, true);
            }
            self.promises.put_back(&self.bus);
            if self.owners_compare {
                self.compare();
            }
        }
    }

    /// Each owner looks whether his agent's last event is still the one that he
    /// knows; if not, what was acknowledged to him is lost.
    fn compare(&mut self) {
        for at in 0..self.nodes.len() {
            for agent in self.nodes[at].owners.keys().copied().collect::<Vec<_>>() {
                let known = *self.nodes[at].owners[&agent].core.state().last();
                let last = self.bus.last(self.agents[agent].id);
                let same = last.is_some_and(|last| Sha256Digest::of(&last.bytes) == known.digest);
                if !same && let Some(owner) = self.nodes[at].owners.remove(&agent) {
                    self.bury(owner);
                    self.nodes[at].again.insert(agent, true);
                }
            }
        }
        self.late.clear();
    }

    // ---- time

    /// Time has passed: leases, contacts, orphans, silent owners.
    pub(crate) fn look_round(&mut self) -> Result {
        let now = self.now();
        for at in 0..self.nodes.len() {
            if self.nodes[at].life != Life::Runs {
                continue;
            }
            let due = self.nodes[at].lease.sent.is_none_or(|sent| now.since(sent) >= RENEW_EVERY);
            if due && self.nodes[at].away {
                self.nodes[at].lease.broken(now);
            } else if due {
                self.renew(at);
            }
            self.contact(at);
        }
        for holder in self.holders.values_mut() {
            if holder.look_at_the_clock(now) {
                *self.counts.entry(fault::ORPHANED).or_default() += 1;
            }
        }
        for at in 0..self.nodes.len() {
            let node = &self.nodes[at];
            if node.life == Life::Runs && !node.away && node.lease.may_act(now) {
                self.look_for_silent_owners(at)?;
            }
        }
        Ok(())
    }

    fn renew(&mut self, at: usize) {
        let now = self.now();
        for _ in 0..3 {
            let node = &mut self.nodes[at];
            let (incarnation, name) = (node.me.incarnation, node.me.node.clone());
            match self.bus.write_lease(incarnation, &name, node.lease.revision, LEASE_TTL) {
                Leased::Written(revision) => return node.lease.renewed(revision, now),
                Leased::Unknown(_) => unreachable!("the bus as a value always answers"),
                Leased::Lost => match self.bus.lease(incarnation) {
                    LeaseEntry::Live { revision, .. } | LeaseEntry::Expired(revision) => {
                        node.lease.revision = revision;
                    }
                    LeaseEntry::Absent if !node.lease.created => {}
                    LeaseEntry::Absent | LeaseEntry::Fenced(_) => {
                        if node.unaware > 0 {
                            node.unaware -= 1;
                        } else {
                            node.lease.fenced = true;
                            self.die(at);
                        }
                        return;
                    }
                },
            }
        }
    }

    fn contact(&mut self, at: usize) {
        let now = self.now();
        if !self.nodes[at].lease.may_act(now) {
            return;
        }
        let incarnation = self.nodes[at].me.incarnation;
        for (agent, owner) in &self.nodes[at].owners {
            if let Some(run) = owner.session
                && let Some(holder) = self.holders.get_mut(&(self.agents[*agent].id, run))
            {
                // A newer owner's holder does not listen.
                let _ = holder.contact((owner.core.epoch(), incarnation), now);
            }
        }
    }

    fn look_for_silent_owners(&mut self, at: usize) -> Result {
        let now = self.now();
        let mut silent = BTreeSet::new();
        for agent in 0..self.agents.len() {
            let id = self.agents[agent].id;
            let Some(newest) = self.promises.events_of(id).last() else { continue };
            let removed = matches!(newest.event, Event::AgentRemoved(AgentRemoved { .. }));
            let (incarnation, owner) = (newest.incarnation, newest.node.clone());
            let node = &self.nodes[at];
            if removed || node.owners.contains_key(&agent) || node.again.contains_key(&agent) {
                continue;
            }
            if incarnation == node.me.incarnation {
                // Only a stream that was put back gives an agent back.
                if self.promises.spoiled.contains(&id) {
                    self.adopt(at, agent, true)?;
                }
                continue;
            }
            let predecessor = owner == node.me.node;
            let expect = match self.bus.lease(incarnation) {
                LeaseEntry::Live { .. } => continue,
                LeaseEntry::Expired(revision) => Some(revision),
                LeaseEntry::Absent => Some(StreamSeq(0)),
                LeaseEntry::Fenced(_) => None,
            };
            if !predecessor && !node.lease.may_judge(now) {
                self.nodes[at].silence.clear();
                continue;
            }
            silent.insert(incarnation);
            let since = *self.nodes[at].silence.entry(incarnation).or_insert(now);
            if let Some(expect) = expect {
                match self.bus.fence(incarnation, expect) {
                    Leased::Written(_) => self.count(fault::LAPSED),
                    Leased::Lost | Leased::Unknown(_) => continue,
                }
            }
            let elsewhere = self.agents[agent].local && !predecessor;
            let lost_after = self.agents[agent].spec.node_lost_after();
            if elsewhere && (self.promises.open_run(id).is_none() || now.since(since) < lost_after) {
                continue;
            }
            self.adopt(at, agent, false)?;
        }
        self.nodes[at].silence.retain(|incarnation, _| silent.contains(incarnation));
        Ok(())
    }

    fn adopt(&mut self, at: usize, agent: usize, history_lost: bool) -> Result {
        let (mut history, _) = self.history(agent, StreamSeq(0));
        if history.len() > 1 && self.strikes(4) {
            // Only the claim's own check needs the leader.
            self.count(fault::STALE_READ);
            let kept = 1 + self.dice.below(history.len() - 1);
            history.truncate(kept);
        }
        self.adopt_from(at, agent, &history, history_lost)
    }

    /// The open run, if only another machine can reach its harness: the one
    /// that accepted it. That its agent was taken over since, even by this
    /// node, does not bring it nearer.
    fn out_of_reach(&self, at: usize, agent: usize) -> Option<RunId> {
        let id = self.agents[agent].id;
        let run = self.promises.open_run(id).filter(|_| self.agents[agent].local)?;
        let accepted =
            |event: &&acri::EventEnvelope| event.run == Some(run) && matches!(event.event, Event::RunAccepted(_));
        let by = &self.promises.events_of(id).iter().find(accepted)?.node;
        (*by != self.nodes[at].me.node).then_some(run)
    }

    fn adopt_from(&mut self, at: usize, agent: usize, history: &[Stored], history_lost: bool) -> Result {
        let (now, me) = (self.now(), self.nodes[at].me.clone());
        let lost = self.out_of_reach(at, agent);
        let minted = &mut self.minted;
        let mut mint = || mint(minted);
        let folded = match Folded::fold(history) {
            Ok(Some(folded)) => folded,
            Ok(None) | Err(_) if self.is_damaged(agent) => return Ok(()),
            other => return Err(format!("a taker cannot fold: {other:?}")),
        };
        let ctx = Ctx { now, events_percent: 0, mint: &mut mint };
        let (core, outputs) = Appender::adopt(me, folded, history_lost, ctx);
        self.nodes[at].owners.insert(agent, Owner::new(core, lost));
        self.with_owner(at, agent, |world, owner| world.carry_out(at, agent, owner, outputs))
    }

    /// An actor that failed is replaced, if the agent is still this node's.
    pub(crate) fn readopt(&mut self, at: usize, agent: usize) -> Result {
        let Some(history_lost) = self.nodes[at].again.remove(&agent) else { return Ok(()) };
        let (history, _) = self.history(agent, StreamSeq(0));
        let newest = self.promises.events_of(self.agents[agent].id).last();
        let ours = newest.is_some_and(|event| event.incarnation == self.nodes[at].me.incarnation);
        if ours { self.adopt_from(at, agent, &history, history_lost) } else { Ok(()) }
    }

    // ---- clients

    pub(crate) fn question(&mut self, agent: usize, kind: Kind) -> usize {
        let now = self.now();
        let millis = u64::try_from(now.as_micros() / 1000).unwrap_or_default();
        self.commands += 1;
        let id = match kind {
            Kind::Create => self.agents[agent].create,
            _ => stage::command_id(millis, self.commands),
        };
        let of = self.agents[agent].id;
        let accepted = |event: &&acri::EventEnvelope| matches!(event.event, Event::RunAccepted(_));
        let run = self.promises.events_of(of).iter().rev().find(accepted).and_then(|event| event.run);
        let run = run.unwrap_or_else(|| RunId::derive(of, id));
        let stop = |grace, on_expiry| StopRun { reason: "s".to_owned(), grace_ms: Some(grace), on_expiry };
        let order = match kind {
            Kind::Create => Order::Create(CreateAgent { spec: self.agents[agent].spec.clone() }),
            Kind::Start => Order::Start(StartRun { task: Payload::text("t") }),
            Kind::Stop => Order::Stop(run, stop(4000, OnExpiry::Kill)),
            Kind::Keep => Order::Stop(run, stop(2000, OnExpiry::Keep)),
            Kind::Kill => Order::Kill(run, KillRun { reason: "k".to_owned() }),
            Kind::Remove => Order::Remove(RemoveAgent { reason: String::new() }),
            Kind::Status => Order::Status(None),
        };
        let command = Command { id, principal: "ann".to_owned(), expires: None, order };
        self.questions.push(Question { agent, command, answer: None });
        self.questions.len() - 1
    }

    /// The request goes to whoever listens; nobody may.
    pub(crate) fn ask(&mut self, number: usize) -> Result {
        let (agent, command) = (self.questions[number].agent, self.questions[number].command.clone());
        let listens = |node: &Node| node.life == Life::Runs && !node.away;
        let owning: Vec<usize> = (0..self.nodes.len())
            .filter(|at| listens(&self.nodes[*at]) && self.nodes[*at].owners.contains_key(&agent))
            .collect();
        let create = matches!(command.order, Order::Create(_));
        if create && (owning.is_empty() || self.dice.one_in(4)) {
            let able = (0..self.nodes.len()).filter(|at| {
                listens(&self.nodes[*at]) && self.may_act(*at) && !self.nodes[*at].owners.contains_key(&agent)
            });
            let able: Vec<usize> = able.collect();
            if able.is_empty() {
                return Ok(());
            }
            let at = self.dice.pick(&able);
            return self.create(at, agent, number, command);
        }
        if owning.is_empty() {
            return Ok(());
        }
        let at = self.dice.pick(&owning);
        if let Order::Kill(run, kill) = &command.order {
            self.pull_the_switch(at, agent, *run, (command.id, command.principal.clone(), kill.reason.clone()));
        }
        self.with_owner(at, agent, |world, owner| {
            let asker = owner.ask(number);
            world.input(at, agent, owner, Input::Command(asker, command))
        })
    }

    fn create(&mut self, at: usize, agent: usize, number: usize, command: Command) -> Result {
        let (now, me) = (self.now(), self.nodes[at].me.clone());
        let creation = stage::creation(self.agents[agent].create, self.agents[agent].spec.clone());
        let minted = &mut self.minted;
        let mut mint = || mint(minted);
        let ctx = Ctx { now, events_percent: 0, mint: &mut mint };
        let (core, outputs) = Appender::create(me, creation, Asker(0), command, ctx);
        let mut owner = Owner::new(core, None);
        owner.ask(number);
        self.nodes[at].owners.insert(agent, owner);
        self.with_owner(at, agent, |world, owner| world.carry_out(at, agent, owner, outputs))
    }

    /// The control thread ends the harness at once, beside everything.
    fn pull_the_switch(&mut self, at: usize, agent: usize, run: RunId, record: super::holder::KillRecord) {
        let (now, machine) = (self.now(), self.nodes[at].machine);
        let incarnation = self.nodes[at].me.incarnation;
        let Some(epoch) = self.nodes[at].owners.get(&agent).map(|owner| owner.core.epoch()) else { return };
        let open = self.promises.open_run(self.agents[agent].id) == Some(run);
        let local = self.agents[agent].local;
        if open && self.may_act(at) {
            let holder = self.holder(agent, run);
            if !local || holder.home.is_none_or(|home| home == machine) {
                // What a former owner's switch does is refused; his record, too.
                let _ = holder.kill((epoch, incarnation), record, now);
            }
        }
    }
}
