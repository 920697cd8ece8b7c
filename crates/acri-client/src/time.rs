//! The client's clock. It mints command ids by the bus's time, so that a
//! laptop with a wrong clock is not told that its commands are from the past.

use acri::{CommandId, Timestamp};
use std::time::{SystemTime, UNIX_EPOCH};

pub(crate) fn now() -> Timestamp {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_micros(i64::try_from(elapsed.as_micros()).unwrap_or(i64::MAX))
}

/// The bus's time, given how far its clock is ahead of ours.
pub(crate) fn bus_now(offset_micros: i64) -> Timestamp {
    Timestamp::from_micros(now().as_micros().saturating_add(offset_micros))
}

/// A fresh command id that bears this time.
pub(crate) fn mint(time: Timestamp) -> CommandId {
    let micros = u64::try_from(time.as_micros()).unwrap_or(0);
    let nanos = u32::try_from(micros % 1_000_000).unwrap_or(0) * 1_000;
    let timestamp = uuid::Timestamp::from_unix(uuid::NoContext, micros / 1_000_000, nanos);
    CommandId::from_uuid(uuid::Uuid::new_v7(timestamp))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minted_id_bears_its_time_and_no_two_are_the_same() {
        let time = Timestamp::from_micros(1_764_500_000_123_456);
        assert_eq!(mint(time).millis(), Some(1_764_500_000_123));
        assert_ne!(mint(time), mint(time));
    }
}
