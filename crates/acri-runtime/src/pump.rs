//! The task that publishes one run's output: reads the spool, steps the
//! writer, carries out what it says.

use crate::{
    agent::{self, retry_pause},
    counters::count,
    frames,
    node::Shared,
};
use acri::{AgentId, RunId, event::Source, log::ResumeToken};
use acri_bus::port::{Appended, FrameAppend};
use acri_core::{
    appender::{self, Report, Token},
    writer::{Input, LogEnd, Output, SpoolRecord, Writer},
};
use acri_drivers::driver::{Chunk, ChunkEnd, Fault, Owner, Session};
use bytes::Bytes;
use futures_util::{future::BoxFuture, poll};
use ractor::ActorRef;
use std::{collections::VecDeque, sync::Arc, task::Poll, time::Duration};
use tokio::{sync::mpsc, time::Instant};

/// Bytes of output that are read at once.
const READ_BYTES_MAX: usize = 512 * 1024;
/// Attempts to read the spool before the agent is adopted anew.
const READ_ATTEMPTS_MAX: u32 = 10;
/// A release costs the holder a file, so frames share one: after this pause, or
/// as soon as so much of the spool can go.
const RELEASE_PAUSE: Duration = Duration::from_millis(200);
const RELEASE_BYTES: u64 = 4 * 1024 * 1024;

/// One run's pump.
pub(crate) struct Pump {
    pub(crate) agent: AgentId,
    pub(crate) run: RunId,
    pub(crate) owner: Owner,
    pub(crate) session: Arc<dyn Session>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) derived: mpsc::Receiver<Source>,
}

/// What the bus answered to one thing that the writer asked.
enum Answer {
    Stored(Token, acri::StreamSeq),
    Conflict(Token),
    Unknown(Token),
    Refused(Token),
    Last(Token, LogEnd),
    EpochOk(Token),
    Fenced,
    ReadFailed(Token),
}

type Asked = BoxFuture<'static, Answer>;
type Read = BoxFuture<'static, Result<Chunk, Fault>>;
type Releasing = BoxFuture<'static, Result<(), Fault>>;

struct Flow {
    asked: Option<Asked>,
    /// Latest release that was not carried out.
    release: Option<(u64, Bytes)>,
    /// Up to where was released, and when the next one is due.
    released: u64,
    release_at: Instant,
    done: bool,
}

/// What was read of the spool, and what is being read.
#[derive(Default)]
struct Spool {
    /// Read and not taken by the writer yet; two at most.
    chunks: VecDeque<Chunk>,
    /// From which offset, and the read.
    reading: Option<(u64, Read)>,
    /// Where the output ends, and whether bytes after it could not be read.
    ended: Option<(u64, bool)>,
}

impl Flow {
    fn new() -> Self {
        Self { asked: None, release: None, released: 0, release_at: Instant::now(), done: false }
    }

    fn is_release_worth_it(&self) -> bool {
        self.release.as_ref().is_some_and(|(offset, _)| offset.saturating_sub(self.released) >= RELEASE_BYTES)
    }
}

impl Pump {
    /// Publishes until the run's log is complete. An error: this owner cannot
    /// go on, the agent is to be adopted anew.
    pub(crate) async fn run(mut self, to: &ActorRef<agent::Msg>) -> Result<(), String> {
        let kept = self.session.resume_token().await.map_err(|fault| fault.to_string())?;
        let kept = kept.and_then(|bytes| acri::codec::from_msgpack::<ResumeToken>(&bytes).ok());
        let (mut writer, outputs) = Writer::new(self.agent, self.run, self.owner.epoch, kept);
        let mut flow = Flow::new();
        let mut spool = Spool::default();
        let mut releasing: Option<Releasing> = None;
        self.carry_out(&mut flow, outputs, to)?;
        while !flow.done {
            if releasing.is_none() && flow.is_release_worth_it() {
                releasing = self.release(&mut flow);
            }
            begin(&mut flow.asked).await;
            self.feed(&mut writer, &mut spool, &mut flow, to)?;
            if flow.done {
                break;
            }
            begin(&mut flow.asked).await;
            writer.prepare();
            self.read_on(&writer, &mut spool);
            tokio::select! {
                answer = next(&mut flow.asked) => {
                    flow.asked = None;
                    let outputs = match answer {
                        Answer::Stored(token, seq) => writer.step(Input::Stored(token, seq)),
                        Answer::Conflict(token) => writer.step(Input::Conflict(token)),
                        Answer::Unknown(token) => writer.step(Input::Unknown(token)),
                        Answer::Refused(token) => writer.step(Input::Refused(token)),
                        Answer::Last(token, last) => writer.step(Input::Last(token, last)),
                        Answer::EpochOk(token) => writer.step(Input::EpochOk(token)),
                        Answer::ReadFailed(token) => writer.step(Input::ReadFailed(token)),
                        Answer::Fenced => return Err("a newer owner exists".to_owned()),
                    };
                    self.carry_out(&mut flow, outputs, to)?;
                }
                chunk = next_read(&mut spool.reading) => {
                    let chunk = chunk.map_err(|fault| fault.to_string())?;
                    // The next one is read while the writer is busy with this one.
                    let mut ahead = (spool.chunks.is_empty() && chunk.end == ChunkEnd::Open)
                        .then(|| self.read(chunk.next));
                    begin(&mut ahead).await;
                    spool.reading = ahead.map(|read| (chunk.next, read));
                    spool.chunks.push_back(chunk);
                }
                source = self.derived.recv() => {
                    let Some(source) = source else { return Ok(()) };
                    let outputs = writer.step(Input::Derived(source));
                    self.carry_out(&mut flow, outputs, to)?;
                }
                released = next(&mut releasing) => {
                    releasing = None;
                    // Not answered is not lost: the next release says more.
                    if let Err(fault) = released {
                        tracing::debug!(run = %self.run, %fault, "release is not taken");
                    }
                }
                () = tokio::time::sleep_until(flow.release_at),
                    if releasing.is_none() && flow.release.is_some() =>
                {
                    releasing = self.release(&mut flow);
                }
            }
        }
        if let Some(releasing) = releasing {
            let _ = releasing.await;
        }
        if let Some(releasing) = self.release(&mut flow) {
            let _ = releasing.await;
        }
        Ok(())
    }

