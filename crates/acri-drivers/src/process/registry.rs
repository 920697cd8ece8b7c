//! What this node knows of its runs beside their directories: latches, claims,
//! and what the node's bounds are spent on.

use super::limits::{SPOOL_RUN_BYTES_MIN, SPOOL_RUN_SHARE, STOPS_REMEMBERED_MAX};
use crate::driver::{Fault, KillRequest, Owner, Refusal};
use acri::{AgentId, CommandId, ErrorBody, ErrorCode, RunId};
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

pub(super) type Key = (AgentId, RunId);

/// One run. Made when something is first done about it, gone when it is forgotten.
#[derive(Debug, Default)]
pub(super) struct Entry {
    /// Held by whoever starts it.
    pub(super) starting: tokio::sync::Mutex<()>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    kill: Option<KillRequest>,
    owner: Option<Owner>,
    stops: VecDeque<CommandId>,
    alive: bool,
    spool_bytes: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What a panic left is still consistent: every change is one assignment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Entry {
    /// Takes the run over for an owner, as far as this process can say so: a
    /// shim that lives is asked as well.
    pub(super) fn claim(&self, owner: Owner) -> Result<(), Fault> {
        let mut state = lock(&self.state);
        match state.owner {
            Some(highest) if highest != owner && owner.epoch <= highest.epoch => Err(Fault::Stale(highest.epoch)),
            _ => {
                state.owner = Some(owner);
                Ok(())
            }
        }
    }

    /// Refuses what another than the highest owner asks, when there is no shim
    /// left that could.
    pub(super) fn check(&self, owner: Owner) -> Result<(), Fault> {
        match lock(&self.state).owner {
            Some(highest) if owner != highest => Err(Fault::Stale(highest.epoch)),
            _ => Ok(()),
        }
    }

    /// Records a Kill for a start to find; the first one stays.
    pub(super) fn latch(&self, request: &KillRequest) -> Result<(), Fault> {
        let mut state = lock(&self.state);
        match state.owner {
            Some(highest) if request.owner.epoch < highest.epoch => Err(Fault::Stale(highest.epoch)),
            _ => {
                state.kill.get_or_insert_with(|| request.clone());
                Ok(())
            }
        }
    }

    pub(super) fn latched(&self) -> Option<KillRequest> {
        lock(&self.state).kill.clone()
    }

    pub(super) fn was_stopped_by(&self, command: CommandId) -> bool {
        lock(&self.state).stops.contains(&command)
    }

    pub(super) fn remember_stop(&self, command: CommandId) {
        let mut state = lock(&self.state);
        if state.stops.len() == STOPS_REMEMBERED_MAX {
            state.stops.pop_front();
        }
        state.stops.push_back(command);
    }
}

/// All runs of the node, and what they use of its bounds.
#[derive(Debug)]
pub(super) struct Registry {
    entries: Mutex<HashMap<Key, Arc<Entry>>>,
    spent: Mutex<Spent>,
    processes_max: usize,
    spool_node_bytes_max: u64,
    spool_run_bytes_max: u64,
}

#[derive(Debug, Default)]
struct Spent {
    processes: usize,
    spool_bytes: u64,
    /// Runs that hold spool bytes, alive or not.
    spools: usize,
}

impl Registry {
    pub(super) fn new(processes_max: usize, spool_node_bytes_max: u64, spool_run_bytes_max: u64) -> Self {
        Self {
            entries: Mutex::default(),
            spent: Mutex::default(),
            processes_max,
            spool_node_bytes_max,
            spool_run_bytes_max,
        }
    }

    pub(super) fn entry(&self, key: Key) -> Arc<Entry> {
        Arc::clone(lock(&self.entries).entry(key).or_default())
    }

    /// Runs of an agent that are known here.
    pub(super) fn runs_of(&self, agent: AgentId) -> Vec<RunId> {
        lock(&self.entries).keys().filter(|(of, _)| *of == agent).map(|(_, run)| *run).collect()
    }

