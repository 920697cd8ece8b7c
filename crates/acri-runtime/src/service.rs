//! The command service of a harness type: Create and Capabilities.

use crate::{
    counters::count,
    node::Shared,
    request::{self, Back, HarnessOrder},
    supervisor,
};
use acri::{AgentId, ErrorBody, ErrorCode, command::CreateAgent, command::Envelope, limits};
use acri_bus::port::{Request, RequestStream};
use acri_core::appender::{Command, Creation, Order};
use acri_drivers::driver::Driver;
use futures_util::StreamExt as _;
use ractor::ActorRef;
use std::{sync::Arc, time::Duration};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// Creates that are worked on at once, per harness type.
const CREATES_AT_ONCE_MAX: usize = 64;
/// How long a Create may take.
const CREATE_TIMEOUT: Duration = Duration::from_secs(120);

/// Serves one harness type until `stop`.
pub(crate) struct Service {
    pub(crate) shared: Arc<Shared>,
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) supervisor: ActorRef<supervisor::Msg>,
}

impl Service {
    /// Takes requests until `stop`.
    pub(crate) async fn run(self: Arc<Self>, mut requests: RequestStream, stop: CancellationToken) {
        let permits = Arc::new(Semaphore::new(CREATES_AT_ONCE_MAX));
        loop {
            let request = tokio::select! {
                () = stop.cancelled() => return,
                request = requests.next() => request,
            };
            let Some(request) = request else { return };
            let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
            let this = Arc::clone(&self);
            tokio::spawn(async move {
                this.take(request).await;
                drop(permit);
            });
        }
    }

    async fn take(&self, mut request: Request) {
        let back = Back::of(&mut request, &self.shared.lease);
        if !back.is_open() {
            count(&self.shared.counters.requests_unanswerable);
            return;
        }
        if !self.shared.lease.may_act() {
            count(&self.shared.counters.replies_withheld);
            return;
        }
        match request::to_harness(&request) {
            Ok(HarnessOrder::Capabilities) => back.send(&self.driver.capabilities()).await,
            Ok(HarnessOrder::Create(envelope)) => self.create(envelope, back).await,
            Err(error) => {
                count(&self.shared.counters.requests_malformed);
                back.refuse(&error).await;
            }
        }
    }

    async fn create(&self, envelope: Envelope<CreateAgent>, back: Back) {
        let agent = AgentId::derive(self.driver.harness(), envelope.id);
        let spec = envelope.data.spec.clone();
        let command = Command {
            id: envelope.id,
            principal: envelope.principal,
            expires: envelope.expires,
            order: Order::Create(envelope.data),
        };
        let known = ractor::call_t!(self.supervisor, supervisor::Msg::Knows, 5_000, agent).unwrap_or(false);
        if known {
            let _ = self.supervisor.cast(supervisor::Msg::CreateAgain { agent, command, back });
            return;
        }
        let mut creation = Creation {
            harness: self.driver.harness().clone(),
            agent,
            spec,
            capabilities: self.driver.capabilities(),
            working_directory: None,
        };
        // One that exists somewhere is only looked up: what it needed then may
        // be gone by now, and its answer stays the first one.
        match self.shared.bus.last(agent).await {
            Ok(Some(_)) => {}
            Ok(None) => {
                let checked = command.check_time(self.shared.clock.now());
                let checked = checked.and_then(|()| command.check_room(self.shared.room.percent()));
                if let Err(error) = checked {
                    back.refuse(&error).await;
                    return;
                }
                match tokio::time::timeout(CREATE_TIMEOUT, self.driver.create(agent, &creation.spec)).await {
                    Ok(Ok(provisioned)) => creation.working_directory = provisioned.working_directory,
                    Ok(Err(refusal)) => {
                        back.refuse(&refusal.0).await;
                        return;
                    }
                    Err(_) => {
                        let text = format!("the driver did not provision within {} s", CREATE_TIMEOUT.as_secs());
                        back.refuse(&ErrorBody::new(ErrorCode::Unavailable, text)).await;
                        return;
                    }
                }
            }
            Err(error) => {
                back.refuse(&ErrorBody::new(ErrorCode::Unavailable, error.to_string())).await;
                return;
            }
        }
        let _ = self.supervisor.cast(supervisor::Msg::Create { creation, command, back });
    }
}

/// How often the node says that it lives.
pub(crate) async fn heartbeat(shared: Arc<Shared>, drivers: Vec<Arc<dyn Driver>>, stop: CancellationToken) {
    let started = shared.clock.now();
    let mut every = tokio::time::interval(shared.config.heartbeat_every);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = every.tick() => {}
        }
        let runs = u64::try_from(shared.control.switches.len()).unwrap_or(u64::MAX);
        let body = acri::node::Heartbeat {
            node: shared.config.node.clone(),
            incarnation: shared.incarnation,
            started,
            time: shared.clock.now(),
            harnesses: drivers.iter().map(|driver| driver.capabilities()).collect(),
            agents: shared.agents_owned(),
            runs,
            counters: shared.counter_values(),
        };
        match acri::codec::to_msgpack(&body) {
            Ok(bytes) if bytes.len() <= limits::EVENT_BODY_BYTES_MAX => {
                shared.bus.heartbeat(&shared.config.node, bytes.into()).await;
            }
            Ok(_) | Err(_) => tracing::error!("heartbeat cannot be written"),
        }
    }
}
