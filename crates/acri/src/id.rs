//! Ids, one type each.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::{fmt, str::FromStr};
use uuid::Uuid;

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Uuid);

        impl $name {
            /// Takes a UUID as this id.
            #[must_use]
            pub const fn from_uuid(uuid: Uuid) -> Self {
                Self(uuid)
            }

            /// The UUID behind it.
            #[must_use]
            pub const fn as_uuid(&self) -> &Uuid {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.hyphenated().fmt(formatter)
            }
        }

        impl FromStr for $name {
            type Err = Error;

            /// Only the lower-case hyphenated form: a subject has one spelling.
            fn from_str(text: &str) -> Result<Self, Error> {
                let bad = || Error::Uuid { what: stringify!($name), text: shown(text) };
                let uuid = Uuid::try_parse(text).map_err(|_| bad())?;
                if uuid.hyphenated().to_string() == text { Ok(Self(uuid)) } else { Err(bad()) }
            }
        }
    };
}

uuid_id! {
    /// An agent: a provisioned instance of a harness. Derived from the
    /// command that created it, so that a repeated Create gives the same one.
    AgentId
}
uuid_id! {
    /// One execution on an agent. Derived from its agent and the command that
    /// started it.
    RunId
}
uuid_id! {
    /// A command, minted by the client as UUIDv7: its time bounds how late the
    /// command may still be carried out.
    CommandId
}
uuid_id! {
    /// An event, minted once for each event body, for ever.
    EventId
}
uuid_id! {
    /// One start of a node process.
    Incarnation
}

/// Why text is no id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Not a lower-case hyphenated UUID.
    #[error("{what} {text:?} is not a lower-case hyphenated UUID")]
    Uuid {
        /// Which id was expected.
        what: &'static str,
        /// The text, cut to a bearable length.
        text: String,
    },
    /// Not a name that can be a subject token.
    #[error("{what} {text:?} is not 1 to {NAME_LEN_MAX} of a-z, 0-9, `-`, `_` and, within, `:`")]
    Name {
        /// Which name was expected.
        what: &'static str,
        /// The text, cut to a bearable length.
        text: String,
    },
}

fn shown(text: &str) -> String {
    text.chars().take(80).collect()
}

fn derived(domain: &[u8], parts: &[&[u8]]) -> Uuid {
    let mut hash = Sha256::new();
    hash.update(domain);
    for part in parts {
        // The length makes ("ab", "c") another input than ("a", "bc").
        hash.update(u64::try_from(part.len()).unwrap_or(u64::MAX).to_be_bytes());
        hash.update(part);
    }
    let digest = hash.finalize();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}

impl AgentId {
    /// The id of the agent that a Create makes: UUIDv8 over the harness type
    /// and the command id.
    #[must_use]
    pub fn derive(harness: &HarnessType, command: CommandId) -> Self {
        Self(derived(b"acri.agent", &[harness.as_str().as_bytes(), command.0.as_bytes()]))
    }

    /// The shard of its subjects: the last hexadecimal digit of the id.
    #[must_use]
    pub fn shard(&self) -> char {
        char::from_digit(u32::from(self.0.as_bytes()[15] & 0x0f), 16).unwrap_or('0')
    }
}

impl RunId {
    /// The id of the run that a Start begins: UUIDv8 over the agent and the
    /// command id.
    #[must_use]
    pub fn derive(agent: AgentId, command: CommandId) -> Self {
        Self(derived(b"acri.run", &[agent.0.as_bytes(), command.0.as_bytes()]))
    }
}

impl CommandId {
    /// The time in the id, in milliseconds since the epoch; `None` if the id
    /// is no UUIDv7.
    #[must_use]
    pub fn millis(&self) -> Option<u64> {
        if self.0.get_version_num() != 7 {
            return None;
        }
        let mut bytes = [0; 8];
        bytes[2..].copy_from_slice(&self.0.as_bytes()[..6]);
        Some(u64::from_be_bytes(bytes))
    }
}

/// Most characters in a name ([`NodeId`], [`HarnessType`]).
pub const NAME_LEN_MAX: usize = 63;

macro_rules! name_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self, Error> {
                let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
                let fine = !text.is_empty()
                    && text.len() <= NAME_LEN_MAX
                    && text.bytes().all(|byte| plain(byte) || matches!(byte, b'-' | b'_' | b':'))
                    && text.bytes().next().is_some_and(plain)
                    && text.bytes().last().is_some_and(plain);
                if fine {
                    Ok(Self(text.to_owned()))
                } else {
                    Err(Error::Name { what: stringify!($name), text: shown(text) })
                }
            }
        }

        impl TryFrom<String> for $name {
            type Error = Error;

            fn try_from(text: String) -> Result<Self, Error> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(&self.0)
            }
        }
    };
}

