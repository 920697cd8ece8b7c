//! What a node is told when it starts.

use acri::{NodeId, limits};
use std::{path::PathBuf, time::Duration};

/// Settings of one node. All times and sizes have defaults from
/// [`acri::limits`].
#[derive(Debug, Clone)]
pub struct Config {
    /// Its name, kept over restarts.
    pub node: NodeId,
    /// Where its lock file lies; local harnesses keep their state below it.
    pub state_dir: PathBuf,
    /// Lifetime of its lease.
    pub lease_ttl: Duration,
    /// How often the lease is renewed.
    pub lease_renew_every: Duration,
    /// Own actions end this long after the last acknowledged renewal was sent.
    pub lease_stop_after: Duration,
    /// How often it says that it lives.
    pub heartbeat_every: Duration,
    /// How often holders of local harnesses hear that their owner lives.
    pub contact_every: Duration,
    /// How often it looks for agents of silent nodes.
    pub adopt_every: Duration,
    /// Runs that it may own.
    pub runs_max: usize,
}

impl Config {
    /// Defaults, for a name and a state directory.
    #[must_use]
    pub fn new(node: NodeId, state_dir: PathBuf) -> Self {
        Self {
            node,
            state_dir,
            lease_ttl: limits::LEASE_TTL,
            lease_renew_every: limits::LEASE_RENEW_EVERY,
            lease_stop_after: limits::LEASE_STOP_AFTER,
            heartbeat_every: Duration::from_secs(3),
            contact_every: Duration::from_secs(5),
            adopt_every: Duration::from_secs(5),
            runs_max: limits::RUNS_PER_NODE_MAX,
        }
    }
}
