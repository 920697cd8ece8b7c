//! Versions of nats-server, and the oldest that will do.

use std::{fmt, str::FromStr};

/// A version of nats-server; what follows the patch number is ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Major.
    pub major: u32,
    /// Minor.
    pub minor: u32,
    /// Patch.
    pub patch: u32,
}

impl Version {
    /// The oldest server that will do. Older ones drop what they do not know
    /// without a word: on 2.9 the fence over an agent is silently off.
    pub const FLOOR: Self = Self { major: 2, minor: 14, patch: 0 };
    /// The one that is fetched where there is none.
    pub const PINNED: Self = Self { major: 2, minor: 15, patch: 1 };
}

impl fmt::Display for Version {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Text that is no version.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no version of nats-server")]
pub struct Error(String);

impl FromStr for Version {
    type Err = Error;

    /// Takes `2.15.1`, `v2.15.1`, `2.15.1-beta.3`.
    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = || Error(text.chars().take(80).collect());
        let plain = text.trim().trim_start_matches('v');
        let mut numbers = plain.splitn(3, '.').map(|token| {
            let digits: String = token.chars().take_while(char::is_ascii_digit).collect();
            digits.parse::<u32>().map_err(|_| bad())
        });
        let mut next = || numbers.next().ok_or_else(bad)?;
        Ok(Self { major: next()?, minor: next()?, patch: next()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_ordered_by_number() {
        let version = |text: &str| text.parse::<Version>().unwrap();
        assert_eq!(version("v2.15.1\n"), Version::PINNED);
        assert_eq!(version("2.14.0-RC.3"), Version::FLOOR);
        assert!(version("2.9.10") < Version::FLOOR);
        assert!(version("10.0.0") > Version::PINNED);
        for bad in ["", "2", "2.x.1", "latest"] {
            assert!(bad.parse::<Version>().is_err(), "{bad:?}");
        }
    }
}