    /// Counts a process that is about to be started, and says how many bytes its spool may hold.
    pub(super) fn admit(&self, entry: &Entry) -> Result<u64, Refusal> {
        let full = |message: String| Refusal(ErrorBody::new(ErrorCode::ResourceExhausted, message));
        let (mut state, mut spent) = (lock(&entry.state), lock(&self.spent));
        if !state.alive && spent.processes >= self.processes_max {
            return Err(full(format!("the node holds {} local processes, its limit", spent.processes)));
        }
        if state.spool_bytes == 0 {
            let bytes = self.grant(&spent).ok_or_else(|| {
                full(format!("the node's spools are granted {} bytes, their limit", spent.spool_bytes))
            })?;
            state.spool_bytes = bytes;
            spent.spool_bytes += bytes;
            spent.spools += 1;
        }
        if !state.alive {
            state.alive = true;
            spent.processes += 1;
        }
        Ok(state.spool_bytes)
    }

    /// A share of what is free beyond the least that every further process will want, so that the last one of a full
    /// node still gets its least.
    fn grant(&self, spent: &Spent) -> Option<u64> {
        let least = SPOOL_RUN_BYTES_MIN.min(self.spool_run_bytes_max);
        let free = self.spool_node_bytes_max.saturating_sub(spent.spool_bytes);
        let to_come = u64::try_from(self.processes_max.saturating_sub(spent.spools)).unwrap_or(u64::MAX);
        let spare = free.saturating_sub(to_come.saturating_mul(least));
        let share = (least + spare / SPOOL_RUN_SHARE).min(self.spool_run_bytes_max);
        (free >= share).then_some(share)
    }

    /// Counts a process that was found alive, limit or not.
    pub(super) fn found_alive(&self, entry: &Entry) {
        let (mut state, mut spent) = (lock(&entry.state), lock(&self.spent));
        if !state.alive {
            state.alive = true;
            spent.processes += 1;
        }
        if state.spool_bytes == 0 {
            // What it was granted by an earlier node is not known; the least is what it surely has.
            state.spool_bytes = SPOOL_RUN_BYTES_MIN;
            spent.spool_bytes += SPOOL_RUN_BYTES_MIN;
            spent.spools += 1;
        }
    }

    /// The run's shim has ended.
    pub(super) fn gone(&self, entry: &Entry) {
        let (mut state, mut spent) = (lock(&entry.state), lock(&self.spent));
        if state.alive {
            state.alive = false;
            spent.processes -= 1;
        }
    }

    /// The run's files are gone, or were never made.
    pub(super) fn emptied(&self, entry: &Entry) {
        self.gone(entry);
        let (mut state, mut spent) = (lock(&entry.state), lock(&self.spent));
        if state.spool_bytes > 0 {
            spent.spool_bytes -= state.spool_bytes;
            spent.spools -= 1;
            state.spool_bytes = 0;
        }
    }

    pub(super) fn forget(&self, key: Key) {
        let entry = lock(&self.entries).remove(&key);
        if let Some(entry) = entry {
            self.emptied(&entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::limits::SPOOL_NODE_BYTES_MAX;
    use acri::limits::{PROCESSES_PER_NODE_MAX, SPOOL_BYTES_MAX};

    fn registry() -> Registry {
        Registry::new(PROCESSES_PER_NODE_MAX, SPOOL_NODE_BYTES_MAX, SPOOL_BYTES_MAX)
    }

    #[test]
    fn a_full_node_grants_every_process_a_spool_and_never_more_than_its_budget() {
        let registry = registry();
        let entries: Vec<Entry> = (0..PROCESSES_PER_NODE_MAX).map(|_| Entry::default()).collect();
        let grants: Vec<u64> = entries.iter().map(|entry| registry.admit(entry).unwrap()).collect();
        assert_eq!(grants[0], SPOOL_BYTES_MAX);
        assert!(grants.iter().all(|grant| *grant >= SPOOL_RUN_BYTES_MIN));
        assert!(grants.iter().sum::<u64>() <= SPOOL_NODE_BYTES_MAX);
        assert_eq!(registry.admit(&Entry::default()).unwrap_err().0.code, ErrorCode::ResourceExhausted);
        registry.emptied(&entries[0]);
        assert!(registry.admit(&Entry::default()).is_ok());
    }

    #[test]
    fn a_process_is_counted_once_however_often_it_is_told() {
        let registry = Registry::new(1, SPOOL_NODE_BYTES_MAX, SPOOL_BYTES_MAX);
        let entry = Entry::default();
        registry.admit(&entry).unwrap();
        registry.found_alive(&entry);
        registry.admit(&entry).unwrap();
        registry.gone(&entry);
        registry.gone(&entry);
        assert!(registry.admit(&Entry::default()).is_ok());
    }
}
