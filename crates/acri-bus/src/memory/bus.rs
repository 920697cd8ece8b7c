//! [`State`] behind the asynchronous port.

use super::{
    State,
    commands::{Door, FirstAnswer, Listeners, MemoryReply, listen},
    fault::{self, Faults, Kind, On, Write},
};
use crate::port::{
    Answer, Append, Appended, Commands, EventSelection, EventStream, Events, Fault, FrameAppend, FrameStream,
    LeaseEntry, Leased, Leases, Logs, Recorded, RecordedFrame, Reply, Request, RequestError, RequestStream,
    StreamFacts, Until, Why,
};
use acri::{AgentId, HarnessType, Incarnation, NodeId, RunId, StreamSeq, Subject, Timestamp, codec::Format};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{
    StreamExt as _,
    stream::{self, BoxStream},
};
use std::{
    collections::{BTreeSet, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{
    sync::{broadcast, oneshot, watch},
    time::Instant,
};

/// Heartbeats that a slow listener may be behind before it misses some.
const HEARTBEATS_MAX: usize = 256;

struct World {
    state: Mutex<State>,
    late: Mutex<VecDeque<Write>>,
    /// Counts what happened, so that followers and waiters look again.
    changed: watch::Sender<u64>,
    listeners: Arc<Mutex<Listeners>>,
    away: Mutex<BTreeSet<u64>>,
    heartbeats: broadcast::Sender<Bytes>,
    begun: Instant,
    base: Timestamp,
    clients: AtomicU64,
}

/// One client of a bus in memory. Clones share the client, and with it its
/// faults; [`MemoryBus::another`] is another client of the same bus.
///
/// Its time is tokio's: it stands still where a test has paused it.
#[derive(Clone)]
pub struct MemoryBus {
    world: Arc<World>,
    client: u64,
    faults: Arc<Mutex<Faults>>,
}

impl std::fmt::Debug for MemoryBus {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("MemoryBus").field("client", &self.client).finish_non_exhaustive()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn away(operation: &'static str) -> Fault {
    Fault::Unavailable { operation, detail: "the bus is away".to_owned() }
}

impl Default for MemoryBus {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryBus {
    /// An empty bus that begins now.
    #[must_use]
    pub fn new() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = Timestamp::from_micros(i64::try_from(since.as_micros()).unwrap_or(i64::MAX));
        Self::with_state(State::new(now))
    }

    /// A bus that goes on from a state, at the state's time.
    #[must_use]
    pub fn with_state(state: State) -> Self {
        let world = World {
            base: state.now(),
            state: Mutex::new(state),
            late: Mutex::default(),
            changed: watch::Sender::new(0),
            listeners: Arc::default(),
            away: Mutex::default(),
            heartbeats: broadcast::Sender::new(HEARTBEATS_MAX),
            begun: Instant::now(),
            clients: AtomicU64::new(1),
        };
        Self { world: Arc::new(world), client: 0, faults: Arc::default() }
    }

    /// Another client of the same bus, without faults.
    #[must_use]
    pub fn another(&self) -> Self {
        let client = self.world.clients.fetch_add(1, Ordering::SeqCst);
        Self { world: Arc::clone(&self.world), client, faults: Arc::default() }
    }

    /// A copy of what is stored now.
    #[must_use]
    pub fn state(&self) -> State {
        self.state_now().clone()
    }

    /// Looks at or changes what is stored: roll it back, let retention pass.
    pub fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let outcome = change(&mut self.state_now());
        self.world.changed.send_modify(|count| *count += 1);
        outcome
    }

    fn state_now(&self) -> MutexGuard<'_, State> {
        let mut state = locked(&self.world.state);
        let passed = Instant::now().saturating_duration_since(self.world.begun);
        state.advance_to(self.world.base.plus(passed));
        state
    }

    /// This client's faults.
    #[must_use]
    pub fn faults(&self) -> impl std::ops::DerefMut<Target = Faults> + '_ {
        locked(&self.faults)
    }

    /// Takes the bus away from this client, or gives it back.
    pub fn set_away(&self, gone: bool) {
        {
            let mut faults = locked(&self.faults);
            faults.away = gone;
            if gone {
                faults.count("away");
            }
        }
        let mut away = locked(&self.world.away);
        if gone {
            away.insert(self.client);
        } else {
            away.remove(&self.client);
        }
        drop(away);
        self.world.changed.send_modify(|count| *count += 1);
    }

    /// Rolls the event stream back, as a restored backup does.
    pub fn roll_back_events(&self, last: StreamSeq) {
        locked(&self.faults).count("rolled_back");
        self.with(|state| state.truncate_events(last));
    }

    /// Lets the late writes arrive, of all clients, in the order in which they
    /// were sent; says how each ended.
    pub fn land(&self) -> Vec<Appended> {
        let late = std::mem::take(&mut *locked(&self.world.late));
        self.with(|state| late.iter().map(|write| write.apply(state)).collect())
    }

    /// A request as anybody may make one, with any reply subject. Says what
    /// was answered, and to whom, if anything was.
    #[must_use]
    pub fn raw_request(
        &self,
        subject: &str,
        reply: Option<&str>,
        content_type: Option<&str>,
        body: Bytes,
    ) -> oneshot::Receiver<Answer> {
        let inbox = reply.is_some_and(|reply| reply.starts_with("_INBOX.") || reply.starts_with("_INBOX_"));
        self.raw_request_to(subject, inbox, content_type, body)
    }

    pub(crate) fn raw_request_to(
        &self,
        subject: &str,
        answered: bool,
        content_type: Option<&str>,
        body: Bytes,
    ) -> oneshot::Receiver<Answer> {
        let (sender, receiver) = oneshot::channel();
        let first: FirstAnswer = Arc::new(Mutex::new(Some(sender)));
        let format = match content_type {
            Some(text) => Format::of_content_type(text),
            None => Some(Format::default()),
        };
        if let Some(door) = door_of(subject) {
            self.deliver(&door, subject, format, body, answered.then_some(&first));
        }
        receiver
    }

    fn deliver(
        &self,
        door: &Door,
        subject: &str,
        format: Option<Format>,
        body: Bytes,
        first: Option<&FirstAnswer>,
    ) -> usize {
        let away = locked(&self.world.away).clone();
        let listeners = locked(&self.world.listeners).at(door, |client| away.contains(&client));
        for listener in &listeners {
            let reply = first.map(|first| Box::new(MemoryReply(Arc::clone(first))) as Box<dyn Reply>);
            let request = Request { subject: subject.to_owned(), format, body: body.clone(), reply };
            if listener.try_send(request).is_err() {
                tracing::debug!(subject, "request lost at a slow listener");
            }
        }
        listeners.len()
    }

    fn here(&self, operation: &'static str) -> Result<(), Fault> {
        if locked(&self.faults).away { Err(away(operation)) } else { Ok(()) }
    }

    fn write(&self, operation: &'static str, on: On, write: Write) -> Appended {
        if let Err(fault) = self.here(operation) {
            return Appended::Unknown(fault);
        }
        let kind = locked(&self.faults).next(on);
        let mut late = locked(&self.world.late);
        self.with(|state| fault::apply(state, kind, write, &mut late))
    }

    fn write_lease_with(&self, operation: &'static str, write: impl Fn(&mut State) -> Leased) -> Leased {
        if let Err(fault) = self.here(operation) {
            return Leased::Unknown(fault);
        }
        let kind = locked(&self.faults).next(On::Lease);
        let unknown = Leased::Unknown(Fault::Unavailable { operation, detail: "no acknowledgement".to_owned() });
        match kind {
            None => self.with(|state| write(state)),
            Some(Kind::AckLost) => {
                self.with(|state| write(state));
                unknown
            }
            Some(Kind::Twice) => self.with(|state| {
                write(state);
                write(state)
            }),
            // A late write of a lease is not kept: who writes leases repeats at once.
            Some(Kind::NeverArrived | Kind::Late | Kind::Full | Kind::InFlight) => unknown,
        }
    }

    /// Whether this leader read is one that a follower answers.
    fn stale(&self) -> bool {
        let mut faults = locked(&self.faults);
        let stale = faults.stale_reads > 0;
        if stale {
            faults.stale_reads -= 1;
            faults.count("stale_read");
        }
        stale
    }

    /// Reads by `step`, which gives the next item from a sequence on.
    fn follow<T: Send + 'static>(
        &self,
        operation: &'static str,
        from: StreamSeq,
        until: Until,
        facts: fn(&State) -> StreamFacts,
        step: impl Fn(&State, StreamSeq) -> Option<(StreamSeq, T)> + Send + Sync + 'static,
    ) -> BoxStream<'static, Result<T, Fault>> {
        let target = match until {
            Until::Now => Some(facts(&self.state_now()).last),
            Until::Dropped => None,
        };
        let bus = self.clone();
        let begin = (bus, from, StreamSeq(0), self.world.changed.subscribe(), step, false);
        stream::unfold(begin, move |(bus, next, seen, mut changed, step, ended)| async move {
            if ended {
                return None;
            }
            loop {
                changed.borrow_and_update();
                let gone = locked(&bus.faults).away;
                if gone && target.is_some() {
                    return Some((Err(away(operation)), (bus, next, seen, changed, step, true)));
                }
                let found = if gone { None } else { bus.look(operation, facts, next, seen, &step) };
                match found {
                    Some(Err(fault)) => {
                        return Some((Err(fault), (bus, next, seen, changed, step, true)));
                    }
                    Some(Ok((seq, _))) if target.is_some_and(|target| seq > target) => return None,
                    Some(Ok((seq, item))) => {
                        return Some((Ok(item), (bus, seq.next(), seq, changed, step, false)));
                    }
                    None if target.is_some() => return None,
                    None => {}
                }
                if changed.changed().await.is_err() {
                    return None;
                }
            }
        })
        .boxed()
    }

    fn look<T>(
        &self,
        operation: &'static str,
        facts: fn(&State) -> StreamFacts,
        next: StreamSeq,
        seen: StreamSeq,
        step: &impl Fn(&State, StreamSeq) -> Option<(StreamSeq, T)>,
    ) -> Option<Result<(StreamSeq, T), Fault>> {
        let state = locked(&self.world.state);
        let last = facts(&state).last;
        if last < seen {
            let detail = format!("the stream was rolled back from {seen} to {last}");
            return Some(Err(Fault::Refused { operation, why: Why::State, detail }));
        }
        step(&state, next).map(Ok)
    }
}

