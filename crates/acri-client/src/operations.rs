//! The operations: one envelope, one id, sent until it is answered.

use crate::{
    error::Error,
    limits::{Backoff, Limits},
    time,
};
use acri::{
    AgentId, AgentSpec, AgentStatus, CapabilitySet, CommandId, ErrorBody, ErrorCode, HarnessType, Incarnation, Payload,
    RunId, Subject, Timestamp,
    codec::{self, Format},
    command::{
        AgentHandle, Checked, CreateAgent, Envelope, GetCapabilities, GetStatus, KillAck, KillRun, OnExpiry, RemoveAck,
        RemoveAgent, RunHandle, StartRun, StopAck, StopRun,
    },
    limits::EVENT_BODY_BYTES_MAX,
    node::Heartbeat,
    subject::{AgentVerb, HarnessVerb, RunVerb},
};
use acri_bus::port::{Answer, Fault, LeaseEntry, RequestError, SharedBus};
use bytes::Bytes;
use futures_util::{FutureExt as _, StreamExt as _, future::BoxFuture};
use serde::{Serialize, de::DeserializeOwned};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::{
    sync::OnceCell,
    time::{Instant, sleep, timeout},
};

/// A client of one bus, speaking for one principal. Cheap to clone.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

struct Inner {
    bus: SharedBus,
    principal: String,
    limits: Limits,
    /// How far the bus's clock is ahead of ours, asked once.
    offset_micros: OnceCell<i64>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Client").field("principal", &self.inner.principal).finish_non_exhaustive()
    }
}

/// A node as its leases and heartbeats show it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeView {
    /// Which start of a node.
    pub incarnation: Incarnation,
    /// Its lease, from the leader.
    pub lease: LeaseEntry,
    /// The last heartbeat that arrived while we listened.
    pub heartbeat: Option<Heartbeat>,
}

/// A status, and who told it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusTold {
    /// What is known.
    pub status: AgentStatus,
    /// Why the owner did not say so itself and the events were folded; `None`:
    /// the owner answered.
    pub owner_silent: Option<ErrorBody>,
}

/// How one command is sent.
struct Call {
    operation: &'static str,
    subject: Subject,
    deadline: Duration,
    attempt: Duration,
}

/// What a missing owner means for a command.
enum Ownerless<A> {
    /// Somebody may take the agent: ask again.
    Retry,
    /// The history answers.
    Answer(A),
}

impl Client {
    /// A client with the default [`Limits`]. The principal (1 to 256 bytes)
    /// is recorded with every command; it is not proved by itself.
    #[must_use]
    pub fn new(bus: SharedBus, principal: String) -> Self {
        Self::with_limits(bus, principal, Limits::default())
    }

    /// A client that waits otherwise.
    #[must_use]
    pub fn with_limits(bus: SharedBus, principal: String, limits: Limits) -> Self {
        Self { inner: Arc::new(Inner { bus, principal, limits, offset_micros: OnceCell::new() }) }
    }

    /// The bus it speaks on.
    #[must_use]
    pub fn bus(&self) -> &SharedBus {
        &self.inner.bus
    }

