//! The actor of one run: its session, and the tasks round it. It carries out
//! the effects that the agent's actor hands on, and reports what it sees.

use crate::{agent, node::Shared, pump};
use acri::{
    AgentId, AgentSpec, RunId,
    event::{FailReason, RunStarted, Source},
    id::LogSeq,
    log::ResumeToken,
};
use acri_core::appender::{Effect, Input, Report, Token};
use acri_drivers::driver::{Attached, Driver, Fault, KillRequest, Owner, Provisioned, Session, Start, StartError};
use futures_util::FutureExt as _;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use std::{panic::AssertUnwindSafe, sync::Arc};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Derived events whose storing the pump has not heard of yet.
const DERIVED_WAITING_MAX: usize = 64;
/// Attempts to reach a holder, about a minute's worth, before its run is given
/// up and ended without it.
const ATTEMPTS_MAX: u32 = 40;

/// Arguments of the actor.
pub(crate) struct Spawn {
    pub(crate) agent: AgentId,
    pub(crate) run: RunId,
    pub(crate) spec: AgentSpec,
    pub(crate) working_directory: Option<String>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) to: ActorRef<agent::Msg>,
    /// The harness was on a node that is given up: there is nothing to attach
    /// to.
    pub(crate) node_lost: bool,
    /// The harness had begun when this actor was made.
    pub(crate) started: bool,
}

/// What a run's actor hears.
pub(crate) enum Msg {
    /// Do this.
    Effect(Token, Effect),
    /// A derived event is stored.
    Derived(Source),
    /// The harness is there.
    Ready(Token, Owner, Arc<dyn Session>),
    /// The holder could not be asked.
    Unreachable(Token, Fault),
}

impl std::fmt::Debug for Msg {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Effect(token, effect) => formatter.debug_tuple("Effect").field(token).field(effect).finish(),
            Self::Derived(source) => formatter.debug_tuple("Derived").field(source).finish(),
            Self::Ready(token, ..) => formatter.debug_tuple("Ready").field(token).finish(),
            Self::Unreachable(token, fault) => formatter.debug_tuple("Unreachable").field(token).field(fault).finish(),
        }
    }
}

pub(crate) struct State {
    spawn: Spawn,
    session: Option<Arc<dyn Session>>,
    derived: Option<mpsc::Sender<Source>>,
    /// Ends every task of this run when the actor's state is dropped.
    tasks: CancellationToken,
}

impl Drop for State {
    fn drop(&mut self) {
        self.tasks.cancel();
    }
}

/// The actor.
pub(crate) struct Run;

impl Actor for Run {
    type Msg = Msg;
    type State = State;
    type Arguments = Spawn;

    async fn pre_start(&self, _myself: ActorRef<Msg>, spawn: Spawn) -> Result<State, ActorProcessingErr> {
        Ok(State { spawn, session: None, derived: None, tasks: CancellationToken::new() })
    }

    async fn handle(&self, myself: ActorRef<Msg>, message: Msg, state: &mut State) -> Result<(), ActorProcessingErr> {
        match message {
            Msg::Effect(token, effect) => state.effect(&myself, token, effect),
            Msg::Derived(source) => {
                if let Some(derived) = &state.derived {
                    // The pump waits for this very source, so there is room.
                    let _ = derived.try_send(source);
                }
            }
            Msg::Ready(token, owner, session) => state.ready(token, owner, session),
            Msg::Unreachable(token, fault) => {
                state.spawn.done(token);
                return Err(fault.into());
            }
        }
        Ok(())
    }
}

impl Spawn {
    fn report(&self, report: Report) {
        let _ = self.to.cast(agent::Msg::Input(Input::Report(self.run, report)));
    }

    fn done(&self, token: Token) {
        let _ = self.to.cast(agent::Msg::Input(Input::EffectDone(token)));
    }
}

/// Reports what the last stored frame says of a run's log, with a gap.
async fn stored_log(shared: &Shared, agent: AgentId, run: RunId, to: &ActorRef<agent::Msg>) {
    for attempt in 0..ATTEMPTS_MAX {
        match shared.bus.last_frame(agent, Some(run)).await {
            Ok(frame) => {
                let start = ResumeToken::start();
                let token = frame.map_or(Ok(start), |frame| acri::codec::from_msgpack(&frame.resume));
                // One that cannot be read: the core seals without it, in time.
                let Ok(token) = token else { return };
                let count = LogSeq(token.next_sequence.0.saturating_sub(1));
                let report = Report::LogsDone { count, chain: token.chain, gap: true };
                let _ = to.cast(agent::Msg::Input(Input::Report(run, report)));
                return;
            }
            Err(error) => {
                tracing::warn!(%run, %error, "the stored log of a lost run cannot be read yet");
                tokio::time::sleep(agent::retry_pause(attempt)).await;
            }
        }
    }
}

