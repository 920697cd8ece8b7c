//! What a walk walks over, and the faults of thought that it is to find.

use crate::stage::{self, Expected, Record};
use acri::{
    AgentId, AgentSpec, CommandId, RunId, Timestamp, codec,
    command::{OnExpiry, StopRun},
    log::{ResumeToken, Stream},
};
use bytes::Bytes;

/// How often each fault may strike in one history, and other bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Left {
    /// The owner's process dies.
    pub(crate) crashes: u8,
    /// The owner's lease lapses unnoticed by itself: the other one takes over.
    pub(crate) lapses: u8,
    /// The bus is away for the owner: every answer is lost, once.
    pub(crate) outages: u8,
    /// An answer is lost, or a write is late.
    pub(crate) timeouts: u8,
    /// What an owner still does after another one has begun to take over, in
    /// steps; what it had sent before is not counted.
    pub(crate) zombie_steps: u8,
}

/// The scope of one walk.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) now: Timestamp,
    pub(crate) create: CommandId,
    pub(crate) start: CommandId,
    pub(crate) stop: CommandId,
    pub(crate) agent: AgentId,
    pub(crate) run: RunId,
    pub(crate) spec: AgentSpec,
    pub(crate) spool: Vec<Record>,
    pub(crate) expected: Expected,
    pub(crate) left: Left,
    /// Whether somebody may ask for a Stop.
    pub(crate) stops: bool,
    /// Whether the bus answers repeats as a replicated stream does.
    pub(crate) replicated: bool,
    pub(crate) states_max: usize,
    pub(crate) mutant: Mutant,
}

/// A fault of thought, put into the model, never into the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Mutant {
    None,
    /// The resume token has one offset, not one a stream.
    OneOffset,
    /// A repeat holds what came in meanwhile, and any frame of one's own epoch
    /// is taken for it.
    GrownRepeat,
    /// The writer does not wait for its derived events.
    DerivedAfterFrame,
    /// The holder is told of the new owner only after his first effect.
    LateClaim,
    /// The holder takes requests of any epoch.
    NoEpochs,
    /// The holder does not keep the ids of what it delivered.
    NoIds,
    /// A reader drops frames of an owner who was no longer the owner.
    ReaderByEpoch,
    /// The effect is sent off together with its event.
    EarlyEffect,
    /// The command is answered when its event is sent.
    EarlyReply,
    /// Frames are stored whatever is expected.
    NoFrameCheck,
}

impl Mutant {
    /// All that are mutants.
    pub(crate) const ALL: [Self; 10] = [
        Self::OneOffset,
        Self::GrownRepeat,
        Self::DerivedAfterFrame,
        Self::LateClaim,
        Self::NoEpochs,
        Self::NoIds,
        Self::ReaderByEpoch,
        Self::EarlyEffect,
        Self::EarlyReply,
        Self::NoFrameCheck,
    ];

    /// The token as this writer would write it.
    pub(crate) fn token(self, resume: Bytes) -> Bytes {
        if self != Self::OneOffset {
            return resume;
        }
        let token: ResumeToken = codec::from_msgpack(&resume).expect("it is a token");
        let token = ResumeToken { streams: std::collections::BTreeMap::new(), ..token };
        codec::to_msgpack(&token).expect("a token has a form").into()
    }
}

impl Plan {
    pub(crate) fn new(left: Left, stops: bool) -> Self {
        let now = stage::at_millis(stage::START_MS);
        let [create, start, stop] = [1, 2, 3].map(|number| stage::command_id(stage::START_MS, number));
        let mut spool = Vec::new();
        let outputs: [(Stream, &[u8]); 4] = [
            (Stream::Stdout, b"hel"),
            (Stream::Stderr, b"x\n"),
            (Stream::Stdout, b"lo\n!ask q\n"),
            (Stream::Stderr, b"y"),
        ];
        for (stream, bytes) in outputs {
            stage::write(&mut spool, stream, bytes, now);
        }
        Self {
            now,
            create,
            start,
            stop,
            agent: stage::agent_id(create),
            run: stage::run_id(create, start),
            spec: stage::spec(),
            expected: Expected::of(&spool, true),
            spool,
            left,
            stops,
            replicated: false,
            states_max: usize::MAX,
            mutant: Mutant::None,
        }
    }

    /// The same with a single output, which asks.
    pub(crate) fn of_one_line(mut self) -> Self {
        self.spool.clear();
        stage::write(&mut self.spool, Stream::Stdout, b"!ask q\n", self.now);
        self.expected = Expected::of(&self.spool, true);
        self
    }

    /// The same with all output on one stream.
    pub(crate) fn on_one_stream(mut self) -> Self {
        let outputs: [&[u8]; 4] = [b"hel", b"lo\n", b"x\n", b"y\n"];
        self.spool.clear();
        for bytes in outputs {
            stage::write(&mut self.spool, Stream::Stdout, bytes, self.now);
        }
        self.expected = Expected::of(&self.spool, true);
        self
    }

    pub(crate) fn spool_end(&self) -> u64 {
        self.spool.last().map_or(0, |record| record.end)
    }

    /// A Stop that lets the run go on: its effect is what is watched.
    pub(crate) fn stop_run(&self) -> StopRun {
        StopRun { reason: String::new(), grace_ms: Some(60_000), on_expiry: OnExpiry::Keep }
    }
}

impl std::fmt::Display for Plan {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Left { crashes, lapses, outages, timeouts, zombie_steps } = self.left;
        let outputs = self.spool.len();
        write!(formatter, "{outputs} outputs")?;
        for (count, name) in [(crashes, "crash"), (lapses, "lapse"), (outages, "outage"), (timeouts, "timeout")] {
            if count > 0 {
                write!(formatter, ", {count} {name}")?;
            }
        }
        match zombie_steps {
            _ if lapses == 0 => {}
            u8::MAX => formatter.write_str(", zombie_steps unbounded")?,
            steps => write!(formatter, ", zombie_steps at most {steps}")?,
        }
        formatter.write_str(if self.stops { ", a Stop" } else { "" })?;
        formatter.write_str(if self.replicated { ", replicated bus" } else { "" })
    }
}
