//! What may happen next, and the choice.

use super::{
    node::{Life, Owner},
    world::{AGENTS, MACHINES, World, fault},
};
use acri::log::Stream;
use acri_bus::port::LeaseEntry;
use acri_core::{appender::Input, writer};
use std::time::Duration;

/// One step. Numbers: the node, the agent, the place in a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    Clock(u64),
    Append(usize, usize),
    Answer(usize, usize),
    Reread(usize, usize),
    Tick(usize, usize),
    Effect(usize, usize, usize),
    EffectTold(usize, usize, usize),
    HearExit(usize, usize),
    Publish(usize, usize),
    Published(usize, usize),
    AskForTheLog(usize, usize),
    ReadOutput(usize, usize),
    Release(usize, usize),
    TellStored(usize, usize),
    Readopt(usize, usize),
    /// The harness of this agent's open run writes the output of this number.
    Write(usize, usize),
    /// It ends by itself with this status.
    Exit(usize, i32),
    /// Somebody asks something new of this agent.
    Ask(usize, Kind),
    /// A question is asked again.
    Again(usize),
    Crash(usize),
    Boot(usize),
    Pause(usize),
    Resume(usize),
    Outage(usize),
    Return(usize),
    /// A late write arrives.
    Land,
    /// The event stream loses its last events.
    RollBack(u64),
}

/// What is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Create,
    Start,
    Stop,
    Keep,
    Kill,
    Remove,
    Status,
}

const OUTPUTS: [(Stream, &[u8]); 8] = [
    (Stream::Stdout, b"hel"),
    (Stream::Stdout, b"lo\n"),
    (Stream::Stderr, b"x\n"),
    (Stream::Stdout, b"!ask a\n"),
    (Stream::Stderr, b"!ask b\nand "),
    (Stream::Stdout, b"one\ntwo\nthr"),
    (Stream::Stderr, b"y"),
    (Stream::Stdout, b"\xff\n"),
];

impl World {
    pub(crate) fn choose(&mut self) -> Turn {
        if self.healing {
            return self.choose_to_end();
        }
        match self.dice.below(100) {
            0..10 => Turn::Clock(self.dice.pick(&[5, 50, 500, 1000, 3000, 3000])),
            10..16 => self.choose_question(),
            16..34 => {
                let agent = self.dice.below(AGENTS);
                if self.dice.one_in(25) {
                    return Turn::Exit(agent, self.dice.pick(&[0, 0, 1]));
                }
                Turn::Write(agent, self.dice.below(OUTPUTS.len()))
            }
            34..37 => self.choose_fault(),
            _ => self.choose_work().unwrap_or(Turn::Clock(300)),
        }
    }

    /// Everything that can happen without the clock happens before it.
    fn choose_to_end(&mut self) -> Turn {
        if let Some(turn) = self.choose_work() {
            return turn;
        }
        let machines = (0..MACHINES).map(|machine| (machine, self.living(machine)));
        let mut turns: Vec<Turn> =
            machines.filter(|(_, living)| living.is_none()).map(|(machine, _)| Turn::Boot(machine)).collect();
        if !self.late.is_empty() {
            turns.push(Turn::Land);
        }
        for (number, question) in self.questions.iter().enumerate() {
            let asked = |owner: &&Owner| owner.askers.values().any(|of| *of == number);
            let waits = self.nodes.iter().flat_map(|node| node.owners.values()).any(|owner| asked(&owner));
            if self.waits(question) && !waits {
                turns.push(Turn::Again(number));
            }
        }
        for agent in 0..AGENTS {
            let run = self.promises.open_run(self.agents[agent].id);
            let holder = run.and_then(|run| self.holders.get(&(self.agents[agent].id, run)));
            if holder.is_some_and(super::holder::Holder::is_alive) {
                turns.push(Turn::Exit(agent, 0));
            }
        }
        // A lost node is waited for by the hour.
        let long = self.told.len() > super::world::STEPS + 2000;
        turns.push(Turn::Clock(if long { 3_600_000 } else { 1000 }));
        self.dice.pick(&turns)
    }

    fn choose_question(&mut self) -> Turn {
        if !self.questions.is_empty() && self.dice.one_in(2) {
            return Turn::Again(self.dice.below(self.questions.len()));
        }
        let agent = self.dice.below(AGENTS);
        if self.promises.events_of(self.agents[agent].id).is_empty() {
            return Turn::Ask(agent, Kind::Create);
        }
        let kinds = [Kind::Start, Kind::Start, Kind::Start, Kind::Stop, Kind::Keep, Kind::Kill, Kind::Status];
        if self.dice.one_in(30) {
            return Turn::Ask(agent, Kind::Remove);
        }
        Turn::Ask(agent, self.dice.pick(&kinds))
    }