    /// Begins the release that waits, if one does.
    fn release(&self, flow: &mut Flow) -> Option<Releasing> {
        let (offset, resume) = flow.release.take()?;
        flow.released = offset;
        flow.release_at = Instant::now() + RELEASE_PAUSE;
        let (session, owner) = (Arc::clone(&self.session), self.owner);
        Some(Box::pin(async move { session.release(owner, offset, resume).await }))
    }

    /// Hands what was read to the writer, as far as it wants it.
    fn feed(
        &self,
        writer: &mut Writer,
        spool: &mut Spool,
        flow: &mut Flow,
        to: &ActorRef<agent::Msg>,
    ) -> Result<(), String> {
        while let Some(mut chunk) = spool.chunks.pop_front() {
            let mut taken = 0;
            for (index, record) in chunk.records.iter().enumerate() {
                let wanted = writer.wants_output();
                if wanted.is_some_and(|offset| record.spool_offset < offset) {
                    taken = index + 1;
                    continue;
                }
                if wanted != Some(record.spool_offset) {
                    break;
                }
                let spool_end = chunk.records.get(index + 1).map_or(chunk.next, |next| next.spool_offset);
                let outputs = writer.step(Input::Output(SpoolRecord {
                    spool_offset: record.spool_offset,
                    spool_end,
                    stream: record.stream,
                    stream_offset: record.stream_offset,
                    time: record.time,
                    bytes: &record.bytes,
                }));
                self.carry_out(flow, outputs, to)?;
                taken = index + 1;
            }
            if taken < chunk.records.len() {
                // Back-pressure keeps the rest for later; after a jump back to
                // a former owner's token it is read again from the spool.
                chunk.records.drain(..taken);
                let first = chunk.records.first().map_or(chunk.next, |record| record.spool_offset);
                match writer.wants_output() {
                    // What was read behind it is of no use either.
                    Some(offset) if offset != first => continue,
                    _ => spool.chunks.push_front(chunk),
                }
                return Ok(());
            }
            match chunk.end {
                ChunkEnd::Open => {}
                ChunkEnd::Ended => spool.ended = Some((chunk.next, false)),
                ChunkEnd::Torn => spool.ended = Some((chunk.next, true)),
                ChunkEnd::Gone { first } => {
                    let outputs = writer.step(Input::OutputGone { first });
                    self.carry_out(flow, outputs, to)?;
                }
            }
        }
        if let Some((at, torn)) = spool.ended {
            let outputs = writer.step(Input::EndOfOutput { at, torn });
            self.carry_out(flow, outputs, to)?;
        }
        Ok(())
    }

    /// Sees to it that what the writer wants next is being read, if nothing that
    /// was read waits for it.
    fn read_on(&self, writer: &Writer, spool: &mut Spool) {
        let Some(offset) = writer.wants_output().filter(|_| spool.chunks.is_empty()) else { return };
        if spool.ended.is_some_and(|(at, _)| at == offset) {
            return;
        }
        // One from elsewhere is of no use: the writer went on from a former
        // owner's frame, and that read may wait for output that never comes.
        if spool.reading.as_ref().is_none_or(|(at, _)| *at != offset) {
            spool.reading = Some((offset, self.read(offset)));
        }
    }

    fn read(&self, offset: u64) -> Read {
        let (session, run) = (Arc::clone(&self.session), self.run);
        Box::pin(async move {
            let mut attempt = 0;
            loop {
                match session.output(offset, READ_BYTES_MAX).await {
                    Err(fault) if attempt < READ_ATTEMPTS_MAX => {
                        tracing::debug!(%run, %fault, "output is read again");
                        tokio::time::sleep(retry_pause(attempt)).await;
                        attempt += 1;
                    }
                    answer => return answer,
                }
            }
        })
    }

