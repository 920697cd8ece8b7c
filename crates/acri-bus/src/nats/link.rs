//! One connection, and the gate before it.
//!
//! ```text
//!   connected ─ check version and configuration ─> open ─ connection lost ─> shut ─ connected ─> …
//!                          └ they do not do ─> closed, and everything is refused
//! ```

use super::{Error, config::Authored, wire::ApiError};
use crate::{
    Version,
    port::{Fault, Why},
};
use async_nats::{
    Client, ConnectOptions, Event, HeaderMap, Message, Request, RequestErrorKind, ServerAddr, ServerError, Subscriber,
    connection::State,
};
use bytes::Bytes;
use serde::{Serialize, de::DeserializeOwned};
use std::{
    collections::VecDeque,
    hash::{BuildHasher as _, RandomState},
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

/// How often the connection is looked at besides its own events, which the
/// library may drop.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Pause before a check that got no answer is repeated.
const RECHECK_PAUSE: Duration = Duration::from_millis(100);
/// How often other tasks are let pass before a subscription counts as allowed.
const YIELDS: u32 = 16;
/// Refused subjects that are remembered for whoever waits on one.
const DENIED_MAX: usize = 256;

/// A random part of a pause, at least half of it.
pub(super) fn jittered(pause: Duration) -> Duration {
    let random = u32::try_from(RandomState::new().hash_one(0_u8) & 0xffff).unwrap_or(0);
    pause / 2 + (pause / 2) * random / 0xffff
}

/// What is known of the server behind the connection.
#[derive(Debug, Clone)]
pub(super) enum Gate {
    /// Checked. The number names this very connection.
    Open(u64),
    /// No connection, or not yet checked.
    Shut,
    /// Checked, and it does not do.
    Closed(Fault),
}

/// Which server, and which connection to it.
type Identity = (String, u64);

struct Shared {
    gate: watch::Sender<Gate>,
    wake: Notify,
    losses: AtomicU64,
    dropped: AtomicU64,
    denied: Mutex<VecDeque<(u64, String)>>,
    denials: watch::Sender<u64>,
}

pub(super) struct Link {
    client: Client,
    shared: Arc<Shared>,
    config: Arc<Authored>,
    timeout: Duration,
    messages_max: usize,
    subscribed: AtomicU64,
    settled: tokio::sync::Mutex<u64>,
}

/// What bounds the use of a connection.
pub(super) struct Limits {
    /// How long one publish or request may take.
    pub(super) timeout: Duration,
    /// Messages that one subscription may hold.
    pub(super) messages_max: usize,
}

/// Why an exchange has no answer.
#[derive(Debug)]
pub(super) enum Miss {
    /// It may have been carried out.
    Unknown(Fault),
    /// Nobody listens.
    NoResponders,
    /// It was not carried out, and a repeat will not help.
    Refused(Fault),
}

impl Miss {
    pub(super) fn into_fault(self, operation: &'static str) -> Fault {
        match self {
            Self::Unknown(fault) | Self::Refused(fault) => fault,
            Self::NoResponders => Fault::Unavailable { operation, detail: "nobody answers".to_owned() },
        }
    }
}

/// Why a request to the JetStream API failed.
#[derive(Debug)]
pub(super) enum ApiMiss {
    /// The server's own error.
    Api(ApiError),
    /// No usable answer.
    Fault(Fault),
}

impl ApiMiss {
    pub(super) fn into_fault(self, operation: &'static str) -> Fault {
        match self {
            Self::Api(error) => error.into_fault(operation),
            Self::Fault(fault) => fault,
        }
    }
}

impl Shared {
    fn on_event(&self, event: Event) {
        match event {
            Event::Disconnected => {
                self.losses.fetch_add(1, Ordering::SeqCst);
                self.shut();
                tracing::info!("bus connection lost");
            }
            // Drained: it does not come back.
            Event::Closed => {
                self.losses.fetch_add(1, Ordering::SeqCst);
                let detail = "the connection was closed".to_owned();
                self.gate.send_replace(Gate::Closed(Fault::Unavailable { operation: "use the bus", detail }));
            }
            Event::Connected => self.wake.notify_one(),
            // One for each message: a flood must not become a flood of lines.
            Event::SlowConsumer(_) => {
                let dropped = self.dropped.fetch_add(1, Ordering::Relaxed) + 1;
                if dropped.is_power_of_two() {
                    tracing::warn!(dropped, "a subscription is full, its newest messages are dropped");
                }
            }
            Event::ServerError(ServerError::Other(text)) => {
                tracing::warn!(error = %text, "bus server");
                if let Some(subject) = denied_subject(&text) {
                    self.denials.send_modify(|count| {
                        *count += 1;
                        let mut denied = self.denied.lock().unwrap_or_else(PoisonError::into_inner);
                        if denied.len() == DENIED_MAX {
                            denied.pop_front();
                        }
                        denied.push_back((*count, subject.to_owned()));
                    });
                }
            }
            other => tracing::debug!(event = %other, "bus connection"),
        }
    }

    fn shut(&self) {
        self.gate.send_if_modified(|gate| {
            let was_open = matches!(gate, Gate::Open(_));
            if was_open {
                *gate = Gate::Shut;
            }
            was_open
        });
    }

    fn denied_since(&self, since: u64, subject: &str) -> bool {
        let denied = self.denied.lock().unwrap_or_else(PoisonError::into_inner);
        denied.iter().any(|(count, denied)| *count > since && denied.eq_ignore_ascii_case(subject))
    }
}

/// The subject in `Permissions Violation for Publish to "..."`. The library
/// hands the text over in lower case, and ours are in lower case, except
/// those of the API.
fn denied_subject(text: &str) -> Option<&str> {
    let lower = text.to_ascii_lowercase();
    lower.contains("permissions violation").then_some(())?;
    text.split('"').nth(1)
}

impl Link {
    pub(super) async fn open(
        options: ConnectOptions,
        urls: Vec<ServerAddr>,
        config: Arc<Authored>,
        limits: Limits,
        provision: bool,
    ) -> Result<Arc<Self>, Error> {
        let shared = Arc::new(Shared {
            gate: watch::Sender::new(Gate::Shut),
            wake: Notify::new(),
            losses: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            denied: Mutex::new(VecDeque::new()),
            denials: watch::Sender::new(0),
        });
        let told = Arc::clone(&shared);
        let options = options.event_callback(move |event| {
            told.on_event(event);
            std::future::ready(())
        });
        let client = options.connect(urls).await.map_err(|error| Error::Connect { detail: error.to_string() })?;
        let link = Arc::new(Self {
            client,
            shared,
            config,
            timeout: limits.timeout,
            messages_max: limits.messages_max,
            subscribed: AtomicU64::new(0),
            settled: tokio::sync::Mutex::new(0),
        });
        let identity = link.check(provision).await?;
        link.shared.gate.send_replace(Gate::Open(1));
        tokio::spawn(watch_over(Arc::downgrade(&link), Arc::clone(&link.shared), identity));
        Ok(link)
    }

    /// How often the connection was lost.
    pub(super) fn losses(&self) -> u64 {
        self.shared.losses.load(Ordering::SeqCst)
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    /// Messages that one subscription may hold.
    pub(super) fn messages_max(&self) -> usize {
        self.messages_max
    }

    pub(super) fn config(&self) -> &Authored {
        &self.config
    }

    pub(super) fn gate(&self) -> watch::Receiver<Gate> {
        self.shared.gate.subscribe()
    }

    fn identity(&self) -> Identity {
        let info = self.client.server_info();
        (info.server_id, info.client_id)
    }

    /// Checks the server that is connected, and says which one it was.
    async fn check(&self, provision: bool) -> Result<Identity, Error> {
        // The first answer proves that the server's greeting is that of this connection.
        self.check_version()?;
        self.config.check(self, provision).await?;
        self.check_version()?;
        Ok(self.identity())
    }

    fn check_version(&self) -> Result<(), Error> {
        let info = self.client.server_info();
        match info.version.parse::<Version>() {
            Ok(version) if version >= Version::FLOOR => {}
            _ => return Err(Error::TooOld { found: info.version.chars().take(80).collect() }),
        }
        let setting = |field, found: String, wanted: String| Err(Error::Server { field, found, wanted });
        if !info.jetstream {
            return setting("jetstream", "off".to_owned(), "on".to_owned());
        }
        if info.max_payload < acri::limits::FRAME_MESSAGE_BYTES_MAX {
            let wanted = acri::limits::FRAME_MESSAGE_BYTES_MAX.to_string();
            return setting("max_payload", info.max_payload.to_string(), wanted);
        }
        Ok(())
    }

    /// Waits until the gate is open, and names the connection.
    pub(super) async fn ready(&self, operation: &'static str, within: Duration) -> Result<u64, Miss> {
        let mut gate = self.gate();
        let known = tokio::time::timeout(within, gate.wait_for(|gate| !matches!(gate, Gate::Shut))).await;
        let known = match known {
            Ok(Ok(known)) => known.clone(),
            Ok(Err(_)) | Err(_) => Gate::Shut,
        };
        match known {
            Gate::Open(connection) => Ok(connection),
            Gate::Closed(fault) => Err(Miss::Refused(fault)),
            Gate::Shut => {
                Err(Miss::Unknown(Fault::Unavailable { operation, detail: "the bus is not connected".to_owned() }))
            }
        }
    }

    /// One request and its one answer, through the gate.
    pub(super) async fn exchange(
        &self,
        operation: &'static str,
        subject: &str,
        headers: Option<HeaderMap>,
        body: Bytes,
        within: Duration,
    ) -> Result<Message, Miss> {
        let deadline = Instant::now() + within;
        let connection = self.ready(operation, within).await?;
        let mut gate = self.gate();
        let lost = gate.wait_for(|gate| !matches!(gate, Gate::Open(current) if *current == connection));
        tokio::select! {
            answer = self.ask(operation, subject, headers, body, deadline) => answer,
            _ = lost => {
                let detail = "the connection was lost while it waited".to_owned();
                Err(Miss::Unknown(Fault::Unavailable { operation, detail }))
            }
        }
    }

    /// The same, whatever the gate says.
    async fn ask(
        &self,
        operation: &'static str,
        subject: &str,
        headers: Option<HeaderMap>,
        body: Bytes,
        deadline: Instant,
    ) -> Result<Message, Miss> {
        let mut denials = self.shared.denials.subscribe();
        let since = *denials.borrow_and_update();
        let left = deadline.saturating_duration_since(Instant::now());
        let mut request = Request::new().payload(body).timeout(Some(left));
        if let Some(headers) = headers {
            request = request.headers(headers);
        }
        let denied = async {
            loop {
                if denials.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
                if self.shared.denied_since(since, subject) {
                    return;
                }
            }
        };
        // The library's time-out does not cover its own full queue.
        let sent = tokio::time::timeout_at(deadline, self.client.send_request(subject.to_owned(), request));
        let answer = tokio::select! {
            answer = sent => answer,
            () = denied => {
                let detail = format!("no permission to publish to {subject}");
                return Err(Miss::Refused(Fault::Refused { operation, why: Why::Permission, detail }));
            }
        };
        let unknown = |detail: String| Err(Miss::Unknown(Fault::Unavailable { operation, detail }));
        match answer {
            Ok(Ok(message)) => Ok(message),
            Ok(Err(error)) => match error.kind() {
                RequestErrorKind::NoResponders => Err(Miss::NoResponders),
                RequestErrorKind::InvalidSubject => {
                    Err(Miss::Refused(Fault::Refused { operation, why: Why::State, detail: error.to_string() }))
                }
                RequestErrorKind::MaxPayloadExceeded => {
                    Err(Miss::Refused(Fault::Refused { operation, why: Why::TooLarge, detail: error.to_string() }))
                }
                RequestErrorKind::TimedOut | RequestErrorKind::Other => unknown(error.to_string()),
            },
            Err(_) => unknown("it was not sent in time".to_owned()),
        }
    }

    /// One request to the JetStream API, through the gate.
    pub(super) async fn api<T: DeserializeOwned>(
        &self,
        operation: &'static str,
        method: &str,
        body: &impl Serialize,
    ) -> Result<T, ApiMiss> {
        let body = Bytes::from(serde_json::to_vec(body).expect("a request is plain data"));
        let subject = format!("$JS.API.{method}");
        let answer = self.exchange(operation, &subject, None, body, self.timeout).await;
        parsed(operation, answer)
    }

    /// The same, for the check itself.
    pub(super) async fn api_unchecked<T: DeserializeOwned>(
        &self,
        operation: &'static str,
        method: &str,
        body: &impl Serialize,
    ) -> Result<T, ApiMiss> {
        let body = Bytes::from(serde_json::to_vec(body).expect("a request is plain data"));
        let subject = format!("$JS.API.{method}");
        let answer = self.ask(operation, &subject, None, body, Instant::now() + self.timeout).await;
        parsed(operation, answer)
    }

    /// One publish to a stream and its acknowledgement.
    pub(super) async fn publish(
        &self,
        operation: &'static str,
        subject: &str,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<Message, Miss> {
        self.exchange(operation, subject, Some(headers), body, self.timeout).await
    }

    /// Subscribes, and waits for a round trip: from then on the server knows.
    pub(super) async fn subscribe(
        &self,
        operation: &'static str,
        subject: &str,
        queue: Option<&str>,
    ) -> Result<Subscriber, Fault> {
        self.ready(operation, self.timeout).await.map_err(|miss| miss.into_fault(operation))?;
        let since = *self.shared.denials.borrow();
        let subscribed = match queue {
            Some(queue) => self.client.queue_subscribe(subject.to_owned(), queue.to_owned()).await,
            None => self.client.subscribe(subject.to_owned()).await,
        };
        let subscriber =
            subscribed.map_err(|error| Fault::Refused { operation, why: Why::State, detail: error.to_string() })?;
        self.settle(operation).await?;
        // The server's refusal came before that answer, and is told by another task.
        for _ in 0..YIELDS {
            tokio::task::yield_now().await;
        }
        if self.shared.denied_since(since, subject) {
            return Err(Fault::Refused {
                operation,
                why: Why::Permission,
                detail: format!("no permission to subscribe to {subject}"),
            });
        }
        Ok(subscriber)
    }

    /// A round trip that began after everything sent so far. Whoever waits
    /// shares it: ten thousand subscriptions cost a few.
    async fn settle(&self, operation: &'static str) -> Result<(), Fault> {
        let mine = self.subscribed.fetch_add(1, Ordering::SeqCst) + 1;
        let mut settled = self.settled.lock().await;
        if *settled >= mine {
            return Ok(());
        }
        let covered = self.subscribed.load(Ordering::SeqCst);
        // Any answer will do; to this request the server has one without a look.
        let nothing = serde_json::json!({});
        match self.api::<serde_json::Value>(operation, "STREAM.MSG.GET.ACRI_EVENTS", &nothing).await {
            Ok(_) | Err(ApiMiss::Api(_)) => {
                *settled = covered;
                Ok(())
            }
            Err(ApiMiss::Fault(fault)) => Err(fault),
        }
    }
}

fn parsed<T: DeserializeOwned>(operation: &'static str, answer: Result<Message, Miss>) -> Result<T, ApiMiss> {
    #[derive(serde::Deserialize)]
    struct Failure {
        error: ApiError,
    }
    let message = answer.map_err(|miss| ApiMiss::Fault(miss.into_fault(operation)))?;
    if let Ok(failure) = serde_json::from_slice::<Failure>(&message.payload) {
        return Err(ApiMiss::Api(failure.error));
    }
    serde_json::from_slice(&message.payload)
        .map_err(|error| ApiMiss::Fault(Fault::Malformed { operation, detail: error.to_string() }))
}

/// Checks each new connection before the gate opens for it; ends with the link.
async fn watch_over(link: Weak<Link>, shared: Arc<Shared>, mut known: Identity) {
    let mut connection = 1_u64;
    loop {
        tokio::select! {
            () = shared.wake.notified() => {}
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
        let Some(link) = link.upgrade() else { return };
        if link.client.connection_state() != State::Connected {
            continue;
        }
        let open = matches!(*shared.gate.borrow(), Gate::Open(_));
        if open && link.identity() == known {
            continue;
        }
        let closed = matches!(*shared.gate.borrow(), Gate::Closed(_));
        if closed && link.identity() == known {
            continue;
        }
        shared.shut();
        let losses = shared.losses.load(Ordering::SeqCst);
        match link.check(false).await {
            Ok(identity) => {
                known = identity;
                connection += 1;
                shared.gate.send_if_modified(|gate| {
                    // Lost again in the meantime: that event shut a gate that was not open.
                    let same = shared.losses.load(Ordering::SeqCst) == losses;
                    if same {
                        *gate = Gate::Open(connection);
                    }
                    same
                });
                tracing::info!(server = %known.0, "bus server checked");
            }
            Err(Error::Fault(fault)) => {
                tracing::debug!(%fault, "bus server not checked yet");
                shared.wake.notify_one();
                tokio::time::sleep(RECHECK_PAUSE).await;
            }
            Err(error) => {
                tracing::error!(%error, "bus server refused");
                known = link.identity();
                let detail = error.to_string();
                shared.gate.send_replace(Gate::Closed(Fault::Refused {
                    operation: "use the bus",
                    why: Why::State,
                    detail,
                }));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_refused_subject_is_read_out_of_the_servers_text() {
        let text = "Permissions Violation for Publish to \"some.where\"";
        assert_eq!(denied_subject(text), Some("some.where"));
        assert_eq!(denied_subject("Slow Consumer Detected"), None);
    }
}
