//! Which steps a state allows, and what they make of it. Every promise about a
//! step is checked here, every promise about what is stored in [`super::bus`].

use super::{
    bus::Buses,
    machines::{Id, Kind, Machines, OwnerIn, WriterIn},
    plan::{Mutant, Plan},
    world::{Action, Answered, Asked, Holder, Node, What, World},
};
use acri::id::Epoch;
use acri_bus::{memory::State, port::Appended};
use std::{collections::HashMap, rc::Rc};

/// What is wrong.
pub(crate) type Violation = String;

/// The walk's machinery.
pub(crate) struct Steps {
    pub(crate) plan: Rc<Plan>,
    pub(crate) machines: Machines,
    pub(crate) buses: Buses,
    /// The write that a machine has under way, by its number.
    pub(super) events: HashMap<Id, Id>,
    pub(super) frames: HashMap<Id, Id>,
    /// A bus's last frame, by its number.
    pub(super) lasts: HashMap<Id, Id>,
}

impl Steps {
    /// The run has begun, its first owner is about to publish.
    pub(crate) fn begin(plan: Plan) -> (Self, World) {
        let plan = Rc::new(plan);
        let mut machines = Machines::new(Rc::clone(&plan));
        let mut buses = Buses::new(Rc::clone(&plan));
        let fresh = State::new(plan.now);
        let mut state = if plan.replicated { fresh.replicated() } else { fresh };
        let owner = machines.first(|append| match state.append(append) {
            Appended::Stored(seq) => seq,
            other => unreachable!("nobody else is there: {other:?}"),
        });
        let bus = buses.keep(state, Vec::new()).expect("nothing has gone wrong yet");
        let node = Node { owner: Some(owner), session: true, ..Node::default() };
        let world = World {
            bus,
            holder: Holder { claimed: 1, exited: false, released: 0, kept: None, stops: 0 },
            nodes: [node, Node::default()],
            late: Vec::new(),
            left: plan.left,
            asked: Asked::No,
            silent: false,
        };
        let (events, frames, lasts) = (HashMap::new(), HashMap::new(), HashMap::new());
        (Self { plan, machines, buses, events, frames, lasts }, world)
    }

    /// Every step that this state allows.
    pub(crate) fn actions(&self, world: &World) -> Vec<Action> {
        let mut actions = Vec::new();
        if !world.holder.exited {
            actions.push(Action::Exit);
        }
        for node in [0, 1] {
            self.actions_of(world, node, &mut actions);
        }
        actions.extend(world.late.iter().map(|write| Action::LandLate(*write)));
        let alive = world.nodes[0].owner.is_some();
        if alive && world.left.crashes > 0 {
            actions.push(Action::Crash(0));
        }
        if alive && !world.silent && world.left.lapses > 0 {
            actions.push(Action::Lapse);
        }
        if world.silent && self.owner_epoch(world, 1).is_none() && !self.was_taken_over(world) {
            actions.push(Action::TakeOver);
        }
        actions
    }

    fn was_taken_over(&self, world: &World) -> bool {
        self.buses.get(world.bus).epoch > Epoch(1)
    }

    /// Whether the first owner goes on although another one is there.
    fn is_zombie(&self, world: &World) -> bool {
        world.nodes[0].owner.is_some() && world.nodes[1].owner.is_some()
    }

    pub(super) fn owner_epoch(&self, world: &World, node: usize) -> Option<u64> {
        world.nodes[node].owner.map(|id| self.machines.owners.get(id).epoch().0)
    }

    fn actions_of(&self, world: &World, at: usize, actions: &mut Vec<Action>) {
        let node = &world.nodes[at];
        let Some(owner) = node.owner.map(|id| self.machines.owners.get(id)) else { return };
        if node.session && world.holder.exited && !node.heard_exit {
            actions.push(Action::HearExit(at));
        }
        let mut wire = |what, pending: bool, answer: Option<Answered>| {
            if !pending {
                return;
            }
            actions.push(answer.map_or(Action::Land(at, what), |_| Action::Answer(at, what)));
            if world.left.timeouts > 0 {
                actions.push(Action::TimeOut(at, what));
            }
        };
        wire(What::Event, owner.append.is_some(), node.event);
        let writer = node.writer.map(|id| self.machines.writers.get(id));
        let publishes = writer.as_ref().is_some_and(|writer| writer.publish.is_some());
        wire(What::Frame, publishes, node.frame);
        if world.left.outages > 0 && at == 0 && (owner.append.is_some() || publishes) {
            actions.push(Action::Outage(at));
        }
        if owner.read.is_some() {
            actions.push(Action::Reread(at));
        }
        for kind in Kind::ALL {
            if owner.effects.contains_key(&kind) {
                let done = node.done & kind.bit() != 0;
                actions.push(if done { Action::Told(at, kind) } else { Action::Act(at, kind) });
            }
        }
        if let Some(writer) = writer {
            if writer.read.is_some() {
                actions.push(Action::ReadLast(at));
            }
            if writer.checks() {
                actions.push(Action::CheckEpoch(at));
            }
            if let Some(offset) = writer.wants() {
                match self.plan.spool.iter().position(|record| record.offset == offset) {
                    Some(record) => actions.push(Action::Read(at, record)),
                    None if world.holder.exited => actions.push(Action::ReadEnd(at)),
                    None => {}
                }
            }
        }
        if node.back.is_some() {
            actions.push(Action::Tell(at));
        }
        let may_ask = self.plan.stops && matches!(world.asked, Asked::No | Asked::Lost);
        if may_ask && node.session {
            actions.push(Action::Stop(at));
        }
        if node.unreported.is_some() {
            actions.push(Action::Report(at));
        }
        if node.unclaimed {
            actions.push(Action::Claim(at));
        }
    }

