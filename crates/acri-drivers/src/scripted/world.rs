//! Where scripted harnesses live.

use super::script::{self, OnStop, Step};
use crate::driver::{Chunk, ChunkEnd, Exit, Fault, KillRequest, OutputRecord, Owner};
use acri::{
    AgentId, CommandId, RunId, Timestamp,
    event::{ExitStatus, FailReason},
    log::Stream,
};
use bytes::Bytes;
use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio::sync::Notify;

/// Bytes of output that one scripted harness holds before it blocks.
pub const SPOOL_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// Bytes of one record of a flood at most, as a holder would read from a pipe.
const RECORD_BYTES_MAX: usize = 64 * 1024;
/// What a record costs in the spool beside its bytes; any number but 0 keeps
/// spool offsets and stream offsets from being mixed up unnoticed.
const RECORD_OVERHEAD: u64 = 40;
const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

/// What a driver or a session is asked to do, for [`World::fail_next`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Effect {
    /// Create an agent.
    Create,
    /// Start a run.
    Start,
    /// Attach to a run.
    Attach,
    /// Stop a run.
    Stop,
    /// Tell the holder that the owner lives.
    Contact,
    /// Read output.
    Output,
    /// Release output.
    Release,
    /// Kill a run.
    Kill,
}

/// How an effect fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// Nothing happens, and the asker is told that it is not known.
    Before,
    /// It happens, and its answer is lost.
    After,
}

/// Holds scripted harnesses. Outlives the node: a clone of it in the next
/// [`super::ScriptedDriver`] is what a restarted node finds.
#[derive(Clone)]
pub struct World(Arc<Inner>);

struct Inner {
    clock: Box<dyn Fn() -> Timestamp + Send + Sync>,
    runs: Mutex<HashMap<(AgentId, RunId), Arc<Run>>>,
    failures: Mutex<VecDeque<(Effect, Failure)>>,
}

impl std::fmt::Debug for World {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("World").field("runs", &lock(&self.0.runs).len()).finish_non_exhaustive()
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What a panic left is still consistent: every change is made in one step, at the end.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    /// An empty world whose records bear the times of `clock`.
    pub fn new(clock: impl Fn() -> Timestamp + Send + Sync + 'static) -> Self {
        Self(Arc::new(Inner { clock: Box::new(clock), runs: Mutex::default(), failures: Mutex::default() }))
    }

    /// Lets a `wait NAME` go on; remembered if the script is not there yet.
    pub fn release(&self, agent: AgentId, run: RunId, name: &str) {
        self.change(agent, run, |state| {
            state.names.insert(name.to_owned());
        });
    }

    /// The holder dies without a word: the output so far can be read, the
    /// rest is torn, the status unknown.
    pub fn crash(&self, agent: AgentId, run: RunId) {
        self.change(agent, run, |state| state.crash(FailReason::HarnessLost));
    }

    /// Holder, harness and output are gone.
    pub fn lose(&self, agent: AgentId, run: RunId) {
        self.change(agent, run, |state| {
            state.crash(FailReason::HarnessLost);
            state.spool.clear();
            state.readable = false;
        });
    }

    /// The machine restarts: every harness dies, what it wrote can be read.
    pub fn restart_machine(&self) {
        let all: Vec<_> = lock(&self.0.runs).keys().copied().collect();
        for (agent, run) in all {
            self.change(agent, run, |state| state.crash(FailReason::MachineRestarted));
        }
    }

    /// Whether the run's holder answers; it does until this says otherwise.
    /// Output stays readable, as files are.
    pub fn set_reachable(&self, agent: AgentId, run: RunId, reachable: bool) {
        self.change(agent, run, |state| state.reachable = reachable);
    }

    /// Whether the run's tree resists a Kill: the request is recorded, and the
    /// proof comes when this is taken back.
    pub fn set_unkillable(&self, agent: AgentId, run: RunId, unkillable: bool) {
        self.change(agent, run, |state| state.unkillable = unkillable);
    }

    /// The next `effect` of any run fails. Several are taken in order.
    pub fn fail_next(&self, effect: Effect, failure: Failure) {
        lock(&self.0.failures).push_back((effect, failure));
    }

    /// How often the run's harness was started: more than once never.
    #[must_use]
    pub fn starts(&self, agent: AgentId, run: RunId) -> u32 {
        self.look(agent, run, |state| state.starts).unwrap_or(0)
    }

    /// The Stops that reached the harness, each command once.
    #[must_use]
    pub fn stops(&self, agent: AgentId, run: RunId) -> Vec<CommandId> {
        self.look(agent, run, |state| state.stops.clone()).unwrap_or_default()
    }

