//! From a request that anybody may have sent to a command, or a reason why it
//! is none.

use crate::lease::Lease;
use acri::{
    AgentId, ErrorBody, ErrorCode, RunId, Subject,
    codec::{self, Format},
    command::{Checked, CreateAgent, Envelope, GetCapabilities, GetStatus, KillRun, RemoveAgent, StartRun, StopRun},
    limits::EVENT_BODY_BYTES_MAX,
    subject::{AgentVerb, HarnessVerb, RunVerb},
};
use acri_bus::port::{self, Reply, Request};
use acri_core::appender::{Answer, Command, Order};
use bytes::Bytes;
use serde::{Serialize, de::DeserializeOwned};
use std::sync::Arc;

/// What a harness's command subject was asked.
#[expect(clippy::large_enum_variant, reason = "it lives for a moment and is moved once")]
#[derive(Debug)]
pub(crate) enum HarnessOrder {
    /// Create an agent.
    Create(Envelope<CreateAgent>),
    /// Tell the capabilities.
    Capabilities,
}

fn envelope<T: DeserializeOwned + Checked>(request: &Request) -> Result<Envelope<T>, ErrorBody> {
    let format = request.format.ok_or_else(|| {
        ErrorBody::new(ErrorCode::Malformed, "the header `Content-Type` names neither MessagePack nor JSON")
    })?;
    if request.body.len() > EVENT_BODY_BYTES_MAX {
        let text = format!("the body has {} bytes, more than {EVENT_BODY_BYTES_MAX}", request.body.len());
        return Err(ErrorBody::new(ErrorCode::TooLarge, text));
    }
    let envelope: Envelope<T> = codec::decode(format, &request.body)?;
    envelope.check()?;
    Ok(envelope)
}

fn command<T>(envelope: Envelope<T>, order: impl FnOnce(T) -> Order) -> Command {
    Command { id: envelope.id, principal: envelope.principal, expires: envelope.expires, order: order(envelope.data) }
}

fn subject(request: &Request) -> Result<Subject, ErrorBody> {
    request.subject.parse().map_err(|error: acri::subject::Error| {
        let code = match error {
            acri::subject::Error::Verb(_) => ErrorCode::UnknownVerb,
            acri::subject::Error::Unknown(_) | acri::subject::Error::Id(_) | acri::subject::Error::Shard { .. } => {
                ErrorCode::InvalidArgument
            }
        };
        ErrorBody::new(code, error.to_string())
    })
}

/// Reads a command to an agent or one of its runs.
pub(crate) fn to_agent(agent: AgentId, request: &Request) -> Result<Command, ErrorBody> {
    let foreign = || ErrorBody::new(ErrorCode::InvalidArgument, "the subject is not one of this agent's commands");
    match subject(request)? {
        Subject::Agent(of, verb) if of == agent => Ok(match verb {
            AgentVerb::Start => command(envelope::<StartRun>(request)?, Order::Start),
            AgentVerb::Status => command(envelope::<GetStatus>(request)?, |_| Order::Status(None)),
            AgentVerb::Remove => command(envelope::<RemoveAgent>(request)?, Order::Remove),
        }),
        Subject::Run(of, run, verb) if of == agent => Ok(match verb {
            RunVerb::Status => command(envelope::<GetStatus>(request)?, |_| Order::Status(Some(run))),
            RunVerb::Stop => command(envelope::<StopRun>(request)?, |stop| Order::Stop(run, stop)),
            RunVerb::Kill => command(envelope::<KillRun>(request)?, |kill| Order::Kill(run, kill)),
        }),
        _ => Err(foreign()),
    }
}