    fn living(&self, machine: usize) -> Option<usize> {
        self.nodes.iter().rposition(|node| node.machine == machine && node.life != Life::Dead)
    }

    fn choose_fault(&mut self) -> Turn {
        let machine = self.dice.below(MACHINES);
        let Some(at) = self.living(machine) else {
            return if self.dice.one_in(4) { Turn::Boot(machine) } else { Turn::Clock(3000) };
        };
        let node = &self.nodes[at];
        if node.life == Life::Paused {
            // Mostly only when somebody else has noticed.
            let fenced = matches!(self.bus.lease(node.me.incarnation), LeaseEntry::Fenced(_));
            return if fenced || self.dice.one_in(6) { Turn::Resume(at) } else { Turn::Clock(3000) };
        }
        if node.away {
            return if self.dice.one_in(4) { Turn::Return(at) } else { Turn::Clock(3000) };
        }
        match self.dice.below(10) {
            0..2 => Turn::Crash(at),
            2..5 => Turn::Pause(at),
            5..7 => Turn::Outage(at),
            7 if !self.rolled_back && self.dice.one_in(4) => {
                self.rolled_back = true;
                Turn::RollBack(1 + crate::stage::long(self.dice.below(3)))
            }
            _ => Turn::Land,
        }
    }

    fn choose_work(&mut self) -> Option<Turn> {
        let mut turns = Vec::new();
        for (at, node) in self.nodes.iter().enumerate() {
            if node.life != Life::Runs {
                continue;
            }
            for (agent, owner) in &node.owners {
                self.work_of(at, *agent, owner, &mut turns);
            }
            if !node.away {
                turns.extend(node.again.keys().map(|agent| Turn::Readopt(at, *agent)));
            }
        }
        (!turns.is_empty()).then(|| self.dice.pick(&turns))
    }

    fn work_of(&self, at: usize, agent: usize, owner: &Owner, turns: &mut Vec<Turn>) {
        let (acts, now) = (self.may_act(at), self.now());
        let mut may = |possible: bool, turn: Turn| {
            if possible {
                turns.push(turn);
            }
        };
        may(acts && owner.append.is_some() && owner.answer.is_none(), Turn::Append(at, agent));
        may(owner.answer.is_some(), Turn::Answer(at, agent));
        may(owner.read.is_some(), Turn::Reread(at, agent));
        may(owner.wake.is_some_and(|wake| wake <= now), Turn::Tick(at, agent));
        for (place, asked) in owner.effects.iter().enumerate() {
            match asked.done {
                None => may(acts, Turn::Effect(at, agent, place)),
                Some(_) => may(true, Turn::EffectTold(at, agent, place)),
            }
        }
        let holder = |run| self.holders.get(&(self.agents[agent].id, run));
        let exited = owner.session.and_then(holder).is_some_and(|holder| holder.exit.is_some());
        may(exited && !owner.heard_exit, Turn::HearExit(at, agent));
        let Some(pump) = &owner.pump else { return };
        may(acts && pump.publish.is_some() && pump.answer.is_none(), Turn::Publish(at, agent));
        may(pump.answer.is_some(), Turn::Published(at, agent));
        may(pump.read.or(pump.check).is_some(), Turn::AskForTheLog(at, agent));
        may(pump.release.is_some(), Turn::Release(at, agent));
        may(!pump.stored.is_empty(), Turn::TellStored(at, agent));
        if let (Some(offset), Some(holder)) = (pump.writer.wants_output(), holder(pump.run)) {
            let more = offset < holder.spool_end() || holder.exit.is_some();
            may(more, Turn::ReadOutput(at, agent));
        }
    }

    pub(crate) fn may_act(&self, at: usize) -> bool {
        self.nodes[at].unaware > 0 || self.nodes[at].lease.may_act(self.now())
    }

    /// A step that needs a look at the lease was made without one.
    fn was_unaware(&mut self, at: usize) {
        let now = self.now();
        let node = &mut self.nodes[at];
        if node.unaware == 0 || node.lease.may_act(now) {
            return;
        }
        node.unaware -= 1;
        if matches!(self.bus.lease(node.me.incarnation), LeaseEntry::Fenced(_)) {
            self.count(fault::PAUSED);
        }
    }

