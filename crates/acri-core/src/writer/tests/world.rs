//! What is around a writer: the spool and its holder, the stream, the agent's
//! history, and a reader that sees each frame as it is stored.

use crate::{
    appender::Token,
    writer::{
        Input, LastFrame, Limits, LogEnd, Output, Parser, SpoolRecord, Writer,
        reader::{Frame, LogItem, LogStream, Next, Reader, Since},
    },
};
use acri::{
    AgentId, Event, RunId, StreamSeq, Timestamp, codec,
    cursor::Cursor,
    event::{EscalationRaised, Source},
    id::{Epoch, LogSeq, Sha256Digest},
    log::{LogEvent, ResumeToken, Stream, decode, packed},
};
use bytes::Bytes;
use std::collections::{BTreeMap, VecDeque};

pub(super) fn agent() -> AgentId {
    AgentId::from_uuid("cf41a647-18b5-8a70-a2c4-ea39ba67efe6".parse::<AgentId>().map(|id| *id.as_uuid()).unwrap())
}

pub(super) fn run() -> RunId {
    "01936f5e-8a00-8000-8000-000000000001".parse().unwrap()
}

/// `!ask a&b` asks two questions.
#[derive(Debug)]
pub(super) struct Asks;

impl Parser for Asks {
    fn derive(&self, _: Stream, line: &[u8], events: &mut Vec<Event>) {
        if let Some(questions) = line.strip_prefix(b"!ask ") {
            for question in questions.split(|byte| *byte == b'&') {
                let question = String::from_utf8_lossy(question).into_owned();
                events.push(EscalationRaised { escalation: question.clone(), question }.into());
            }
        }
    }
}

pub(super) struct Record {
    pub(super) offset: u64,
    pub(super) end: u64,
    pub(super) stream: Stream,
    pub(super) stream_offset: u64,
    pub(super) time: Timestamp,
    pub(super) bytes: Vec<u8>,
}

#[derive(Clone)]
pub(super) struct Sent {
    pub(super) epoch: Epoch,
    pub(super) token: Token,
    pub(super) expect: StreamSeq,
    pub(super) bytes: Bytes,
    pub(super) resume: Bytes,
}

pub(super) struct Kept {
    pub(super) seq: StreamSeq,
    pub(super) epoch: Epoch,
    pub(super) bytes: Bytes,
    pub(super) resume: Bytes,
}

pub(super) struct World {
    pub(super) limits: Limits,
    pub(super) spool: Vec<Record>,
    pub(super) spool_end: u64,
    pub(super) released: u64,
    pub(super) ended: bool,
    holder: Option<Bytes>,
    pub(super) stream: Vec<Kept>,
    /// The last message on the subject that no owner wrote.
    foreign: StreamSeq,
    pub(super) last_seq: u64,
    pub(super) retention: bool,
    pub(super) epoch: Epoch,
    pub(super) writer: Writer,
    /// What the writer waits for.
    pub(super) publish: Option<Sent>,
    pub(super) read: Option<Token>,
    pub(super) check: Option<Token>,
    pub(super) derives: VecDeque<(Source, Event)>,
    releases: VecDeque<(u64, Bytes)>,
    pub(super) done: Option<(LogSeq, Sha256Digest, bool)>,
    pub(super) fenced: Option<Epoch>,
    /// Attempts of anybody that may still arrive.
    pub(super) network: Vec<Sent>,
    pub(super) history: Vec<(Source, Event)>,
    highest: BTreeMap<Stream, Source>,
    live: Reader,
    pub(super) seen: Vec<LogEvent>,
    cursor: Option<Cursor>,
    pub(super) resumed: Vec<LogEvent>,
}

