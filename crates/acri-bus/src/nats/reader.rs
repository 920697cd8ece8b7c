//! A read in stream order over a consumer of its own.
//!
//! ```text
//!   open: consumer from the next sequence ─ pull, pull, … ─ a gap, silence, another connection ─┐
//!     ^────────────────────────── back to the sequence after the last one given out <───────────┘
//! ```
//! The library's ordered consumer is not used: it waits for two missed
//! heartbeats where a lost connection can be known at once, its pulls have no
//! limit in bytes by default, and it cannot say that it has reached an end.
//! No task runs behind a reader: it is polled, or it stands still.

use super::{
    events::last_under,
    link::{ApiMiss, Gate, Link, jittered},
    wire::{Consumer, Delivery, Got, Info, NO_MESSAGE, Stored},
};
use crate::port::{Fault, Until, Why};
use acri::StreamSeq;
use async_nats::{Message, StatusCode, Subscriber};
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use serde_json::json;
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

/// Messages asked for at a time, if a subscription may hold four times as many.
const PULL_MESSAGES_MAX: usize = 500;
/// Bytes asked for at a time; above the largest message.
const PULL_BYTES_MAX: i64 = 4 * 1024 * 1024;
/// How long a pull waits for messages.
const PULL_EXPIRES: Duration = Duration::from_secs(60);
/// How often the server says that a pull still waits, when following.
const HEARTBEAT_FOLLOWING: Duration = Duration::from_secs(10);
/// The same, when an end is near.
const HEARTBEAT_ENDING: Duration = Duration::from_secs(1);
/// How long the server keeps a consumer without a pull.
const CONSUMER_IDLE_MAX: Duration = Duration::from_secs(120);
/// Longest pause before a consumer is made anew.
const REOPEN_PAUSE_MAX: Duration = Duration::from_secs(2);
/// Openings without a message after which one is read by itself.
const FAILURES_MAX: u32 = 2;
/// How long a read that has to end may be without an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// What is read, and from where.
pub(super) struct Plan {
    pub(super) operation: &'static str,
    pub(super) stream: &'static str,
    pub(super) filter: String,
    pub(super) from: StreamSeq,
    pub(super) until: Until,
}

struct Session {
    subscriber: Subscriber,
    consumer: String,
    inbox: String,
    connection: u64,
    consumer_seq: u64,
    messages_asked: i64,
    bytes_asked: i64,
}

pub(super) struct Reader {
    link: Arc<Link>,
    plan: Plan,
    /// The sequence after the last one given out.
    next: u64,
    /// The last one to be given out, where there is an end.
    target: Option<u64>,
    /// When the stream was created: another value, another stream. Known
    /// where it matters, in a read that goes on.
    created: Option<String>,
    session: Option<Session>,
    /// Openings without a message since.
    failures: u32,
    opened_before: bool,
    silent_since: Instant,
}

/// What a message tells, besides itself.
enum Heard {
    Data(Delivery),
    /// Nothing was said that matters.
    Nothing,
    /// The server is alive and has nothing now.
    Idle,
    /// The consumer is gone, or something was missed.
    Broken,
}

impl Reader {
    pub(super) async fn begin(link: &Arc<Link>, plan: Plan) -> Result<Self, Fault> {
        let operation = plan.operation;
        let next = plan.from.0.max(1);
        let (target, created) = match plan.until {
            Until::Dropped => {
                let info: Info = link
                    .api(operation, &format!("STREAM.INFO.{}", plan.stream), &serde_json::Value::Null)
                    .await
                    .map_err(|miss| miss.into_fault(operation))?;
                (None, Some(info.created))
            }
            // The leader's word, since a consumer may sit on a follower that is behind.
            Until::Now => {
                let last = last_under(link, operation, plan.stream, &plan.filter).await?;
                (Some(last.map_or(0, |last| last.seq)), None)
            }
        };
        Ok(Self {
            link: Arc::clone(link),
            plan,
            next,
            target,
            created,
            session: None,
            failures: 0,
            opened_before: false,
            silent_since: Instant::now(),
        })
    }

