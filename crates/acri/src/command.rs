//! What an orchestrator asks, and what it is answered.
//!
//! The verb is the last token of the subject; the body is an [`Envelope`]
//! with that verb's data. An answer is the verb's answer type, or an
//! [`ErrorBody`](crate::ErrorBody) with the headers `Nats-Service-Error` and
//! `Nats-Service-Error-Code`.

use crate::{
    capability::CapabilitySet,
    id::{AgentId, CommandId, HarnessType, NodeId, RunId},
    limits::{PRINCIPAL_BYTES_MAX, REASON_BYTES_MAX, STOP_GRACE, STOP_GRACE_MAX},
    payload::Payload,
    spec::{AgentSpec, Invalid},
    time::Timestamp,
};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Around every command: who asks, under which id, until when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Envelope<T> {
    /// The command's id, a UUIDv7 minted by the client. A repeat bears the
    /// same one and gets the first answer.
    pub id: CommandId,
    /// Who asks, 1 to 256 bytes. Recorded; not proved by itself.
    pub principal: String,
    /// Not carried out after this. Missing: 24 h after the id's time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<Timestamp>,
    /// What is asked.
    pub data: T,
}

/// A body that can say whether it keeps its limits.
pub trait Checked {
    /// Checks every limit.
    ///
    /// # Errors
    /// The first field that breaks its limit.
    fn check(&self) -> Result<(), Invalid>;
}

impl<T: Checked> Checked for Envelope<T> {
    fn check(&self) -> Result<(), Invalid> {
        if self.id.millis().is_none() {
            return Err(Invalid::new("id", "must be a UUIDv7"));
        }
        if self.principal.is_empty() || self.principal.len() > PRINCIPAL_BYTES_MAX {
            return Err(Invalid::new("principal", format!("must have 1 to {PRINCIPAL_BYTES_MAX} bytes")));
        }
        self.data.check()
    }
}

fn check_reason(reason: &str) -> Result<(), Invalid> {
    if reason.len() > REASON_BYTES_MAX {
        return Err(Invalid::new("reason", format!("is longer than {REASON_BYTES_MAX} bytes")));
    }
    Ok(())
}

/// Create: provision an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateAgent {
    /// What is wanted.
    pub spec: AgentSpec,
}

impl Checked for CreateAgent {
    fn check(&self) -> Result<(), Invalid> {
        self.spec.check()
    }
}

/// Start: begin a run of a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StartRun {
    /// The task. Empty text for a program that needs none.
    pub task: Payload,
}

impl Checked for StartRun {
    fn check(&self) -> Result<(), Invalid> {
        Ok(())
    }
}

/// What happens when the grace of a Stop is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnExpiry {
    /// The run is killed.
    #[default]
    Kill,
    /// The run goes on.
    Keep,
}

/// Stop: a graceful halt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StopRun {
    /// Why, at most 4096 bytes.
    pub reason: String,
    /// How long the agent has to end. Missing: 30 s. At most 24 h.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace_ms: Option<u64>,
    /// What happens then.
    #[serde(default)]
    pub on_expiry: OnExpiry,
}

impl StopRun {
    /// The grace in force.
    #[must_use]
    pub fn grace(&self) -> Duration {
        self.grace_ms.map_or(STOP_GRACE, Duration::from_millis)
    }
}

impl Checked for StopRun {
    fn check(&self) -> Result<(), Invalid> {
        check_reason(&self.reason)?;
        if self.grace() > STOP_GRACE_MAX {
            return Err(Invalid::new("grace_ms", format!("is more than {}", STOP_GRACE_MAX.as_millis())));
        }
        Ok(())
    }
}

/// Kill: an immediate, certain end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KillRun {
    /// Why, at most 4096 bytes.
    pub reason: String,
}

impl Checked for KillRun {
    fn check(&self) -> Result<(), Invalid> {
        check_reason(&self.reason)
    }
}

/// Status: of one run, or of an agent with the last of its runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetStatus {}

impl Checked for GetStatus {
    fn check(&self) -> Result<(), Invalid> {
        Ok(())
    }
}

/// Remove: give the agent up. Refused while a run is open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoveAgent {
    /// Why, at most 4096 bytes.
    #[serde(default)]
    pub reason: String,
}

impl Checked for RemoveAgent {
    fn check(&self) -> Result<(), Invalid> {
        check_reason(&self.reason)
    }
}

/// Capabilities of a harness type on whichever node answers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetCapabilities {}

impl Checked for GetCapabilities {
    fn check(&self) -> Result<(), Invalid> {
        Ok(())
    }
}

/// The answer to Create.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentHandle {
    /// The agent.
    pub agent: AgentId,
    /// Its harness type.
    pub harness: HarnessType,
    /// The node that owned it when this was said.
    pub node: NodeId,
    /// What it can do there.
    pub capabilities: CapabilitySet,
    /// When it was created, by the bus's clock of its first event.
    pub created: Timestamp,
}

/// The answer to Start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunHandle {
    /// The agent.
    pub agent: AgentId,
    /// The run.
    pub run: RunId,
}

/// The answer to Stop: the request is recorded, the run will end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StopAck {
    /// The run.
    pub run: RunId,
    /// When the grace is over.
    pub deadline: Timestamp,
}

/// The answer to Kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KillAck {
    /// The run.
    pub run: RunId,
    /// Whether the process tree is proved gone and `run.killed` is recorded.
    /// `false`: the run's phase is `killing` and the Kill is repeated until it
    /// is proved.
    pub proved: bool,
}

/// The answer to remove.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoveAck {
    /// The agent.
    pub agent: AgentId,
}
