//! Bodies of the JetStream API that are read here.

use crate::port::{Fault, Why};
use acri::{StreamSeq, Timestamp};
use async_nats::{HeaderMap, HeaderName, HeaderValue, Message};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use serde::Deserialize;

/// The expected last sequence was wrong.
pub(super) const WRONG_LAST_SEQUENCE: u64 = 10071;
/// Another write with the same expectation is in flight.
pub(super) const IN_FLIGHT: u64 = 10164;
/// No such message.
pub(super) const NO_MESSAGE: u64 = 10037;
/// No such stream.
pub(super) const NO_STREAM: u64 = 10059;
/// The stream did not take it, in words: its limits, or its disk.
const STORE_FAILED: u64 = 10077;
/// Codes of 503 that speak of a limit and not of an absence: not stored, and
/// a repeat will not help.
const LIMITS: [u64; 3] = [
    10023, // insufficient resources
    10028, // resource limits exceeded
    10047, // insufficient storage
];
const TOO_LARGE: [u64; 2] = [
    10054, // message size
    10097, // header size
];

#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct ApiError {
    #[serde(default)]
    pub(super) code: u64,
    #[serde(default)]
    pub(super) err_code: u64,
    #[serde(default)]
    pub(super) description: String,
}

impl ApiError {
    /// Whether the server was not able to say, rather than said no. What its
    /// disk did with a write that failed nobody knows before it is started
    /// again.
    pub(super) fn is_absence(&self) -> bool {
        self.code == 503 && !LIMITS.contains(&self.err_code) && !self.is_limit_of_stream()
    }

    fn is_limit_of_stream(&self) -> bool {
        self.err_code == STORE_FAILED && (self.description.contains("maximum") || self.is_too_large())
    }

    fn is_too_large(&self) -> bool {
        // The server writes "message to large".
        TOO_LARGE.contains(&self.err_code) || (self.err_code == STORE_FAILED && self.description.contains("large"))
    }

    fn why(&self) -> Why {
        if self.is_too_large() {
            Why::TooLarge
        } else if self.is_limit_of_stream() || LIMITS.contains(&self.err_code) {
            Why::Full
        } else {
            Why::State
        }
    }

    pub(super) fn into_fault(self, operation: &'static str) -> Fault {
        let (absence, why) = (self.is_absence(), self.why());
        let detail = format!("{} ({})", self.description, self.err_code);
        if absence { Fault::Unavailable { operation, detail } } else { Fault::Refused { operation, why, detail } }
    }
}

/// The acknowledgement of a publish.
#[derive(Debug, Deserialize)]
pub(super) struct Ack {
    pub(super) error: Option<ApiError>,
    #[serde(default)]
    pub(super) seq: u64,
    #[serde(default)]
    pub(super) duplicate: bool,
}

/// The answer to `STREAM.MSG.GET`.
#[derive(Debug, Deserialize)]
pub(super) struct Got {
    pub(super) message: Stored,
}

#[derive(Debug, Deserialize)]
pub(super) struct Stored {
    pub(super) subject: String,
    pub(super) seq: u64,
    #[serde(default)]
    hdrs: String,
    #[serde(default)]
    data: String,
    time: String,
}

impl Stored {
    pub(super) fn seq(&self) -> StreamSeq {
        StreamSeq(self.seq)
    }

    pub(super) fn time(&self, operation: &'static str) -> Result<Timestamp, Fault> {
        self.time.parse().map_err(|_| malformed(operation, self.seq, "its time"))
    }

    pub(super) fn body(&self, operation: &'static str) -> Result<Bytes, Fault> {
        STANDARD.decode(&self.data).map(Bytes::from).map_err(|_| malformed(operation, self.seq, "its body"))
    }

    /// As if it had been delivered; without headers if they are no text.
    pub(super) fn message(&self, operation: &'static str) -> Result<Message, Fault> {
        let payload = self.body(operation)?;
        let mut headers = HeaderMap::new();
        for (name, value) in self.headers(operation)?.all() {
            if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), value.parse::<HeaderValue>()) {
                headers.append(name, value);
            }
        }
        Ok(Message {
            subject: self.subject.as_str().into(),
            reply: None,
            length: payload.len(),
            payload,
            headers: Some(headers),
            status: None,
            description: None,
        })
    }

    pub(super) fn headers(&self, operation: &'static str) -> Result<Headers, Fault> {
        let bytes = STANDARD.decode(&self.hdrs).map_err(|_| malformed(operation, self.seq, "its headers"))?;
        Ok(Headers(String::from_utf8_lossy(&bytes).into_owned()))
    }
}

