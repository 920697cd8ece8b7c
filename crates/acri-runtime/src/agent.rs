//! The actor of one agent: receives, calls `Appender::step`, carries out what
//! it says, feeds the results back. It has no rules of its own.

use crate::{
    adoptions::Adoption,
    counters::count,
    machine::{Core, Waiting, with_ctx},
    node::Shared,
    refused,
    request::{self, Back},
    run::{self, Run, Spawn},
    supervisor,
};
use acri::{
    AgentId, CommandId, ErrorBody, ErrorCode, RunId, StreamSeq,
    command::{KillRun, OnExpiry, StopRun},
    id::{Epoch, EventSeq, Sha256Digest},
};
use acri_bus::port::{self, Appended, EventSelection, Until};
use acri_core::{
    agent::Agent as Folded,
    appender::{Appender, Command, Creation, Effect, Halt, Input, Me, Order, Output, Stored, Token},
};
use acri_drivers::driver::Driver;
use futures_util::StreamExt as _;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::{sync::Semaphore, task::AbortHandle};

/// First and longest pause before an append or a read is tried again.
const RETRY_FIRST: Duration = Duration::from_millis(20);
const RETRY_LAST: Duration = Duration::from_secs(2);
/// Histories that are compared with the stream at once.
static COMPARISONS: Semaphore = Semaphore::const_new(64);
/// Attempts at one comparison; the next append notices as well.
const COMPARISON_ATTEMPTS_MAX: u32 = 20;
/// Pause before a failed leader read is asked for again.
const REREAD_PAUSE: Duration = Duration::from_millis(200);

pub(crate) fn retry_pause(attempt: u32) -> Duration {
    RETRY_FIRST.saturating_mul(1 << attempt.min(7)).min(RETRY_LAST)
}

/// What an agent's actor hears.
#[derive(Debug)]
pub(crate) enum Msg {
    /// A command.
    Command(Waiting),
    /// A repeat of the Create that made it.
    CreateAgain { command: Command, back: Back },
    /// A step on the control thread left something to do.
    Undone,
    /// A result, or a report from a run.
    Input(Input),
    /// Time passed.
    Tick(u64),
    /// A task of a run failed: adopt anew.
    Failed(String),
    /// The node goes and stops its runs.
    StopRun { command: CommandId, grace: Duration, reason: String },
    /// The node goes and kills its runs.
    KillRun { command: CommandId, reason: String },
    /// The stream may have been put back: does it hold what was acknowledged?
    CompareHistory,
    /// It does not.
    HistoryLost,
    /// The node goes: no further effect.
    Leave,
}

/// How an agent's actor comes to be.
#[expect(clippy::large_enum_variant, reason = "it lives for a moment and is moved once")]
#[derive(Debug)]
pub(crate) enum Birth {
    /// By a Create.
    Create { creation: Creation, command: Command, back: Back },
    /// By an adoption of what the stream tells.
    Adopt { folded: Box<Folded>, adoption: Adoption, history_lost: bool },
}

/// Arguments of the actor.
pub(crate) struct Arguments {
    pub(crate) agent: AgentId,
    pub(crate) birth: Birth,
    pub(crate) shared: Arc<Shared>,
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) supervisor: ActorRef<supervisor::Msg>,
}

pub(crate) struct State {
    agent: AgentId,
    /// Taken by `post_start`, which may await: the supervisor waits for
    /// `pre_start` only.
    birth: Option<Birth>,
    core: Arc<Core>,
    runs: HashMap<RunId, Run>,
    served: Option<Epoch>,
    /// Only its former node could reach its open run's harness.
    node_lost: bool,
    /// Which wish for a tick is the newest.
    wake: u64,
    /// The task behind it.
    timer: Option<AbortHandle>,
    shared: Arc<Shared>,
    driver: Arc<dyn Driver>,
    supervisor: ActorRef<supervisor::Msg>,
}

