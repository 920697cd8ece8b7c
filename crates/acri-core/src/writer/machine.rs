//! The state machine: one frame in flight, and what to do when it is refused.

use super::{
    Input, LastFrame, Limits, LogEnd, Output, Parser, Plain, SpoolRecord,
    pending::{Pending, STREAMS, slot},
    split::{Piece, Splitter},
};
use crate::appender::Token;
use acri::{
    AgentId, Event, RunId, StreamSeq, codec,
    id::{Epoch, LogSeq, Sha256Digest},
    log::{ResumeToken, Stream, StreamPosition},
};
use bytes::Bytes;

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The run's last frame: at the start, or because a frame was refused.
    Reading(Token),
    /// Whether the agent is still ours, because a frame was refused.
    Checking(Token),
    /// The outcome of the frame in flight.
    Publishing(Token),
    /// Something to publish.
    Idle,
    /// Nothing: we are fenced, or done.
    Over,
}

/// The frame in flight.
#[derive(Debug)]
struct Flight {
    bytes: Bytes,
    token: ResumeToken,
    resume: Bytes,
    events: usize,
    attempt: u32,
}

/// Turns the output of one run into stored log frames.
#[derive(Debug)]
pub struct Writer {
    agent: AgentId,
    run: RunId,
    epoch: Epoch,
    limits: Limits,
    parser: Box<dyn Parser>,
    phase: Phase,
    tokens: u64,
    /// How often the present question was asked.
    asked: u32,
    /// What the holder kept; used by the first read only.
    kept: Option<ResumeToken>,
    /// The token of the last stored frame; none until it is read.
    stored: Option<ResumeToken>,
    /// The sequence of the last message on the run's subject.
    last: StreamSeq,
    flight: Option<Flight>,
    /// The frame after the one in flight, if it is full: nothing that comes in
    /// can make it larger, so its cutting and hashing need not wait.
    ready: Option<Flight>,
    pending: Pending,
    splitters: [Splitter; 2],
    /// Offset of the next record.
    next: u64,
    ended: bool,
    gap: bool,
    ignored: u64,
    /// Kept to be used again.
    found: Vec<Event>,
}

impl Writer {
    /// The writer of a run whose output is plain. `kept` is the token that the
    /// holder of the spool had with the last release.
    #[must_use]
    pub fn new(agent: AgentId, run: RunId, epoch: Epoch, kept: Option<ResumeToken>) -> (Self, Vec<Output>) {
        Self::with(agent, run, epoch, kept, Box::new(Plain), Limits::default())
    }

    /// The same with a parser and limits.
    #[must_use]
    pub fn with(
        agent: AgentId,
        run: RunId,
        epoch: Epoch,
        kept: Option<ResumeToken>,
        parser: Box<dyn Parser>,
        limits: Limits,
    ) -> (Self, Vec<Output>) {
        let start = ResumeToken::start();
        let mut writer = Self {
            agent,
            run,
            epoch,
            limits,
            parser,
            phase: Phase::Idle,
            tokens: 0,
            asked: 0,
            kept,
            stored: None,
            last: StreamSeq(0),
            flight: None,
            ready: None,
            pending: Pending::after(&start),
            splitters: STREAMS.map(|_| Splitter::new(limits.line_bytes_max, StreamPosition::default())),
            next: 0,
            ended: false,
            gap: false,
            ignored: 0,
            found: Vec::new(),
        };
        let mut outputs = Vec::new();
        writer.read_last(&mut outputs);
        (writer, outputs)
    }

    /// Where the spool is to be read on; none while enough is pending, after the
    /// end of the output, and when the writer is over. Ask after each step.
    #[must_use]
    pub fn wants_output(&self) -> Option<u64> {
        let wanted = self.takes_output() && self.pending.bytes() < self.limits.pending_bytes_wanted;
        wanted.then_some(self.next)
    }

    /// Whether nothing will follow: fenced, or done.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// Inputs that were ignored as stale, or as output that was not wanted.
    #[must_use]
    pub fn ignored(&self) -> u64 {
        self.ignored
    }

    /// A digest of all that decides what this machine will do: two machines
    /// with the same one behave alike, up to the names of their tokens and the
    /// numbers of their attempts.
    #[must_use]
    pub fn fingerprint(&self) -> Sha256Digest {
        let phase = match self.phase {
            Phase::Reading(_) => "reading",
            Phase::Checking(_) => "checking",
            Phase::Publishing(_) => "publishing",
            Phase::Idle => "idle",
            Phase::Over => "over",
        };
        let flight = self.flight.as_ref().map(|flight| (&flight.bytes, &flight.token));
        let whose = (self.agent, self.run, self.epoch, self.limits, &self.parser);
        let stored = (phase, &self.kept, &self.stored, self.last, flight);
        let read = (&self.pending, &self.splitters, self.next, self.ended, self.gap);
        Sha256Digest::of(format!("{whose:?} {stored:?} {read:?}").as_bytes())
    }

