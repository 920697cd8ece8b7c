//! The one place that folds: hands a stored event to `acri-core`.

use crate::events::StoredEvent;
use acri_core::{agent::Agent, appender::Stored};

/// Folds one event. The text says why it does not fit.
pub(crate) fn apply(agent: &mut Option<Agent>, event: &StoredEvent) -> Result<(), String> {
    let stored = Stored { seq: event.seq, time: event.time, bytes: event.bytes.clone() };
    let folded = match agent {
        Some(agent) => agent.evolve(&stored),
        None => Agent::fold([&stored]).map(|folded| *agent = folded),
    };
    folded.map_err(|error| error.to_string())
}
