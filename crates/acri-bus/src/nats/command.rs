//! Requests and replies, and heartbeats.

use super::{
    DRAIN_TIMEOUT, NatsBus,
    link::Miss,
    service::{QUEUE, Tally},
};
use crate::port::{Answer, Commands, Fault, Reply, Request, RequestError, RequestStream};
use acri::{AgentId, HarnessType, NodeId, Subject, codec::Format, subject::filter};
use async_nats::{Client, HeaderMap, Message};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{StreamExt as _, stream::BoxStream};
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

const SERVE: &str = "listen for commands";
const ASK: &str = "ask";
const HEARTBEATS: &str = "listen for heartbeats";
const CONTENT_TYPE: &str = "Content-Type";
const ERROR: &str = "Nats-Service-Error";
const ERROR_CODE: &str = "Nats-Service-Error-Code";

/// Only an inbox is answered. Whoever may call any JetStream API can make the
/// server send to a command subject, and whoever may send a command could
/// have the answer sent to one, or to the API.
pub(super) fn is_inbox(subject: &str) -> bool {
    subject.strip_prefix("_INBOX").is_some_and(|rest| rest.starts_with(['.', '_'])) && !subject.contains(['*', '>'])
}

/// `None` for a type that is not spoken here; MessagePack where none is named.
fn format_of(headers: Option<&HeaderMap>) -> Option<Format> {
    // Other languages' libraries write it as they like.
    let named = headers.and_then(|headers| {
        headers
            .iter()
            .find(|(name, _)| AsRef::<str>::as_ref(name).eq_ignore_ascii_case(CONTENT_TYPE))
            .and_then(|(_, values)| values.first())
    });
    match named {
        Some(value) => Format::of_content_type(value.as_str()),
        None => Some(Format::default()),
    }
}

struct InboxReply {
    client: Client,
    inbox: async_nats::Subject,
    tally: Option<Arc<Tally>>,
    begun: Instant,
}

#[async_trait]
impl Reply for InboxReply {
    async fn send(self: Box<Self>, answer: Answer) {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, answer.format.content_type());
        if let Some((code, text)) = &answer.error {
            headers.insert(ERROR_CODE, code.to_string());
            // A header is one line.
            let line: String =
                text.chars().map(|character| if character.is_control() { ' ' } else { character }).collect();
            headers.insert(ERROR, line);
        }
        if let Some(tally) = &self.tally {
            tally.answered(self.begun.elapsed(), answer.error.as_ref().map(|(_, text)| text.as_str()));
        }
        if let Err(error) = self.client.publish_with_headers(self.inbox, headers, answer.body).await {
            tracing::warn!(%error, "answer not sent");
        }
    }
}

fn request_of(client: &Client, message: Message, tally: Option<&Arc<Tally>>) -> Request {
    if let Some(tally) = tally {
        tally.arrived();
    }
    let format = format_of(message.headers.as_ref());
    let inbox = message.reply.filter(|reply| is_inbox(reply));
    let reply = inbox.map(|inbox| {
        let (client, tally) = (client.clone(), tally.map(Arc::clone));
        Box::new(InboxReply { client, inbox, tally, begun: Instant::now() }) as Box<dyn Reply>
    });
    Request { subject: message.subject.as_str().to_owned(), format, body: message.payload, reply }
}

fn answer_of(message: Message) -> Result<Answer, RequestError> {
    let malformed = |detail: String| RequestError::Fault(Fault::Malformed { operation: ASK, detail });
    let headers = message.headers.as_ref();
    let format = format_of(headers).ok_or_else(|| malformed("an answer of an unknown content type".to_owned()))?;
    let text = |name: &str| headers.and_then(|headers| headers.get(name)).map(|value| value.as_str().to_owned());
    let error = match text(ERROR_CODE) {
        None => None,
        Some(code) => {
            let code = code.parse().map_err(|_| malformed(format!("an error with the code {code:?}")))?;
            Some((code, text(ERROR).unwrap_or_default()))
        }
    };
    Ok(Answer { format, body: message.payload, error })
}

#[async_trait]
impl Commands for NatsBus {
    async fn serve_harness(&self, harness: &HarnessType) -> Result<RequestStream, Fault> {
        self.service.begin(&self.link).await?;
        let subject = filter::harness_commands(harness);
        let subscriber = self.link.subscribe(SERVE, &subject, Some(QUEUE)).await?;
        let listed = self.service.list(harness, subject);
        let client = self.link.client().clone();
        Ok(subscriber.map(move |message| request_of(&client, message, Some(listed.tally()))).boxed())
    }

    async fn serve_agent(&self, agent: AgentId) -> Result<RequestStream, Fault> {
        let subscriber = self.link.subscribe(SERVE, &filter::agent_commands(agent), None).await?;
        let client = self.link.client().clone();
        Ok(subscriber.map(move |message| request_of(&client, message, None)).boxed())
    }

    async fn request(
        &self,
        subject: &Subject,
        format: Format,
        body: Bytes,
        timeout: Duration,
    ) -> Result<Answer, RequestError> {
        let subject = subject.to_string();
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, format.content_type());
        match self.link.exchange(ASK, &subject, Some(headers), body, timeout).await {
            Ok(message) => answer_of(message),
            Err(Miss::NoResponders) => Err(RequestError::NoResponders(subject)),
            Err(Miss::Unknown(fault) | Miss::Refused(fault)) => Err(RequestError::Fault(fault)),
        }
    }

    async fn heartbeat(&self, node: &NodeId, body: Bytes) {
        // Old news is worth nothing: none is kept for a bus that is away.
        if self.link.ready("publish a heartbeat", Duration::ZERO).await.is_err() {
            return;
        }
        let subject = Subject::Heartbeat(node.clone()).to_string();
        if let Err(error) = self.link.client().publish(subject, body).await {
            tracing::debug!(%error, "heartbeat not sent");
        }
    }

    async fn heartbeats(&self) -> Result<BoxStream<'static, Bytes>, Fault> {
        let subscriber = self.link.subscribe(HEARTBEATS, &filter::heartbeats(), None).await?;
        Ok(subscriber.map(|message| message.payload).boxed())
    }

    fn connections_lost(&self) -> u64 {
        self.link.losses()
    }

    async fn drain(&self) {
        let mut gate = self.link.gate();
        if let Err(error) = self.link.client().drain().await {
            tracing::debug!(%error, "connection not drained");
            return;
        }
        let closed = gate.wait_for(|gate| !matches!(gate, super::link::Gate::Open(_)));
        if tokio::time::timeout(DRAIN_TIMEOUT, closed).await.is_err() {
            tracing::debug!("the drain of the connection took too long");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_inboxes_are_answered() {
        for inbox in ["_INBOX.a.b", "_INBOX_node-1.a.b"] {
            assert!(is_inbox(inbox), "{inbox}");
        }
        for other in ["", "_INBOX", "_INBOXES.a", "$JS.API.STREAM.DELETE.ACRI_EVENTS", acri::subject::ROOT, "_INBOX.>"]
        {
            assert!(!is_inbox(other), "{other}");
        }
    }
}
