//! Waiting for shims, whose parent the node is: no thread for each.

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::{io, os::fd::OwnedFd, process::Child};
use tokio::io::{Interest, unix::AsyncFd};

/// Waits for the child and takes its status.
pub(super) async fn reap(mut child: Child) {
    if let Ok(pidfd) = watched(&child) {
        // Whatever woke us, the child itself says whether it has ended.
        while matches!(child.try_wait(), Ok(None)) {
            let Ok(mut ready) = pidfd.readable().await else { break };
            if matches!(child.try_wait(), Ok(None)) {
                ready.clear_ready();
            }
        }
    }
    if matches!(child.try_wait(), Ok(None)) {
        // No descriptor to be had: a thread, then.
        let _ = tokio::task::spawn_blocking(move || child.wait()).await;
    }
}

fn watched(child: &Child) -> io::Result<AsyncFd<OwnedFd>> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    #[expect(
        deprecated,
        reason = "its successor is unsafe for types that may close their descriptor; an `OwnedFd` does not"
    )]
    AsyncFd::with_interest(pidfd_open(pid, PidfdFlags::NONBLOCK)?, Interest::READABLE)
}