    /// Whether the run's harness lives.
    #[must_use]
    pub fn is_alive(&self, agent: AgentId, run: RunId) -> bool {
        self.look(agent, run, |state| matches!(state.life, Life::Running)).unwrap_or(false)
    }

    /// How many contacts the run's present owner made.
    #[must_use]
    pub fn contacts(&self, agent: AgentId, run: RunId) -> u64 {
        self.look(agent, run, |state| state.contacts).unwrap_or(0)
    }

    /// Runs that this world knows, alive or not.
    #[must_use]
    pub fn runs(&self) -> Vec<(AgentId, RunId)> {
        lock(&self.0.runs).keys().copied().collect()
    }

    pub(crate) fn run(&self, agent: AgentId, run: RunId) -> Arc<Run> {
        lock(&self.0.runs).entry((agent, run)).or_default().clone()
    }

    pub(crate) fn find(&self, agent: AgentId, run: RunId) -> Option<Arc<Run>> {
        lock(&self.0.runs).get(&(agent, run)).cloned()
    }

    pub(crate) fn forget(&self, agent: AgentId, run: RunId) {
        lock(&self.0.runs).remove(&(agent, run));
    }

    pub(crate) fn remove(&self, agent: AgentId) {
        lock(&self.0.runs).retain(|(of, _), _| *of != agent);
    }

    /// Takes the failure that was ordered for this effect.
    pub(crate) fn strike(&self, effect: Effect) -> Option<Failure> {
        let mut failures = lock(&self.0.failures);
        let at = failures.iter().position(|(of, _)| *of == effect)?;
        failures.remove(at).map(|(_, failure)| failure)
    }

    fn look<T>(&self, agent: AgentId, run: RunId, of: impl FnOnce(&State) -> T) -> Option<T> {
        self.find(agent, run).map(|run| of(&lock(&run.state)))
    }

    fn change(&self, agent: AgentId, run: RunId, change: impl FnOnce(&mut State)) {
        self.act(&self.run(agent, run), change);
    }

    /// Changes a run, lets its script go on, and wakes who waits.
    pub(crate) fn act<T>(&self, run: &Run, change: impl FnOnce(&mut State) -> T) -> T {
        let result = {
            let mut state = lock(&run.state);
            let result = change(&mut state);
            state.go_on(&*self.0.clock);
            result
        };
        run.changed.notify_waiters();
        result
    }
}

/// One run: a state that changes only when somebody does something, so that an
/// idle harness costs no task and no timer.
#[derive(Default)]
pub(crate) struct Run {
    pub(crate) state: Mutex<State>,
    changed: Notify,
}

impl Run {
    /// Waits until `of` finds something in the state.
    pub(crate) async fn until<T>(&self, mut of: impl FnMut(&State) -> Option<T>) -> T {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Registered before the look: a change between the two wakes.
            changed.as_mut().enable();
            if let Some(found) = of(&lock(&self.state)) {
                return found;
            }
            changed.await;
        }
    }
}

#[derive(Default)]
pub(crate) enum Life {
    #[default]
    NotStarted,
    Running,
    Ended(Exit),
    Crashed(FailReason),
}

pub(crate) struct State {
    pub(crate) life: Life,
    pub(crate) owner: Option<Owner>,
    pub(crate) killed: Option<KillRequest>,
    pub(crate) token: Option<Bytes>,
    pub(crate) readable: bool,
    pub(crate) reachable: bool,
    unkillable: bool,
    starts: u32,
    stops: Vec<CommandId>,
    contacts: u64,
    on_stop: OnStop,
    names: BTreeSet<String>,
    script: VecDeque<Step>,
    /// Lines of the flood at the script's head that are written.
    flooded: u64,
    spool: VecDeque<OutputRecord>,
    end: u64,
    released: u64,
    stream_ends: [u64; 2],
}

impl Default for State {
    fn default() -> Self {
        Self {
            life: Life::NotStarted,
            owner: None,
            killed: None,
            token: None,
            readable: true,
            reachable: true,
            unkillable: false,
            starts: 0,
            stops: Vec::new(),
            contacts: 0,
            on_stop: OnStop::Die,
            names: BTreeSet::new(),
            script: VecDeque::new(),
            flooded: 0,
            spool: VecDeque::new(),
            end: 0,
            released: 0,
            stream_ends: [0; 2],
        }
    }
}

