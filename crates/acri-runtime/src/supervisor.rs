//! One supervisor a harness type: starts agents' actors, and replaces one that
//! dies by an adoption with the next epoch. It never dies of its child.

use crate::{
    adoptions::Adoption,
    agent::{self, Agent, Arguments, Birth},
    clock::boot_time,
    counters::count,
    histories,
    node::Shared,
    request::Back,
};
use acri::{AgentId, ErrorBody, ErrorCode, StreamSeq};
use acri_core::{
    agent::Agent as Folded,
    appender::{Command, Creation, Stored},
};
use acri_drivers::driver::Driver;
use ractor::{Actor, ActorId, ActorProcessingErr, ActorRef, RpcReplyPort, SupervisionEvent};
use std::{collections::HashMap, sync::Arc, time::Duration};

/// First and longest pause before an agent is adopted again.
const REPLACE_FIRST: Duration = Duration::from_millis(50);
const REPLACE_LAST: Duration = Duration::from_secs(30);
/// A life of this length ends the row of replacements.
const REPLACEMENTS_FORGOTTEN_AFTER: Duration = Duration::from_secs(600);
/// Replacements in a row after which an agent is left alone, loudly.
const REPLACEMENTS_MAX: u32 = 20;

/// What a supervisor hears.
#[expect(clippy::large_enum_variant, reason = "it lives for a moment and is moved once")]
#[derive(Debug)]
pub(crate) enum Msg {
    /// Make an agent. `creation` is `None` if the agent is known to exist
    /// somewhere: then only its handle is looked up.
    Create { creation: Creation, command: Command, back: Back },
    /// Whether this supervisor has the agent.
    Knows(AgentId, RpcReplyPort<bool>),
    /// A repeat of a Create.
    CreateAgain { agent: AgentId, command: Command, back: Back },
    /// Take an agent over. The second is dropped when commands reach it.
    Adopt(Box<Folded>, Adoption),
    /// Read the agent's history and take it over again, as the actor `from`
    /// asks.
    Readopt { agent: AgentId, from: ActorId, history_lost: bool },
    /// What was read.
    Reread { agent: AgentId, history: Vec<Stored>, history_lost: bool },
    /// The actor has stepped down.
    Gone(AgentId, ActorId),
    /// The stream may have been put back: each agent compares itself with it.
    CompareHistories,
    /// All agents' actors, for drain.
    Agents(RpcReplyPort<Vec<ActorRef<agent::Msg>>>),
}

/// Arguments of the actor.
pub(crate) struct Parts {
    pub(crate) shared: Arc<Shared>,
    pub(crate) driver: Arc<dyn Driver>,
}

pub(crate) struct State {
    parts: Parts,
    agents: HashMap<AgentId, ActorRef<agent::Msg>>,
    /// How often in a row, and when last (by boot time).
    replacements: HashMap<AgentId, (u32, Duration)>,
}

/// The actor.
pub(crate) struct Supervisor;

impl Actor for Supervisor {
    type Msg = Msg;
    type State = State;
    type Arguments = Parts;

    async fn pre_start(&self, _myself: ActorRef<Msg>, parts: Parts) -> Result<State, ActorProcessingErr> {
        Ok(State { parts, agents: HashMap::new(), replacements: HashMap::new() })
    }

