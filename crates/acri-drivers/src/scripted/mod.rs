//! The smallest driver: harnesses in memory that follow a script.
//!
//! The agent's `command`, one step an argument, is the script; where it is
//! empty, the task's text is, one step a line:
//!
//! | step | does |
//! |---|---|
//! | `say TEXT`, `err TEXT` | writes a line to stdout, stderr |
//! | `raw HEX` | writes bytes to stdout |
//! | `ask ID QUESTION` | writes the line `!ask ID QUESTION` |
//! | `flood LINES BYTES` | writes numbered lines of so many bytes each |
//! | `wait NAME` | waits for [`World::release`] |
//! | `ignore stop`, `on stop exit N` | what a Stop does from here on; otherwise it ends by SIGTERM |
//! | `idle`, `hang` | lives until something ends it |
//! | `exit N`, `signal N` | ends so; a script that is over ends with status 0 |
//!
//! A script runs in whoever calls: there is no task, no timer and no thread, so
//! ten thousand idle ones cost a few hundred bytes each.

mod script;
mod world;

pub use script::{FLOOD_LINE_BYTES_MAX, STEPS_MAX};
pub use world::{Effect, Failure, SPOOL_BYTES_MAX, World};

use crate::driver::{
    Attached, Chunk, Driver, Exit, Fault, Held, Info, KillRequest, KillSwitch, Owner, Provisioned, Refusal, Session,
    Start, StartError,
};
use acri::{
    AgentId, AgentSpec, CapabilitySet, CommandId, ErrorBody, ErrorCode, HarnessType, Payload, RunId,
    capability::Fidelity,
    event::FailReason,
    spec::{Completion, Invalid, Stdin},
};
use async_trait::async_trait;
use bytes::Bytes;
use std::sync::Arc;
use world::{Life, Run, lock};

/// The name of the harness type.
pub const HARNESS: &str = "scripted";

/// A driver whose harnesses are scripts in a [`World`].
#[derive(Debug)]
pub struct ScriptedDriver {
    harness: HarnessType,
    world: World,
}

impl ScriptedDriver {
    /// A driver for what is and will be in `world`.
    #[must_use]
    pub fn new(world: World) -> Self {
        Self { harness: HARNESS.parse().expect("the name is a constant that fits"), world }
    }

    /// The world.
    #[must_use]
    pub fn world(&self) -> &World {
        &self.world
    }
}

fn lost(operation: &'static str) -> Fault {
    Fault::Unreachable { operation, detail: "it was ordered to fail".to_owned() }
}

/// Carries out an effect between the failures that may be ordered for it.
fn struck<T, E: From<Fault>>(
    world: &World,
    effect: Effect,
    operation: &'static str,
    act: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    let failure = world.strike(effect);
    if failure == Some(Failure::Before) {
        return Err(lost(operation).into());
    }
    let result = act();
    if failure == Some(Failure::After) { Err(lost(operation).into()) } else { result }
}

fn refusal(code: ErrorCode, field: &str, message: impl Into<String>) -> Refusal {
    Refusal(ErrorBody { field: Some(field.to_owned()), ..ErrorBody::new(code, message) })
}

fn script_of(spec: &AgentSpec, task: &Payload) -> Result<Vec<script::Step>, Refusal> {
    if !spec.command.is_empty() {
        return command_script(spec);
    }
    let Payload::Text { text, .. } = task else {
        return Err(refusal(ErrorCode::Unsupported, "task", "field `task` must be text"));
    };
    let bad = |problem| Refusal(Invalid::new("task", problem).into());
    script::parse(text.lines()).map_err(bad)
}

fn command_script(spec: &AgentSpec) -> Result<Vec<script::Step>, Refusal> {
    let bad = |problem| Refusal(Invalid::new("command", problem).into());
    script::parse(spec.command.iter().map(String::as_str)).map_err(bad)
}

#[async_trait]
impl Driver for ScriptedDriver {
    fn harness(&self) -> &HarnessType {
        &self.harness
    }

    fn capabilities(&self) -> CapabilitySet {
        CapabilitySet {
            structured_logs: Fidelity::Emulated,
            graceful_stop: Fidelity::Native,
            headless: Fidelity::Native,
            ..CapabilitySet::none(self.harness.clone())
        }
    }

    fn is_local(&self) -> bool {
        true
    }

    async fn create(&self, _agent: AgentId, spec: &AgentSpec) -> Result<Provisioned, Refusal> {
        if self.world.strike(Effect::Create).is_some() {
            return Err(Refusal(ErrorBody::new(ErrorCode::Unavailable, "create was ordered to fail")));
        }
        spec.check().map_err(|invalid| Refusal(invalid.into()))?;
        if spec.stdin == Stdin::Records {
            return Err(refusal(ErrorCode::Unsupported, "stdin", "field `stdin` cannot be `records` here"));
        }
        if spec.completion == Completion::Record {
            return Err(refusal(ErrorCode::Unsupported, "completion", "field `completion` cannot be `record` here"));
        }
        command_script(spec)?;
        Ok(Provisioned { working_directory: spec.working_directory.clone() })
    }