impl State {
    /// Begins the script, unless a Kill came first.
    pub(crate) fn start(&mut self, script: Vec<Step>) {
        if self.killed.is_some() {
            self.end(None);
            return;
        }
        self.starts += 1;
        self.script = script.into();
        self.life = Life::Running;
    }

    /// Takes the run over for an owner.
    pub(crate) fn claim(&mut self, owner: Owner) -> Result<(), Fault> {
        self.answer("claim")?;
        match self.owner {
            Some(highest) if owner.epoch < highest.epoch => Err(Fault::Stale(highest.epoch)),
            Some(highest) if owner.epoch == highest.epoch && owner != highest => Err(Fault::Stale(highest.epoch)),
            Some(highest) if owner == highest => Ok(()),
            _ => {
                (self.owner, self.contacts) = (Some(owner), 0);
                Ok(())
            }
        }
    }

    /// Refuses what a former owner asks.
    pub(crate) fn check(&self, operation: &'static str, owner: Owner) -> Result<(), Fault> {
        self.answer(operation)?;
        match self.owner {
            Some(highest) if owner.epoch != highest.epoch => Err(Fault::Stale(highest.epoch)),
            _ => Ok(()),
        }
    }

    /// Refuses a Kill of a former owner: a newer one's is no reason to let a
    /// harness live.
    pub(crate) fn check_kill(&self, owner: Owner) -> Result<(), Fault> {
        self.answer("kill")?;
        match self.owner {
            Some(highest) if owner.epoch < highest.epoch => Err(Fault::Stale(highest.epoch)),
            _ => Ok(()),
        }
    }

    fn answer(&self, operation: &'static str) -> Result<(), Fault> {
        if self.reachable {
            return Ok(());
        }
        Err(Fault::Unreachable { operation, detail: "the script says so".to_owned() })
    }

    pub(crate) fn contact(&mut self, owner: Owner) -> Result<(), Fault> {
        self.answer("contact")?;
        match self.owner {
            Some(highest) if owner != highest => Err(Fault::Stale(highest.epoch)),
            _ => {
                self.contacts += 1;
                Ok(())
            }
        }
    }

    pub(crate) fn stop(&mut self, command: CommandId) {
        if !matches!(self.life, Life::Running) || self.stops.contains(&command) {
            return;
        }
        self.stops.push(command);
        match self.on_stop {
            OnStop::Ignore => {}
            OnStop::Die => self.end(Some(ExitStatus { code: None, signal: Some(SIGTERM) })),
            OnStop::Exit(code) => self.end(Some(ExitStatus { code: Some(code), signal: None })),
        }
    }

    /// Records the Kill; the first one stays.
    pub(crate) fn kill(&mut self, request: KillRequest) {
        if matches!(self.life, Life::NotStarted | Life::Running) && self.killed.is_none() {
            self.killed = Some(request);
        }
    }

    /// Ends it as if its holder had vanished, and what it kept.
    pub(crate) fn give_up(&mut self, owner: Owner) -> Result<(), Fault> {
        if let Some(highest) = self.owner.filter(|highest| owner.epoch < highest.epoch) {
            return Err(Fault::Stale(highest.epoch));
        }
        if self.unkillable && !self.is_gone() {
            return Err(Fault::Unreachable { operation: "give up", detail: "its tree resists".to_owned() });
        }
        self.owner = Some(owner);
        self.crash(FailReason::HarnessLost);
        Ok(())
    }

    /// Whether nothing of the run's tree lives.
    pub(crate) fn is_gone(&self) -> bool {
        !matches!(self.life, Life::Running)
    }

    pub(crate) fn release(&mut self, offset: u64, token: Bytes) -> Result<(), Fault> {
        if offset > self.end {
            let detail = format!("offset {offset} is beyond the end of the spool, {}", self.end);
            return Err(Fault::Broken { operation: "release", detail });
        }
        self.released = self.released.max(offset);
        while self.spool.front().is_some_and(|record| behind(record) <= self.released) {
            self.spool.pop_front();
        }
        if !token.is_empty() {
            self.token = Some(token);
        }
        Ok(())
    }

