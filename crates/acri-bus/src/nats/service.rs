//! The command side as a NATS service: `$SRV.PING`, `INFO` and `STATS`.
//!
//! The library's own service would answer any reply subject and subscribe one
//! by one; here one subscription and one task serve the whole.

use super::{command, link::Link};
use crate::port::Fault;
use acri::HarnessType;
use async_nats::{Client, Message};
use bytes::Bytes;
use chrono::{DateTime, SecondsFormat, Utc};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};
use tokio::task::JoinHandle;

/// All nodes that offer a harness share its commands.
pub(super) const QUEUE: &str = "acri";
const NAME: &str = "acri";
const VERSION: &str = env!("CARGO_PKG_VERSION");
const OPERATION: &str = "offer the service";

/// What one endpoint has done.
#[derive(Debug, Default)]
pub(super) struct Tally {
    requests: AtomicU64,
    errors: AtomicU64,
    nanos: AtomicU64,
    last_error: Mutex<String>,
}

impl Tally {
    pub(super) fn arrived(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn answered(&self, took: Duration, error: Option<&str>) {
        self.nanos.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        if let Some(error) = error {
            self.errors.fetch_add(1, Ordering::Relaxed);
            let shown = error.chars().take(200).collect();
            *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = shown;
        }
    }
}

struct Endpoint {
    name: String,
    subject: String,
    tally: Arc<Tally>,
}

type Endpoints = Mutex<BTreeMap<u64, Endpoint>>;

pub(super) struct Service {
    id: String,
    started: String,
    endpoints: Arc<Endpoints>,
    next: AtomicU64,
    task: tokio::sync::Mutex<Option<Task>>,
}

struct Task(JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An endpoint is listed as long as this lives.
pub(super) struct Listed {
    key: u64,
    tally: Arc<Tally>,
    endpoints: Weak<Endpoints>,
}

impl Listed {
    pub(super) fn tally(&self) -> &Arc<Tally> {
        &self.tally
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        if let Some(endpoints) = self.endpoints.upgrade() {
            endpoints.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
        }
    }
}

impl Service {
    pub(super) fn new(link: &Link) -> Self {
        let inbox = link.client().new_inbox();
        Self {
            id: inbox.rsplit('.').next().unwrap_or(&inbox).to_owned(),
            started: DateTime::<Utc>::from(SystemTime::now()).to_rfc3339_opts(SecondsFormat::Nanos, true),
            endpoints: Arc::default(),
            next: AtomicU64::new(0),
            task: tokio::sync::Mutex::new(None),
        }
    }

    /// Answers `$SRV` from now on; once.
    pub(super) async fn begin(&self, link: &Link) -> Result<(), Fault> {
        let mut task = self.task.lock().await;
        if task.is_some() {
            return Ok(());
        }
        let mut subscriber = link.subscribe(OPERATION, "$SRV.>", None).await?;
        let client = link.client().clone();
        let (id, started, endpoints) = (self.id.clone(), self.started.clone(), Arc::clone(&self.endpoints));
        *task = Some(Task(tokio::spawn(async move {
            while let Some(message) = subscriber.next().await {
                if let Some(body) = answer(&id, &started, &endpoints, &message.subject) {
                    send(&client, message, &body).await;
                }
            }
        })));
        Ok(())
    }

    pub(super) fn list(&self, harness: &HarnessType, subject: String) -> Listed {
        let key = self.next.fetch_add(1, Ordering::Relaxed);
        let tally = Arc::new(Tally::default());
        // A colon is no part of a service's names.
        let endpoint = Endpoint { name: harness.as_str().replace(':', "_"), subject, tally: Arc::clone(&tally) };
        self.endpoints.lock().unwrap_or_else(PoisonError::into_inner).insert(key, endpoint);
        Listed { key, tally, endpoints: Arc::downgrade(&self.endpoints) }
    }
}

async fn send(client: &Client, message: Message, body: &Value) {
    let Some(inbox) = message.reply.filter(|reply| command::is_inbox(reply)) else { return };
    let body = Bytes::from(body.to_string());
    if let Err(error) = client.publish(inbox, body).await {
        tracing::debug!(%error, "service answer not sent");
    }
}

/// `$SRV.<verb>`, `$SRV.<verb>.<name>`, `$SRV.<verb>.<name>.<id>`.
fn answer(id: &str, started: &str, endpoints: &Endpoints, subject: &str) -> Option<Value> {
    let mut tokens = subject.split('.').skip(1);
    let verb = tokens.next()?;
    let ours = tokens.next().is_none_or(|name| name == NAME) && tokens.next().is_none_or(|wanted| wanted == id);
    if !ours || tokens.next().is_some() {
        return None;
    }
    let endpoints = endpoints.lock().unwrap_or_else(PoisonError::into_inner);
    let mut body = json!({ "name": NAME, "id": id, "version": VERSION, "metadata": {} });
    let (kind, more) = match verb {
        "PING" => ("ping", json!({})),
        "INFO" => {
            let list: Vec<Value> = endpoints
                .values()
                .map(|endpoint| json!({ "name": endpoint.name, "subject": endpoint.subject, "queue_group": QUEUE, "metadata": {} }))
                .collect();
            ("info", json!({ "description": "runs AI agent harnesses", "endpoints": list }))
        }
        "STATS" => {
            let list: Vec<Value> = endpoints.values().map(Endpoint::stats).collect();
            ("stats", json!({ "started": started, "endpoints": list }))
        }
        _ => return None,
    };
    let fields = body.as_object_mut()?;
    fields.insert("type".to_owned(), Value::String(format!("io.nats.micro.v1.{kind}_response")));
    fields.extend(more.as_object()?.clone());
    Some(body)
}

impl Endpoint {
    fn stats(&self) -> Value {
        let requests = self.tally.requests.load(Ordering::Relaxed);
        let nanos = self.tally.nanos.load(Ordering::Relaxed);
        json!({
            "name": self.name,
            "subject": self.subject,
            "queue_group": QUEUE,
            "num_requests": requests,
            "num_errors": self.tally.errors.load(Ordering::Relaxed),
            "last_error": *self.tally.last_error.lock().unwrap_or_else(PoisonError::into_inner),
            "processing_time": nanos,
            "average_processing_time": nanos.checked_div(requests).unwrap_or(0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_answers_to_its_name_and_id_and_to_no_other() {
        let endpoints = Endpoints::default();
        let ask = |subject: &str| answer("one", "now", &endpoints, subject);
        for subject in ["$SRV.PING", "$SRV.INFO.acri", "$SRV.STATS.acri.one"] {
            assert!(ask(subject).is_some(), "{subject}");
        }
        for subject in ["$SRV.PING.other", "$SRV.PING.acri.two", "$SRV.DANCE", "$SRV", "$SRV.PING.acri.one.more"] {
            assert!(ask(subject).is_none(), "{subject}");
        }
        assert_eq!(ask("$SRV.PING").unwrap()["type"], "io.nats.micro.v1.ping_response");
    }
}
