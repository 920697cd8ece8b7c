//! The event store over JetStream.

use super::{
    NatsBus,
    config::EVENTS,
    link::{ApiMiss, Link, Miss},
    reader::{Plan, Reader},
    wire::{Ack, Got, IN_FLIGHT, Info, NO_MESSAGE, Stored, WRONG_LAST_SEQUENCE, malformed},
};
use crate::port::{Append, Appended, EventSelection, EventStream, Events, Fault, Recorded, StreamFacts, Until, Why};
use acri::{AgentId, StreamSeq, Subject, limits::EVENT_BODY_BYTES_MAX, subject::filter};
use async_nats::{HeaderMap, Message, header};
use async_trait::async_trait;
use futures_util::StreamExt as _;
use serde_json::json;

const APPEND: &str = "append an event";
const LAST: &str = "read an agent's last event";
const READ: &str = "read events";
/// The subject, other than the message's own, whose last sequence is checked.
const EXPECTED_SUBJECT: &str = "Nats-Expected-Last-Subject-Sequence-Subject";

/// What an answer to a publish, or its absence, says.
pub(super) fn appended(operation: &'static str, answer: Result<Message, Miss>) -> Appended {
    let message = match answer {
        Ok(message) => message,
        Err(Miss::Refused(fault)) => return Appended::Refused(fault),
        Err(miss) => return Appended::Unknown(miss.into_fault(operation)),
    };
    let ack: Ack = match serde_json::from_slice(&message.payload) {
        Ok(ack) => ack,
        Err(error) => {
            return Appended::Unknown(Fault::Malformed { operation, detail: error.to_string() });
        }
    };
    match ack.error {
        Some(error) if error.err_code == WRONG_LAST_SEQUENCE => Appended::Conflict,
        Some(error) if error.err_code == IN_FLIGHT => Appended::InFlight,
        Some(error) if error.is_absence() => Appended::Unknown(error.into_fault(operation)),
        Some(error) => Appended::Refused(error.into_fault(operation)),
        None if ack.seq == 0 => {
            let detail = "an acknowledgement without a sequence".to_owned();
            Appended::Unknown(Fault::Malformed { operation, detail })
        }
        None if ack.duplicate => Appended::Duplicate(StreamSeq(ack.seq)),
        None => Appended::Stored(StreamSeq(ack.seq)),
    }
}

/// The last message under a subject or wildcard, from the leader.
pub(super) async fn last_under(
    link: &Link,
    operation: &'static str,
    stream: &str,
    filter: &str,
) -> Result<Option<Stored>, Fault> {
    let method = format!("STREAM.MSG.GET.{stream}");
    match link.api::<Got>(operation, &method, &json!({ "last_by_subj": filter })).await {
        Ok(got) => Ok(Some(got.message)),
        Err(ApiMiss::Api(error)) if error.err_code == NO_MESSAGE => Ok(None),
        Err(miss) => Err(miss.into_fault(operation)),
    }
}

pub(super) async fn facts(link: &Link, stream: &str) -> Result<StreamFacts, Fault> {
    const OPERATION: &str = "read a stream's facts";
    let info: Info = link
        .api(OPERATION, &format!("STREAM.INFO.{stream}"), &serde_json::Value::Null)
        .await
        .map_err(|miss| miss.into_fault(OPERATION))?;
    let created = info
        .created
        .parse()
        .map_err(|_| Fault::Malformed { operation: OPERATION, detail: "the time of its creation".to_owned() })?;
    Ok(StreamFacts {
        created,
        first: StreamSeq(info.state.first_seq),
        last: StreamSeq(info.state.last_seq),
        bytes: info.state.bytes,
        // Minus one is the server's word for none.
        bytes_max: info.config.get("max_bytes").and_then(serde_json::Value::as_u64).filter(|max| *max > 0),
    })
}

#[async_trait]
impl Events for NatsBus {
    async fn append(&self, append: &Append) -> Appended {
        let refused = |why: Why, detail: String| Appended::Refused(Fault::Refused { operation: APPEND, why, detail });
        let Subject::Event(agent, ..) = &append.subject else {
            return refused(Why::State, format!("{} is no event's subject", append.subject));
        };
        if append.bytes.len() > EVENT_BODY_BYTES_MAX {
            return refused(
                Why::TooLarge,
                format!("{} bytes, and {EVENT_BODY_BYTES_MAX} is the limit", append.bytes.len()),
            );
        }
        let mut headers = HeaderMap::new();
        headers.insert(header::NATS_MESSAGE_ID, append.id.to_string());
        headers.insert(header::NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, append.expect.to_string());
        headers.insert(EXPECTED_SUBJECT, filter::agent_events(*agent));
        let subject = append.subject.to_string();
        appended(APPEND, self.link.publish(APPEND, &subject, headers, append.bytes.clone()).await)
    }

    async fn last(&self, agent: AgentId) -> Result<Option<Recorded>, Fault> {
        let Some(stored) = last_under(&self.link, LAST, EVENTS, &filter::agent_events(agent)).await? else {
            return Ok(None);
        };
        let subject = stored.subject.parse().map_err(|_| malformed(LAST, stored.seq, "its subject"))?;
        Ok(Some(Recorded { seq: stored.seq(), time: stored.time(LAST)?, subject, bytes: stored.body(LAST)? }))
    }

    async fn read(&self, selection: EventSelection, from: StreamSeq, until: Until) -> Result<EventStream, Fault> {
        let filter = match selection {
            EventSelection::All => filter::all_events(),
            EventSelection::Agent(agent) => filter::agent_events(agent),
            EventSelection::Run(agent, run) => filter::run_events(agent, run),
        };
        let reader = Reader::begin(&self.link, Plan { operation: READ, stream: EVENTS, filter, from, until }).await?;
        let events = reader.messages().filter_map(|message| {
            std::future::ready(match message {
                Err(fault) => Some(Err(fault)),
                Ok((delivery, message)) => match message.subject.as_str().parse() {
                    Ok(subject) => Some(Ok(Recorded {
                        seq: StreamSeq(delivery.stream_seq),
                        time: delivery.time,
                        subject,
                        bytes: message.payload,
                    })),
                    // No event of any version: it must not stop every reader for ever.
                    Err(error) => {
                        tracing::warn!(%error, seq = delivery.stream_seq, "message in the event stream skipped");
                        None
                    }
                },
            })
        });
        Ok(events.boxed())
    }

    async fn event_facts(&self) -> Result<StreamFacts, Fault> {
        facts(&self.link, EVENTS).await
    }
}
