//! What a step does to the machines, and what they say to it.

use super::{
    machines::{Id, Kind, OwnerIn, OwnerOut, WriterIn, WriterOut},
    plan::Mutant,
    steps::{Steps, Violation},
    world::{Answered, Asked, Node, What, World},
};
use acri::id::Epoch;
use acri_bus::memory::fault::Write;
use acri_core::{
    appender::{Answer, Halt},
    writer::LogEnd,
};

impl Steps {
    // ---- writes

    pub(super) fn under_way(&mut self, world: &World, at: usize, what: What) -> Option<Id> {
        let node = &world.nodes[at];
        let (known, machine) = match what {
            What::Event => (&mut self.events, node.owner?),
            What::Frame => (&mut self.frames, node.writer?),
        };
        if let Some(write) = known.get(&machine) {
            return Some(*write);
        }
        let write = match what {
            What::Event => Write::Event(self.machines.owners.get(machine).append.clone()?.1),
            What::Frame => Write::Frame(self.machines.writers.get(machine).publish.clone()?.1),
        };
        let write = self.buses.writes.put_shown(write);
        known.insert(machine, write);
        Some(write)
    }

    pub(super) fn wire(world: &mut World, at: usize, what: What) -> &mut Option<Answered> {
        match what {
            What::Event => &mut world.nodes[at].event,
            What::Frame => &mut world.nodes[at].frame,
        }
    }

    pub(super) fn land(&mut self, world: &mut World, at: usize, what: What) -> Result<(), Violation> {
        let write = self.under_way(world, at, what).expect("it is under way");
        let (bus, answered) = self.buses.land(world.bus, write)?;
        world.bus = bus;
        *Self::wire(world, at, what) = Some(answered);
        Ok(())
    }

    pub(super) fn answer(&mut self, world: &mut World, at: usize, what: What) -> Result<(), Violation> {
        let answered = Self::wire(world, at, what).take().expect("it was answered");
        match what {
            What::Event => {
                let input = match answered {
                    Answered::Stored(seq) => OwnerIn::Stored(seq),
                    Answered::Duplicate(seq) => OwnerIn::Duplicate(seq),
                    Answered::Conflict => OwnerIn::Conflict,
                };
                self.own(world, at, &input)
            }
            What::Frame => {
                let input = match answered {
                    Answered::Stored(seq) => WriterIn::Stored(seq),
                    Answered::Duplicate(_) => WriterIn::Unknown,
                    Answered::Conflict => WriterIn::Conflict,
                };
                self.write(world, at, &input)
            }
        }
    }

    pub(super) fn time_out(&mut self, world: &mut World, at: usize, what: What, late: bool) -> Result<(), Violation> {
        let write = self.under_way(world, at, what).expect("it is under way");
        if Self::wire(world, at, what).take().is_none() && late {
            world.late.push(write);
        }
        match what {
            What::Event => self.own(world, at, &OwnerIn::Unknown),
            What::Frame if self.plan.mutant == Mutant::GrownRepeat => {
                self.grow(world, at);
                Ok(())
            }
            What::Frame => self.write(world, at, &WriterIn::Unknown),
        }
    }

    /// Mutants only: the frame is built anew, of all that was read.
    pub(super) fn grow(&mut self, world: &mut World, at: usize) {
        let Some(id) = world.nodes[at].writer else { return };
        let writer = self.machines.writers.get(id);
        let epoch = Epoch(self.owner_epoch(world, at).unwrap_or_default());
        let none = self.machines.lasts.put_shown(LogEnd::default());
        let base = writer.base.unwrap_or(none);
        let last = self.machines.lasts.get(base);
        let from = last.frame.as_ref().map_or(0, |frame| frame.token.spool_offset);
        let to = writer.wants().unwrap_or(self.plan.spool_end());
        let place = |offset| self.plan.spool.iter().take_while(|record| record.offset < offset).count();
        let (from, to) = (place(from), place(to));
        let mut inputs = vec![WriterIn::Last(base)];
        inputs.extend(self.plan.expected.derived.iter().map(|source| WriterIn::Derived(*source)));
        if from < to {
            inputs.push(WriterIn::Records(from, to));
        }
        let (grown, _) = self.machines.replayed(epoch, None, inputs.iter());
        world.nodes[at].writer = Some(grown);
    }

    /// The number of the run's last frame.
    pub(super) fn last_frame(&mut self, world: &World, at: usize) -> Id {
        let mutant = self.plan.mutant == Mutant::GrownRepeat;
        if let (Some(known), false) = (self.lasts.get(&world.bus), mutant) {
            return *known;
        }
        let mut last = self.buses.last_frame(world.bus);
        if let (true, Some(last), Some(id)) = (mutant, &mut last.frame, world.nodes[at].writer)
            && let Some(frame) = &self.machines.writers.get(id).sent
            && frame.epoch == last.epoch
        {
            last.token = acri::codec::from_msgpack(&frame.resume).expect("it is a token");
        }
        let last = self.machines.lasts.put_shown(last);
        self.lasts.insert(world.bus, last);
        last
    }

    /// The process, or its part in this agent, is gone. What it had sent may
    /// still arrive.
    pub(super) fn step_down(&mut self, world: &mut World, at: usize) {
        for what in [What::Event, What::Frame] {
            if Self::wire(world, at, what).is_none()
                && let Some(write) = self.under_way(world, at, what)
            {
                world.late.push(write);
            }
        }
        world.nodes[at] = Node::default();
    }

    // ---- the machines