    /// How long it waits.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.inner.limits
    }

    /// The bus's time, as far as one exchange could tell it.
    pub async fn bus_time(&self) -> Timestamp {
        let offset = self
            .inner
            .offset_micros
            .get_or_try_init(|| self.inner.bus.clock_offset_micros())
            .await
            .copied()
            .unwrap_or_default();
        time::bus_now(offset)
    }

    /// A fresh command id. Keep it where a repeat after a crash must find it,
    /// and use the `_with_id` form.
    pub async fn mint_id(&self) -> CommandId {
        time::mint(self.bus_time().await)
    }

    /// Create: provisions an agent on any node that offers its harness.
    ///
    /// # Errors
    /// [`Error`]; `unavailable` if no node offers the harness.
    pub async fn create(&self, spec: AgentSpec) -> Result<AgentHandle, Error> {
        self.create_with_id(self.mint_id().await, spec).await
    }

    /// Create, under this id: a repeat gives the same agent.
    ///
    /// # Errors
    /// As [`Client::create`].
    pub async fn create_with_id(&self, id: CommandId, spec: AgentSpec) -> Result<AgentHandle, Error> {
        let call = Call {
            operation: "create",
            subject: Subject::Harness(spec.harness.clone(), HarnessVerb::Create),
            deadline: self.inner.limits.create_deadline,
            attempt: self.inner.limits.create_attempt_timeout,
        };
        self.command(&call, id, CreateAgent { spec }, || async { Ok(Ownerless::Retry) }.boxed()).await
    }

    /// Start: begins a run of a task.
    ///
    /// # Errors
    /// [`Error`]; `failed_precondition` while another run is open.
    pub async fn start(&self, agent: AgentId, task: Payload) -> Result<RunHandle, Error> {
        self.start_with_id(self.mint_id().await, agent, task).await
    }

    /// Start, under this id: a repeat gives the same run.
    ///
    /// # Errors
    /// As [`Client::start`].
    pub async fn start_with_id(&self, id: CommandId, agent: AgentId, task: Payload) -> Result<RunHandle, Error> {
        let call = self.to_agent("start", agent, AgentVerb::Start);
        self.command(&call, id, StartRun { task }, || {
            async {
                let history = self.known_agent(call.operation, agent).await?;
                let run = RunId::derive(agent, id);
                match history.run(run) {
                    Some(_) => Ok(Ownerless::Answer(RunHandle { agent, run })),
                    None if history.removed() => Err(removed(&call)),
                    None => Ok(Ownerless::Retry),
                }
            }
            .boxed()
        })
        .await
    }

    /// Stop: asks for a graceful halt.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn stop(
        &self,
        agent: AgentId,
        run: RunId,
        reason: impl Into<String>,
        grace: Option<Duration>,
        on_expiry: OnExpiry,
    ) -> Result<StopAck, Error> {
        let id = self.mint_id().await;
        self.stop_with_id(id, agent, run, reason, grace, on_expiry).await
    }

    /// Stop, under this id.
    ///
    /// # Errors
    /// As [`Client::stop`].
    pub async fn stop_with_id(
        &self,
        id: CommandId,
        agent: AgentId,
        run: RunId,
        reason: impl Into<String>,
        grace: Option<Duration>,
        on_expiry: OnExpiry,
    ) -> Result<StopAck, Error> {
        let grace_ms = grace.map(|grace| u64::try_from(grace.as_millis()).unwrap_or(u64::MAX));
        let data = StopRun { reason: reason.into(), grace_ms, on_expiry };
        let call = self.to_run("stop", agent, run, RunVerb::Stop);
        self.command(&call, id, data, || self.stop_without_owner(&call, id, agent, run).boxed()).await
    }

    /// Kill: ends the run at once, and answers when its whole process tree is
    /// proved gone, or says that the proof is still out.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn kill(&self, agent: AgentId, run: RunId, reason: impl Into<String>) -> Result<KillAck, Error> {
        self.kill_with_id(self.mint_id().await, agent, run, reason).await
    }

    /// Kill, under this id.
    ///
    /// # Errors
    /// As [`Client::kill`].
    pub async fn kill_with_id(
        &self,
        id: CommandId,
        agent: AgentId,
        run: RunId,
        reason: impl Into<String>,
    ) -> Result<KillAck, Error> {
        let call = self.to_run("kill", agent, run, RunVerb::Kill);
        let data = KillRun { reason: reason.into() };
        self.command(&call, id, data, || self.kill_without_owner(&call, agent, run).boxed()).await
    }

    /// Remove: gives the agent up. Refused while a run is open.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn remove(&self, agent: AgentId, reason: impl Into<String>) -> Result<RemoveAck, Error> {
        self.remove_with_id(self.mint_id().await, agent, reason).await
    }

    /// Remove, under this id.
    ///
    /// # Errors
    /// As [`Client::remove`].
    pub async fn remove_with_id(
        &self,
        id: CommandId,
        agent: AgentId,
        reason: impl Into<String>,
    ) -> Result<RemoveAck, Error> {
        let call = self.to_agent("remove", agent, AgentVerb::Remove);
        self.command(&call, id, RemoveAgent { reason: reason.into() }, || {
            async {
                let history = self.known_agent(call.operation, agent).await?;
                if history.removed() { Ok(Ownerless::Answer(RemoveAck { agent })) } else { Ok(Ownerless::Retry) }
            }
            .boxed()
        })
        .await
    }

    /// Status of a run, or of an agent with the last of its runs. The owner
    /// answers; where none lives, or it says nothing within
    /// [`Limits::query_attempt_timeout`], the events are folded here. The phase
    /// of an open run is `unreachable` where its owner's lease is not live.
    ///
    /// # Errors
    /// [`Error`]; `not_found` if the events know of no such agent or run.
    pub async fn status(&self, agent: AgentId, run: Option<RunId>) -> Result<AgentStatus, Error> {
        Ok(self.status_told(agent, run).await?.status)
    }

    /// The same, with who told it.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub async fn status_told(&self, agent: AgentId, run: Option<RunId>) -> Result<StatusTold, Error> {
        let subject = match run {
            Some(run) => Subject::Run(agent, run, RunVerb::Status),
            None => Subject::Agent(agent, AgentVerb::Status),
        };
        let limit = self.inner.limits.query_attempt_timeout;
        let deadline = limit.min(self.inner.limits.command_deadline);
        let call = Call { attempt: limit, deadline, ..self.call("status", subject) };
        let id = self.mint_id().await;
        let nobody = || {
            let body = unavailable("no owner lives".to_owned());
            async { Err(Error::Unanswered { operation: "status", body }) }.boxed()
        };
        let silence = match self.command(&call, id, GetStatus {}, nobody).await {
            Ok(status) => return Ok(StatusTold { status, owner_silent: None }),
            // The owner is there and silent, or fenced, or says "not now": the history still knows.
            Err(Error::Unanswered { body, .. }) => body,
            Err(Error::Refused { body, .. }) if body.retryable => body,
            // Who may only read still gets the status.
            Err(Error::Bus { source: source @ Fault::Refused { .. }, .. }) => {
                ErrorBody::new(ErrorCode::FailedPrecondition, source.to_string())
            }
            Err(error) => return Err(error),
        };
        let status = self.folded_status(agent, run).await?;
        Ok(StatusTold { status, owner_silent: Some(silence) })
    }

    /// The same from the events alone, no owner asked.
    ///
    /// # Errors
    /// [`Error`]; `not_found` if the events know of no such agent or run.
    pub async fn folded_status(&self, agent: AgentId, run: Option<RunId>) -> Result<AgentStatus, Error> {
        let history = self.known_agent("status", agent).await?;
        let live = match self.inner.bus.lease(history.owner().incarnation).await {
            Ok(lease) => matches!(lease, LeaseEntry::Live { .. }),
            // Who may not see leases cannot say that an owner is silent.
            Err(Fault::Refused { .. }) => true,
            Err(fault) => return Err(Error::bus("status")(fault)),
        };
        crate::history::status(&history, run, live)
    }

    /// Capabilities of a harness type, on whichever node answers.
    ///
    /// # Errors
    /// [`Error`]; `unavailable` if no node offers the harness.
    pub async fn capabilities(&self, harness: &HarnessType) -> Result<CapabilitySet, Error> {
        let subject = Subject::Harness(harness.clone(), HarnessVerb::Capabilities);
        let call = Call { attempt: self.inner.limits.query_attempt_timeout, ..self.call("capabilities", subject) };
        let id = self.mint_id().await;
        self.command(&call, id, GetCapabilities {}, || async { Ok(Ownerless::Retry) }.boxed()).await
    }

    /// The nodes that hold a lease or held one, with the heartbeats that
    /// arrive within `listen`.
    ///
    /// # Errors
    /// [`Error::Bus`].
    pub async fn nodes(&self, listen: Duration) -> Result<Vec<NodeView>, Error> {
        let mut beats = self.inner.bus.heartbeats().await.map_err(Error::bus("nodes"))?;
        let mut heard = BTreeMap::new();
        let leases = self.inner.bus.leases().await.map_err(Error::bus("nodes"))?;
        let live = leases.iter().filter(|(_, entry)| matches!(entry, LeaseEntry::Live { .. })).count();
        let until = Instant::now() + listen;
        while heard.len() < live {
            let left = until.saturating_duration_since(Instant::now());
            let Ok(Some(bytes)) = timeout(left, beats.next()).await else { break };
            // Anybody may publish there: what is no heartbeat is skipped.
            if let Ok(beat) = codec::from_msgpack::<Heartbeat>(&bytes) {
                heard.insert(beat.incarnation, beat);
            }
        }
        let mut nodes: Vec<_> = leases
            .into_iter()
            .map(|(incarnation, lease)| NodeView { incarnation, lease, heartbeat: heard.remove(&incarnation) })
            .collect();
        nodes.sort_by_key(|node| node.incarnation);
        Ok(nodes)
    }

    fn call(&self, operation: &'static str, subject: Subject) -> Call {
        let limits = &self.inner.limits;
        Call { operation, subject, deadline: limits.command_deadline, attempt: limits.attempt_timeout }
    }

    fn to_agent(&self, operation: &'static str, agent: AgentId, verb: AgentVerb) -> Call {
        self.call(operation, Subject::Agent(agent, verb))
    }

    fn to_run(&self, operation: &'static str, agent: AgentId, run: RunId, verb: RunVerb) -> Call {
        self.call(operation, Subject::Run(agent, run, verb))
    }

    /// Sends one command until it is answered, or its deadline passed. Only
    /// ever the same bytes under the same id.
    async fn command<'a, T, A>(
        &self,
        call: &Call,
        id: CommandId,
        data: T,
        ownerless: impl Fn() -> BoxFuture<'a, Result<Ownerless<A>, Error>> + Send + Sync,
    ) -> Result<A, Error>
    where
        T: Serialize + Checked,
        A: DeserializeOwned + Send,
    {
        let body = self.body(call, id, data)?;
        let until = Instant::now() + call.deadline;
        let mut backoff = Backoff::new(&self.inner.limits);
        let mut attempts = 0_u32;
        let mut attempt = call.attempt.min(self.inner.limits.attempt_timeout_first);
        loop {
            attempts += 1;
            let left = until.saturating_duration_since(Instant::now());
            let wait = attempt.min(left).max(self.inner.limits.retry_pause_first);
            attempt = attempt.saturating_mul(2).min(call.attempt);
            let obstacle = match self.inner.bus.request(&call.subject, Format::MessagePack, body.clone(), wait).await {
                Ok(answer) => match read_answer(call, &answer)? {
                    Ok(answer) => return Ok(answer),
                    Err(body) if body.retryable && body.code != ErrorCode::ResourceExhausted => body,
                    Err(body) => return Err(Error::Refused { operation: call.operation, body }),
                },
                Err(RequestError::NoResponders(subject)) => match ownerless().await? {
                    Ownerless::Answer(answer) => return Ok(answer),
                    Ownerless::Retry => unavailable(format!("nobody answers on {subject}")),
                },
                Err(RequestError::Fault(fault @ Fault::Unavailable { .. })) => unavailable(fault.to_string()),
                Err(RequestError::Fault(source)) => {
                    return Err(Error::Bus { operation: call.operation, source });
                }
            };
            let pause = backoff.pause();
            if Instant::now() + pause >= until {
                return Err(given_up(call, attempts, obstacle));
            }
            tracing::debug!(operation = call.operation, %id, attempts, %obstacle, "asking again");
            sleep(pause).await;
        }
    }

    fn body<T: Serialize + Checked>(&self, call: &Call, id: CommandId, data: T) -> Result<Bytes, Error> {
        let refused = |body| Error::Refused { operation: call.operation, body };
        let envelope = Envelope { id, principal: self.inner.principal.clone(), expires: None, data };
        envelope.check().map_err(|invalid| refused(invalid.into()))?;
        let bytes = codec::to_msgpack(&envelope).map_err(|error| refused(error.into()))?;
        if bytes.len() > EVENT_BODY_BYTES_MAX {
            let message = format!("the command has {} bytes, more than {EVENT_BODY_BYTES_MAX}", bytes.len());
            return Err(refused(ErrorBody::new(ErrorCode::TooLarge, message)));
        }
        Ok(bytes.into())
    }

    /// Stop of a run whose agent has no owner: the history answers what is
    /// final, otherwise somebody may take the agent.
    async fn stop_without_owner(
        &self,
        call: &Call,
        id: CommandId,
        agent: AgentId,
        run: RunId,
    ) -> Result<Ownerless<StopAck>, Error> {
        let history = self.known_run(call.operation, agent, run).await?;
        let Some(known) = history.run(run) else { return Ok(Ownerless::Retry) };
        if let Some(stop) = known.stop.as_ref().filter(|stop| stop.command == id) {
            return Ok(Ownerless::Answer(StopAck { run, deadline: stop.deadline }));
        }
        if known.end.is_some() {
            let body = ErrorBody::new(ErrorCode::FailedPrecondition, format!("run {run} has ended"));
            return Err(Error::Refused { operation: call.operation, body });
        }
        Ok(Ownerless::Retry)
    }

    /// The same for Kill.
    async fn kill_without_owner(&self, call: &Call, agent: AgentId, run: RunId) -> Result<Ownerless<KillAck>, Error> {
        let history = self.known_run(call.operation, agent, run).await?;
        let proved = history.run(run).map(acri_core::agent::Run::kill_ack).filter(|ack| ack.proved);
        Ok(proved.map_or(Ownerless::Retry, Ownerless::Answer))
    }
}

