//! What a server says of itself.
//!
//! A nats-server that could not write to a stream once refuses that stream
//! until it is started again, also when there is room by then, and all its
//! other streams go on. A publisher gets no answer, the stream's facts look
//! as ever, and a lease is renewed in another stream: only the server knows.

use super::server::{Note, SYSTEM_USER};
use serde::Deserialize;
use std::{path::Path, time::Duration};

/// How long it may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// How a server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    /// It says that it can do all that it is there for.
    Well,
    /// It says that it cannot, and why: a stream takes nothing more, for one.
    Fails(String),
    /// It does not answer, or not in a way that can be read.
    Silent(String),
}

#[derive(Debug, Deserialize)]
struct Answer {
    data: Option<Data>,
}

#[derive(Debug, Deserialize)]
struct Data {
    status: String,
    #[serde(default)]
    error: Option<String>,
    #[serde(default)]
    errors: Vec<Detail>,
}

#[derive(Debug, Deserialize)]
struct Detail {
    error: String,
}

/// The health of the server that runs on `store` now; `None` if none does.
/// For another process of the same user.
pub async fn health_of(store: &Path) -> Option<Health> {
    let note = Note::read(store)?;
    if note.runs() { Some(ask(&note).await) } else { None }
}

pub(super) async fn ask(note: &Note) -> Health {
    match tokio::time::timeout(ANSWER_TIMEOUT, asked(note)).await {
        Ok(Ok(bytes)) => read(&bytes),
        Ok(Err(detail)) => Health::Silent(detail),
        Err(_) => Health::Silent(format!("no answer in {} s", ANSWER_TIMEOUT.as_secs())),
    }
}

async fn asked(note: &Note) -> Result<bytes::Bytes, String> {
    let url: async_nats::ServerAddr = note.url(SYSTEM_USER).parse().map_err(|error| format!("{error}"))?;
    let options = async_nats::ConnectOptions::new().connection_timeout(ANSWER_TIMEOUT).max_reconnects(1);
    let client = crate::login::from_urls(options, std::slice::from_ref(&url))
        .connect(url)
        .await
        .map_err(|error| format!("connect to it: {error}"))?;
    let subject = format!("$SYS.REQ.SERVER.{}.HEALTHZ", client.server_info().server_id);
    let answer = client.request(subject, r#"{"details":true}"#.into()).await.map_err(|error| error.to_string())?;
    Ok(answer.payload)
}

fn read(bytes: &[u8]) -> Health {
    match serde_json::from_slice::<Answer>(bytes) {
        Ok(Answer { data: Some(data) }) if data.status == "ok" => Health::Well,
        Ok(Answer { data: Some(data) }) => {
            let details = data.error.into_iter().chain(data.errors.into_iter().map(|detail| detail.error));
            let text = details.collect::<Vec<_>>().join("; ");
            Health::Fails(if text.is_empty() { data.status } else { text })
        }
        Ok(Answer { data: None }) => Health::Silent("an answer without health".to_owned()),
        Err(error) => Health::Silent(format!("an answer that cannot be read: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_says_of_itself_is_read_in_both_its_forms() {
        assert_eq!(read(br#"{"server":{"id":"N"},"data":{"status":"ok","status_code":200}}"#), Health::Well);
        let short = br#"{"data":{"status":"unavailable","error":"stream 'A' write error: no space left"}}"#;
        assert_eq!(read(short), Health::Fails("stream 'A' write error: no space left".to_owned()));
        let long = br#"{"data":{"status":"error","errors":[{"type":"STREAM","error":"one"},{"error":"two"}]}}"#;
        assert_eq!(read(long), Health::Fails("one; two".to_owned()));
        assert_eq!(read(br#"{"data":{"status":"error"}}"#), Health::Fails("error".to_owned()));
        assert!(matches!(read(br#"{"error":{"code":500}}"#), Health::Silent(_)));
        assert!(matches!(read(b"hello"), Health::Silent(_)));
    }
}