    /// Takes what happened and tells what to do.
    pub fn step(&mut self, input: Input<'_>) -> Vec<Output> {
        let mut outputs = Vec::new();
        if !self.take(input, &mut outputs) {
            self.ignored += 1;
            return outputs;
        }
        let max = self.limits.derived_in_flight_max;
        self.pending.derive(max, |source, event| outputs.push(Output::Derive(source, Box::new(event))));
        self.publish(&mut outputs);
        outputs
    }

    /// Cuts the next frame while one is in flight, if it would be full: that
    /// takes as long as the frame is under way. Call it after the outputs of a
    /// step were carried out; it changes nothing but when the work is done.
    pub fn prepare(&mut self) {
        let (Phase::Publishing(_), Some(flight), None) = (self.phase, &self.flight, &self.ready) else {
            return;
        };
        let frame_bytes_max = self.limits.frame_bytes_max;
        if self.pending.is_frame_full(frame_bytes_max) {
            self.ready = cut(&mut self.pending, self.agent, self.run, &flight.token, frame_bytes_max);
        }
    }

    /// False if the input means nothing now.
    fn take(&mut self, input: Input<'_>, outputs: &mut Vec<Output>) -> bool {
        match input {
            Input::Output(record) => {
                let wanted = self.takes_output() && self.pending.bytes() < self.limits.pending_bytes_max;
                if !wanted || record.spool_offset != self.next {
                    return false;
                }
                self.split(&record);
            }
            Input::EndOfOutput { at, torn } => {
                if !self.takes_output() || at != self.next {
                    return false;
                }
                self.end();
                self.gap |= torn;
            }
            Input::OutputGone { first } => {
                if !self.takes_output() || first <= self.next {
                    return false;
                }
                self.next = first;
                self.gap = true;
            }
            Input::Derived(source) => self.pending.derived(source),
            Input::Stored(token, seq) => {
                if self.phase != Phase::Publishing(token) {
                    return false;
                }
                self.settle(seq, outputs);
            }
            Input::Unknown(token) => {
                if self.phase != Phase::Publishing(token) {
                    return false;
                }
                self.send(outputs);
            }
            Input::Conflict(token) | Input::Refused(token) => {
                if self.phase != Phase::Publishing(token) {
                    return false;
                }
                self.asked = 0;
                self.check_epoch(outputs);
            }
            Input::EpochOk(token) => {
                if self.phase != Phase::Checking(token) {
                    return false;
                }
                self.asked = 0;
                self.read_last(outputs);
            }
            Input::Last(token, last) => {
                if self.phase != Phase::Reading(token) {
                    return false;
                }
                self.found_last(last, outputs);
            }
            Input::ReadFailed(token) => {
                if self.phase == Phase::Reading(token) {
                    self.read_last(outputs);
                } else if self.phase == Phase::Checking(token) {
                    self.check_epoch(outputs);
                } else {
                    return false;
                }
            }
        }
        true
    }

    fn takes_output(&self) -> bool {
        self.stored.is_some() && !self.ended && !self.is_over()
    }

    // ---- the spool

    fn split(&mut self, record: &SpoolRecord<'_>) {
        let Self { splitters: [stdout, stderr], parser, pending, found, .. } = self;
        let (splitter, other) = match record.stream {
            Stream::Stdout => (stdout, stderr),
            Stream::Stderr => (stderr, stdout),
        };
        self.gap |= record.stream_offset > splitter.next();
        // Nothing of the other stream changes while this record is split.
        let other = other.held_from().unwrap_or(u64::MAX);
        splitter.feed(record, |piece| {
            add(pending, parser.as_ref(), found, record.stream, &piece, piece.spool.min(other));
        });
        self.next = record.spool_end;
    }

    /// Lines without an end are given out in the order of their beginnings.
    fn end(&mut self) {
        self.ended = true;
        let end = self.next;
        let mut order = STREAMS;
        order.sort_by_key(|stream| self.splitters[slot(*stream)].held_from());
        for (stream, later) in order.into_iter().zip([Some(order[1]), None]) {
            let needed = later.and_then(|later| self.splitters[slot(later)].held_from()).unwrap_or(end);
            let Self { splitters, parser, pending, found, .. } = self;
            splitters[slot(stream)].finish(end, |piece| {
                add(pending, parser.as_ref(), found, stream, &piece, needed);
            });
        }
    }

    /// Goes on behind this token: nothing of what was split before counts.
    fn resume_from(&mut self, token: ResumeToken, last: StreamSeq) {
        self.pending.restart(&token);
        for stream in STREAMS {
            let position = token.streams.get(&stream).copied().unwrap_or_default();
            self.splitters[slot(stream)] = Splitter::new(self.limits.line_bytes_max, position);
        }
        self.next = token.spool_offset;
        self.ended = false;
        self.flight = None;
        self.ready = None;
        self.last = last;
        self.stored = Some(token);
        self.phase = Phase::Idle;
    }

    // ---- the stream

    fn mint(&mut self) -> Token {
        self.tokens += 1;
        Token(self.tokens)
    }