    /// The messages, until the end, or until a fault.
    pub(super) fn messages(self) -> impl Stream<Item = Result<(Delivery, Message), Fault>> + Send + 'static {
        futures_util::stream::unfold(Some(self), |reader| async move {
            let mut reader = reader?;
            match reader.next().await {
                Ok(Some(message)) => Some((Ok(message), Some(reader))),
                Ok(None) => None,
                Err(fault) => Some((Err(fault), None)),
            }
        })
    }

    fn ended(&self) -> bool {
        self.target.is_some_and(|target| self.next > target)
    }

    async fn next(&mut self) -> Result<Option<(Delivery, Message)>, Fault> {
        loop {
            if self.ended() {
                return Ok(None);
            }
            if self.session.is_none() {
                if self.failures >= FAILURES_MAX
                    && let Some(found) = self.by_itself().await?
                {
                    return Ok(Some(found));
                }
                if !self.open().await? {
                    return Ok(None);
                }
            }
            self.pull().await?;
            match self.hear().await {
                None | Some((Heard::Broken, _)) => self.broken()?,
                Some((Heard::Nothing, _)) => {}
                Some((Heard::Idle, _)) => {
                    self.silent_since = Instant::now();
                    self.failures = 0;
                    if self.nothing_left().await? {
                        return Ok(None);
                    }
                }
                Some((Heard::Data(delivery), message)) => {
                    self.silent_since = Instant::now();
                    self.failures = 0;
                    // A consumer made before its start existed begins earlier.
                    if delivery.stream_seq < self.next {
                        continue;
                    }
                    if self.target.is_some_and(|target| delivery.stream_seq > target) {
                        return Ok(None);
                    }
                    self.next = delivery.stream_seq + 1;
                    if delivery.pending == 0 && !self.ended() && self.nothing_left().await? {
                        self.target = Some(delivery.stream_seq);
                    }
                    return Ok(Some((delivery, message)));
                }
            }
        }
    }

    /// The session is given up; a read that has to end does not try for ever.
    fn broken(&mut self) -> Result<(), Fault> {
        self.close();
        self.failures = self.failures.saturating_add(1);
        if self.target.is_some() && self.silent_since.elapsed() > ANSWER_TIMEOUT {
            let (operation, detail) = (self.plan.operation, "the read stood still".to_owned());
            return Err(Fault::Unavailable { operation, detail });
        }
        Ok(())
    }

    fn close(&mut self) {
        let Some(session) = self.session.take() else { return };
        let method = format!("$JS.API.CONSUMER.DELETE.{}.{}", self.plan.stream, session.consumer);
        let client = self.link.client().clone();
        // The server would do it by itself after two minutes.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                if let Err(error) = client.publish(method, Bytes::new()).await {
                    tracing::debug!(%error, "consumer left to its time-out");
                }
            });
        }
    }

    /// Reads the next message without a consumer: with headers that are no text
    /// it costs the connection that a consumer delivers it on, each time. None
    /// if it is not there, or nobody answers.
    async fn by_itself(&mut self) -> Result<Option<(Delivery, Message)>, Fault> {
        let operation = self.plan.operation;
        let Ok(Some(stored)) = self.stored().await else { return Ok(None) };
        if self.target.is_some_and(|target| stored.seq > target) {
            return Ok(None);
        }
        tracing::warn!(stream = self.plan.stream, seq = stored.seq, "message read by itself");
        self.next = stored.seq + 1;
        self.silent_since = Instant::now();
        self.failures = 0;
        let delivery =
            Delivery { stream_seq: stored.seq, consumer_seq: 0, time: stored.time(operation)?, pending: u64::MAX };
        Ok(Some((delivery, stored.message(operation)?)))
    }

    /// Makes a consumer from `next` on. `false`: there is nothing to read.
    async fn open(&mut self) -> Result<bool, Fault> {
        loop {
            if self.failures > 0 {
                let doublings = self.failures.min(8);
                let pause = Duration::from_millis(10 << doublings).min(REOPEN_PAUSE_MAX);
                tokio::time::sleep(jittered(pause)).await;
            }
            match self.try_open().await {
                Ok(something) => {
                    self.opened_before = true;
                    return Ok(something);
                }
                Err(Fault::Unavailable { .. }) if self.target.is_none() => {
                    self.failures = self.failures.saturating_add(1);
                }
                Err(fault @ Fault::Unavailable { .. }) => {
                    if self.silent_since.elapsed() > ANSWER_TIMEOUT {
                        return Err(fault);
                    }
                    self.failures = self.failures.saturating_add(1);
                }
                Err(fault) => return Err(fault),
            }
        }
    }

    async fn try_open(&mut self) -> Result<bool, Fault> {
        let operation = self.plan.operation;
        let fault = |miss: ApiMiss| miss.into_fault(operation);
        // A subscription lives on over a reconnect, the pulls that it waits for do not.
        let connection = self.link.ready(operation, ANSWER_TIMEOUT).await.map_err(|miss| miss.into_fault(operation))?;
        if self.opened_before {
            self.same_stream().await?;
        }
        let client = self.link.client();
        let inbox = client.new_inbox();
        let subscriber = client
            .subscribe(inbox.clone())
            .await
            .map_err(|error| Fault::Unavailable { operation, detail: error.to_string() })?;
        let consumer = inbox.rsplit('.').next().unwrap_or(&inbox).to_owned();
        let nanos = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let request = json!({
            "stream_name": self.plan.stream,
            "action": "create",
            "config": {
                "name": consumer,
                "deliver_policy": "by_start_sequence",
                "opt_start_seq": self.next,
                "ack_policy": "none",
                "replay_policy": "instant",
                "filter_subject": self.plan.filter,
                "inactive_threshold": nanos(CONSUMER_IDLE_MAX),
                "max_deliver": 1,
                "num_replicas": 1,
                "mem_storage": true,
            },
        });
        let method = format!("CONSUMER.CREATE.{}.{consumer}.{}", self.plan.stream, self.plan.filter);
        let made: Consumer = self.link.api(operation, &method, &request).await.map_err(fault)?;
        self.session = Some(Session {
            subscriber,
            consumer,
            inbox,
            connection,
            consumer_seq: 0,
            messages_asked: 0,
            bytes_asked: 0,
        });
        if made.num_pending == 0 && self.nothing_left().await? {
            self.close();
            return Ok(false);
        }
        Ok(true)
    }

    /// After a loss of sight: a stream that was created anew or rolled back is
    /// not the one that was read.
    async fn same_stream(&self) -> Result<(), Fault> {
        let operation = self.plan.operation;
        let method = format!("STREAM.INFO.{}", self.plan.stream);
        let info: Info = self
            .link
            .api(operation, &method, &serde_json::Value::Null)
            .await
            .map_err(|miss| miss.into_fault(operation))?;
        let refused = |detail: String| Err(Fault::Refused { operation, why: Why::State, detail });
        if let Some(created) = &self.created
            && *created != info.created
        {
            return refused(format!("the stream of {created} is another now, of {}", info.created));
        }
        if info.state.last_seq + 1 < self.next {
            return refused(format!("the stream was rolled back from {} to {}", self.next - 1, info.state.last_seq));
        }
        Ok(())
    }

    /// Whether, by the leader, nothing up to the target is left. A consumer
    /// may sit on a follower that is behind, so its silence proves nothing.
    async fn nothing_left(&self) -> Result<bool, Fault> {
        let Some(target) = self.target else { return Ok(false) };
        if self.next > target {
            return Ok(true);
        }
        Ok(self.stored().await?.is_none_or(|stored| stored.seq > target))
    }

    /// The next message, by the leader.
    async fn stored(&self) -> Result<Option<Stored>, Fault> {
        let operation = self.plan.operation;
        let request = json!({ "seq": self.next, "next_by_subj": self.plan.filter });
        let method = format!("STREAM.MSG.GET.{}", self.plan.stream);
        match self.link.api::<Got>(operation, &method, &request).await {
            Ok(got) => Ok(Some(got.message)),
            Err(ApiMiss::Api(error)) if error.err_code == NO_MESSAGE => Ok(None),
            Err(miss) => Err(miss.into_fault(operation)),
        }
    }

    fn heartbeat(&self) -> Duration {
        if self.target.is_some() { HEARTBEAT_ENDING } else { HEARTBEAT_FOLLOWING }
    }

    /// Asks for more when half of what was asked for has come.
    async fn pull(&mut self) -> Result<(), Fault> {
        let heartbeat = self.heartbeat();
        let Some(session) = &mut self.session else { return Ok(()) };
        let messages = i64::try_from(PULL_MESSAGES_MAX.min(self.link.messages_max() / 4)).unwrap_or(i64::MAX);
        let enough = session.messages_asked > messages / 2 && session.bytes_asked > PULL_BYTES_MAX / 2;
        if enough {
            return Ok(());
        }
        let request = json!({
            "batch": messages,
            "max_bytes": PULL_BYTES_MAX,
            "expires": u64::try_from(PULL_EXPIRES.as_nanos()).unwrap_or(u64::MAX),
            "idle_heartbeat": u64::try_from(heartbeat.as_nanos()).unwrap_or(u64::MAX),
        });
        let body = Bytes::from(serde_json::to_vec(&request).expect("a request is plain data"));
        let subject = format!("$JS.API.CONSUMER.MSG.NEXT.{}.{}", self.plan.stream, session.consumer);
        session.messages_asked += messages;
        session.bytes_asked = (session.bytes_asked + PULL_BYTES_MAX).min(2 * PULL_BYTES_MAX);
        let operation = self.plan.operation;
        let sent = self.link.client().publish_with_reply(subject, session.inbox.clone(), body).await;
        sent.map_err(|error| Fault::Unavailable { operation, detail: error.to_string() })
    }

    /// The next thing on the subscription; `None` if the connection was lost
    /// or nothing came for more than two heartbeats.
    async fn hear(&mut self) -> Option<(Heard, Message)> {
        let silence = self.heartbeat() * 5 / 2;
        let session = self.session.as_mut()?;
        let connection = session.connection;
        // What is there is taken without asking the clock or the gate.
        let ready = futures_util::FutureExt::now_or_never(session.subscriber.next());
        let message = match ready {
            Some(message) => message?,
            None => {
                let mut gate = self.link.gate();
                let lost = gate.wait_for(|gate| !matches!(gate, Gate::Open(current) if *current == connection));
                tokio::select! {
                    message = tokio::time::timeout(silence, session.subscriber.next()) => message.ok()??,
                    _ = lost => return None,
                }
            }
        };
        Some((session.take(&message), message))
    }
}

