//! The log store over JetStream.

use super::{
    NatsBus,
    config::LOGS,
    events::{appended, facts, last_under},
    reader::{Plan, Reader},
};
use crate::port::{Appended, Fault, FrameAppend, FrameMark, FrameStream, Logs, RecordedFrame, StreamFacts, Until};
use acri::{
    AgentId, Epoch, RunId, StreamSeq, Subject, codec,
    log::{
        ResumeToken,
        header::{EPOCH, RESUME},
    },
};
use async_nats::{HeaderMap, HeaderValue, header};
use async_trait::async_trait;
use base64::{Engine as _, engine::general_purpose::STANDARD};

use futures_util::StreamExt as _;

const APPEND: &str = "append a log frame";
const LAST: &str = "read a run's last log frame";
const READ: &str = "read log frames";

/// None if a header is missing, or is not what a writer makes it.
fn mark<'a>(header: impl Fn(&str) -> Option<&'a str>) -> Option<FrameMark> {
    let epoch = Epoch(header(EPOCH)?.parse().ok()?);
    let resume = STANDARD.decode(header(RESUME)?).ok()?;
    codec::from_msgpack::<ResumeToken>(&resume).ok()?;
    Some(FrameMark { epoch, resume: resume.into() })
}

#[async_trait]
impl Logs for NatsBus {
    async fn append_frame(&self, append: &FrameAppend) -> Appended {
        let mut headers = HeaderMap::new();
        headers.insert(header::NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, append.expect.to_string());
        headers.insert(EPOCH, append.epoch.to_string());
        headers.insert(RESUME, STANDARD.encode(&append.resume));
        let subject = Subject::Log(append.agent, append.run).to_string();
        match appended(APPEND, self.link.publish(APPEND, &subject, headers, append.bytes.clone()).await) {
            // Without a message id there are none; whoever says so is no stream of ours.
            Appended::Duplicate(seq) => {
                let detail = format!("a duplicate at sequence {seq}, without an id");
                Appended::Unknown(Fault::Malformed { operation: APPEND, detail })
            }
            outcome => outcome,
        }
    }

    async fn last_frame(&self, agent: AgentId, run: Option<RunId>) -> Result<Option<RecordedFrame>, Fault> {
        let subject = Subject::Log(agent, run).to_string();
        let Some(stored) = last_under(&self.link, LAST, LOGS, &subject).await? else {
            return Ok(None);
        };
        let headers = stored.headers(LAST)?;
        Ok(Some(RecordedFrame {
            seq: stored.seq(),
            time: stored.time(LAST)?,
            mark: mark(|name| headers.get(name)),
            bytes: stored.body(LAST)?,
        }))
    }

    async fn read_frames(
        &self,
        agent: AgentId,
        run: Option<RunId>,
        from: StreamSeq,
        until: Until,
    ) -> Result<FrameStream, Fault> {
        let filter = Subject::Log(agent, run).to_string();
        let reader = Reader::begin(&self.link, Plan { operation: READ, stream: LOGS, filter, from, until }).await?;
        let frames = reader.messages().map(|message| {
            let (delivery, message) = message?;
            let headers = message.headers.as_ref();
            Ok(RecordedFrame {
                seq: StreamSeq(delivery.stream_seq),
                time: delivery.time,
                mark: mark(|name| headers?.get(name).map(HeaderValue::as_str)),
                bytes: message.payload.clone(),
            })
        });
        Ok(frames.boxed())
    }

    async fn log_facts(&self) -> Result<StreamFacts, Fault> {
        facts(&self.link, LOGS).await
    }
}