/// The door of any subject that begins like a command's, whatever its verb.
fn door_of(subject: &str) -> Option<Door> {
    let mut tokens = subject.strip_prefix(acri::subject::ROOT)?.split('.').skip(1);
    match (tokens.next()?, tokens.next()?, tokens.next()?, tokens.count()) {
        ("cmd", "harness", harness, 1) => Some(Door::Harness(harness.parse().ok()?)),
        ("cmd", "agent", agent, 2) => Some(Door::Agent(agent.parse().ok()?)),
        _ => None,
    }
}

#[async_trait]
impl Events for MemoryBus {
    async fn append(&self, append: &Append) -> Appended {
        self.write("append an event", On::Event, Write::Event(append.clone()))
    }

    async fn last(&self, agent: AgentId) -> Result<Option<Recorded>, Fault> {
        self.here("read an agent's last event")?;
        let stale = self.stale();
        let state = self.state_now();
        let last = state.last(agent);
        let before = last.map_or(StreamSeq(0), |last| last.seq);
        let selection = EventSelection::Agent(agent);
        let behind = || state.read(&selection, StreamSeq(1)).filter(|event| event.seq < before).last();
        Ok(if stale { behind() } else { last }.cloned())
    }

    async fn read(&self, selection: EventSelection, from: StreamSeq, until: Until) -> Result<EventStream, Fault> {
        const OPERATION: &str = "read events";
        self.here(OPERATION)?;
        let step = move |state: &State, next: StreamSeq| {
            state.read(&selection, next).next().map(|recorded| (recorded.seq, recorded.clone()))
        };
        Ok(self.follow(OPERATION, from, until, State::event_facts, step))
    }

