//! The node's lease: may it act, and the loop that keeps it.

use crate::clock::{BusClock, boot_time};
use acri::{Incarnation, NodeId, StreamSeq};
use acri_bus::port::{LeaseEntry, Leased, SharedBus};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// Pause before a renewal without an answer is tried again: at once and often.
const RETRY_AFTER: Duration = Duration::from_millis(200);

/// Whether this incarnation may act. Looked at immediately before each append,
/// effect and reply.
#[derive(Debug, Default)]
pub(crate) struct Lease {
    valid_until_ms: AtomicU64,
    held_since_ms: AtomicU64,
    fenced: AtomicBool,
    changed: Notify,
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl Lease {
    /// Whether it may act now.
    pub(crate) fn may_act(&self) -> bool {
        !self.is_fenced() && millis(boot_time()) < self.valid_until_ms.load(Ordering::Acquire)
    }

    /// Whether it is over for good.
    pub(crate) fn is_fenced(&self) -> bool {
        self.fenced.load(Ordering::Acquire)
    }

    /// Waits until it may act. `false`: it never will again.
    pub(crate) async fn wait(&self) -> bool {
        loop {
            let changed = self.changed.notified();
            if self.may_act() {
                return true;
            }
            if self.is_fenced() {
                return false;
            }
            changed.await;
        }
    }

    /// Waits for the end of this incarnation.
    pub(crate) async fn fenced(&self) {
        loop {
            let changed = self.changed.notified();
            if self.is_fenced() {
                return;
            }
            changed.await;
        }
    }

    /// For how long it was held without a break.
    pub(crate) fn held_for(&self) -> Duration {
        if !self.may_act() {
            return Duration::ZERO;
        }
        boot_time().saturating_sub(Duration::from_millis(self.held_since_ms.load(Ordering::Acquire)))
    }

    fn renewed(&self, sent: Duration, stop_after: Duration) {
        if !self.may_act() {
            self.broken();
        }
        // Counted from the sending: counted from the answer it would outlive
        // the lease.
        self.valid_until_ms.store(millis(sent + stop_after), Ordering::Release);
        self.changed.notify_waiters();
    }

    fn broken(&self) {
        self.held_since_ms.store(millis(boot_time()), Ordering::Release);
    }

    /// Ends it.
    pub(crate) fn end(&self) {
        self.fenced.store(true, Ordering::Release);
        self.changed.notify_waiters();
    }
}

/// Whose lease, and how it is kept.
#[derive(Debug, Clone)]
pub(crate) struct Terms {
    pub(crate) node: NodeId,
    pub(crate) incarnation: Incarnation,
    pub(crate) ttl: Duration,
    pub(crate) renew_every: Duration,
    pub(crate) stop_after: Duration,
}

/// Creates the lease and keeps it until `stop`, or until it is fenced.
pub(crate) async fn keep(
    bus: SharedBus,
    terms: Terms,
    lease: Arc<Lease>,
    clock: Arc<BusClock>,
    stop: CancellationToken,
) {
    let mut revision = StreamSeq(0);
    let mut created = false;
    loop {
        let sent = boot_time();
        let pause = match bus.write_lease(terms.incarnation, &terms.node, revision, terms.ttl).await {
            Leased::Written(written) => {
                revision = written;
                created = true;
                lease.renewed(sent, terms.stop_after);
                if let Ok(offset) = bus.clock_offset_micros().await {
                    clock.set_offset_from_wall(offset);
                }
                terms.renew_every.saturating_sub(boot_time().saturating_sub(sent))
            }
            Leased::Lost => match bus.lease(terms.incarnation).await {
                // Only we write under this key, so this is our own write whose
                // answer was lost; or our own marker, which we may overwrite.
                Ok(LeaseEntry::Live { revision: found, .. } | LeaseEntry::Expired(found)) => {
                    revision = found;
                    created = true;
                    Duration::ZERO
                }
                Ok(LeaseEntry::Absent) if !created => Duration::ZERO,
                // Given back by the node itself.
                Ok(LeaseEntry::Absent | LeaseEntry::Fenced(_)) if stop.is_cancelled() => return,
                Ok(LeaseEntry::Absent | LeaseEntry::Fenced(_)) => {
                    tracing::error!(incarnation = %terms.incarnation, "lease is fenced");
                    lease.end();
                    return;
                }
                Err(error) => {
                    tracing::warn!(%error, "lease cannot be read");
                    lease.broken();
                    RETRY_AFTER
                }
            },
            Leased::Unknown(error) => {
                tracing::warn!(%error, "lease is not renewed");
                lease.broken();
                RETRY_AFTER
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
    }
}
