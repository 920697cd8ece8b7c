//! How full the event stream is, as far as this node knows. Whether that is
//! too full for something is the core's to say.

use crate::node::Shared;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// How often the bus is asked.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// The least pause between two questions, however many appends are refused.
const LOOK_PAUSE_MIN: Duration = Duration::from_millis(500);

/// What was told last; 0 before anything was.
#[derive(Debug, Default)]
pub(crate) struct Room {
    percent: AtomicU64,
    wanted: Notify,
}

impl Room {
    /// How full the event stream was when it was asked for last, in hundredths.
    pub(crate) fn percent(&self) -> u64 {
        self.percent.load(Ordering::Relaxed)
    }

    /// Asks soon: an append was refused.
    pub(crate) fn ask(&self) {
        self.wanted.notify_one();
    }
}

/// Asks once. What was known stays where nobody answers.
pub(crate) async fn look(shared: &Shared) {
    match shared.bus.event_facts().await {
        Ok(facts) => shared.room.percent.store(facts.percent_full(), Ordering::Relaxed),
        Err(error) => tracing::warn!(%error, "how full the event stream is cannot be read"),
    }
}

/// Asks again and again, until `stop`.
pub(crate) async fn watch(shared: Arc<Shared>, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(LOOK_EVERY) => {}
            () = shared.room.wanted.notified() => {}
        }
        look(&shared).await;
        tokio::time::sleep(LOOK_PAUSE_MIN).await;
    }
}