impl World {
    pub(super) fn new(limits: Limits) -> Self {
        let epoch = Epoch(1);
        let (writer, outputs) = Writer::with(agent(), run(), epoch, None, Box::new(Asks), limits);
        let facts = LogStream { created: 7, first: StreamSeq(1), last: StreamSeq(0) };
        let mut world = Self {
            limits,
            spool: Vec::new(),
            spool_end: 0,
            released: 0,
            ended: false,
            holder: None,
            stream: Vec::new(),
            foreign: StreamSeq(0),
            last_seq: 0,
            retention: false,
            epoch,
            writer,
            publish: None,
            read: None,
            check: None,
            derives: VecDeque::new(),
            releases: VecDeque::new(),
            done: None,
            fenced: None,
            network: Vec::new(),
            history: Vec::new(),
            highest: BTreeMap::new(),
            live: Reader::new(facts, Since::Start),
            seen: Vec::new(),
            cursor: None,
            resumed: Vec::new(),
        };
        world.carry_out(outputs);
        world
    }

    /// The harness writes.
    pub(super) fn write(&mut self, stream: Stream, bytes: &[u8]) {
        let before = self.spool.iter().rev().find(|record| record.stream == stream);
        let stream_offset = before.map_or(0, |record| record.stream_offset + record.bytes.len() as u64);
        let offset = self.spool_end;
        self.spool_end = offset + 40 + bytes.len() as u64;
        let time = Timestamp::from_micros(1000 + self.spool.len() as i64);
        self.spool.push(Record { offset, end: self.spool_end, stream, stream_offset, time, bytes: bytes.to_vec() });
    }

    /// The driver reads one record of the spool, or finds its end.
    pub(super) fn pump(&mut self) -> bool {
        let Some(from) = self.writer.wants_output() else { return false };
        assert!(from >= self.released, "wants {from}, but up to {} it is released", self.released);
        let Some(at) = self.spool.iter().position(|record| record.offset >= from) else {
            assert_eq!(from, self.spool_end);
            if self.ended {
                self.step(Input::EndOfOutput { at: from, torn: false });
            }
            return self.ended;
        };
        let record = &self.spool[at];
        assert_eq!(record.offset, from, "reading goes on between two records");
        let outputs = self.writer.step(Input::Output(SpoolRecord {
            spool_offset: record.offset,
            spool_end: record.end,
            stream: record.stream,
            stream_offset: record.stream_offset,
            time: record.time,
            bytes: &record.bytes,
        }));
        self.carry_out(outputs);
        true
    }

    pub(super) fn step(&mut self, input: Input<'_>) {
        let outputs = self.writer.step(input);
        self.carry_out(outputs);
    }

    fn carry_out(&mut self, outputs: Vec<Output>) {
        for output in outputs {
            assert!(self.done.is_none() && self.fenced.is_none(), "nothing follows the end: {output:?}");
            match output {
                Output::Derive(source, event) => {
                    self.derives.push_back((source, *event));
                    assert!(self.derives.len() <= self.limits.derived_in_flight_max);
                }
                Output::Publish { token, expect, bytes, resume, events, .. } => {
                    assert!(self.publish.is_none(), "one frame in flight");
                    self.fits(&bytes, events);
                    self.publish = Some(Sent { epoch: self.epoch, token, expect, bytes, resume });
                }
                Output::ReadLast { token, .. } => assert!(self.read.replace(token).is_none()),
                Output::CheckEpoch { token, .. } => assert!(self.check.replace(token).is_none()),
                Output::Release { spool_offset, resume } => self.releases.push_back((spool_offset, resume)),
                Output::StepDown(epoch) => self.fenced = Some(epoch),
                Output::Done { count, chain, gap } => self.done = Some((count, chain, gap)),
            }
        }
        self.writer.prepare();
    }

    fn fits(&self, stored: &[u8], events: usize) {
        let frame = decode::frame(stored).unwrap();
        assert_eq!(frame.events.len(), events);
        let bytes = packed::unpack(stored).unwrap();
        assert_eq!(codec::to_msgpack(&frame).unwrap(), *bytes);
        assert!(stored.len() <= bytes.len());
        assert!(events == 1 || bytes.len() <= self.limits.frame_bytes_max + 96, "{}", bytes.len());
        assert!(bytes.len() + 4096 < acri::limits::FRAME_MESSAGE_BYTES_MAX);
        assert!(frame.events.iter().all(|event| event.payload.as_bytes().len() <= self.limits.line_bytes_max));
    }