fn unavailable(message: String) -> ErrorBody {
    ErrorBody::new(ErrorCode::Unavailable, message)
}

/// The deadline passed. An owner who kept saying "not now" said no.
fn given_up(call: &Call, attempts: u32, obstacle: ErrorBody) -> Error {
    if obstacle.code != ErrorCode::Unavailable {
        return Error::Refused { operation: call.operation, body: obstacle };
    }
    let (deadline, last) = (call.deadline, obstacle.message);
    let message = format!("no answer in {deadline:?}, after {attempts} attempts: {last}");
    Error::Unanswered { operation: call.operation, body: unavailable(message) }
}

fn removed(call: &Call) -> Error {
    let body = ErrorBody::new(ErrorCode::FailedPrecondition, "the agent was removed");
    Error::Refused { operation: call.operation, body }
}

fn read_answer<A: DeserializeOwned>(call: &Call, answer: &Answer) -> Result<Result<A, ErrorBody>, Error> {
    let unreadable = |error: codec::Error| Error::Unreadable { operation: call.operation, detail: error.to_string() };
    match &answer.error {
        None => codec::decode(answer.format, &answer.body).map(Ok).map_err(unreadable),
        Some(_) => codec::decode(answer.format, &answer.body).map(Err).map_err(unreadable),
    }
}
