//! What a harness can do (spec, section 5).

use crate::id::HarnessType;
use serde::{Deserialize, Serialize};

/// How an operation is met.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fidelity {
    /// Not at all.
    #[default]
    None,
    /// By the driver, in the harness's stead.
    Emulated,
    /// By the harness itself.
    Native,
}

/// The capabilities of one harness type on one node.
///
/// A flag that is missing means `none`: the sender's version did not know it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapabilitySet {
    /// Whose.
    pub harness: HarnessType,
    /// Emits typed log events, rather than raw output.
    #[serde(default)]
    pub structured_logs: Fidelity,
    /// Takes messages mid-run without its standard input.
    #[serde(default)]
    pub async_injection: Fidelity,
    /// Reports which context it holds.
    #[serde(default)]
    pub context_state: Fidelity,
    /// Tells Stop from Kill.
    #[serde(default)]
    pub graceful_stop: Fidelity,
    /// Creates subordinate agents itself.
    #[serde(default)]
    pub subagent_spawn: Fidelity,
    /// Works without a human at a terminal.
    #[serde(default)]
    pub headless: Fidelity,
    /// Takes context updates mid-run.
    #[serde(default)]
    pub streaming_context: Fidelity,
    /// Takes binary content in injections.
    #[serde(default)]
    pub multimodal_input: Fidelity,
    /// Produces typed binary payloads.
    #[serde(default)]
    pub multimodal_output: Fidelity,
    /// Largest inline binary payload in bytes; 0 means none.
    #[serde(default)]
    pub artifact_inline_max_bytes: u64,
    /// How a process tree is held: `cgroup`, `pidns`, `subreaper`; missing
    /// where the harness is no local process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tree_control: Option<String>,
    /// What keeps the harness from the node's own files; `none` is said
    /// openly. Missing where the harness is no local process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub isolation: Option<String>,
}

impl CapabilitySet {
    /// A set in which nothing is supported.
    #[must_use]
    pub fn none(harness: HarnessType) -> Self {
        Self {
            harness,
            structured_logs: Fidelity::None,
            async_injection: Fidelity::None,
            context_state: Fidelity::None,
            graceful_stop: Fidelity::None,
            subagent_spawn: Fidelity::None,
            headless: Fidelity::None,
            streaming_context: Fidelity::None,
            multimodal_input: Fidelity::None,
            multimodal_output: Fidelity::None,
            artifact_inline_max_bytes: 0,
            tree_control: None,
            isolation: None,
        }
    }
}
