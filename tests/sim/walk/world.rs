//! One state of the walk: what is stored, what the holder knows, and where the
//! two owners and the network between them stand.

use super::{machines::Id, plan::Left};
use acri::{StreamSeq, event::Source};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) bus: Id,
    pub(crate) holder: Holder,
    /// The owner, and who takes over.
    pub(crate) nodes: [Node; 2],
    /// Writes that may still arrive, each by its number, in order.
    pub(crate) late: Vec<Id>,
    pub(crate) left: Left,
    pub(crate) asked: Asked,
    /// Whether the taker may take over.
    pub(crate) silent: bool,
}

impl World {
    /// A number that tells this state from others, made fast: a hash of all of
    /// it, by 64 bits.
    pub(crate) fn key(&self) -> u64 {
        let Left { crashes, lapses, outages, timeouts, zombie_steps } = self.left;
        let left = [crashes, lapses, outages, timeouts, zombie_steps, self.holder.stops];
        let flags = [self.silent, self.holder.exited];
        let asked = match self.asked {
            Asked::No => 0,
            Asked::At(node) => 1 + node as u64,
            Asked::Lost => 3,
            Asked::Answered => 4,
        };
        let mut key = mix(u64::from(self.bus), self.holder.claimed);
        key = mix(key, self.holder.released);
        key = mix(key, some(self.holder.kept));
        key = mix(key, left.iter().fold(asked, |sum, left| (sum << 8) | u64::from(*left)));
        key = mix(key, flags.iter().fold(0, |sum, flag| (sum << 1) | u64::from(*flag)));
        for node in &self.nodes {
            key = node.key(key);
        }
        self.late.iter().fold(key, |key, write| mix(key, u64::from(*write) + 1))
    }
}

impl Node {
    fn key(&self, key: u64) -> u64 {
        let source = |source: Option<Source>| source.map_or(0, |source| source.offset + 1);
        let flags = [self.taken, self.session, self.heard_exit, self.unclaimed];
        let bits = flags.iter().fold(u64::from(self.done), |sum, flag| (sum << 1) | u64::from(*flag));
        let key = mix(key, (some(self.owner) << 32) | some(self.writer));
        let key = mix(key, (answered(self.event) << 32) | answered(self.frame));
        mix(key, (bits << 48) | (source(self.back) << 24) | source(self.unreported))
    }
}

fn some(id: Option<Id>) -> u64 {
    id.map_or(0, |id| u64::from(id) + 1)
}

fn answered(answered: Option<Answered>) -> u64 {
    match answered {
        None => 0,
        Some(Answered::Conflict) => 1,
        Some(Answered::Stored(seq)) => 2 + (seq.0 << 2),
        Some(Answered::Duplicate(seq)) => 3 + (seq.0 << 2),
    }
}

fn mix(key: u64, value: u64) -> u64 {
    let mixed = (key.rotate_left(25) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 29)
}

/// The harness's holder. Its spool grows when it is read: nobody but a reader
/// sees it, and what is not read when the harness ends was written before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Holder {
    pub(crate) claimed: u64,
    pub(crate) exited: bool,
    pub(crate) released: u64,
    /// The token that came with the last release.
    pub(crate) kept: Option<Id>,
    /// How often the Stop reached the harness.
    pub(crate) stops: u8,
}

/// A node, as far as this agent is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Node {
    /// Its appender; none: it does not run, or has stepped down.
    pub(crate) owner: Option<Id>,
    /// The bus's answer to the event under way, on its way back.
    pub(crate) event: Option<Answered>,
    pub(crate) writer: Option<Id>,
    /// The same for the frame under way.
    pub(crate) frame: Option<Answered>,
    /// Effects that are done and not yet reported, by [`super::machines::Kind::bit`].
    pub(crate) done: u8,
    /// Whether the Stop that is done was taken.
    pub(crate) taken: bool,
    pub(crate) session: bool,
    pub(crate) heard_exit: bool,
    /// A derived event is stored, and the writer has not heard it yet.
    pub(crate) back: Option<Source>,
    /// Mutants only: a derived event of which the appender has not heard.
    pub(crate) unreported: Option<Source>,
    /// Mutants only: the holder has not heard of the claim.
    pub(crate) unclaimed: bool,
}

/// How the bus answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Answered {
    Stored(StreamSeq),
    Duplicate(StreamSeq),
    Conflict,
}

/// Where the Stop command stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Asked {
    No,
    /// This node has it.
    At(usize),
    /// Who had it is gone: the client asks again.
    Lost,
    Answered,
}

/// One of the two writes of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum What {
    Event,
    Frame,
}

/// A step of the world. `usize` is the node: 0 the owner, 1 the taker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Action {
    /// The writer reads this record, which was written by then.
    Read(usize, usize),
    ReadEnd(usize),
    Exit,
    HearExit(usize),
    /// The write under way reaches the bus.
    Land(usize, What),
    /// The bus's answer reaches who asked.
    Answer(usize, What),
    /// No answer came in time; if the write has not arrived, it is late.
    TimeOut(usize, What),
    /// All that is under way to and from the bus is lost.
    Outage(usize),
    /// A late write arrives.
    LandLate(Id),
    /// The appender reads from the leader.
    Reread(usize),
    /// The writer reads from the leader.
    ReadLast(usize),
    CheckEpoch(usize),
    /// An effect reaches the holder.
    Act(usize, super::machines::Kind),
    /// What became of it reaches its owner.
    Told(usize, super::machines::Kind),
    /// The writer hears that its derived event is stored.
    Tell(usize),
    /// Somebody asks for a Stop, or asks again.
    Stop(usize),
    Crash(usize),
    /// The lease lapses while its owner goes on as if nothing had happened.
    Lapse,
    TakeOver,
    /// Mutants only.
    Report(usize),
    Claim(usize),
}

impl Action {
    /// Whether a world without faults may leave it out.
    pub(crate) fn is_fault(self) -> bool {
        match self {
            Self::TimeOut(..) | Self::Outage(_) | Self::LandLate(_) | Self::Crash(_) | Self::Lapse => true,
            Self::Read(..)
            | Self::ReadEnd(_)
            | Self::Exit
            | Self::HearExit(_)
            | Self::Land(..)
            | Self::Answer(..)
            | Self::Reread(_)
            | Self::ReadLast(_)
            | Self::CheckEpoch(_)
            | Self::Act(..)
            | Self::Told(..)
            | Self::Tell(_)
            | Self::Stop(_)
            | Self::TakeOver
            | Self::Report(_)
            | Self::Claim(_) => false,
        }
    }

    /// Whose step it is, if an owner's.
    pub(crate) fn node(self) -> Option<usize> {
        match self {
            Self::Read(node, _)
            | Self::ReadEnd(node)
            | Self::HearExit(node)
            | Self::Land(node, _)
            | Self::Answer(node, _)
            | Self::TimeOut(node, _)
            | Self::Outage(node)
            | Self::Reread(node)
            | Self::ReadLast(node)
            | Self::CheckEpoch(node)
            | Self::Act(node, _)
            | Self::Told(node, _)
            | Self::Tell(node)
            | Self::Stop(node)
            | Self::Report(node)
            | Self::Claim(node) => Some(node),
            Self::Exit | Self::LandLate(_) | Self::Crash(_) | Self::Lapse | Self::TakeOver => None,
        }
    }
}