    pub(super) fn last_on_subject(&self) -> StreamSeq {
        self.stream.last().map_or(StreamSeq(0), |kept| kept.seq).max(self.foreign)
    }

    /// Somebody who owns nothing publishes on the run's subject; it may look
    /// like a frame.
    pub(super) fn stray(&mut self) {
        self.last_seq += 1;
        self.foreign = StreamSeq(self.last_seq);
        let bytes = self.stream.last().map_or_else(|| Bytes::from_static(b"hello"), |kept| kept.bytes.clone());
        let mut items = Vec::new();
        let message = Frame { seq: self.foreign, owned: false, bytes: &bytes };
        assert_eq!(self.live.push(message, &mut items), Next::GoOn);
        assert!(matches!(&items[..], [LogItem::Malformed { frame, .. }] if *frame == self.foreign), "{items:?}");
    }

    /// An attempt reaches the stream. None if the expectation is wrong.
    pub(super) fn land(&mut self, sent: &Sent) -> Option<StreamSeq> {
        if sent.expect != self.last_on_subject() {
            return None;
        }
        let token: ResumeToken = codec::from_msgpack(&sent.resume).unwrap();
        for (stream, source) in &token.sources {
            assert!(self.highest.get(stream).is_some_and(|highest| source <= highest), "published before {source:?}");
        }
        if !self.retention {
            let before =
                self.stream.last().map_or(ResumeToken::start(), |kept| codec::from_msgpack(&kept.resume).unwrap());
            assert_eq!(token.chain, before.chain.chained(&sent.bytes));
        }
        self.last_seq += 1;
        let seq = StreamSeq(self.last_seq);
        self.stream.push(Kept { seq, epoch: sent.epoch, bytes: sent.bytes.clone(), resume: sent.resume.clone() });
        let mut items = Vec::new();
        assert_eq!(self.live.push(Frame { seq, owned: true, bytes: &sent.bytes }, &mut items), Next::GoOn);
        for item in items {
            let LogItem::Event(event, _) = item else { panic!("{item:?}") };
            self.seen.push(event);
        }
        self.resume_reading();
        Some(seq)
    }

    /// A client that begins anew at its cursor for each frame.
    fn resume_reading(&mut self) {
        let first = self.stream.first().map_or(StreamSeq(self.last_seq + 1), |kept| kept.seq);
        let facts = LogStream { created: 7, first, last: StreamSeq(self.last_seq) };
        let mut reader = Reader::new(facts, self.cursor.map_or(Since::Start, Since::After));
        let from = reader.start_from();
        for kept in self.stream.iter().skip_while(|kept| kept.seq < from) {
            let mut items = Vec::new();
            assert_eq!(reader.push(Frame { seq: kept.seq, owned: true, bytes: &kept.bytes }, &mut items), Next::GoOn);
            for item in items {
                let LogItem::Event(event, cursor) = item else { panic!("{item:?}") };
                self.resumed.push(event);
                self.cursor = Some(cursor.to_string().parse().unwrap());
            }
        }
    }

    /// The agent takes a derived event, or has it already.
    pub(super) fn derive(&mut self) -> bool {
        let Some((source, event)) = self.derives.pop_front() else { return false };
        self.append_derived(source, event);
        self.step(Input::Derived(source));
        true
    }

    pub(super) fn append_derived(&mut self, source: Source, event: Event) {
        if self.highest.get(&source.stream).is_none_or(|highest| source > *highest) {
            self.highest.insert(source.stream, source);
            self.history.push((source, event));
        }
    }

    pub(super) fn release(&mut self) -> bool {
        let Some((offset, resume)) = self.releases.pop_front() else { return false };
        assert!(offset >= self.released, "a release never goes back");
        self.released = offset;
        self.holder = Some(resume);
        true
    }

    pub(super) fn last(&self) -> LogEnd {
        let frame = self.stream.last().map(|kept| LastFrame::of(kept.epoch, &kept.resume).unwrap());
        LogEnd { seq: self.last_on_subject(), frame }
    }

    pub(super) fn answer_read(&mut self) -> bool {
        let Some(token) = self.read.take() else { return false };
        let last = self.last();
        self.step(Input::Last(token, last));
        true
    }