name_id! {
    /// The name of a node; kept over restarts, unlike its [`Incarnation`].
    NodeId
}
name_id! {
    /// Which kind of harness: `process`, `scripted`, `acp:gemini`.
    HarnessType
}

macro_rules! number {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl $name {
            /// The one after it.
            #[must_use]
            pub const fn next(self) -> Self {
                Self(self.0 + 1)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(formatter)
            }
        }
    };
}

number! {
    /// Counts the owners of an agent, from 1. Whoever takes over bumps it.
    Epoch
}
number! {
    /// A sequence in a JetStream stream; 0 means that nothing is stored.
    StreamSeq
}
number! {
    /// Position of an event in its agent's history, or in its run's: 1, 2, 3 …
    EventSeq
}
number! {
    /// Position of a log event in its run: 1, 2, 3 …
    LogSeq
}

/// A SHA-256 digest; 64 hexadecimal digits in JSON, 32 bytes in MessagePack.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Sha256Digest(pub [u8; 32]);

impl Sha256Digest {
    /// The digest of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// The digest of an earlier digest and `bytes` after it: a link of a chain.
    #[must_use]
    pub fn chained(self, bytes: &[u8]) -> Self {
        let mut hash = Sha256::new();
        hash.update(self.0);
        hash.update(bytes);
        Self(hash.finalize().into())
    }
}

impl fmt::Display for Sha256Digest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl fmt::Debug for Sha256Digest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

impl Serialize for Sha256Digest {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() { serializer.collect_str(self) } else { serializer.serialize_bytes(&self.0) }
    }
}

impl<'de> Deserialize<'de> for Sha256Digest {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error as _;
        if deserializer.is_human_readable() {
            let text = String::deserialize(deserializer)?;
            let mut digest = [0; 32];
            if text.len() != 64 || !text.is_ascii() {
                return Err(D::Error::custom("a SHA-256 digest is 64 hexadecimal digits"));
            }
            for (index, byte) in digest.iter_mut().enumerate() {
                *byte = u8::from_str_radix(&text[index * 2..index * 2 + 2], 16).map_err(D::Error::custom)?;
            }
            Ok(Self(digest))
        } else {
            let bytes = serde_bytes::ByteBuf::deserialize(deserializer)?;
            bytes.as_slice().try_into().map(Self).map_err(|_| D::Error::custom("a SHA-256 digest is 32 bytes"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command() -> CommandId {
        CommandId::from_uuid(uuid::uuid!("01936f5e-8a00-7000-8000-000000000001"))
    }

    #[test]
    fn the_same_command_gives_the_same_agent_and_another_harness_another() {
        let process: HarnessType = "process".parse().unwrap();
        let agent = AgentId::derive(&process, command());
        assert_eq!(agent, AgentId::derive(&process, command()));
        assert_ne!(agent, AgentId::derive(&"scripted".parse().unwrap(), command()));
        assert!(agent.to_string().ends_with(agent.shard()));
        // Pinned: a changed derivation would make every repeated Create a second agent.
        assert_eq!(agent.to_string(), "cf41a647-18b5-8a70-a2c4-ea39ba67efe6");
    }

    #[test]
    fn only_the_one_spelling_of_a_uuid_is_an_id() {
        let text = "01936f5e-8a00-7000-8000-00000000000a";
        assert_eq!(text.parse::<CommandId>().unwrap().to_string(), text);
        for bad in ["01936F5E-8A00-7000-8000-00000000000A", "01936f5e8a0070008000000000000001", "", "*", ">"] {
            assert!(bad.parse::<CommandId>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn names_that_could_break_a_subject_are_refused() {
        assert!("acp:gemini".parse::<HarnessType>().is_ok());
        for bad in ["", "a.b", "a b", "*", ">", "A", ":a", "a-", &"x".repeat(64)] {
            assert!(bad.parse::<HarnessType>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_command_id_tells_its_time_only_if_it_is_version_seven() {
        assert_eq!(command().millis(), Some(0x0193_6f5e_8a00));
        assert_eq!(CommandId::from_uuid(Uuid::nil()).millis(), None);
    }
}
