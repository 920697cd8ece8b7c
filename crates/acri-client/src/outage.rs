//! How long a stream bears an absent bus.

use crate::{
    error::Error,
    limits::{Backoff, Limits},
};
use acri_bus::port::Fault;
use std::time::Duration;
use tokio::time::{Instant, sleep};

#[derive(Debug)]
pub(crate) struct Outage {
    operation: &'static str,
    since: Option<Instant>,
    max: Duration,
    backoff: Backoff,
}

impl Outage {
    pub(crate) fn new(operation: &'static str, limits: &Limits) -> Self {
        Self { operation, since: None, max: limits.stream_outage_max, backoff: Backoff::new(limits) }
    }

    /// Something arrived.
    pub(crate) fn over(&mut self) {
        if self.since.take().is_some() {
            self.backoff.reset();
        }
    }

    /// Waits before the next attempt, or says that it has been long enough.
    pub(crate) async fn bear(&mut self, fault: Fault) -> Result<(), Error> {
        let since = *self.since.get_or_insert_with(Instant::now);
        let hopeless = matches!(fault, Fault::Refused { .. } | Fault::Malformed { .. });
        if hopeless || since.elapsed() >= self.max {
            return Err(Error::Bus { operation: self.operation, source: fault });
        }
        tracing::debug!(operation = self.operation, %fault, "reading again");
        sleep(self.backoff.pause()).await;
        Ok(())
    }
}