/// Pauses before a holder is tried again; or, when that was tried often enough,
/// ends the run without it. A run is called lost only when nothing of it
/// lives: as long as that is not proved, it is tried again.
async fn again(
    driver: &dyn Driver,
    (agent, run): (AgentId, RunId),
    owner: Owner,
    attempt: u32,
    fault: Fault,
) -> Result<Report, Fault> {
    let fault = if attempt < ATTEMPTS_MAX {
        fault
    } else {
        match driver.give_up(agent, run, owner).await {
            Ok(()) => return Ok(Report::Lost(FailReason::HarnessLost, fault.to_string())),
            Err(unproved) => unproved,
        }
    };
    tracing::warn!(%agent, %run, %fault, "the holder of a run is tried again");
    tokio::time::sleep(agent::retry_pause(attempt)).await;
    Err(fault)
}

fn owner(shared: &Shared, epoch: acri::id::Epoch) -> Owner {
    Owner { epoch, incarnation: shared.incarnation }
}

impl State {
    fn effect(&mut self, myself: &ActorRef<Msg>, token: Token, effect: Effect) {
        match effect {
            Effect::Attach { epoch } => self.attach(myself, token, epoch),
            Effect::Spawn { task, epoch } => self.start(myself, token, task, epoch),
            Effect::Stop { command, epoch } => self.stop(token, command, epoch),
            Effect::Kill { command, principal, reason, epoch } => {
                let owner = owner(&self.spawn.shared, epoch);
                let (control, agent, run) = (self.spawn.shared.control.clone(), self.spawn.agent, self.spawn.run);
                let (to, request) = (self.spawn.to.clone(), KillRequest { command, principal, reason, owner });
                tokio::spawn(async move {
                    control.kill(agent, run, request).await;
                    let _ = to.cast(agent::Msg::Input(Input::EffectDone(token)));
                });
            }
            Effect::Pump { epoch } => {
                self.pump(epoch);
                self.spawn.done(token);
            }
        }
    }

    fn attach(&self, myself: &ActorRef<Msg>, token: Token, epoch: acri::id::Epoch) {
        if self.spawn.node_lost {
            self.spawn.done(token);
            self.spawn.report(Report::Lost(FailReason::NodeLost, "its node was silent for too long".to_owned()));
            self.tell_stored_log();
            return;
        }
        let (shared, driver, myself) = (Arc::clone(&self.spawn.shared), Arc::clone(&self.spawn.driver), myself.clone());
        let (agent, run, to) = (self.spawn.agent, self.spawn.run, self.spawn.to.clone());
        let started = self.spawn.started;
        self.task(async move {
            let owner = owner(&shared, epoch);
            for attempt in 0.. {
                if !shared.lease.wait().await {
                    return;
                }
                let report = match driver.attach(agent, run, owner).await {
                    Ok(Attached::Session(session)) => {
                        let _ = myself.cast(Msg::Ready(token, owner, session));
                        return;
                    }
                    Ok(Attached::NeverStarted) => Report::NeverStarted,
                    Ok(Attached::Lost { reason, message }) => Report::Lost(reason, message),
                    Err(fault @ Fault::Stale(_)) => {
                        let _ = myself.cast(Msg::Unreachable(token, fault));
                        return;
                    }
                    Err(fault) => match again(&*driver, (agent, run), owner, attempt, fault).await {
                        Ok(report) => report,
                        Err(Fault::Stale(epoch)) => {
                            let _ = myself.cast(Msg::Unreachable(token, Fault::Stale(epoch)));
                            return;
                        }
                        Err(_) => continue,
                    },
                };
                let lost = matches!(report, Report::Lost(..)) || started;
                let _ = to.cast(agent::Msg::Input(Input::EffectDone(token)));
                let _ = to.cast(agent::Msg::Input(Input::Report(run, report)));
                if lost {
                    stored_log(&shared, agent, run, &to).await;
                }
                return;
            }
        });
    }

    /// Tells what is stored of the log of a run that nobody can read any more.
    fn tell_stored_log(&self) {
        let (shared, agent) = (Arc::clone(&self.spawn.shared), self.spawn.agent);
        let (run, to) = (self.spawn.run, self.spawn.to.clone());
        self.task(async move { stored_log(&shared, agent, run, &to).await });
    }

