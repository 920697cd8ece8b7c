//! What a node says of itself.

use crate::{
    capability::CapabilitySet,
    id::{Incarnation, NodeId},
    time::Timestamp,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Body of `acri.v1.node.<node>.heartbeat`, MessagePack, every few seconds.
/// Nobody may conclude from its absence; the lease decides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Which node.
    pub node: NodeId,
    /// Which start of it.
    pub incarnation: Incarnation,
    /// When it started.
    pub started: Timestamp,
    /// When this was said.
    pub time: Timestamp,
    /// The harness types that it offers, with what they can do.
    pub harnesses: Vec<CapabilitySet>,
    /// Agents that it owns.
    pub agents: u64,
    /// Runs whose harness it holds.
    pub runs: u64,
    /// Counters by name, from its start on: what was refused, repeated or
    /// dropped.
    #[serde(default)]
    pub counters: BTreeMap<String, u64>,
}