    async fn event_facts(&self) -> Result<StreamFacts, Fault> {
        self.here("read a stream's facts")?;
        Ok(self.state_now().event_facts())
    }
}

#[async_trait]
impl Logs for MemoryBus {
    async fn append_frame(&self, append: &FrameAppend) -> Appended {
        self.write("append a log frame", On::Frame, Write::Frame(append.clone()))
    }

    async fn last_frame(&self, agent: AgentId, run: Option<RunId>) -> Result<Option<RecordedFrame>, Fault> {
        self.here("read a run's last log frame")?;
        let stale = self.stale();
        let state = self.state_now();
        let last = state.last_frame(agent, run);
        let before = last.map_or(StreamSeq(0), |last| last.seq);
        let behind = || state.read_frames(agent, run, StreamSeq(1)).filter(|frame| frame.seq < before).last();
        Ok(if stale { behind() } else { last }.cloned())
    }

    async fn read_frames(
        &self,
        agent: AgentId,
        run: Option<RunId>,
        from: StreamSeq,
        until: Until,
    ) -> Result<FrameStream, Fault> {
        const OPERATION: &str = "read log frames";
        self.here(OPERATION)?;
        let step = move |state: &State, next: StreamSeq| {
            state.read_frames(agent, run, next).next().map(|frame| (frame.seq, frame.clone()))
        };
        Ok(self.follow(OPERATION, from, until, State::log_facts, step))
    }