    pub(crate) fn take(&mut self, turn: Turn) -> Result<(), String> {
        match turn {
            Turn::Append(at, _) | Turn::Effect(at, ..) | Turn::Publish(at, _) => self.was_unaware(at),
            _ => {}
        }
        match turn {
            Turn::Clock(millis) => {
                self.pass(Duration::from_millis(millis));
                self.look_round()?;
            }
            Turn::Append(at, agent) => self.with_owner(at, agent, |world, owner| {
                world.append(at, owner);
                Ok(())
            })?,
            Turn::Answer(at, agent) => self.with_owner(at, agent, |world, owner| {
                owner.append = None;
                let Some(input) = owner.answer.take() else { return Ok(()) };
                world.input(at, agent, owner, input)
            })?,
            Turn::Reread(at, agent) => self.with_owner(at, agent, |world, owner| world.reread(at, agent, owner))?,
            Turn::Tick(at, agent) => self.with_owner(at, agent, |world, owner| {
                owner.wake = None;
                world.input(at, agent, owner, Input::Tick)
            })?,
            Turn::Effect(at, agent, place) => {
                self.with_owner(at, agent, |world, owner| world.perform(at, agent, owner, place))?;
            }
            Turn::EffectTold(at, agent, place) => {
                self.with_owner(at, agent, |world, owner| world.tell_effect(at, agent, owner, place))?;
            }
            Turn::HearExit(at, agent) => {
                self.with_owner(at, agent, |world, owner| world.hear_exit(at, agent, owner))?;
            }
            Turn::Publish(..)
            | Turn::Published(..)
            | Turn::AskForTheLog(..)
            | Turn::ReadOutput(..)
            | Turn::Release(..)
            | Turn::TellStored(..) => self.take_log_turn(turn)?,
            Turn::Readopt(at, agent) => self.readopt(at, agent)?,
            Turn::Write(agent, output) => self.harness_does(agent, |holder, now| {
                let (stream, bytes) = OUTPUTS[output];
                holder.write(stream, bytes, now);
            }),
            Turn::Exit(agent, code) => self.harness_does(agent, |holder, _| holder.exits(code)),
            Turn::Ask(agent, kind) => {
                let number = self.question(agent, kind);
                self.ask(number)?;
            }
            Turn::Again(number) => self.ask(number)?,
            Turn::Boot(machine) => {
                self.boot(machine);
                self.take_back(machine)?;
            }
            Turn::Crash(_)
            | Turn::Pause(_)
            | Turn::Resume(_)
            | Turn::Outage(_)
            | Turn::Return(_)
            | Turn::Land
            | Turn::RollBack(_) => self.take_fault(turn),
        }
        Ok(())
    }

    fn take_log_turn(&mut self, turn: Turn) -> Result<(), String> {
        match turn {
            Turn::Publish(at, agent) => self.with_owner(at, agent, |world, owner| {
                world.publish(at, owner);
                Ok(())
            }),
            Turn::Published(at, agent) => self.with_owner(at, agent, |world, owner| {
                let Some(pump) = &mut owner.pump else { return Ok(()) };
                pump.publish = None;
                let Some(input) = pump.answer.take() else { return Ok(()) };
                world.write(at, agent, owner, input)
            }),
            Turn::AskForTheLog(at, agent) => {
                self.with_owner(at, agent, |world, owner| world.ask_for_the_log(at, agent, owner))
            }
            Turn::ReadOutput(at, agent) => {
                self.with_owner(at, agent, |world, owner| world.read_output(at, agent, owner))
            }
            Turn::Release(at, agent) => self.with_owner(at, agent, |world, owner| {
                let Some(pump) = &mut owner.pump else { return Ok(()) };
                let who = (pump.epoch, world.nodes[at].me.incarnation);
                let (run, now) = (pump.run, world.now());
                if let Some((offset, kept)) = pump.release.take() {
                    world.holder(agent, run).release(who, offset, kept, now);
                }
                Ok(())
            }),
            Turn::TellStored(at, agent) => self.with_owner(at, agent, |world, owner| {
                let Some(source) = owner.pump.as_mut().and_then(|pump| pump.stored.pop_front()) else { return Ok(()) };
                world.write(at, agent, owner, writer::Input::Derived(source))
            }),
            _ => unreachable!("no turn of a log"),
        }
    }

    fn harness_does(&mut self, agent: usize, act: impl FnOnce(&mut super::holder::Holder, acri::Timestamp)) {
        let (id, now) = (self.agents[agent].id, self.now());
        if let Some(run) = self.promises.open_run(id)
            && let Some(holder) = self.holders.get_mut(&(id, run))
        {
            act(holder, now);
        }
    }
}
