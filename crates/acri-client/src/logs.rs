//! The log of a run as a stream that resumes (spec, section 2).

use crate::{
    error::Error,
    events::{EventItem, EventTypes, EventsSince},
    operations::Client,
    outage::Outage,
};
use acri::{AgentId, Event, RunId, StreamSeq, Timestamp, cursor::Cursor, id::LogSeq};
use acri_bus::port::{EventSelection, Fault, FrameStream, RecordedFrame, Until};
pub use acri_core::writer::reader::LogItem;
use acri_core::writer::reader::{self, Frame, LogStream, Next};
use futures_util::{
    FutureExt as _, StreamExt as _, TryStreamExt as _,
    future::BoxFuture,
    stream::{self, BoxStream},
};
use tokio::time::sleep;

/// Where a log begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Since {
    /// With the run's first event; if retention took it, with a gap.
    #[default]
    Start,
    /// With what is stored from now on.
    Now,
    /// With what the harness wrote at this time or later.
    Time(Timestamp),
    /// Just after this position.
    Cursor(Cursor),
}

impl Client {
    /// The log of a run, each event once and in order. It reconnects and goes
    /// on after the last event told. With `follow` it ends when the run is
    /// sealed and everything was told; without, with what is stored now.
    #[must_use]
    pub fn logs(
        &self,
        agent: AgentId,
        run: RunId,
        since: Since,
        follow: bool,
    ) -> BoxStream<'static, Result<LogItem, Error>> {
        self.log_batches(agent, run, since, follow)
            .map_ok(|items| stream::iter(items.into_iter().map(Ok)))
            .try_flatten()
            .boxed()
    }

    /// The same, as much at a time as one stored frame holds: for readers of
    /// a million events a second, and for those who flush when it pauses.
    #[must_use]
    pub fn log_batches(
        &self,
        agent: AgentId,
        run: RunId,
        since: Since,
        follow: bool,
    ) -> BoxStream<'static, Result<Vec<LogItem>, Error>> {
        let log = Log {
            outage: Outage::new("logs", self.limits()),
            client: self.clone(),
            agent,
            run,
            since,
            follow,
            place: None,
            restart: None,
            now: None,
            told: LogSeq(0),
            cursor: None,
            seal: Seal::Unasked,
            ended: false,
        };
        stream::unfold(log, |mut log| async move {
            if log.ended {
                return None;
            }
            match log.next().await {
                Ok(Some(items)) => Some((Ok(items), log)),
                Ok(None) => None,
                Err(error) => {
                    log.ended = true;
                    Some((Err(error), log))
                }
            }
        })
        .boxed()
    }

    /// The number of log events of a run, if its log is complete.
    async fn sealed(&self, agent: AgentId, run: RunId) -> Result<Option<LogSeq>, Error> {
        let mut known = false;
        let mut events = self.run_events(agent, run, false);
        while let Some(item) = events.next().await {
            if let EventItem::Event(event) = item? {
                known = true;
                if let Event::RunLogsSealed(sealed) = event.envelope.event {
                    return Ok(Some(sealed.count));
                }
            }
        }
        if !known {
            // Nothing, or a follower that is behind: the leader decides.
            self.known_run("logs", agent, run).await?;
        }
        Ok(None)
    }
}

/// Waits for `run.logs_sealed`.
async fn sealing(client: Client, agent: AgentId, run: RunId) -> Result<LogSeq, Error> {
    let types = EventTypes::Only(["run.logs_sealed".to_owned()].into());
    let mut events = client.events(EventSelection::Run(agent, run), types, EventsSince::Start, true);
    while let Some(item) = events.next().await {
        if let EventItem::Event(event) = item?
            && let Event::RunLogsSealed(sealed) = event.envelope.event
        {
            return Ok(sealed.count);
        }
    }
    let detail = "the reader ended".to_owned();
    Err(Error::bus("logs")(Fault::Unavailable { operation: "logs", detail }))
}

/// What is known of the log's end.
enum Seal {
    Unasked,
    /// The run is open; the future tells when it is sealed.
    Awaited(BoxFuture<'static, Result<LogSeq, Error>>),
    /// The run is open, and nobody waits for its end.
    Open,
    Sealed(LogSeq),
}

/// Where a read stands in the stream.
struct Place {
    reader: reader::Reader,
    frames: FrameStream,
    /// The last frame that was read, or the one before the first to be read.
    seen: StreamSeq,
}

struct Log {
    client: Client,
    agent: AgentId,
    run: RunId,
    since: Since,
    follow: bool,
    place: Option<Place>,
    /// A reader that wants to read from another position.
    restart: Option<reader::Reader>,
    /// What [`Since::Now`] came to mean.
    now: Option<StreamSeq>,
    /// The highest log sequence that was told, or told as missing.
    told: LogSeq,
    cursor: Option<Cursor>,
    seal: Seal,
    outage: Outage,
    ended: bool,
}

/// What woke a log up.
enum Woken {
    Frame(Option<Result<RecordedFrame, Fault>>),
    Sealed(Result<LogSeq, Error>),
    Silence,
}

impl Log {
    async fn next(&mut self) -> Result<Option<Vec<LogItem>>, Error> {
        loop {
            if let Seal::Sealed(count) = self.seal
                && self.told >= count
            {
                return Ok(None);
            }
            if self.place.is_none() {
                self.ask_for_the_end().await?;
                match self.open().await {
                    Ok(place) => self.place = Some(place),
                    Err(fault) => self.outage.bear(fault).await?,
                }
                continue;
            }
            match self.wake().await {
                Woken::Frame(Some(Ok(frame))) => {
                    self.outage.over();
                    let items = self.take(&frame);
                    if !items.is_empty() {
                        return Ok(Some(items));
                    }
                }
                Woken::Frame(Some(Err(fault))) => self.broken(fault).await?,
                Woken::Frame(None) if self.follow => {
                    let detail = "the reader ended".to_owned();
                    self.broken(Fault::Unavailable { operation: "logs", detail }).await?;
                }
                Woken::Frame(None) => {
                    self.ended = true;
                    return self.rest().await;
                }
                Woken::Sealed(count) => self.seal = Seal::Sealed(count?),
                Woken::Silence => {
                    if self.nothing_follows().await? {
                        self.ended = true;
                        return self.rest().await;
                    }
                }
            }
        }
    }