impl Drop for State {
    fn drop(&mut self) {
        if let Some(timer) = self.timer.take() {
            timer.abort();
        }
        drop(self.core.end());
        self.shared.agents.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The actor.
pub(crate) struct Agent;

impl Actor for Agent {
    type Msg = Msg;
    type State = State;
    type Arguments = Arguments;

    async fn pre_start(&self, _myself: ActorRef<Msg>, arguments: Arguments) -> Result<State, ActorProcessingErr> {
        let Arguments { agent, birth, shared, driver, supervisor } = arguments;
        shared.agents.fetch_add(1, Ordering::Relaxed);
        Ok(State {
            agent,
            birth: Some(birth),
            core: Arc::new(Core::new(Arc::clone(&shared), Arc::clone(&driver))),
            runs: HashMap::new(),
            served: None,
            node_lost: false,
            wake: 0,
            timer: None,
            shared,
            driver,
            supervisor,
        })
    }

    async fn post_start(&self, myself: ActorRef<Msg>, state: &mut State) -> Result<(), ActorProcessingErr> {
        let Some(birth) = state.birth.take() else { return Ok(()) };
        let (outputs, adoption) = state.begin(birth);
        Box::pin(state.serve(&myself)).await?;
        drop(adoption);
        state.perform(&myself, outputs).await
    }

    async fn handle(&self, myself: ActorRef<Msg>, message: Msg, state: &mut State) -> Result<(), ActorProcessingErr> {
        let input = match message {
            Msg::Command(Waiting { command, back, permit }) => {
                let asker = {
                    let mut inner = state.core.lock();
                    match state.core.refusal(&inner, &command) {
                        None => Ok(inner.ask(back, Some(permit))),
                        Some(error) => Err((back, error)),
                    }
                };
                match asker {
                    Ok(asker) => Input::Command(asker, command),
                    Err((back, error)) => {
                        back.refuse(&error).await;
                        return Ok(());
                    }
                }
            }
            Msg::CreateAgain { command, back } => Input::Command(state.core.lock().ask(back, None), command),
            Msg::Undone => {
                let outputs = std::mem::take(&mut state.core.lock().undone);
                return state.perform(&myself, outputs).await;
            }
            Msg::Input(input) => input,
            Msg::Tick(wake) if wake == state.wake => Input::Tick,
            Msg::Tick(_) => return Ok(()),
            Msg::StopRun { command, grace, reason } => {
                let grace_ms = Some(u64::try_from(grace.as_millis()).unwrap_or(u64::MAX));
                let stop = StopRun { reason, grace_ms, on_expiry: OnExpiry::Kill };
                let Some(input) = state.own_command(command, |run| Order::Stop(run, stop)) else {
                    return Ok(());
                };
                input
            }
            Msg::KillRun { command, reason } => {
                let Some(input) = state.own_command(command, |run| Order::Kill(run, KillRun { reason })) else {
                    return Ok(());
                };
                input
            }
            Msg::Failed(error) => return Err(error.into()),
            Msg::CompareHistory => {
                state.compare_history(&myself);
                return Ok(());
            }
            Msg::HistoryLost => return Box::pin(state.halt(&myself, Halt::HistoryLost)).await,
            Msg::Leave => {
                Box::pin(state.leave()).await;
                myself.stop(Some("the node leaves".to_owned()));
                return Ok(());
            }
        };
        let outputs = state.core.step(input);
        state.perform(&myself, outputs).await
    }
}

impl State {
    fn begin(&mut self, birth: Birth) -> (Vec<Output>, Option<Adoption>) {
        let me = Me { node: self.shared.config.node.clone(), incarnation: self.shared.incarnation };
        let mut under_way = None;
        let (appender, outputs) = match birth {
            Birth::Create { creation, command, back } => {
                let asker = self.core.lock().ask(back, None);
                with_ctx(&self.shared, |ctx| Appender::create(me, creation, asker, command, ctx))
            }
            Birth::Adopt { folded, adoption, history_lost } => {
                under_way = Some(adoption);
                with_ctx(&self.shared, |ctx| Appender::adopt(me, *folded, history_lost, ctx))
            }
        };
        // A local harness is where its Start was accepted, whoever owns it now.
        self.node_lost = self.driver.is_local() && appender.state().open_run_is_elsewhere(&self.shared.config.node);
        // An open run's switch stands before anybody can ask for a Kill.
        if let Some(run) = appender.open_run() {
            let switch = self.driver.kill_switch(self.agent, run);
            self.shared.control.switches.register(self.agent, run, switch);
        }
        self.core.lock().appender = Some(appender);
        (outputs, under_way)
    }

    /// A command that the node itself gives to the open run.
    fn own_command(&mut self, id: CommandId, order: impl FnOnce(RunId) -> Order) -> Option<Input> {
        let run = self.core.with(Appender::open_run)??;
        let principal = format!("node:{}", self.shared.config.node);
        let asker = self.core.lock().ask(Back::nobody(), None);
        Some(Input::Command(asker, Command { id, principal, expires: None, order: order(run) }))
    }

    async fn serve(&mut self, myself: &ActorRef<Msg>) -> Result<(), ActorProcessingErr> {
        let Some(epoch) = self.core.with(Appender::epoch) else { return Ok(()) };
        for attempt in 0.. {
            match self.shared.control.serve(self.agent, epoch, Arc::clone(&self.core), myself.clone()).await {
                Ok(()) => break,
                Err(error) if attempt < 5 => {
                    tracing::warn!(agent = %self.agent, %error, "subscription is tried again");
                    tokio::time::sleep(retry_pause(attempt)).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.served = Some(epoch);
        Ok(())
    }

    /// Carries out what the core says. An idle actor holds the room for what
    /// its handler holds at most, so that is on the heap, and only meanwhile.
    async fn perform(&mut self, myself: &ActorRef<Msg>, outputs: Vec<Output>) -> Result<(), ActorProcessingErr> {
        if outputs.is_empty() {
            return Ok(());
        }
        Box::pin(self.carry_out(myself, outputs)).await
    }

    async fn carry_out(&mut self, myself: &ActorRef<Msg>, outputs: Vec<Output>) -> Result<(), ActorProcessingErr> {
        if outputs.iter().any(|output| matches!(output, Output::Halt(Halt::NotOurs))) {
            // Before the answer: who has it may repeat his Create at once, and
            // must not be sent to an actor that ends.
            let from = myself.get_id();
            let looks = supervisor::Msg::Readopt { agent: self.agent, from, history_lost: false };
            let _ = self.supervisor.cast(looks);
        }
        for output in outputs {
            match output {
                append @ Output::Append { .. } => self.append(myself, append),
                Output::Reread { token, after } => self.reread(myself, token, after),
                Output::Effect { token, run, effect } => self.effect(myself, token, run, effect),
                Output::Reply(asker, answer) => {
                    let Some((back, _permit)) = self.core.lock().askers.remove(&asker) else { continue };
                    if self.shared.lease.may_act() {
                        // Sending only buffers; it waits for nobody.
                        back.answer(&answer).await;
                    } else {
                        count(&self.shared.counters.replies_withheld);
                    }
                }
                Output::Derived(run, source) => {
                    if let Some(actor) = self.runs.get(&run) {
                        actor.tell(run::Msg::Derived(source));
                    }
                }
                Output::Sealed(run) => {
                    self.shared.control.switches.drop_run(self.agent, run);
                    self.shared.sessions.drop_run(self.agent, run);
                    self.runs.remove(&run);
                    let (driver, agent) = (Arc::clone(&self.driver), self.agent);
                    tokio::spawn(async move { driver.forget(agent, run).await });
                }
                Output::WakeAt(time) => {
                    self.wake += 1;
                    let (wake, myself) = (self.wake, myself.clone());
                    let pause = time.since(self.shared.clock.now());
                    let timer = tokio::spawn(async move {
                        tokio::time::sleep(pause).await;
                        let _ = myself.cast(Msg::Tick(wake));
                    });
                    // A wish for a later time replaces it, a minute long or more.
                    if let Some(former) = self.timer.replace(timer.abort_handle()) {
                        former.abort();
                    }
                }
                Output::Retired => {
                    let error = ErrorBody::new(ErrorCode::FailedPrecondition, "the agent was removed");
                    for (_, waiting) in self.core.end() {
                        waiting.0.refuse(&error).await;
                    }
                    self.leave().await;
                    self.driver.remove(self.agent).await;
                    let _ = self.supervisor.cast(supervisor::Msg::Gone(self.agent, myself.get_id()));
                    myself.stop(Some("removed".to_owned()));
                }
                Output::Halt(halt) => return self.halt(myself, halt).await,
            }
        }
        Ok(())
    }

    async fn halt(&mut self, myself: &ActorRef<Msg>, halt: Halt) -> Result<(), ActorProcessingErr> {
        self.leave().await;
        let next = match halt {
            Halt::Fenced { by } => {
                tracing::warn!(agent = %self.agent, %by, "a newer owner exists: stepped down");
                supervisor::Msg::Gone(self.agent, myself.get_id())
            }
            // Ours after all, if an actor of ours died between the append and
            // its answer: the supervisor looks.
            Halt::NotOurs => supervisor::Msg::Readopt { agent: self.agent, from: myself.get_id(), history_lost: false },
            Halt::HistoryLost => {
                supervisor::Msg::Readopt { agent: self.agent, from: myself.get_id(), history_lost: true }
            }
            Halt::Bug(text) => {
                tracing::error!(agent = %self.agent, text, "this agent stops, and no other");
                supervisor::Msg::Gone(self.agent, myself.get_id())
            }
        };
        let _ = self.supervisor.cast(next);
        myself.stop(Some("halted".to_owned()));
        Ok(())
    }

    async fn leave(&mut self) {
        if let Some(epoch) = self.served.take() {
            self.shared.control.unserve(self.agent, epoch).await;
        }
        self.runs.clear();
        // Here and not by their drop: a node that leaves sends it before its
        // connection goes. What waits in the mailbox hears of it by its drop.
        for (_, (back, _permit)) in self.core.end() {
            if self.shared.lease.may_act() {
                back.refuse(&request::stopped()).await;
            }
        }
    }

    fn append(&self, myself: &ActorRef<Msg>, output: Output) {
        let (shared, myself) = (Arc::clone(&self.shared), myself.clone());
        tokio::spawn(async move {
            if let Some(input) = append(&shared, &shared.bus, output).await {
                let _ = myself.cast(Msg::Input(input));
            }
        });
    }

    /// Looks whether the last event that was acknowledged to us is stored.
    fn compare_history(&self, myself: &ActorRef<Msg>) {
        let Some(last) = self.core.with(|core| *core.state().last()) else { return };
        if last.sequence == EventSeq(0) {
            return;
        }
        let (shared, agent, myself) = (Arc::clone(&self.shared), self.agent, myself.clone());
        tokio::spawn(async move {
            let Ok(_permit) = COMPARISONS.acquire().await else { return };
            for attempt in 0..COMPARISON_ATTEMPTS_MAX {
                match read_after(&shared, agent, StreamSeq(last.seq.0 - 1)).await {
                    Ok((stored, _)) => {
                        let there = |one: &Stored| one.seq == last.seq && Sha256Digest::of(&one.bytes) == last.digest;
                        if !stored.iter().any(there) {
                            let _ = myself.cast(Msg::HistoryLost);
                        }
                        return;
                    }
                    Err(error) => {
                        tracing::warn!(%agent, %error, "a history cannot be compared yet");
                        tokio::time::sleep(retry_pause(attempt)).await;
                    }
                }
            }
        });
    }

    fn reread(&self, myself: &ActorRef<Msg>, token: Token, after: StreamSeq) {
        let (shared, agent, myself) = (Arc::clone(&self.shared), self.agent, myself.clone());
        tokio::spawn(async move {
            let input = match read_after(&shared, agent, after).await {
                Ok((stored, last)) => Input::Caught(token, stored, last),
                Err(error) => {
                    tracing::warn!(%agent, %error, "leader read failed");
                    tokio::time::sleep(REREAD_PAUSE).await;
                    Input::ReadFailed(token)
                }
            };
            let _ = myself.cast(Msg::Input(input));
        });
    }

    fn effect(&mut self, myself: &ActorRef<Msg>, token: Token, run: RunId, effect: Effect) {
        if !self.runs.contains_key(&run) {
            // The switch stands before the harness is spawned.
            let switch = self.driver.kill_switch(self.agent, run);
            self.shared.control.switches.register(self.agent, run, switch);
            let spawn = {
                let core = self.core.lock();
                let Some(state) = core.appender.as_ref().map(Appender::state) else { return };
                Spawn {
                    agent: self.agent,
                    run,
                    needs: Some(Box::new((state.spec().clone(), state.working_directory().map(str::to_owned)))),
                    orphan_after: state.spec().orphan_after(),
                    shared: Arc::clone(&self.shared),
                    driver: Arc::clone(&self.driver),
                    to: myself.clone(),
                    node_lost: self.node_lost,
                    started: state.run(run).is_some_and(|run| run.started),
                }
            };
            // A run that begins from now on is our own.
            self.node_lost = false;
            self.runs.insert(run, Run::begin(spawn));
        }
        if let Some(actor) = self.runs.get(&run) {
            actor.tell(run::Msg::Effect(token, effect));
        }
    }
}

/// Appends over a connection; nothing if this node was fenced before.
pub(crate) async fn append(shared: &Shared, bus: &port::SharedBus, output: Output) -> Option<Input> {
    let Output::Append { token, subject, id, expect, bytes, attempt } = output else { return None };
    if attempt > 0 {
        count(&shared.counters.appends_repeated);
        tokio::time::sleep(retry_pause(attempt - 1)).await;
    }
    if !shared.lease.wait().await {
        return None;
    }
    let append = port::Append { subject, id, expect, bytes };
    Some(match bus.append(&append).await {
        Appended::Stored(seq) => {
            shared.note_acknowledged(seq, &append.bytes);
            Input::Appended(token, seq)
        }
        Appended::Duplicate(seq) => Input::Duplicate(token, seq),
        Appended::Conflict => {
            count(&shared.counters.appends_conflicted);
            Input::Conflict(token)
        }
        Appended::InFlight => Input::Unknown(token),
        Appended::Unknown(error) => {
            tracing::debug!(%error, "append has no answer");
            Input::Unknown(token)
        }
        Appended::Refused(error) => {
            tracing::warn!(%error, "append is refused");
            shared.room.ask();
            Input::Refused(token, refused::append(&error))
        }
    })
}

/// Everything of an agent after a sequence, up to its last event as the leader
/// knows it.
pub(crate) async fn read_after(
    shared: &Shared,
    agent: AgentId,
    after: StreamSeq,
) -> Result<(Vec<Stored>, StreamSeq), port::Fault> {
    let Some(last) = shared.bus.last(agent).await? else { return Ok((Vec::new(), StreamSeq(0))) };
    let mut stored = Vec::new();
    if last.seq > after {
        let mut events = shared.bus.read(EventSelection::Agent(agent), after.next(), Until::Now).await?;
        while let Some(recorded) = events.next().await {
            let recorded = recorded?;
            if recorded.seq >= last.seq {
                break;
            }
            stored.push(stored_of(&recorded));
        }
        stored.push(stored_of(&last));
    }
    Ok((stored, last.seq))
}

pub(crate) fn stored_of(recorded: &port::Recorded) -> Stored {
    Stored { seq: recorded.seq, time: recorded.time, bytes: recorded.bytes.clone() }
}