    fn check_task(&self, spec: &AgentSpec, task: &Payload) -> Result<(), Refusal> {
        crate::process::check_task(task)?;
        script_of(spec, task).map(drop)
    }

    async fn start(&self, start: &Start) -> Result<Arc<dyn Session>, StartError> {
        let run = self.world.run(start.agent, start.run);
        struck(&self.world, Effect::Start, "start", || {
            self.world.act(&run, |state| {
                state.claim(start.owner)?;
                if matches!(state.life, Life::NotStarted) {
                    state.start(script_of(&start.spec, &start.task)?);
                }
                Ok::<_, StartError>(())
            })
        })?;
        Ok(Arc::new(ScriptedSession { world: self.world.clone(), run }))
    }

    async fn attach(&self, agent: AgentId, run: RunId, owner: Owner) -> Result<Attached, Fault> {
        struck(&self.world, Effect::Attach, "attach", || {
            let Some(run) = self.world.find(agent, run) else { return Ok(Attached::NeverStarted) };
            let mut state = lock(&run.state);
            if matches!(state.life, Life::NotStarted) {
                return Ok(Attached::NeverStarted);
            }
            state.claim(owner)?;
            if let Life::Crashed(reason) = state.life
                && !state.readable
            {
                return Ok(Attached::Lost { reason, message: "the script says so".to_owned() });
            }
            drop(state);
            Ok(Attached::Session(Arc::new(ScriptedSession { world: self.world.clone(), run })))
        })
    }

    async fn give_up(&self, agent: AgentId, run: RunId, owner: Owner) -> Result<(), Fault> {
        match self.world.find(agent, run) {
            Some(run) => self.world.act(&run, |state| state.give_up(owner)),
            None => Ok(()),
        }
    }

    async fn scan(&self) -> Vec<Held> {
        let held = |(agent, run)| Held { agent, run, kill_switch: self.kill_switch(agent, run) };
        self.world.runs().into_iter().map(held).collect()
    }

    fn kill_switch(&self, agent: AgentId, run: RunId) -> Arc<dyn KillSwitch> {
        Arc::new(ScriptedKillSwitch { world: self.world.clone(), agent, run })
    }

    async fn forget(&self, agent: AgentId, run: RunId) {
        self.world.forget(agent, run);
    }

    async fn remove(&self, agent: AgentId) {
        self.world.remove(agent);
    }
}

struct ScriptedSession {
    world: World,
    run: Arc<Run>,
}

#[async_trait]
impl Session for ScriptedSession {
    fn info(&self) -> Info {
        Info::default()
    }

    fn lost_reason(&self) -> FailReason {
        match lock(&self.run.state).life {
            Life::Crashed(reason) => reason,
            _ => FailReason::HarnessLost,
        }
    }

    async fn stop(&self, owner: Owner, command: CommandId) -> Result<(), Fault> {
        struck(&self.world, Effect::Stop, "stop", || {
            self.world.act(&self.run, |state| {
                state.check("stop", owner)?;
                state.stop(command);
                Ok(())
            })
        })
    }

    async fn contact(&self, owner: Owner) -> Result<(), Fault> {
        struck(&self.world, Effect::Contact, "contact", || lock(&self.run.state).contact(owner))
    }

    async fn output(&self, offset: u64, bytes_max: usize) -> Result<Chunk, Fault> {
        if self.world.strike(Effect::Output).is_some() {
            return Err(lost("read output"));
        }
        self.run.until(|state| state.read(offset, bytes_max)).await
    }

    async fn exit(&self) -> Result<Exit, Fault> {
        let ended = self.run.until(|state| match &state.life {
            Life::NotStarted | Life::Running => None,
            Life::Ended(exit) => Some(Ok(exit.clone())),
            Life::Crashed(reason) => {
                let detail = format!("the holder is gone without a word ({})", reason.as_str());
                Some(Err(Fault::Broken { operation: "wait for the end", detail }))
            }
        });
        ended.await
    }

    async fn release(&self, owner: Owner, offset: u64, token: Bytes) -> Result<(), Fault> {
        struck(&self.world, Effect::Release, "release", || {
            self.world.act(&self.run, |state| {
                state.check("release", owner)?;
                state.release(offset, token)
            })
        })
    }

    async fn resume_token(&self) -> Result<Option<Bytes>, Fault> {
        Ok(lock(&self.run.state).token.clone())
    }
}

struct ScriptedKillSwitch {
    world: World,
    agent: AgentId,
    run: RunId,
}

#[async_trait]
impl KillSwitch for ScriptedKillSwitch {
    async fn kill(&self, request: KillRequest) -> Result<(), Fault> {
        let run = self.world.run(self.agent, self.run);
        let failure = self.world.strike(Effect::Kill);
        if failure == Some(Failure::Before) {
            return Err(lost("kill"));
        }
        self.world.act(&run, |state| {
            state.check_kill(request.owner)?;
            state.kill(request);
            Ok(())
        })?;
        if failure == Some(Failure::After) {
            return Err(lost("kill"));
        }
        run.until(|state| state.is_gone().then_some(())).await;
        Ok(())
    }
}
