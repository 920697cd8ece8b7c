//! The actor of one run: one task and one mailbox. It holds the session, the
//! pump and the watcher of the end, carries out the effects that the agent's
//! actor hands on, and reports what it sees.
//!
//! It is no actor of the library's: that one has four channels and a task for
//! each piece of work, and an idle run would cost a node half as much again.
//! What a supervisor would be told, [`agent::Msg::Failed`] tells.

use crate::{agent, frames, node::Shared, pump};
use acri::{
    AgentId, AgentSpec, RunId,
    event::{FailReason, RunStarted, Source},
    id::LogSeq,
    log::ResumeToken,
};
use acri_core::appender::{Effect, Input, Report, Token};
use acri_drivers::driver::{Attached, Driver, Fault, KillRequest, Owner, Provisioned, Session, Start, StartError};
use futures_util::{FutureExt as _, StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use ractor::ActorRef;
use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};
use tokio::{
    sync::mpsc::{self, error::TrySendError},
    task::AbortHandle,
};

/// Derived events whose storing the pump has not heard of yet.
const DERIVED_WAITING_MAX: usize = 64;
/// Messages that wait for a run's actor: an effect of each kind is under way
/// once, and the pump waits for fewer derived events than this.
const MESSAGES_WAITING_MAX: usize = 128;
/// Attempts to reach a holder, about a minute's worth, before its run is given
/// up and ended without it.
const ATTEMPTS_MAX: u32 = 40;

/// What a run's actor is made with.
pub(crate) struct Spawn {
    pub(crate) agent: AgentId,
    pub(crate) run: RunId,
    /// What a start needs: spec and working directory. Given away by it.
    pub(crate) needs: Option<Box<(AgentSpec, Option<String>)>>,
    pub(crate) orphan_after: Duration,
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
#[derive(Debug)]
pub(crate) enum Msg {
    /// Do this.
    Effect(Token, Effect),
    /// A derived event is stored.
    Derived(Source),
}

/// What a piece of work tells its own actor.
enum Done {
    /// Nothing, or it told the agent's actor.
    Nothing,
    /// The harness is there.
    Ready(Token, Owner, Arc<dyn Session>),
    /// The holder could not be asked.
    Unreachable(Token, Fault),
}

/// The way to a run's actor. The actor and all its work end with this.
#[derive(Debug)]
pub(crate) struct Run {
    mailbox: mpsc::Sender<Box<Msg>>,
    task: AbortHandle,
}

impl Drop for Run {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Run {
    /// Begins the actor. Its failure, or a panic in it or its work, is told to
    /// the agent's: what it knew is gone with it.
    pub(crate) fn begin(spawn: Spawn) -> Self {
        let (mailbox, inbox) = mpsc::channel(MESSAGES_WAITING_MAX);
        let to = spawn.to.clone();
        let state = State { spawn, session: None, derived: None, work: FuturesUnordered::new() };
        let task = tokio::spawn(async move {
            let why = match AssertUnwindSafe(state.live(inbox)).catch_unwind().await {
                Ok(Ok(())) => return,
                Ok(Err(fault)) => format!("a run's actor failed: {fault}"),
                Err(_) => "a run's actor panicked".to_owned(),
            };
            let _ = to.cast(agent::Msg::Failed(why));
        });
        Self { mailbox, task: task.abort_handle() }
    }