    fn start(&self, myself: &ActorRef<Msg>, token: Token, task: acri::Payload, epoch: acri::id::Epoch) {
        let start = Start {
            agent: self.spawn.agent,
            run: self.spawn.run,
            spec: self.spawn.spec.clone(),
            provisioned: Provisioned { working_directory: self.spawn.working_directory.clone() },
            task,
            owner: owner(&self.spawn.shared, epoch),
        };
        let (shared, driver, myself) = (Arc::clone(&self.spawn.shared), Arc::clone(&self.spawn.driver), myself.clone());
        let (run, to) = (self.spawn.run, self.spawn.to.clone());
        self.task(async move {
            for attempt in 0.. {
                if !shared.lease.wait().await {
                    return;
                }
                let report = match driver.start(&start).await {
                    Ok(session) => {
                        let _ = myself.cast(Msg::Ready(token, start.owner, session));
                        return;
                    }
                    Err(StartError::Refused(refusal)) => Report::NotStarted(FailReason::SpawnFailed, refusal.0.message),
                    Err(StartError::Fault(fault @ Fault::Stale(_))) => {
                        let _ = myself.cast(Msg::Unreachable(token, fault));
                        return;
                    }
                    Err(StartError::Fault(fault)) => {
                        match again(&*driver, (start.agent, run), start.owner, attempt, fault).await {
                            Ok(report) => report,
                            Err(Fault::Stale(epoch)) => {
                                let _ = myself.cast(Msg::Unreachable(token, Fault::Stale(epoch)));
                                return;
                            }
                            Err(_) => continue,
                        }
                    }
                };
                let _ = to.cast(agent::Msg::Input(Input::EffectDone(token)));
                let _ = to.cast(agent::Msg::Input(Input::Report(run, report)));
                return;
            }
        });
    }

    fn ready(&mut self, token: Token, owner: Owner, session: Arc<dyn Session>) {
        self.session = Some(Arc::clone(&session));
        let (orphan_after, at_most) = (self.spawn.spec.orphan_after(), self.spawn.shared.config.contact_every);
        let key = (self.spawn.agent, self.spawn.run);
        self.spawn.shared.sessions.register(key, owner, Arc::clone(&session), orphan_after, at_most);
        let info = session.info();
        self.spawn.done(token);
        self.spawn.report(Report::Started(RunStarted {
            tree_control: info.tree_control,
            isolation: info.isolation,
            pid: info.pid,
        }));
        let (run, to) = (self.spawn.run, self.spawn.to.clone());
        self.task(async move {
            let mut attempt = 0;
            let report = loop {
                match session.exit().await {
                    Ok(exit) => {
                        break Report::Exited {
                            status: exit.status,
                            killed: exit.killed.map(|kill| (kill.command, kill.principal, kill.reason)),
                            orphaned: exit.orphaned,
                        };
                    }
                    Err(fault @ Fault::Broken { .. }) => break Report::Lost(session.lost_reason(), fault.to_string()),
                    // What its holder left may live: that is no end.
                    Err(fault) => tracing::warn!(%run, %fault, "the end of a run is not known yet"),
                }
                tokio::time::sleep(agent::retry_pause(attempt)).await;
                attempt += 1;
            };
            let _ = to.cast(agent::Msg::Input(Input::Report(run, report)));
        });
    }

    fn stop(&self, token: Token, command: acri::CommandId, epoch: acri::id::Epoch) {
        let Some(session) = self.session.clone() else {
            self.spawn.done(token);
            return;
        };
        let (shared, run, to) = (Arc::clone(&self.spawn.shared), self.spawn.run, self.spawn.to.clone());
        self.task(async move {
            let owner = owner(&shared, epoch);
            if shared.lease.wait().await {
                match session.stop(owner, command).await {
                    Ok(()) => {
                        let _ = to.cast(agent::Msg::Input(Input::Report(run, Report::StopDelivered)));
                    }
                    Err(fault) => tracing::warn!(%run, %fault, "stop is not delivered"),
                }
            }
            let _ = to.cast(agent::Msg::Input(Input::EffectDone(token)));
        });
    }

    fn pump(&mut self, epoch: acri::id::Epoch) {
        let Some(session) = self.session.clone() else { return };
        if self.derived.is_some() {
            return;
        }
        let (sender, derived) = mpsc::channel(DERIVED_WAITING_MAX);
        self.derived = Some(sender);
        let pump = pump::Pump {
            agent: self.spawn.agent,
            run: self.spawn.run,
            owner: owner(&self.spawn.shared, epoch),
            session,
            shared: Arc::clone(&self.spawn.shared),
            derived,
        };
        let (run, to) = (self.spawn.run, self.spawn.to.clone());
        self.task(async move {
            if let Err(error) = pump.run(&to).await {
                tracing::error!(%run, %error, "the log of this run stops until its agent is adopted anew");
                let _ = to.cast(agent::Msg::Failed(error));
            }
        });
    }

    /// Runs work until the actor ends. A panic in it is the agent's failure:
    /// nobody else would notice that its result never comes.
    fn task(&self, work: impl Future<Output = ()> + Send + 'static) {
        let (tasks, to) = (self.tasks.clone(), self.spawn.to.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = tasks.cancelled() => {}
                done = AssertUnwindSafe(work).catch_unwind() => if done.is_err() {
                    let _ = to.cast(agent::Msg::Failed("a task of a run panicked".to_owned()));
                },
            }
        });
    }
}
