//! Every bound of the process driver, its unit in its name or its type.

use std::time::Duration;

/// Unreleased bytes that all spools of a node may hold together.
pub const SPOOL_NODE_BYTES_MAX: u64 = 16 * 1024 * 1024 * 1024;
/// Unreleased bytes that one run's spool is granted at least.
pub const SPOOL_RUN_BYTES_MIN: u64 = 4 * 1024 * 1024;
/// Which part of the node's free spool bytes one run is granted at most.
pub const SPOOL_RUN_SHARE: u64 = 16;
/// Shims that are being started at once; each needs a thread meanwhile.
pub const SPAWNS_AT_ONCE_MAX: usize = 8;
/// Reads of output that are going on at once; each needs a thread and half a
/// MiB meanwhile.
pub const READS_AT_ONCE_MAX: usize = 4;
/// Requests of one session that wait for their shim.
pub const ASKS_WAITING_MAX: usize = 64;
/// Stops of one run that are remembered, so that a repeat is none.
pub const STOPS_REMEMBERED_MAX: usize = 16;
/// How long connecting and showing the token may take.
pub const GREETING_WAIT: Duration = Duration::from_secs(1);
/// How long a request of a session waits for its answer, reconnection included.
pub const ANSWER_WAIT: Duration = Duration::from_secs(5);
/// How long a message may take to be written to a shim.
pub const WRITE_WAIT: Duration = Duration::from_secs(5);
/// Pause before the first reconnection; it doubles up to [`RECONNECT_LAST`].
pub const RECONNECT_FIRST: Duration = Duration::from_millis(5);
/// Longest pause before a reconnection.
pub const RECONNECT_LAST: Duration = Duration::from_secs(1);
/// How long a start or an attach waits for another one of the same run.
pub const START_WAIT: Duration = Duration::from_secs(15);
/// How long one Kill tries to prove the tree gone.
pub const KILL_WAIT: Duration = Duration::from_secs(3);
/// How long a Kill waits for a shim's first word before it does without it.
pub const KILL_GREETING_WAIT: Duration = Duration::from_secs(1);
/// Looks at what a dead shim left while it vanishes under the look.
pub const SWEEPS_AGAIN_MAX: u32 = 5;
/// How long forgetting waits for a shim that has ended but not left.
pub const FORGET_WAIT: Duration = Duration::from_secs(2);
/// Pause between two looks where there is no event to wait for.
pub const LOOK_PAUSE: Duration = Duration::from_millis(10);
