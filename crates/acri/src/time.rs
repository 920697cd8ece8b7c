//! Time as the contract writes it.

use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use std::{fmt, time::Duration};

/// A moment, in microseconds since 1970-01-01T00:00:00Z.
///
/// In JSON it is RFC 3339 text with six decimals, in MessagePack an integer:
/// a log event carries one, and text would cost more than the rest of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(i64);

impl Timestamp {
    /// From microseconds since the epoch.
    #[must_use]
    pub fn from_micros(micros: i64) -> Self {
        Self(micros)
    }

    /// Microseconds since the epoch.
    #[must_use]
    pub fn as_micros(self) -> i64 {
        self.0
    }

    /// Later by `duration`; stays at the largest value rather than overflow.
    #[must_use]
    pub fn plus(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)))
    }

    /// How long after `earlier`; zero if it is not after it.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }
}

impl From<DateTime<Utc>> for Timestamp {
    fn from(time: DateTime<Utc>) -> Self {
        Self(time.timestamp_micros())
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match DateTime::from_timestamp_micros(self.0) {
            Some(time) => formatter.write_str(&time.to_rfc3339_opts(SecondsFormat::Micros, true)),
            None => write!(formatter, "{}us", self.0),
        }
    }
}

impl std::str::FromStr for Timestamp {
    type Err = chrono::ParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(DateTime::parse_from_rfc3339(text)?.with_timezone(&Utc).into())
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() { serializer.collect_str(self) } else { serializer.serialize_i64(self.0) }
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
        } else {
            i64::deserialize(deserializer).map(Self)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timestamp_is_text_in_json_and_a_number_in_messagepack() {
        let time: Timestamp = "2026-11-30T12:00:00.000001Z".parse().unwrap();
        assert_eq!(serde_json::to_string(&time).unwrap(), r#""2026-11-30T12:00:00.000001Z""#);
        let packed = crate::codec::to_msgpack(&time).unwrap();
        assert_eq!(packed.len(), 9);
        assert_eq!(crate::codec::from_msgpack::<Timestamp>(&packed).unwrap(), time);
    }

    #[test]
    fn adding_a_century_of_centuries_does_not_overflow() {
        assert!(Timestamp::from_micros(i64::MAX - 1).plus(Duration::from_secs(u64::MAX)) > Timestamp::default());
    }
}