    /// What can be read from `offset` on; `None`: wait.
    pub(crate) fn read(&self, offset: u64, bytes_max: usize) -> Option<Result<Chunk, Fault>> {
        let end = match self.life {
            Life::Crashed(_) => ChunkEnd::Torn,
            Life::Ended(_) => ChunkEnd::Ended,
            Life::NotStarted | Life::Running => ChunkEnd::Open,
        };
        if offset == self.end {
            return (end != ChunkEnd::Open).then_some(Ok(Chunk { records: Vec::new(), next: offset, end }));
        }
        let Ok(first) = self.spool.binary_search_by_key(&offset, |record| record.spool_offset) else {
            if !self.readable {
                return Some(Ok(Chunk { records: Vec::new(), next: offset, end: ChunkEnd::Torn }));
            }
            if offset < self.released {
                let end = ChunkEnd::Gone { first: self.released };
                return Some(Ok(Chunk { records: Vec::new(), next: offset, end }));
            }
            let detail = format!("offset {offset} is no record's ({}..{})", self.released, self.end);
            return Some(Err(Fault::Broken { operation: "read output", detail }));
        };
        let mut budget = bytes_max.max(1);
        let mut records = Vec::new();
        for record in self.spool.range(first..) {
            records.push(record.clone());
            budget = budget.saturating_sub(record.bytes.len());
            if budget == 0 {
                break;
            }
        }
        let next = records.last().map_or(offset, behind);
        let end = if next == self.end { end } else { ChunkEnd::Open };
        Some(Ok(Chunk { records, next, end }))
    }

    fn crash(&mut self, reason: FailReason) {
        if matches!(self.life, Life::Running) {
            self.life = Life::Crashed(reason);
            self.script = VecDeque::new();
        }
    }

    fn end(&mut self, status: Option<ExitStatus>) {
        self.life = Life::Ended(Exit { status, killed: self.killed.clone(), orphaned: false });
        self.script = VecDeque::new();
    }

    /// Runs the script until it waits for something.
    fn go_on(&mut self, clock: &dyn Fn() -> Timestamp) {
        while matches!(self.life, Life::Running) {
            if self.killed.is_some() && !self.unkillable {
                self.end(Some(ExitStatus { code: None, signal: Some(SIGKILL) }));
                return;
            }
            match self.script.front() {
                // A tree that resists may do nothing more but resist.
                _ if self.killed.is_some() => return,
                Some(Step::Write(stream, bytes)) => {
                    let (stream, bytes) = (*stream, bytes.clone());
                    if !self.append(stream, bytes, clock) {
                        return;
                    }
                }
                Some(Step::Flood { lines, line_bytes }) => {
                    let (lines, line_bytes) = (*lines, *line_bytes);
                    if !self.flood(lines, line_bytes, clock) {
                        return;
                    }
                    self.flooded = 0;
                }
                Some(Step::Wait(name)) => {
                    if !self.names.contains(name) {
                        return;
                    }
                }
                Some(Step::OnStop(what)) => self.on_stop = *what,
                Some(Step::Hang) => return,
                Some(Step::Exit(code)) => {
                    let code = Some(*code);
                    self.end(Some(ExitStatus { code, signal: None }));
                    return;
                }
                Some(Step::Signal(signal)) => {
                    let signal = Some(*signal);
                    self.end(Some(ExitStatus { code: None, signal }));
                    return;
                }
                None => {
                    self.end(Some(ExitStatus { code: Some(0), signal: None }));
                    return;
                }
            }
            self.script.pop_front();
        }
    }

    /// Writes what is left of a flood; false if the spool is full before.
    fn flood(&mut self, lines: u64, line_bytes: usize, clock: &dyn Fn() -> Timestamp) -> bool {
        let lines_per_record = u64::try_from(RECORD_BYTES_MAX / line_bytes).unwrap_or(1).max(1);
        while self.flooded < lines {
            let until = lines.min(self.flooded + lines_per_record);
            let mut bytes = Vec::new();
            for number in self.flooded..until {
                script::flood_line(number, line_bytes, &mut bytes);
            }
            if !self.append(Stream::Stdout, bytes.into(), clock) {
                return false;
            }
            self.flooded = until;
        }
        true
    }

    /// Appends a record; false if the spool is full.
    fn append(&mut self, stream: Stream, bytes: Bytes, clock: &dyn Fn() -> Timestamp) -> bool {
        if self.end - self.released >= SPOOL_BYTES_MAX {
            return false;
        }
        let stream_end = &mut self.stream_ends[usize::from(stream == Stream::Stderr)];
        let record = OutputRecord { spool_offset: self.end, stream, stream_offset: *stream_end, time: clock(), bytes };
        *stream_end += u64::try_from(record.bytes.len()).unwrap_or(u64::MAX);
        self.end = behind(&record);
        self.spool.push_back(record);
        true
    }
}

fn behind(record: &OutputRecord) -> u64 {
    record.spool_offset + RECORD_OVERHEAD + u64::try_from(record.bytes.len()).unwrap_or(u64::MAX)
}