    /// The state after a step.
    pub(crate) fn apply(&mut self, world: &World, action: Action) -> Result<World, Violation> {
        let mut next = world.clone();
        if self.is_zombie(world) && action.node() == Some(0) && next.left.zombie_steps != u8::MAX {
            next.left.zombie_steps -= 1;
        }
        self.step(&mut next, action)?;
        if self.is_zombie(&next) && next.left.zombie_steps == 0 {
            // It does nothing more: as good as dead.
            self.step_down(&mut next, 0);
        }
        if matches!(next.asked, Asked::At(node) if next.nodes[node].owner.is_none()) {
            next.asked = Asked::Lost;
        }
        let bus = next.bus;
        next.late.retain(|write| !self.buses.is_dead(bus, *write));
        next.late.sort_unstable();
        next.late.dedup();
        if !self.is_zombie(&next) {
            // What a zombie did is forgotten with it.
            next.left.zombie_steps = self.plan.left.zombie_steps;
        }
        Ok(next)
    }

    fn step(&mut self, world: &mut World, action: Action) -> Result<(), Violation> {
        match action {
            Action::Exit => world.holder.exited = true,
            Action::Read(at, record) => {
                if self.plan.spool[record].offset < world.holder.released {
                    let current = self.owner_epoch(world, at) == Some(world.holder.claimed);
                    if current {
                        return Err(format!("record {record} was removed before it was read"));
                    }
                    self.step_down(world, at);
                    return Ok(());
                }
                self.write(world, at, &WriterIn::Record(record))?;
            }
            Action::ReadEnd(at) => self.write(world, at, &WriterIn::End)?,
            Action::HearExit(at) => {
                world.nodes[at].heard_exit = true;
                self.own(world, at, &OwnerIn::Exited)?;
            }
            Action::Land(at, what) => self.land(world, at, what)?,
            Action::Answer(at, what) => self.answer(world, at, what)?,
            Action::TimeOut(at, what) => {
                world.left.timeouts -= 1;
                self.time_out(world, at, what, true)?;
            }
            Action::Outage(at) => {
                world.left.outages -= 1;
                for what in [What::Event, What::Frame] {
                    if self.under_way(world, at, what).is_some() {
                        self.time_out(world, at, what, false)?;
                    }
                }
            }
            Action::LandLate(write) => {
                world.bus = self.buses.land(world.bus, write)?.0;
                world.late.retain(|late| *late != write);
            }
            Action::Reread(at) => self.own(world, at, &OwnerIn::Caught(world.bus))?,
            Action::ReadLast(at) => {
                let last = self.last_frame(world, at);
                self.write(world, at, &WriterIn::Last(last))?;
            }
            Action::CheckEpoch(at) => {
                if self.owner_epoch(world, at) == Some(self.buses.get(world.bus).epoch.0) {
                    self.write(world, at, &WriterIn::EpochOk)?;
                } else {
                    self.step_down(world, at);
                }
            }
            Action::Act(at, kind) => self.act(world, at, kind)?,
            Action::Told(at, kind) => self.told(world, at, kind)?,
            Action::Tell(at) => {
                if let Some(source) = world.nodes[at].back.take() {
                    self.write(world, at, &WriterIn::Derived(source))?;
                }
            }
            Action::Stop(at) => {
                world.asked = Asked::At(at);
                if self.plan.mutant == Mutant::EarlyReply {
                    self.replied_stop(world)?;
                }
                self.own(world, at, &OwnerIn::Stop)?;
                if self.plan.mutant == Mutant::EarlyEffect {
                    self.deliver_stop(world, at)?;
                }
            }
            Action::Crash(at) => {
                world.left.crashes -= 1;
                world.silent = true;
                self.step_down(world, at);
            }
            Action::Lapse => {
                world.left.lapses -= 1;
                world.silent = true;
            }
            Action::TakeOver => {
                let (history, _) = self.buses.read_after(world.bus, acri::StreamSeq(0));
                let owner = self.machines.adopt(&history)?;
                world.nodes[1] = Node { owner: Some(owner), ..Node::default() };
            }
            Action::Report(at) => {
                if let Some(source) = world.nodes[at].unreported.take() {
                    self.own(world, at, &OwnerIn::Derived(source))?;
                }
            }
            Action::Claim(at) => {
                world.nodes[at].unclaimed = false;
                let epoch = self.owner_epoch(world, at).unwrap_or_default();
                world.holder.claimed = world.holder.claimed.max(epoch);
            }
        }
        Ok(())
    }

    /// Nothing more happens by itself: everything must be there.
    pub(crate) fn at_rest(&self, world: &World) -> Result<(), Violation> {
        if !self.buses.get(world.bus).complete {
            return Err("nothing can happen any more, and the run is not sealed".to_owned());
        }
        match world.asked {
            Asked::At(node) => Err(format!("nothing can happen, and who asked {node} waits")),
            Asked::No | Asked::Lost | Asked::Answered => Ok(()),
        }
    }

    pub(crate) fn is_complete(&self, world: &World) -> bool {
        self.buses.get(world.bus).complete
    }

    /// How much of each machine was met.
    pub(crate) fn tables(&self) -> String {
        format!(
            "{} appenders, {} writers, {} buses",
            self.machines.owners.len(),
            self.machines.writers.len(),
            self.buses.len()
        )
    }
}