impl Session {
    fn take(&mut self, message: &Message) -> Heard {
        let Some(status) = message.status else {
            let Some(delivery) = message.reply.as_deref().and_then(Delivery::of_reply) else {
                return Heard::Nothing;
            };
            self.messages_asked -= 1;
            self.bytes_asked -= i64::try_from(message.length).unwrap_or(i64::MAX);
            if delivery.consumer_seq != self.consumer_seq + 1 {
                return Heard::Broken;
            }
            self.consumer_seq = delivery.consumer_seq;
            return Heard::Data(delivery);
        };
        if status == StatusCode::IDLE_HEARTBEAT {
            return Heard::Idle;
        }
        let about = message.description.as_deref().unwrap_or_default().to_ascii_lowercase();
        let pull_ended = status == StatusCode::TIMEOUT
            || status == StatusCode::NOT_FOUND
            || about.contains("batch completed")
            || about.contains("maxbytes");
        if !pull_ended {
            tracing::debug!(%status, %about, "consumer lost");
            return Heard::Broken;
        }
        let left = |name: &str| {
            let value = message.headers.as_ref().and_then(|headers| headers.get(name));
            value.and_then(|value| value.as_str().parse::<i64>().ok()).unwrap_or(0)
        };
        self.messages_asked -= left("Nats-Pending-Messages");
        self.bytes_asked -= left("Nats-Pending-Bytes");
        Heard::Nothing
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.close();
    }
}
