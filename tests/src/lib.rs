//! What the test binaries of this package share: a bus and nodes of a test's
//! own, ended with it, and the means to look at what they did.
//!
//! Begin with [`site`]. [`look`] reads what was stored and checks it, [`raw`]
//! is a stranger on the bus, [`line`] a connection that can be held up.
#![forbid(unsafe_code)]

pub mod line;
pub mod look;
pub mod process;
pub mod raw;
pub mod site;

use std::time::Duration;

/// The longest that anything here is waited for.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for `work`, and panics where it takes too long.
///
/// # Panics
/// After [`PATIENCE`].
pub async fn within<T>(what: &str, work: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, Box::pin(work)).await {
        Ok(value) => value,
        Err(_) => panic!("waited {} s for {what}", PATIENCE.as_secs()),
    }
}

/// Looks again and again where nothing tells of a change (`/proc`, a file).
///
/// # Panics
/// After [`PATIENCE`].
pub async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut look: impl FnMut() -> F) -> T {
    within(what, async {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
}

/// Random numbers that a printed seed gives again (splitmix64).
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// From `ACRI_TEST_SEED`, else from the clock.
    #[must_use]
    pub fn seeded() -> Self {
        let given = std::env::var("ACRI_TEST_SEED").ok().and_then(|text| text.parse().ok());
        Self(given.unwrap_or_else(|| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            now.map_or(1, |now| u64::from(now.subsec_nanos()) ^ now.as_secs().rotate_left(32))
        }))
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit.max(1)
    }
}

/// How many rounds a soak makes: `ACRI_TEST_ROUNDS`, else the default.
#[must_use]
pub fn rounds(default: u64) -> u64 {
    std::env::var("ACRI_TEST_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}