    async fn log_facts(&self) -> Result<StreamFacts, Fault> {
        self.here("read a stream's facts")?;
        Ok(self.state_now().log_facts())
    }
}

#[async_trait]
impl Leases for MemoryBus {
    async fn write_lease(&self, incarnation: Incarnation, node: &NodeId, expect: StreamSeq, ttl: Duration) -> Leased {
        self.write_lease_with("write a lease", |state| state.write_lease(incarnation, node, expect, ttl))
    }

    async fn fence(&self, incarnation: Incarnation, expect: StreamSeq) -> Leased {
        self.write_lease_with("fence a lease", |state| state.fence(incarnation, expect))
    }

    async fn lease(&self, incarnation: Incarnation) -> Result<LeaseEntry, Fault> {
        self.here("read a lease")?;
        Ok(self.state_now().lease(incarnation))
    }

    async fn leases(&self) -> Result<Vec<(Incarnation, LeaseEntry)>, Fault> {
        self.here("read the leases")?;
        Ok(self.state_now().leases())
    }

    async fn collect_tombstone(&self, incarnation: Incarnation, revision: StreamSeq) -> Result<(), Fault> {
        self.here("collect a tombstone")?;
        self.with(|state| state.collect_tombstone(incarnation, revision))
    }

    /// The clocks are one and the same, unless a test sets them apart.
    async fn clock_offset_micros(&self) -> Result<i64, Fault> {
        self.here("compare clocks")?;
        Ok(self.faults().clock_offset_micros)
    }
}

#[async_trait]
impl Commands for MemoryBus {
    async fn serve_harness(&self, harness: &HarnessType) -> Result<RequestStream, Fault> {
        self.here("listen for commands")?;
        Ok(listen(&self.world.listeners, self.client, Door::Harness(harness.clone())))
    }

    async fn serve_agent(&self, agent: AgentId) -> Result<RequestStream, Fault> {
        self.here("listen for commands")?;
        Ok(listen(&self.world.listeners, self.client, Door::Agent(agent)))
    }

    async fn request(
        &self,
        subject: &Subject,
        format: Format,
        body: Bytes,
        timeout: Duration,
    ) -> Result<Answer, RequestError> {
        const OPERATION: &str = "ask";
        self.here(OPERATION).map_err(RequestError::Fault)?;
        let text = subject.to_string();
        let (sender, receiver) = oneshot::channel();
        let first: FirstAnswer = Arc::new(Mutex::new(Some(sender)));
        let asked = Door::of(subject).map_or(0, |door| self.deliver(&door, &text, Some(format), body, Some(&first)));
        if asked == 0 {
            return Err(RequestError::NoResponders(text));
        }
        let detail = match tokio::time::timeout(timeout, receiver).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(_)) => unreachable!("the sender is held here, in `first`"),
            Err(_) => format!("no answer within {timeout:?}"),
        };
        Err(RequestError::Fault(Fault::Unavailable { operation: OPERATION, detail }))
    }

    async fn heartbeat(&self, _node: &NodeId, body: Bytes) {
        if self.here("publish a heartbeat").is_ok() {
            // Nobody may listen.
            drop(self.world.heartbeats.send(body));
        }
    }

    async fn heartbeats(&self) -> Result<BoxStream<'static, Bytes>, Fault> {
        self.here("listen for heartbeats")?;
        let receiver = self.world.heartbeats.subscribe();
        Ok(stream::unfold(receiver, |mut receiver| async move {
            loop {
                match receiver.recv().await {
                    Ok(body) => return Some((body, receiver)),
                    Err(broadcast::error::RecvError::Lagged(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => return None,
                }
            }
        })
        .boxed())
    }

    fn connections_lost(&self) -> u64 {
        self.faults().counts().get("away").copied().unwrap_or(0)
    }

    async fn drain(&self) {
        locked(&self.world.listeners).end(self.client);
        self.set_away(true);
    }
}