    async fn wake(&mut self) -> Woken {
        let Some(place) = &mut self.place else { return Woken::Silence };
        match &mut self.seal {
            Seal::Awaited(seal) => tokio::select! {
                biased;
                frame = place.frames.next() => Woken::Frame(frame),
                count = seal => Woken::Sealed(count),
            },
            Seal::Sealed(_) if self.follow => {
                let silence = self.client.limits().sealed_silence;
                tokio::select! {
                    biased;
                    frame = place.frames.next() => Woken::Frame(frame),
                    () = sleep(silence) => Woken::Silence,
                }
            }
            Seal::Unasked | Seal::Open | Seal::Sealed(_) => Woken::Frame(place.frames.next().await),
        }
    }

    /// Asks once whether the run is sealed; an unknown run ends the log here.
    async fn ask_for_the_end(&mut self) -> Result<(), Error> {
        if matches!(self.seal, Seal::Unasked) {
            self.seal = match self.client.sealed(self.agent, self.run).await? {
                Some(count) => Seal::Sealed(count),
                None if self.follow => Seal::Awaited(sealing(self.client.clone(), self.agent, self.run).boxed()),
                None => Seal::Open,
            };
        }
        Ok(())
    }

    async fn open(&mut self) -> Result<Place, Fault> {
        if let Some(reader) = self.restart.clone() {
            let place = self.read(reader).await?;
            self.restart = None;
            return Ok(place);
        }
        let bus = self.client.bus().clone();
        let facts = bus.log_facts().await?;
        let stream = LogStream { created: facts.created.as_micros(), first: facts.first, last: facts.last };
        let since = match (self.cursor, self.since) {
            (Some(cursor), _) | (None, Since::Cursor(cursor)) => {
                self.told = self.told.max(cursor.sequence);
                reader::Since::After(cursor)
            }
            (None, Since::Start) => reader::Since::Start,
            (None, Since::Now) => {
                // A reconnect begins where the first attempt did.
                let from = *self.now.get_or_insert(facts.last.next());
                reader::Since::From(from)
            }
            (None, Since::Time(_)) => reader::Since::From(facts.first),
        };
        let reader = reader::Reader::new(stream, since);
        self.read(reader).await
    }

    async fn read(&mut self, reader: reader::Reader) -> Result<Place, Fault> {
        let until = if self.follow { Until::Dropped } else { Until::Now };
        let from = reader.start_from().max(StreamSeq(1));
        let frames = self.client.bus().read_frames(self.agent, Some(self.run), from, until).await?;
        Ok(Place { reader, frames, seen: StreamSeq(from.0 - 1) })
    }

    async fn broken(&mut self, fault: Fault) -> Result<(), Error> {
        self.place = None;
        self.outage.bear(fault).await
    }

    fn take(&mut self, frame: &RecordedFrame) -> Vec<LogItem> {
        let mut items = Vec::new();
        let Some(place) = &mut self.place else { return items };
        place.seen = frame.seq;
        if let Since::Time(floor) = self.since
            && frame.time < floor
        {
            return items;
        }
        let pushed = Frame { seq: frame.seq, owned: frame.mark.is_some(), bytes: &frame.bytes };
        match place.reader.push(pushed, &mut items) {
            Next::GoOn => {}
            Next::Restart => {
                let reader = place.reader.clone();
                self.restart = Some(reader);
                self.place = None;
                return items;
            }
        }
        for item in &items {
            match item {
                LogItem::Event(event, cursor) => {
                    self.told = event.sequence;
                    self.cursor = Some(*cursor);
                }
                LogItem::Gap { to, .. } => self.told = *to,
                LogItem::Rewound { .. } | LogItem::Malformed { .. } => {}
            }
        }
        if let Since::Time(floor) = self.since {
            items.retain(|item| !matches!(item, LogItem::Event(event, _) if event.time < floor));
        }
        items
    }

    /// Whether the leader has no frame of this run behind the last one seen.
    async fn nothing_follows(&mut self) -> Result<bool, Error> {
        let seen = self.place.as_ref().map_or(StreamSeq(0), |place| place.seen);
        match self.client.bus().last_frame(self.agent, Some(self.run)).await {
            Ok(last) => Ok(last.is_none_or(|last| last.seq <= seen)),
            Err(fault) => {
                self.broken(fault).await?;
                Ok(false)
            }
        }
    }

    /// What is missing at the end of a sealed log, once nothing follows.
    async fn rest(&mut self) -> Result<Option<Vec<LogItem>>, Error> {
        let Seal::Sealed(count) = self.seal else { return Ok(None) };
        let told_from_a_position = matches!(self.since, Since::Start | Since::Cursor(_));
        if !told_from_a_position || self.told >= count || !self.nothing_follows().await? {
            return Ok(None);
        }
        Ok(Some(vec![LogItem::Gap { from: self.told.next(), to: count }]))
    }
}