    fn carry_out(&self, flow: &mut Flow, outputs: Vec<Output>, to: &ActorRef<agent::Msg>) -> Result<(), String> {
        for output in outputs {
            match output {
                Output::Derive(source, event) => self.report(to, Report::Derived(source, *event)),
                Output::Publish { token, expect, bytes, resume, events: _, attempt } => {
                    let append = FrameAppend {
                        agent: self.agent,
                        run: Some(self.run),
                        expect,
                        epoch: self.owner.epoch,
                        resume,
                        bytes,
                    };
                    flow.asked = Some(publish(Arc::clone(&self.shared), token, append, attempt));
                }
                Output::ReadLast { token, attempt } => {
                    flow.asked = Some(read_last(Arc::clone(&self.shared), self.agent, self.run, token, attempt));
                }
                Output::CheckEpoch { token, attempt } => {
                    flow.asked = Some(check_epoch(Arc::clone(&self.shared), self.agent, self.owner, token, attempt));
                }
                Output::Release { spool_offset, resume } => flow.release = Some((spool_offset, resume)),
                Output::StepDown(epoch) => {
                    return Err(format!("a frame of epoch {epoch} is stored"));
                }
                Output::Done { count, chain, gap } => {
                    flow.done = true;
                    self.report(to, Report::LogsDone { count, chain, gap });
                }
            }
        }
        Ok(())
    }

    fn report(&self, to: &ActorRef<agent::Msg>, report: Report) {
        let _ = to.cast(agent::Msg::Input(appender::Input::Report(self.run, report)));
    }
}

/// Polls it once: what it asks for is under way before this task is busy again.
async fn begin<T: Send + 'static>(future: &mut Option<BoxFuture<'static, T>>) {
    if let Some(begun) = future
        && let Poll::Ready(outcome) = poll!(begun)
    {
        *future = Some(Box::pin(std::future::ready(outcome)));
    }
}

async fn next_read(reading: &mut Option<(u64, Read)>) -> Result<Chunk, Fault> {
    match reading {
        Some((_, read)) => {
            let chunk = read.await;
            *reading = None;
            chunk
        }
        None => std::future::pending().await,
    }
}

async fn next<T>(future: &mut Option<BoxFuture<'static, T>>) -> T {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

fn publish(shared: Arc<Shared>, token: Token, append: FrameAppend, attempt: u32) -> Asked {
    Box::pin(async move {
        if attempt > 0 {
            count(&shared.counters.frames_repeated);
            tokio::time::sleep(retry_pause(attempt - 1)).await;
        }
        if !shared.lease.wait().await {
            return Answer::Fenced;
        }
        match shared.bus.append_frame(&append).await {
            Appended::Stored(seq) => Answer::Stored(token, seq),
            Appended::Conflict => Answer::Conflict(token),
            // Without a message id the server cannot know a duplicate.
            Appended::Duplicate(_) | Appended::InFlight => Answer::Unknown(token),
            Appended::Unknown(error) => {
                tracing::debug!(%error, "frame has no answer");
                Answer::Unknown(token)
            }
            Appended::Refused(error) => {
                tracing::warn!(%error, "frame is refused");
                Answer::Refused(token)
            }
        }
    })
}

fn read_last(shared: Arc<Shared>, agent: AgentId, run: RunId, token: Token, attempt: u32) -> Asked {
    Box::pin(async move {
        if attempt > 0 {
            tokio::time::sleep(retry_pause(attempt)).await;
        }
        match frames::last(&shared.bus, agent, run).await {
            Ok(last) => Answer::Last(token, last),
            Err(error) => {
                tracing::warn!(%error, "last frame cannot be read");
                Answer::ReadFailed(token)
            }
        }
    })
}

fn check_epoch(shared: Arc<Shared>, agent: AgentId, owner: Owner, token: Token, attempt: u32) -> Asked {
    Box::pin(async move {
        if attempt > 0 {
            tokio::time::sleep(retry_pause(attempt)).await;
        }
        match shared.bus.last(agent).await {
            Ok(Some(last)) => match acri::codec::from_msgpack::<acri::EventEnvelope>(&last.bytes) {
                Ok(envelope) if envelope.epoch == owner.epoch && envelope.incarnation == owner.incarnation => {
                    Answer::EpochOk(token)
                }
                Ok(_) => Answer::Fenced,
                Err(error) => {
                    tracing::error!(%agent, %error, "the agent's last event cannot be read");
                    Answer::ReadFailed(token)
                }
            },
            Ok(None) => Answer::Fenced,
            Err(error) => {
                tracing::warn!(%error, "the agent's last event cannot be read");
                Answer::ReadFailed(token)
            }
        }
    })
}