    pub(super) fn own(&mut self, world: &mut World, at: usize, input: &OwnerIn) -> Result<(), Violation> {
        let Some(id) = world.nodes[at].owner else { return Ok(()) };
        let (buses, bus) = (&self.buses, world.bus);
        let (next, outs) =
            self.machines.step_owner(id, crate::stage::long(at), input, |after| buses.read_after(bus, after));
        world.nodes[at].owner = Some(next);
        for out in outs.iter() {
            self.owner_said(world, at, out)?;
        }
        let halted = self.machines.owners.get(next).halted.clone();
        match halted {
            None => Ok(()),
            Some(Halt::Fenced { .. }) => {
                self.step_down(world, at);
                Ok(())
            }
            Some(other) => Err(format!("node {at} halts: {other:?}")),
        }
    }

    pub(super) fn owner_said(&mut self, world: &mut World, at: usize, out: &OwnerOut) -> Result<(), Violation> {
        let stored = self.buses.get(world.bus).stop_is_stored;
        match out {
            OwnerOut::Effect(Kind::Stop) if !stored => {
                return Err("an effect before its event: Stop".to_owned());
            }
            OwnerOut::Effect(_) => {}
            OwnerOut::Reply(Answer::Stopping(_)) => self.replied_stop(world)?,
            OwnerOut::Reply(Answer::Refused(_)) => world.asked = Asked::Answered,
            OwnerOut::Reply(other) => return Err(format!("a Stop was answered {other:?}")),
            OwnerOut::Derived(source) => world.nodes[at].back = Some(*source),
        }
        Ok(())
    }

    pub(super) fn replied_stop(&self, world: &mut World) -> Result<(), Violation> {
        world.asked = Asked::Answered;
        if self.buses.get(world.bus).stop_is_stored {
            return Ok(());
        }
        Err("an acknowledged command without its event: Stop".to_owned())
    }

    pub(super) fn write(&mut self, world: &mut World, at: usize, input: &WriterIn) -> Result<(), Violation> {
        let Some(id) = world.nodes[at].writer else { return Ok(()) };
        let (next, outs) = self.machines.step_writer(id, input);
        world.nodes[at].writer = Some(next);
        for out in outs.iter() {
            self.writer_said(world, at, out)?;
        }
        Ok(())
    }

    pub(super) fn writer_said(&mut self, world: &mut World, at: usize, out: &WriterOut) -> Result<(), Violation> {
        match *out {
            WriterOut::Derive(source) if self.plan.mutant == Mutant::DerivedAfterFrame => {
                world.nodes[at].unreported = Some(source);
                self.write(world, at, &WriterIn::Derived(source))
            }
            WriterOut::Derive(source) => self.own(world, at, &OwnerIn::Derived(source)),
            WriterOut::Release(offset, token) => {
                if self.owner_epoch(world, at) != Some(world.holder.claimed) {
                    return Ok(());
                }
                if offset > self.buses.get(world.bus).log.spool_offset {
                    return Err(format!("the spool is released up to {offset}, too far"));
                }
                world.holder.released = world.holder.released.max(offset);
                world.holder.kept = Some(token);
                Ok(())
            }
            WriterOut::StepDown => {
                self.step_down(world, at);
                Ok(())
            }
            WriterOut::Done(count, chain, gap) => self.own(world, at, &OwnerIn::LogsDone(count, chain, gap)),
        }
    }

    // ---- effects

    pub(super) fn act(&mut self, world: &mut World, at: usize, kind: Kind) -> Result<(), Violation> {
        let epoch = self.owner_epoch(world, at).unwrap_or_default();
        match kind {
            Kind::Attach => {
                if epoch < world.holder.claimed {
                    self.step_down(world, at);
                    return Ok(());
                }
                if self.plan.mutant == Mutant::LateClaim {
                    world.nodes[at].unclaimed = true;
                } else {
                    world.holder.claimed = epoch;
                }
            }
            Kind::Stop => self.deliver_stop(world, at)?,
            Kind::Pump => {
                let writer = self.machines.begin(Epoch(epoch), world.holder.kept);
                world.nodes[at].writer = Some(writer);
                return self.own(world, at, &OwnerIn::Done(kind));
            }
        }
        world.nodes[at].done |= kind.bit();
        Ok(())
    }

    pub(super) fn deliver_stop(&mut self, world: &mut World, at: usize) -> Result<(), Violation> {
        let bus = self.buses.get(world.bus);
        let epoch = self.owner_epoch(world, at).unwrap_or_default();
        world.nodes[at].taken = epoch == world.holder.claimed || self.plan.mutant == Mutant::NoEpochs;
        if !world.nodes[at].taken {
            return Ok(());
        }
        if !bus.stop_is_stored {
            return Err("an effect before its event: Stop".to_owned());
        }
        if Epoch(epoch) < bus.epoch && (bus.decided || epoch < world.holder.claimed) {
            return Err(format!("the holder took a request of epoch {epoch} from {}", bus.epoch));
        }
        if world.holder.stops == 0 || self.plan.mutant == Mutant::NoIds {
            world.holder.stops += 1;
        }
        if world.holder.stops > 1 {
            return Err("the Stop reached the harness twice".to_owned());
        }
        Ok(())
    }

    pub(super) fn told(&mut self, world: &mut World, at: usize, kind: Kind) -> Result<(), Violation> {
        world.nodes[at].done &= !kind.bit();
        self.own(world, at, &OwnerIn::Done(kind))?;
        match kind {
            Kind::Attach => {
                world.nodes[at].session = true;
                self.own(world, at, &OwnerIn::Started)
            }
            Kind::Stop if world.nodes[at].taken => self.own(world, at, &OwnerIn::StopDelivered),
            Kind::Stop | Kind::Pump => Ok(()),
        }
    }
}
