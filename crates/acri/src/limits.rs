//! Every limit of the contract, its unit in its name, in one place.

use std::time::Duration;

/// Bytes in the body of one event, or in the body of a command.
pub const EVENT_BODY_BYTES_MAX: usize = 256 * 1024;
/// Bytes in one log line before it is split into parts.
pub const LOG_LINE_BYTES_MAX: usize = 1024 * 1024;
/// Bytes of harness output that one log frame carries, at most.
pub const FRAME_BYTES_MAX: usize = 1024 * 1024;
/// Bytes in one stored log message with its header: a part of a line may
/// exceed a frame, so this stands above both.
pub const FRAME_MESSAGE_BYTES_MAX: usize = 1536 * 1024;
/// Hundredths of the event stream from which on nothing new begins: the rest is
/// for the ends of what runs.
pub const EVENTS_PERCENT_MAX: u64 = 90;
/// Commands that wait for one agent.
pub const COMMANDS_WAITING_MAX: usize = 256;
/// Bytes in a reason (Stop, Kill, remove).
pub const REASON_BYTES_MAX: usize = 4 * 1024;
/// Bytes in the name of a principal.
pub const PRINCIPAL_BYTES_MAX: usize = 256;
/// Bytes of a task that a plain process gets in its environment.
pub const PROCESS_TASK_BYTES_MAX: usize = 96 * 1024;
/// Arguments of a command.
pub const COMMAND_ARGUMENTS_MAX: usize = 1024;
/// Bytes of all arguments and environment values of a command together.
pub const COMMAND_BYTES_MAX: usize = 128 * 1024;
/// Labels of an agent.
pub const LABELS_MAX: usize = 64;
/// Bytes in a label's name or value.
pub const LABEL_BYTES_MAX: usize = 256;
/// Runs that one agent's history may hold.
pub const RUNS_PER_AGENT_MAX: usize = 1_000;
/// How late after the time in its id a command may still be carried out.
pub const COMMAND_AGE_MAX: Duration = Duration::from_secs(24 * 3600);
/// How far ahead of the bus's clock a command id may be.
pub const COMMAND_AHEAD_MAX: Duration = Duration::from_secs(60);
/// Grace of a Stop that names none.
pub const STOP_GRACE: Duration = Duration::from_secs(30);
/// Longest grace of a Stop.
pub const STOP_GRACE_MAX: Duration = Duration::from_secs(24 * 3600);
/// From Start accepted to the harness having begun.
pub const START_TIMEOUT: Duration = Duration::from_secs(60);
/// From a Kill request to the tree proved empty; later it is repeated.
pub const KILL_PROOF_MAX: Duration = Duration::from_secs(3);
/// A local harness without a leased owner for this long is killed by its shim.
pub const ORPHAN_AFTER: Duration = Duration::from_secs(15 * 60);
/// The longest that a spec may ask for: after it nobody waits for a machine.
pub const ORPHAN_AFTER_MAX: Duration = Duration::from_secs(30 * 24 * 3600);
/// A run whose owner is silent for this long is given up.
pub const NODE_LOST_AFTER: Duration = Duration::from_secs(20 * 60);
/// The longest that a spec may ask for.
pub const NODE_LOST_AFTER_MAX: Duration = Duration::from_secs(60 * 24 * 3600);
/// What `node_lost_after` must exceed `orphan_after` by: the kill, a lease's
/// grace and one renewal.
pub const LOST_MARGIN_MIN: Duration = Duration::from_secs(30);
/// Lifetime of a lease.
pub const LEASE_TTL: Duration = Duration::from_secs(15);
/// How often a lease is renewed.
pub const LEASE_RENEW_EVERY: Duration = Duration::from_secs(3);
/// Own actions end this long after the last acknowledged renewal was *sent*.
pub const LEASE_STOP_AFTER: Duration = Duration::from_secs(11);
/// Clock difference to the bus above which a node refuses to own.
pub const CLOCK_SKEW_MAX: Duration = Duration::from_secs(2);
/// After an adoption timers wait this long, so that commands come first.
pub const ADOPTION_GRACE: Duration = Duration::from_secs(30);
/// Unreleased bytes in one run's spool.
pub const SPOOL_BYTES_MAX: u64 = 256 * 1024 * 1024;
/// Runs that one node may own.
pub const RUNS_PER_NODE_MAX: usize = 10_000;
/// Local processes that one node may hold.
pub const PROCESSES_PER_NODE_MAX: usize = 1_000;