/// Reads a command to a harness type.
pub(crate) fn to_harness(request: &Request) -> Result<HarnessOrder, ErrorBody> {
    match subject(request)? {
        Subject::Harness(harness, HarnessVerb::Create) => {
            let envelope = envelope::<CreateAgent>(request)?;
            if envelope.data.spec.harness != harness {
                let text =
                    format!("field `spec.harness` is {}, the subject says {harness}", envelope.data.spec.harness);
                return Err(ErrorBody::new(ErrorCode::InvalidArgument, text));
            }
            Ok(HarnessOrder::Create(envelope))
        }
        Subject::Harness(_, HarnessVerb::Capabilities) => {
            envelope::<GetCapabilities>(request)?;
            Ok(HarnessOrder::Capabilities)
        }
        _ => Err(ErrorBody::new(ErrorCode::InvalidArgument, "the subject is no command to a harness")),
    }
}

/// The way back to who asked. Dropped unused, wherever its command waited, it
/// says that its owner stopped: the asker repeats, and the next owner answers.
pub(crate) struct Back {
    reply: Option<Box<dyn Reply>>,
    format: Format,
    /// Without it nothing is said at the end either.
    lease: Option<Arc<Lease>>,
}

impl std::fmt::Debug for Back {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Back").field("format", &self.format).finish_non_exhaustive()
    }
}

impl Back {
    /// Takes the way back out of a request.
    pub(crate) fn of(request: &mut Request, lease: &Arc<Lease>) -> Self {
        let (reply, format) = (request.reply.take(), request.format.unwrap_or_default());
        Self { reply, format, lease: Some(Arc::clone(lease)) }
    }

    /// Nobody waits.
    pub(crate) fn nobody() -> Self {
        Self { reply: None, format: Format::default(), lease: None }
    }

    /// Whether anybody can be answered.
    pub(crate) fn is_open(&self) -> bool {
        self.reply.is_some()
    }

    /// Answers with a body.
    pub(crate) async fn send<T: Serialize + Sync>(mut self, body: &T) {
        let Some(reply) = self.reply.take() else { return };
        match codec::encode(self.format, body) {
            Ok(bytes) => reply.send(port::Answer { format: self.format, body: bytes.into(), error: None }).await,
            Err(error) => tracing::error!(%error, "answer cannot be written"),
        }
    }

    /// Answers with a no.
    pub(crate) async fn refuse(mut self, error: &ErrorBody) {
        let Some(reply) = self.reply.take() else { return };
        let body = codec::encode(self.format, error).map_or_else(|_| Bytes::new(), Bytes::from);
        let head = Some((error.code.number(), error.to_string()));
        reply.send(port::Answer { format: self.format, body, error: head }).await;
    }

    /// Answers with what the core says.
    pub(crate) async fn answer(self, answer: &Answer) {
        match answer {
            Answer::Created(handle) => self.send(handle).await,
            Answer::Started(handle) => self.send(handle).await,
            Answer::Stopping(ack) => self.send(ack).await,
            Answer::Killed(ack) => self.send(ack).await,
            Answer::Status(status) => self.send(status).await,
            Answer::Removed(ack) => self.send(ack).await,
            Answer::Refused(error) => self.refuse(error).await,
        }
    }
}

impl Drop for Back {
    fn drop(&mut self) {
        let (Some(reply), Some(lease)) = (self.reply.take(), self.lease.take()) else { return };
        if !lease.may_act() {
            return;
        }
        let back = Self { reply: Some(reply), format: self.format, lease: None };
        // Fails only when the node ends: then nobody can send it.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { back.refuse(&stopped()).await });
        }
    }
}

/// To a command whose owner stopped acting before it was answered.
pub(crate) fn stopped() -> ErrorBody {
    let text =
        "this owner stopped acting before it answered; the command may have been carried out: repeat it under its id";
    ErrorBody::new(ErrorCode::Unavailable, text)
}

/// The run of a kill, if that is what is asked.
pub(crate) fn killed_run(command: &Command) -> Option<(RunId, &KillRun)> {
    if let Order::Kill(run, kill) = &command.order { Some((*run, kill)) } else { None }
}
