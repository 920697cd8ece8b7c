//! The answer to Status.

use super::{Agent, Run};
use acri::{
    AgentStatus, RunId,
    event::WaitReason,
    status::{Phase, RunStatus},
};

impl Agent {
    /// The state of the agent with a run, or with its last one; `None` if
    /// there is no such run. Phase `unreachable` is the asker's to derive.
    #[must_use]
    pub fn status(&self, run: Option<RunId>) -> Option<AgentStatus> {
        let run = match run {
            Some(run) => Some(self.run(run)?),
            None => self.last_run(),
        };
        Some(AgentStatus {
            agent: self.id,
            node: self.owner.node.clone(),
            epoch: self.owner.epoch,
            removed: self.removed(),
            sequence: self.last.sequence,
            run: run.map(Run::status),
        })
    }
}

impl Run {
    /// Its state in the contract's words.
    #[must_use]
    pub fn status(&self) -> RunStatus {
        RunStatus {
            run: self.id,
            state: self.state,
            phase: self.phase(),
            reason: self.reason(),
            since: self.since,
            termination: self.end.as_ref().map(|end| end.termination),
            exit: self.end.as_ref().and_then(|end| end.exit),
            sealed: self.sealed,
        }
    }

    fn phase(&self) -> Option<Phase> {
        if self.end.is_some() {
            None
        } else if self.kill.is_some() {
            Some(Phase::Killing)
        } else if self.stop.is_some() {
            Some(Phase::Stopping)
        } else if self.waiting == Some(WaitReason::Paused) {
            Some(Phase::Paused)
        } else {
            None
        }
    }

    fn reason(&self) -> Option<String> {
        if let Some(end) = &self.end {
            return end.reason.clone();
        }
        let asked = self.kill.as_ref().map(|kill| &kill.reason).or(self.stop.as_ref().map(|stop| &stop.reason));
        asked.cloned().or_else(|| self.waiting.map(|reason| reason.as_str().to_owned()))
    }
}
