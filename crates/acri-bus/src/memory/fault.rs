//! Faults, each as a real bus commits them, each counted by its name: a test
//! that meant to inject one can say whether it happened.

use super::State;
use crate::port::{Append, Appended, Fault, FrameAppend, Why};
use std::collections::{BTreeMap, VecDeque};

/// What goes wrong with one write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// It is stored, and its acknowledgement is lost.
    AckLost,
    /// It never arrives.
    NeverArrived,
    /// It never arrives now; it lands when [`Faults`] is told so.
    Late,
    /// It arrives twice, and the second answer is the one that is heard.
    Twice,
    /// It is refused for good: the stream is full.
    Full,
    /// Another write with the same expectation is said to be in flight; it is
    /// not stored.
    InFlight,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 6] = [Self::AckLost, Self::NeverArrived, Self::Late, Self::Twice, Self::Full, Self::InFlight];

    /// Its name, under which it is counted.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AckLost => "ack_lost",
            Self::NeverArrived => "never_arrived",
            Self::Late => "late",
            Self::Twice => "twice",
            Self::Full => "full",
            Self::InFlight => "in_flight",
        }
    }
}

/// A write to one of the two streams.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Write {
    /// An event.
    Event(Append),
    /// A log frame.
    Frame(FrameAppend),
}

impl Write {
    /// Carries it out.
    pub fn apply(&self, state: &mut State) -> Appended {
        match self {
            Self::Event(append) => state.append(append),
            Self::Frame(append) => state.append_frame(append),
        }
    }
}

fn unknown(detail: &str) -> Appended {
    Appended::Unknown(Fault::Unavailable { operation: "append", detail: detail.to_owned() })
}

/// Carries out one write as `kind` has it; a late one is put into `late`, to
/// be applied when the caller likes. Deterministic: for simulations.
pub fn apply(state: &mut State, kind: Option<Kind>, write: Write, late: &mut VecDeque<Write>) -> Appended {
    match kind {
        None => write.apply(state),
        Some(Kind::AckLost) => {
            write.apply(state);
            unknown("the acknowledgement was lost")
        }
        Some(Kind::NeverArrived) => unknown("the message was lost"),
        Some(Kind::Late) => {
            late.push_back(write);
            unknown("the message is late")
        }
        Some(Kind::Twice) => {
            write.apply(state);
            write.apply(state)
        }
        Some(Kind::Full) => Appended::Refused(Fault::Refused {
            operation: "append",
            why: Why::Full,
            detail: "maximum bytes exceeded".to_owned(),
        }),
        Some(Kind::InFlight) => Appended::InFlight,
    }
}

/// Which writes a fault waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum On {
    /// The next event.
    Event,
    /// The next log frame.
    Frame,
    /// The next lease or tombstone.
    Lease,
}

/// The faults of one client of a [`MemoryBus`](super::MemoryBus).
#[derive(Debug, Default)]
pub struct Faults {
    waiting: VecDeque<(On, Kind)>,
    pub(super) stale_reads: u32,
    pub(super) away: bool,
    pub(super) clock_offset_micros: i64,
    counts: BTreeMap<&'static str, u64>,
}

impl Faults {
    /// The next write of that sort goes wrong; several wait in order.
    pub fn inject(&mut self, on: On, kind: Kind) {
        self.waiting.push_back((on, kind));
    }

    /// The next `reads` leader reads are answered by a follower that is one
    /// message behind: what an adapter must never do, for tests of tests.
    pub fn stale(&mut self, reads: u32) {
        self.stale_reads += reads;
    }

    /// From now on the bus's clock is so far ahead of this client's.
    pub fn set_clock_offset_micros(&mut self, micros: i64) {
        self.clock_offset_micros = micros;
    }

    pub(super) fn next(&mut self, on: On) -> Option<Kind> {
        let index = self.waiting.iter().position(|(waiting, _)| *waiting == on)?;
        let (_, kind) = self.waiting.remove(index)?;
        self.count(kind.as_str());
        Some(kind)
    }

    pub(super) fn count(&mut self, name: &'static str) {
        *self.counts.entry(name).or_default() += 1;
    }

    /// How often each fault happened.
    #[must_use]
    pub fn counts(&self) -> &BTreeMap<&'static str, u64> {
        &self.counts
    }

    /// Faults that still wait for their write.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }
}
