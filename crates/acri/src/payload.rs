//! Typed payloads of tasks and log events (spec, "Multimodal Log Payloads").

use serde::{Deserialize, Serialize};

/// What a task or a log event carries.
///
/// On the wire a map with `type`; fields that a type does not have are absent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Wire", into = "Wire")]
pub enum Payload {
    /// Text. `media_type` missing means `text/plain`.
    Text {
        /// The text.
        text: String,
        /// Its media type, `None` for plain text.
        media_type: Option<String>,
    },
    /// Output that is no UTF-8, kept byte for byte: a `text` payload whose
    /// bytes are in `octets`.
    Octets {
        /// The bytes.
        octets: Vec<u8>,
    },
}

impl Payload {
    /// Plain text.
    #[must_use]
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text { text: text.into(), media_type: None }
    }

    /// What a harness wrote: text if it is UTF-8, its bytes otherwise.
    #[must_use]
    pub fn of_output(bytes: Vec<u8>) -> Self {
        match String::from_utf8(bytes) {
            Ok(text) => Self::text(text),
            Err(error) => Self::Octets { octets: error.into_bytes() },
        }
    }

    /// The bytes of the text or the octets.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Text { text, .. } => text.as_bytes(),
            Self::Octets { octets } => octets,
        }
    }
}

/// Flat on the wire, so that decoding buffers nothing.
#[derive(Serialize, Deserialize)]
struct Wire {
    #[serde(rename = "type")]
    kind: Kind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    media_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none", with = "crate::codec::blob_option")]
    octets: Option<Vec<u8>>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Text,
}

impl From<Payload> for Wire {
    fn from(payload: Payload) -> Self {
        match payload {
            Payload::Text { text, media_type } => Self { kind: Kind::Text, text: Some(text), media_type, octets: None },
            Payload::Octets { octets } => Self { kind: Kind::Text, text: None, media_type: None, octets: Some(octets) },
        }
    }
}

impl TryFrom<Wire> for Payload {
    type Error = &'static str;

    fn try_from(wire: Wire) -> Result<Self, Self::Error> {
        match (wire.kind, wire.text, wire.octets) {
            (Kind::Text, Some(text), None) => Ok(Self::Text { text, media_type: wire.media_type }),
            (Kind::Text, None, Some(octets)) => Ok(Self::Octets { octets }),
            (Kind::Text, ..) => Err("a text payload carries either `text` or `octets`"),
        }
    }
}
