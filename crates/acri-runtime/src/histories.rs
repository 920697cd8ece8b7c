//! All agents as one read of all events tells, folded while the read goes on:
//! the server is busy with the next events meanwhile.

use crate::agent::stored_of;
use acri::{AgentId, HarnessType, NodeId, Subject};
use acri_bus::port::Recorded;
use acri_core::{
    agent::{Agent as Folded, FoldError},
    appender::Stored,
};
use std::collections::{BTreeSet, HashMap, hash_map::Entry};

/// Agents that a node may have to take on.
pub(crate) struct Histories {
    harnesses: BTreeSet<HarnessType>,
    /// None: of a harness that is not here, or not to be folded.
    agents: HashMap<AgentId, Option<Box<Folded>>>,
}

impl Histories {
    /// None was read yet; agents of other harnesses are passed by.
    pub(crate) fn new(harnesses: impl IntoIterator<Item = HarnessType>) -> Self {
        Self { harnesses: harnesses.into_iter().collect(), agents: HashMap::new() }
    }

    /// Takes in the next stored event.
    pub(crate) fn note(&mut self, recorded: &Recorded) {
        let Subject::Event(agent, _, kind) = &recorded.subject else { return };
        if kind == "agent.removed" {
            self.agents.remove(agent);
            return;
        }
        let stored = stored_of(recorded);
        match self.agents.entry(*agent) {
            Entry::Vacant(entry) => {
                let begun = folded(*agent, &[stored]);
                entry.insert(begun.filter(|folded| self.harnesses.contains(&folded.spec().harness)));
            }
            Entry::Occupied(mut entry) => {
                if let Some(folded) = entry.get_mut()
                    && let Err(error) = folded.evolve(&stored)
                {
                    unusable(*agent, &error);
                    entry.insert(None);
                }
            }
        }
    }

    /// The agents whose last owner was an incarnation of this node.
    pub(crate) fn owned_by(self, node: &NodeId) -> impl Iterator<Item = Box<Folded>> {
        self.agents.into_values().flatten().filter(move |folded| folded.owner().node == *node)
    }
}

/// The agent that a history makes; an error is for the operator to see.
pub(crate) fn folded(agent: AgentId, history: &[Stored]) -> Option<Box<Folded>> {
    match Folded::fold(history) {
        Ok(folded) => folded.map(Box::new),
        Err(error) => {
            unusable(agent, &error);
            None
        }
    }
}

fn unusable(agent: AgentId, error: &FoldError) {
    tracing::error!(%agent, %error, "a history cannot be folded: nobody can own its agent");
}