    fn read_last(&mut self, outputs: &mut Vec<Output>) {
        let token = self.mint();
        self.phase = Phase::Reading(token);
        outputs.push(Output::ReadLast { token, attempt: self.asked });
        self.asked = self.asked.saturating_add(1);
    }

    fn check_epoch(&mut self, outputs: &mut Vec<Output>) {
        let token = self.mint();
        self.phase = Phase::Checking(token);
        outputs.push(Output::CheckEpoch { token, attempt: self.asked });
        self.asked = self.asked.saturating_add(1);
    }

    fn found_last(&mut self, LogEnd { seq, frame }: LogEnd, outputs: &mut Vec<Output>) {
        if let Some(frame) = &frame
            && frame.epoch > self.epoch
        {
            self.phase = Phase::Over;
            outputs.push(Output::StepDown(frame.epoch));
            return;
        }
        let Some(flight) = &self.flight else {
            self.begin(seq, frame, outputs);
            return;
        };
        match frame {
            // Retention removed the frame on which the one in flight rests.
            None => {
                self.last = seq;
                self.send(outputs);
            }
            Some(frame) if frame.token.chain == flight.token.chain => self.settle(seq, outputs),
            Some(frame) => {
                let ours = self.stored.as_ref().map_or(LogSeq(0), |stored| stored.next_sequence);
                if frame.token.next_sequence > ours {
                    self.release(&frame.token, outputs);
                    self.resume_from(frame.token, seq);
                } else {
                    // The very frame on which ours rests; or an earlier one, if
                    // stored frames were lost: what they held is released.
                    self.gap |= frame.token.next_sequence < ours;
                    self.last = seq;
                    self.send(outputs);
                }
            }
        }
    }

    /// The first read is answered.
    fn begin(&mut self, seq: StreamSeq, frame: Option<LastFrame>, outputs: &mut Vec<Output>) {
        let kept = self.kept.take();
        let token = match (frame, kept) {
            // The holder was told of a frame that is stored no more, although an
            // earlier one is: the stream was put back. The spool is released.
            (Some(frame), Some(kept)) if kept.next_sequence > frame.token.next_sequence => {
                self.gap = true;
                kept
            }
            (Some(frame), _) => {
                self.release(&frame.token, outputs);
                frame.token
            }
            (None, kept) => kept.unwrap_or_else(ResumeToken::start),
        };
        self.resume_from(token, seq);
    }

    fn settle(&mut self, seq: StreamSeq, outputs: &mut Vec<Output>) {
        let Some(flight) = self.flight.take() else { return };
        outputs.push(Output::Release { spool_offset: flight.token.spool_offset, resume: flight.resume });
        self.stored = Some(flight.token);
        self.last = seq;
        self.phase = Phase::Idle;
    }

    fn release(&self, token: &ResumeToken, outputs: &mut Vec<Output>) {
        outputs.push(Output::Release { spool_offset: token.spool_offset, resume: packed(token) });
    }

    fn publish(&mut self, outputs: &mut Vec<Output>) {
        let (Phase::Idle, Some(base)) = (self.phase, &self.stored) else { return };
        self.flight = self.ready.take().or_else(|| {
            let frame_bytes_max = self.limits.frame_bytes_max;
            cut(&mut self.pending, self.agent, self.run, base, frame_bytes_max)
        });
        if self.flight.is_some() {
            self.send(outputs);
        } else if self.ended && self.pending.is_empty() {
            self.phase = Phase::Over;
            let count = LogSeq(base.next_sequence.0.saturating_sub(1));
            outputs.push(Output::Done { count, chain: base.chain, gap: self.gap });
        }
    }

    /// Sends the frame in flight, for the first time or again.
    fn send(&mut self, outputs: &mut Vec<Output>) {
        let token = self.mint();
        let Some(flight) = &mut self.flight else { return };
        self.phase = Phase::Publishing(token);
        outputs.push(Output::Publish {
            token,
            expect: self.last,
            bytes: flight.bytes.clone(),
            resume: flight.resume.clone(),
            events: flight.events,
            attempt: flight.attempt,
        });
        flight.attempt = flight.attempt.saturating_add(1);
    }
}

/// A frame of what is pending, to follow `base`.
fn cut(pending: &mut Pending, agent: AgentId, run: RunId, base: &ResumeToken, bytes_max: usize) -> Option<Flight> {
    let cut = pending.cut(agent, run, base, bytes_max)?;
    let resume = packed(&cut.token);
    Some(Flight { bytes: cut.bytes, token: cut.token, resume, events: cut.events, attempt: 0 })
}

fn add(
    pending: &mut Pending,
    parser: &dyn Parser,
    found: &mut Vec<Event>,
    stream: Stream,
    piece: &Piece<'_>,
    spool: u64,
) {
    if piece.part.is_none() {
        parser.derive(stream, piece.bytes, found);
        if !found.is_empty() {
            pending.add_derived(stream, piece, found);
        }
    }
    pending.add(stream, piece, spool);
}

fn packed(token: &ResumeToken) -> Bytes {
    codec::to_msgpack(token).expect("a token has a MessagePack form").into()
}
