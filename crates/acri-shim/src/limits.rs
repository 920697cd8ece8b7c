//! Every bound of the shim, with its unit, in one place.

use std::time::Duration;

/// Payload bytes of one spool record at most.
pub const RECORD_PAYLOAD_BYTES_MAX: usize = 64 * 1024;
/// Default size in bytes at which a segment file is ended and the next one begun.
pub const SEGMENT_BYTES: u64 = 8 * 1024 * 1024;
/// Default for unreleased spool bytes at which the shim stops reading, so that the harness blocks.
pub const SPOOL_BYTES_MAX: u64 = 256 * 1024 * 1024;
/// Default time without a leased owner after which the tree is killed.
pub const ORPHAN_AFTER: Duration = Duration::from_secs(15 * 60);
/// How long the pipes may still be read after the main process ended, before what it left behind is killed.
pub const STOP_DRAIN: Duration = Duration::from_millis(100);
/// Pause before a failed write to the disk is tried again.
pub const DISK_RETRY: Duration = Duration::from_millis(250);
/// Size in bytes that the harness's pipes are enlarged to where the system allows it.
pub const PIPE_BYTES: usize = 1024 * 1024;
/// Bytes kept on disk in reserve, given up so that a kill or an exit can be recorded on a full disk.
pub const RESERVE_BYTES: usize = 16 * 1024;

/// Connections to the socket at once.
pub const CONNECTIONS_MAX: usize = 16;
/// Bytes of one message on the socket at most, without its length prefix.
pub const MESSAGE_BYTES_MAX: usize = 1024 * 1024;
/// Bytes of the first message of a connection at most: whoever has not shown the token gets no memory.
pub const HELLO_BYTES_MAX: usize = 1024;
/// Bytes waiting for a slow client at most; then its connection is dropped.
pub const OUTGOING_BYTES_MAX: usize = 256 * 1024;
/// Bytes of a resume token at most.
pub const RESUME_TOKEN_BYTES_MAX: usize = 64 * 1024;
/// Bytes of a text in a request (principal, reason, ids) that are kept; the rest is cut at a character boundary.
pub const TEXT_BYTES_MAX: usize = 4 * 1024;
/// Kill requests that may wait for the proof of an empty tree at once.
pub const KILL_WAITERS_MAX: usize = 64;

/// Bytes of a launch description at most.
pub const LAUNCH_BYTES_MAX: usize = 8 * 1024 * 1024;
/// How long the node waits for the shim's answer at a launch.
pub const LAUNCH_ANSWER: Duration = Duration::from_secs(10);
/// How long the shim waits for the lock of its run directory, which a scan may hold for a moment.
pub const LOCK_WAIT: Duration = Duration::from_millis(250);
/// Bytes of a state file (`meta`, `exit`, `kill`, ...) at most.
pub const STATE_FILE_BYTES_MAX: u64 = 256 * 1024;
/// How long the end of a shim is held up for messages that a client has not taken yet.
pub const FAREWELL: Duration = Duration::from_millis(200);

/// Pause between two looks where the kernel has no event for the end of a process.
pub const KILL_LOOK: Duration = Duration::from_millis(2);
/// Shortest pause between two looks at a tree that is being killed, beside the events that announce its end: those of a
/// cgroup come at most every 10 ms. A quarter of the time that the killing has taken, but never less.
pub const KILL_LOOK_MIN: Duration = Duration::from_micros(200);
/// Longest such pause: a process in an uninterruptible sleep may take its time.
pub const KILL_LOOK_MAX: Duration = Duration::from_millis(10);
/// Pause between two rounds of signals to a tree that is being killed process by process.
pub const KILL_ROUND: Duration = Duration::from_millis(5);
/// Processes that one walk of a tree lists at most; the next round finds the rest.
pub const WALK_PROCESSES_MAX: usize = 32 * 1024;
/// Walks within one round that look for processes begun since the last one.
pub const WALKS_PER_ROUND: usize = 8;
/// How often a guardian that was killed is replaced.
pub const GUARDIAN_RESTARTS_MAX: u32 = 8;
/// How long a guardian waits for the cgroup that it killed to become empty.
pub const GUARDIAN_WAIT: Duration = Duration::from_secs(10);
/// How long a start-up of the pid namespace's init may take.
pub const INIT_START: Duration = Duration::from_secs(8);
