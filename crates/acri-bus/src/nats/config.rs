//! Streams and buckets as authored in `subjects/`: created where they are
//! missing, compared where they are there.
//!
//! A server that does not know a field answers success without it, so what it
//! echoes is compared, on the authored keys only: it adds others of its own.

use super::{
    Error,
    link::{ApiMiss, Link},
    wire::{Info, NO_STREAM},
};
use crate::port::Fault;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The event stream.
pub(super) const EVENTS: &str = "ACRI_EVENTS";
/// The log stream.
pub(super) const LOGS: &str = "ACRI_LOGS";
/// The stream behind the bucket of leases.
pub(super) const NODES: &str = "KV_ACRI_NODES";

const FILES: [&str; 4] = [
    include_str!("../../../../subjects/streams/ACRI_EVENTS.json"),
    include_str!("../../../../subjects/streams/ACRI_LOGS.json"),
    include_str!("../../../../subjects/buckets/ACRI_NODES.json"),
    include_str!("../../../../subjects/buckets/ACRI_INDEX.json"),
];

pub(super) struct Authored(Vec<(String, Map<String, Value>)>);

impl Authored {
    pub(super) fn with(overrides: &BTreeMap<String, Map<String, Value>>, buckets: bool) -> Result<Self, Error> {
        let mut streams = Vec::new();
        for file in FILES {
            let mut config: Map<String, Value> = serde_json::from_str(file).expect("a test reads every authored file");
            let name = config.get("name").and_then(Value::as_str).expect("a test looks for every name").to_owned();
            config.extend(overrides.get(&name).into_iter().flatten().map(|(key, value)| (key.clone(), value.clone())));
            streams.push((name, config));
        }
        match overrides.keys().find(|name| !streams.iter().any(|(stream, _)| stream == *name)) {
            Some(stream) => Err(Error::Missing { stream: stream.clone() }),
            None => {
                streams.retain(|(name, _)| buckets || !name.starts_with("KV_"));
                Ok(Self(streams))
            }
        }
    }

    pub(super) async fn check(&self, link: &Link, provision: bool) -> Result<(), Error> {
        for (name, config) in &self.0 {
            let info = match ask(link, &format!("STREAM.INFO.{name}"), &Value::Null).await {
                Err(ApiMiss::Api(error)) if error.err_code == NO_STREAM && provision => {
                    ask(link, &format!("STREAM.CREATE.{name}"), &Value::Object(config.clone())).await
                }
                Err(ApiMiss::Api(error)) if error.err_code == NO_STREAM => {
                    return Err(Error::Missing { stream: name.clone() });
                }
                answer => answer,
            };
            let info = match info {
                Ok(info) => info,
                // Another node created it between the two requests, or holds another configuration.
                Err(ApiMiss::Api(error)) if error.err_code == NAME_IN_USE => {
                    ask(link, &format!("STREAM.INFO.{name}"), &Value::Null).await.map_err(fault)?
                }
                Err(miss) => return Err(fault(miss)),
            };
            compare(name, config, &info.config)?;
        }
        Ok(())
    }
}

/// A stream of that name is there already.
const NAME_IN_USE: u64 = 10058;

const OPERATION: &str = "check the streams";

async fn ask(link: &Link, method: &str, body: &Value) -> Result<Info, ApiMiss> {
    link.api_unchecked(OPERATION, method, body).await
}

fn fault(miss: ApiMiss) -> Error {
    match miss {
        // The server's no is an error of the set-up, and not something to try again.
        ApiMiss::Api(error) if !error.is_absence() => {
            Error::Connect { detail: format!("{} ({})", error.description, error.err_code) }
        }
        ApiMiss::Api(error) => Error::Fault(error.into_fault(OPERATION)),
        ApiMiss::Fault(Fault::Refused { operation, detail, .. }) => {
            Error::Connect { detail: format!("{operation}: {detail}") }
        }
        ApiMiss::Fault(fault) => Error::Fault(fault),
    }
}

/// What a server leaves out of its echo when it is so.
fn is_default(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(value) => value.as_i64() == Some(0),
        Value::String(value) => value.is_empty() || value == "none",
        Value::Array(values) => values.is_empty(),
        Value::Object(values) => values.is_empty(),
    }
}

fn compare(stream: &str, authored: &Map<String, Value>, echoed: &Map<String, Value>) -> Result<(), Error> {
    for (field, wanted) in authored {
        // Words for people: an operator may have his own.
        if field == "description" {
            continue;
        }
        let found = echoed.get(field).unwrap_or(&Value::Null);
        let same = found == wanted || (found.is_null() && is_default(wanted));
        if !same {
            return Err(Error::Config {
                stream: stream.to_owned(),
                field: field.clone(),
                found: found.clone(),
                wanted: wanted.clone(),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use acri::{limits, subject::filter};

    fn config(name: &str) -> Map<String, Value> {
        let authored = Authored::with(&BTreeMap::new(), true).unwrap_or_else(|error| panic!("{error}"));
        authored.0.into_iter().find(|(stream, _)| stream == name).unwrap().1
    }

    #[test]
    fn the_authored_files_carry_our_subjects_and_limits() {
        assert_eq!(config(EVENTS)["subjects"], serde_json::json!([filter::all_events()]));
        assert_eq!(config(LOGS)["subjects"], serde_json::json!([filter::all_logs()]));
        assert!(config(EVENTS)["max_msg_size"].as_u64().unwrap() >= limits::EVENT_BODY_BYTES_MAX as u64 + 4096);
        assert_eq!(config(LOGS)["max_msg_size"], limits::FRAME_MESSAGE_BYTES_MAX);
        assert_eq!(config(NODES)["max_msgs_per_subject"], 1, "or short TTLs are raised in silence");
    }

    #[test]
    fn a_field_that_the_server_does_not_echo_is_named() {
        let authored = config(NODES);
        let mut echoed = authored.clone();
        echoed.insert("metadata".into(), serde_json::json!({ "_nats.ver": "2.15.1" }));
        echoed.remove("sealed");
        compare(NODES, &authored, &echoed).unwrap();
        echoed.remove("allow_msg_ttl");
        let error = compare(NODES, &authored, &echoed).unwrap_err();
        assert!(error.to_string().contains("allow_msg_ttl of stream KV_ACRI_NODES is null"), "{error}");
    }

    #[test]
    fn an_override_of_an_unknown_stream_is_an_error() {
        let overrides = BTreeMap::from([("ACRI_LOG".to_owned(), Map::new())]);
        assert!(matches!(Authored::with(&overrides, true), Err(Error::Missing { .. })));
    }
}