    /// Tells it something; in vain only if it has failed, which the agent's
    /// actor hears.
    pub(crate) fn tell(&self, message: Msg) {
        if let Err(TrySendError::Full(message)) = self.mailbox.try_send(Box::new(message)) {
            tracing::error!(?message, "more waits for a run than can");
        }
    }
}

struct State {
    spawn: Spawn,
    session: Option<Arc<dyn Session>>,
    derived: Option<mpsc::Sender<Source>>,
    work: FuturesUnordered<BoxFuture<'static, Done>>,
}

impl State {
    async fn live(mut self, mut inbox: mpsc::Receiver<Box<Msg>>) -> Result<(), Fault> {
        loop {
            tokio::select! {
                message = inbox.recv() => match message {
                    Some(message) => self.take(*message),
                    None => return Ok(()),
                },
                Some(done) = self.work.next() => match done {
                    Done::Nothing => {}
                    Done::Ready(token, owner, session) => self.ready(token, owner, session),
                    Done::Unreachable(token, fault) => {
                        self.spawn.done(token);
                        return Err(fault);
                    }
                },
            }
        }
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
        match frames::last(&shared.bus, agent, run).await {
            Ok(last) => {
                let token = last.frame.map_or_else(ResumeToken::start, |frame| frame.token);
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
    fn take(&mut self, message: Msg) {
        match message {
            Msg::Effect(token, effect) => self.effect(token, effect),
            Msg::Derived(source) => {
                if let Some(derived) = &self.derived {
                    // The pump waits for this very source, so there is room.
                    let _ = derived.try_send(source);
                }
            }
        }
    }

    fn effect(&mut self, token: Token, effect: Effect) {
        match effect {
            Effect::Attach { epoch } => self.attach(token, epoch),
            Effect::Spawn { task, epoch } => self.start(token, task, epoch),
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

    fn attach(&self, token: Token, epoch: acri::id::Epoch) {
        if self.spawn.node_lost {
            self.spawn.done(token);
            self.spawn.report(Report::Lost(FailReason::NodeLost, "its node was silent for too long".to_owned()));
            self.tell_stored_log();
            return;
        }
        let (shared, driver) = (Arc::clone(&self.spawn.shared), Arc::clone(&self.spawn.driver));
        let (agent, run, to) = (self.spawn.agent, self.spawn.run, self.spawn.to.clone());
        let started = self.spawn.started;
        self.task(async move {
            let owner = owner(&shared, epoch);
            for attempt in 0.. {
                if !shared.lease.wait().await {
                    return Done::Nothing;
                }
                let report = match driver.attach(agent, run, owner).await {
                    Ok(Attached::Session(session)) => return Done::Ready(token, owner, session),
                    Ok(Attached::NeverStarted) => Report::NeverStarted,
                    Ok(Attached::Lost { reason, message }) => Report::Lost(reason, message),
                    Err(fault @ Fault::Stale(_)) => return Done::Unreachable(token, fault),
                    Err(fault) => match again(&*driver, (agent, run), owner, attempt, fault).await {
                        Ok(report) => report,
                        Err(Fault::Stale(epoch)) => return Done::Unreachable(token, Fault::Stale(epoch)),
                        Err(_) => continue,
                    },
                };
                let lost = matches!(report, Report::Lost(..)) || started;
                let _ = to.cast(agent::Msg::Input(Input::EffectDone(token)));
                let _ = to.cast(agent::Msg::Input(Input::Report(run, report)));
                if lost {
                    stored_log(&shared, agent, run, &to).await;
                }
                break;
            }
            Done::Nothing
        });
    }

    /// Tells what is stored of the log of a run that nobody can read any more.
    fn tell_stored_log(&self) {
        let (shared, agent) = (Arc::clone(&self.spawn.shared), self.spawn.agent);
        let (run, to) = (self.spawn.run, self.spawn.to.clone());
        self.task(async move {
            stored_log(&shared, agent, run, &to).await;
            Done::Nothing
        });
    }

    fn start(&mut self, token: Token, task: acri::Payload, epoch: acri::id::Epoch) {
        let Some((spec, working_directory)) = self.spawn.needs.take().map(|needs| *needs) else {
            // Its result is still to come, or was told.
            tracing::error!(run = %self.spawn.run, "a run is started once");
            return self.spawn.done(token);
        };
        let start = Start {
            agent: self.spawn.agent,
            run: self.spawn.run,
            spec,
            provisioned: Provisioned { working_directory },
            task,
            owner: owner(&self.spawn.shared, epoch),
        };
        let (shared, driver) = (Arc::clone(&self.spawn.shared), Arc::clone(&self.spawn.driver));
        let (run, to) = (self.spawn.run, self.spawn.to.clone());
        self.task(async move {
            for attempt in 0.. {
                if !shared.lease.wait().await {
                    return Done::Nothing;
                }
                let report = match driver.start(&start).await {
                    Ok(session) => return Done::Ready(token, start.owner, session),
                    Err(StartError::Refused(refusal)) => Report::NotStarted(FailReason::SpawnFailed, refusal.0.message),
                    Err(StartError::Fault(fault @ Fault::Stale(_))) => return Done::Unreachable(token, fault),
                    Err(StartError::Fault(fault)) => {
                        match again(&*driver, (start.agent, run), start.owner, attempt, fault).await {
                            Ok(report) => report,
                            Err(Fault::Stale(epoch)) => return Done::Unreachable(token, Fault::Stale(epoch)),
                            Err(_) => continue,
                        }
                    }
                };
                let _ = to.cast(agent::Msg::Input(Input::EffectDone(token)));
                let _ = to.cast(agent::Msg::Input(Input::Report(run, report)));
                break;
            }
            Done::Nothing
        });
    }

    fn ready(&mut self, token: Token, owner: Owner, session: Arc<dyn Session>) {
        self.session = Some(Arc::clone(&session));
        self.spawn.needs = None;
        let (orphan_after, at_most) = (self.spawn.orphan_after, self.spawn.shared.config.contact_every);
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
            Done::Nothing
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
            Done::Nothing
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
        let shared = Arc::clone(&self.spawn.shared);
        self.task(async move {
            shared.adoptions.over().await;
            if let Err(error) = pump.run(&to).await {
                tracing::error!(%run, %error, "the log of this run stops until its agent is adopted anew");
                let _ = to.cast(agent::Msg::Failed(error));
            }
            Done::Nothing
        });
    }

    /// Takes on work until the actor ends.
    fn task(&self, work: impl Future<Output = Done> + Send + 'static) {
        self.work.push(Box::pin(work));
    }
}