    async fn handle(&self, myself: ActorRef<Msg>, message: Msg, state: &mut State) -> Result<(), ActorProcessingErr> {
        match message {
            Msg::Create { creation, command, back } => {
                if state.agents.contains_key(&creation.agent) {
                    state.create_again(creation.agent, command, back).await;
                    return Ok(());
                }
                if state.agents.len() >= state.parts.shared.config.runs_max {
                    let text = format!("this node owns {} agents, its limit", state.agents.len());
                    back.refuse(&ErrorBody::new(ErrorCode::ResourceExhausted, text)).await;
                    return Ok(());
                }
                let agent = creation.agent;
                state.spawn(&myself, agent, Birth::Create { creation, command, back }).await;
            }
            Msg::Knows(agent, port) => {
                let _ = port.send(state.agents.contains_key(&agent));
            }
            Msg::CreateAgain { agent, command, back } => state.create_again(agent, command, back).await,
            Msg::Adopt(folded, adoption) => {
                let agent = folded.id();
                if !state.agents.contains_key(&agent) {
                    state.spawn(&myself, agent, Birth::Adopt { folded, adoption, history_lost: false }).await;
                }
            }
            Msg::Readopt { agent, from, history_lost } => {
                // Its end may have been heard of before its wish.
                if state.agents.get(&agent).is_none_or(|actor| actor.get_id() == from) {
                    state.agents.remove(&agent);
                    state.replace(&myself, agent, history_lost);
                }
            }
            Msg::Reread { agent, history, history_lost } => {
                if state.agents.contains_key(&agent) {
                    return Ok(());
                }
                if let Some(folded) = state.ours(agent, &history) {
                    let adoption = state.parts.shared.adoptions.begin();
                    state.spawn(&myself, agent, Birth::Adopt { folded, adoption, history_lost }).await;
                } else {
                    // One that was only looked up did not fail.
                    state.replacements.remove(&agent);
                }
            }
            Msg::Gone(agent, from) => {
                if state.agents.get(&agent).is_some_and(|actor| actor.get_id() == from) {
                    state.agents.remove(&agent);
                    state.replacements.remove(&agent);
                }
            }
            Msg::CompareHistories => {
                for actor in state.agents.values() {
                    let _ = actor.cast(agent::Msg::CompareHistory);
                }
            }
            Msg::Agents(port) => {
                let _ = port.send(state.agents.values().cloned().collect());
            }
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<Msg>,
        event: SupervisionEvent,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        let (child, failed) = match event {
            SupervisionEvent::ActorFailed(child, error) => (child, Some(error.to_string())),
            SupervisionEvent::ActorTerminated(child, ..) => (child, None),
            _ => return Ok(()),
        };
        let Some(agent) =
            state.agents.iter().find(|(_, actor)| actor.get_id() == child.get_id()).map(|(agent, _)| *agent)
        else {
            return Ok(());
        };
        state.agents.remove(&agent);
        if let Some(error) = failed {
            tracing::error!(%agent, error, "an agent's actor failed: it is replaced");
            state.replace(&myself, agent, false);
        }
        Ok(())
    }
}

impl State {
    async fn create_again(&self, agent: AgentId, command: Command, back: Back) {
        match self.agents.get(&agent) {
            Some(actor) => {
                let _ = actor.cast(agent::Msg::CreateAgain { command, back });
            }
            None => back.refuse(&ErrorBody::new(ErrorCode::Unavailable, "the agent's actor is being replaced")).await,
        }
    }

    async fn spawn(&mut self, myself: &ActorRef<Msg>, agent: AgentId, birth: Birth) {
        let arguments = Arguments {
            agent,
            birth,
            shared: Arc::clone(&self.parts.shared),
            driver: Arc::clone(&self.parts.driver),
            supervisor: myself.clone(),
        };
        match Actor::spawn_linked(None, Agent, arguments, myself.get_cell()).await {
            Ok((actor, _)) => {
                self.agents.insert(agent, actor);
            }
            Err(error) => tracing::error!(%agent, %error, "an agent's actor did not start"),
        }
    }

    /// The agent, if its owner is this incarnation: another one's is left alone.
    fn ours(&self, agent: AgentId, history: &[Stored]) -> Option<Box<Folded>> {
        let here = self.parts.shared.incarnation;
        histories::folded(agent, history).filter(|folded| folded.owner().incarnation == here && !folded.removed())
    }

    fn replace(&mut self, myself: &ActorRef<Msg>, agent: AgentId, history_lost: bool) {
        let (tried, last) = self.replacements.entry(agent).or_default();
        if boot_time().saturating_sub(*last) > REPLACEMENTS_FORGOTTEN_AFTER {
            *tried = 0;
        }
        *tried += 1;
        *last = boot_time();
        if *tried > REPLACEMENTS_MAX {
            tracing::error!(%agent, tried = *tried, "an agent's actor fails again and again: it is left stopped");
            return;
        }
        count(&self.parts.shared.counters.agents_replaced);
        let pause = REPLACE_FIRST.saturating_mul(1 << (*tried - 1).min(10)).min(REPLACE_LAST);
        let (shared, myself) = (Arc::clone(&self.parts.shared), myself.clone());
        tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            loop {
                match agent::read_after(&shared, agent, StreamSeq(0)).await {
                    Ok((history, _)) => {
                        let _ = myself.cast(Msg::Reread { agent, history, history_lost });
                        return;
                    }
                    Err(error) => {
                        tracing::warn!(%agent, %error, "history cannot be read yet");
                        tokio::time::sleep(REPLACE_LAST).await;
                    }
                }
            }
        });
    }
}