pub(super) fn malformed(operation: &'static str, seq: u64, what: &str) -> Fault {
    Fault::Malformed { operation, detail: format!("{what}, at sequence {seq}") }
}

/// Headers as the server stores them: `NATS/1.0`, then a line each.
pub(super) struct Headers(String);

impl Headers {
    fn all(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.lines().skip(1).filter_map(|line| line.split_once(':')).map(|(name, value)| (name, value.trim()))
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.all().find(|(found, _)| *found == name).map(|(_, value)| value)
    }
}

/// The answer to `STREAM.INFO`.
#[derive(Debug, Deserialize)]
pub(super) struct Info {
    pub(super) config: serde_json::Map<String, serde_json::Value>,
    pub(super) created: String,
    pub(super) state: State,
    /// The server's clock.
    pub(super) ts: Option<String>,
    /// Subjects in all, where they were asked for.
    #[serde(default)]
    pub(super) total: u64,
}

#[derive(Debug, Deserialize)]
pub(super) struct State {
    pub(super) first_seq: u64,
    pub(super) last_seq: u64,
    #[serde(default)]
    pub(super) bytes: u64,
    #[serde(default)]
    pub(super) subjects: std::collections::BTreeMap<String, u64>,
}

/// The answer to `CONSUMER.CREATE`.
#[derive(Debug, Deserialize)]
pub(super) struct Consumer {
    #[serde(default)]
    pub(super) num_pending: u64,
}

/// What the reply subject of a delivered message tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Delivery {
    pub(super) stream_seq: u64,
    pub(super) consumer_seq: u64,
    pub(super) time: Timestamp,
    pub(super) pending: u64,
}

impl Delivery {
    /// `$JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>`;
    /// the longer form has domain and account before the stream, and may have
    /// a token behind.
    pub(super) fn of_reply(reply: &str) -> Option<Self> {
        let tokens = reply.split('.').count();
        let before = match tokens {
            9 => 5,
            11 | 12 => 7,
            _ => return None,
        };
        let mut numbers = reply.strip_prefix("$JS.ACK.").map(|_| reply.split('.').skip(before))?;
        let mut number = || numbers.next()?.parse::<u64>().ok();
        let (stream_seq, consumer_seq, nanos, pending) = (number()?, number()?, number()?, number()?);
        let time = Timestamp::from_micros(i64::try_from(nanos / 1000).ok()?);
        Some(Self { stream_seq, consumer_seq, time, pending })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_a_delivery_are_read() {
        let expected = Delivery {
            stream_seq: 7,
            consumer_seq: 3,
            time: Timestamp::from_micros(1_700_000_000_000_001),
            pending: 9,
        };
        for reply in [
            "$JS.ACK.ACRI_LOGS.c.1.7.3.1700000000000001999.9",
            "$JS.ACK._.hash.ACRI_LOGS.c.1.7.3.1700000000000001999.9",
            "$JS.ACK._.hash.ACRI_LOGS.c.1.7.3.1700000000000001999.9.random",
        ] {
            assert_eq!(Delivery::of_reply(reply), Some(expected), "{reply}");
        }
        for bad in ["", "_INBOX.a", "$JS.ACK.a.b.c.d.e.f.g", "x.y.ACRI_LOGS.c.1.7.3.17.9"] {
            assert_eq!(Delivery::of_reply(bad), None, "{bad}");
        }
    }

    #[test]
    fn refusals_say_what_stands_in_the_way_and_absence_is_none() {
        for (code, err_code, description, expected) in [
            (503, 10077, "maximum bytes exceeded", Some(Why::Full)),
            (503, 10077, "maximum messages exceeded", Some(Why::Full)),
            (503, 10023, "insufficient resources", Some(Why::Full)),
            (503, 10028, "resource limits exceeded for account", Some(Why::Full)),
            (503, 10047, "insufficient storage resources available", Some(Why::Full)),
            (503, 10077, "message to large", Some(Why::TooLarge)),
            (400, 10054, "message size exceeds maximum allowed", Some(Why::TooLarge)),
            (400, 10097, "header size exceeds maximum allowed of 64k", Some(Why::TooLarge)),
            (400, 10109, "invalid operation on sealed stream", Some(Why::State)),
            (503, 10077, "write messages/1.blk: no space left on device", None),
            (503, 10008, "JetStream system temporarily unavailable", None),
        ] {
            let fault = ApiError { code, err_code, description: description.to_owned() }.into_fault("append");
            let why = if let Fault::Refused { why, .. } = fault { Some(why) } else { None };
            assert_eq!(why, expected, "{err_code} {description}");
        }
    }
}
