//! Counters of what was refused, repeated or dropped: told in the heartbeat.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts since the node's start.
        #[derive(Debug, Default)]
        pub(crate) struct Counters { $($(#[$doc])* pub(crate) $name: AtomicU64,)* }

        impl Counters {
            /// All of them by name.
            pub(crate) fn snapshot(&self) -> BTreeMap<String, u64> {
                [$((stringify!($name), &self.$name),)*]
                    .into_iter()
                    .map(|(name, counter)| (name.to_owned(), counter.load(Ordering::Relaxed)))
                    .collect()
            }
        }
    };
}

counters! {
    /// Requests that were no command of ours.
    requests_malformed,
    /// Requests without a reply subject that may be answered.
    requests_unanswerable,
    /// Requests beyond the limit of an agent's queue.
    requests_overflowed,
    /// Appends that were repeated.
    appends_repeated,
    /// Appends that met another's event.
    appends_conflicted,
    /// Replies withheld because the lease had lapsed.
    replies_withheld,
    /// Agents whose actor was replaced after a panic or an error.
    agents_replaced,
    /// Kill effects that were not proved at the first attempt.
    kills_repeated,
    /// Log frames that were repeated.
    frames_repeated,
}

/// Adds one.
pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