    pub(super) fn answer_check(&mut self) -> bool {
        let Some(token) = self.check.take() else { return false };
        self.step(Input::EpochOk(token));
        true
    }

    /// The frame in flight is stored, or refused, and the writer hears it.
    pub(super) fn answer_publish(&mut self) -> bool {
        let Some(sent) = self.publish.take() else { return false };
        match self.land(&sent) {
            Some(seq) => self.step(Input::Stored(sent.token, seq)),
            None => self.step(Input::Conflict(sent.token)),
        }
        true
    }

    /// The owner dies; another one takes over.
    pub(super) fn crash(&mut self) {
        self.network.extend(self.publish.take());
        (self.read, self.check) = (None, None);
        self.derives.clear();
        self.releases.clear();
        (self.done, self.fenced) = (None, None);
        self.epoch = self.epoch.next();
        let kept = self.holder.as_ref().map(|bytes| codec::from_msgpack(bytes).unwrap());
        let (writer, outputs) = Writer::with(agent(), run(), self.epoch, kept, Box::new(Asks), self.limits);
        self.writer = writer;
        self.carry_out(outputs);
    }

    /// Everything goes well from here on.
    pub(super) fn finish(&mut self) {
        self.ended = true;
        for _ in 0..20_000 {
            if self.done.is_some() {
                return;
            }
            let moved = self.pump()
                | self.derive()
                | self.release()
                | self.answer_read()
                | self.answer_check()
                | self.answer_publish();
            assert!(moved, "stuck: {:?}", self.writer);
        }
        panic!("no end: {:?}", self.writer);
    }
}

/// What must come out, told byte by byte.
pub(super) fn expected(spool: &[Record], limit: usize) -> (Vec<LogEvent>, Vec<(Source, Event)>) {
    #[derive(Default)]
    struct Line {
        bytes: Vec<(u8, Timestamp, usize)>,
        offset: u64,
        part: u32,
    }
    let mut lines: BTreeMap<Stream, Line> = BTreeMap::new();
    let (mut events, mut derived) = (Vec::new(), Vec::new());
    let mut give = |stream: Stream, line: &mut Line, length: usize, time: Timestamp, more: bool| {
        let bytes: Vec<u8> = line.bytes.drain(..length).map(|(byte, ..)| byte).collect();
        let part = (line.part > 0 || more).then_some(line.part);
        if part.is_none() {
            let mut found = Vec::new();
            Asks.derive(stream, &bytes, &mut found);
            let source = |index| Source { stream, offset: line.offset, index };
            derived.extend((0..).map(source).zip(found));
        }
        line.offset += length as u64;
        line.part = if more { line.part + 1 } else { 0 };
        events.push(LogEvent {
            agent: agent(),
            run: Some(run()),
            sequence: LogSeq(events.len() as u64 + 1),
            time,
            kind: acri::log::LogType::Message,
            payload: acri::Payload::of_output(bytes),
            stream: Some(stream),
            origin: acri::log::Origin::Passthrough,
            part,
            more,
        });
    };
    for (index, record) in spool.iter().enumerate() {
        let line = lines.entry(record.stream).or_default();
        for byte in &record.bytes {
            if *byte == b'\n' {
                let time = line.bytes.first().map_or(record.time, |(_, time, _)| *time);
                give(record.stream, line, line.bytes.len(), time, false);
                line.offset += 1;
                continue;
            }
            line.bytes.push((*byte, record.time, index));
            if line.bytes.len() > limit {
                let fits = |at: &usize| line.bytes[*at].0 & 0xc0 != 0x80;
                let at = (limit - 3..=limit).rev().find(fits).unwrap_or(limit);
                give(record.stream, line, at, line.bytes[0].1, true);
            }
        }
    }
    let mut left: Vec<_> = lines.into_iter().filter(|(_, line)| !line.bytes.is_empty()).collect();
    left.sort_by_key(|(_, line)| line.bytes[0].2);
    for (stream, mut line) in left {
        let (length, time) = (line.bytes.len(), line.bytes[0].1);
        give(stream, &mut line, length, time, false);
    }
    (events, derived)
}
