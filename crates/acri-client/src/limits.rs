//! How long the client waits, and how often it asks again.

use std::time::Duration;

/// Every wait of a [`Client`](crate::Client). The defaults fit a person at a
/// terminal as well as an orchestrator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// From the first attempt of a command to giving up.
    pub command_deadline: Duration,
    /// The same for Create, which may build, pull or install.
    pub create_deadline: Duration,
    /// The first attempt of a command; then the same id is sent again. Each
    /// attempt may take twice as long as the one before: a node that died with
    /// the command is passed over soon, and a slow one is not pressed.
    pub attempt_timeout_first: Duration,
    /// The longest attempt of a command.
    pub attempt_timeout: Duration,
    /// The longest attempt of Create.
    pub create_attempt_timeout: Duration,
    /// One attempt of Capabilities; and all of Status, after which the history
    /// answers.
    pub query_attempt_timeout: Duration,
    /// Pause before the second attempt; it doubles from there.
    pub retry_pause_first: Duration,
    /// Longest pause between two attempts.
    pub retry_pause_max: Duration,
    /// How long a stream asks an absent bus again before it ends with the
    /// fault. Every item that arrives starts this anew.
    pub stream_outage_max: Duration,
    /// How long a log stream of a sealed run waits in silence before it asks
    /// the leader whether anything is still to come.
    pub sealed_silence: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            command_deadline: Duration::from_secs(30),
            create_deadline: Duration::from_secs(120),
            attempt_timeout_first: Duration::from_secs(5),
            attempt_timeout: Duration::from_secs(10),
            create_attempt_timeout: Duration::from_secs(60),
            query_attempt_timeout: Duration::from_secs(3),
            retry_pause_first: Duration::from_millis(50),
            retry_pause_max: Duration::from_secs(2),
            stream_outage_max: Duration::from_secs(3600),
            sealed_silence: Duration::from_millis(250),
        }
    }
}

/// Pauses between attempts: each twice the one before, up to a limit.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
    first: Duration,
    max: Duration,
}

impl Backoff {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self { next: limits.retry_pause_first, first: limits.retry_pause_first, max: limits.retry_pause_max }
    }

    pub(crate) fn pause(&mut self) -> Duration {
        let pause = self.next.min(self.max);
        self.next = self.next.saturating_mul(2).min(self.max);
        pause
    }

    pub(crate) fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_their_limit_and_begin_anew_after_a_reset() {
        let limits = Limits {
            retry_pause_first: Duration::from_millis(50),
            retry_pause_max: Duration::from_millis(150),
            ..Limits::default()
        };
        let mut backoff = Backoff::new(&limits);
        let pauses: Vec<_> = (0..4).map(|_| backoff.pause().as_millis()).collect();
        assert_eq!(pauses, [50, 100, 150, 150]);
        backoff.reset();
        assert_eq!(backoff.pause().as_millis(), 50);
    }
}
