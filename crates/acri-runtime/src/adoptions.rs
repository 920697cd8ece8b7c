//! Adoptions that are under way. As long as there are some, logs wait: a node
//! that starts with thousands of runs is to answer for each of them first.

use std::time::Duration;
use tokio::sync::watch;

/// How long a log waits for them at most.
const LOGS_WAIT_MAX: Duration = Duration::from_secs(2);

/// How many are under way.
#[derive(Debug, Default)]
pub(crate) struct Adoptions(watch::Sender<usize>);

/// One that is under way, until it is dropped.
#[derive(Debug)]
pub(crate) struct Adoption(watch::Sender<usize>);

impl Adoptions {
    /// Another one begins.
    pub(crate) fn begin(&self) -> Adoption {
        self.0.send_if_modified(|count| {
            *count += 1;
            false
        });
        Adoption(self.0.clone())
    }

    /// Waits until none is under way, or for long enough.
    pub(crate) async fn over(&self) {
        let mut count = self.0.subscribe();
        let _ = tokio::time::timeout(LOGS_WAIT_MAX, count.wait_for(|count| *count == 0)).await;
    }
}

impl Drop for Adoption {
    fn drop(&mut self) {
        // Those who wait are woken once, by the last one.
        self.0.send_if_modified(|count| {
            *count -= 1;
            *count == 0
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::{FutureExt as _, poll};
    use std::{pin::pin, task::Poll};

    #[tokio::test]
    async fn logs_wait_for_the_last_adoption_and_for_none_where_there_is_none() {
        let adoptions = Adoptions::default();
        assert!(adoptions.over().now_or_never().is_some());
        let (first, second) = (adoptions.begin(), adoptions.begin());
        let mut waiting = pin!(adoptions.over());
        assert_eq!(poll!(&mut waiting), Poll::Pending);
        drop(first);
        assert_eq!(poll!(&mut waiting), Poll::Pending);
        drop(second);
        assert_eq!(poll!(&mut waiting), Poll::Ready(()));
    }
}
