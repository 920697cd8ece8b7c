//! The control thread: kill switches, the agents' subscriptions and the lease
//! keeper, on a runtime of their own, so that nothing that is busy elsewhere
//! can delay a Kill. The subscriptions have a connection of their own, and the
//! lease keeper has another one, to which no stranger can publish: a message
//! that makes the client library drop a connection delays commands, and never
//! costs a lease.

use crate::{
    agent,
    clock::BusClock,
    counters::{Counters, count},
    lease::{self, Lease},
    machine::{Core, Here, Stepped, Waiting},
    node::Connect,
    request::{self, Back},
};
use acri::{
    AgentId, ErrorBody, ErrorCode, RunId,
    id::Epoch,
    limits::{COMMANDS_WAITING_MAX, KILL_PROOF_MAX},
};
use acri_bus::port::{Fault, Request, SharedBus};
use acri_core::appender::{self, Answer, Command};
use acri_drivers::driver::{KillRequest, KillSwitch, Owner};
use futures_util::{FutureExt as _, StreamExt as _};
use ractor::ActorRef;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};
use tokio::sync::{Notify, Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

/// Orders that wait for the control thread.
const ORDERS_WAITING_MAX: usize = 4096;

/// The kill switches of all runs whose harness this node may hold.
#[derive(Default)]
pub(crate) struct Switches {
    entries: Mutex<HashMap<(AgentId, RunId), Arc<dyn KillSwitch>>>,
    dropped: Notify,
}

impl std::fmt::Debug for Switches {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Switches").field("len", &self.len()).finish()
    }
}

impl Switches {
    fn with<T>(&self, act: impl FnOnce(&mut HashMap<(AgentId, RunId), Arc<dyn KillSwitch>>) -> T) -> T {
        act(&mut self.entries.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Registers a switch: before its harness is spawned.
    pub(crate) fn register(&self, agent: AgentId, run: RunId, switch: Arc<dyn KillSwitch>) {
        self.with(|entries| entries.insert((agent, run), switch));
    }

    /// Drops a switch: after its run is sealed.
    pub(crate) fn drop_run(&self, agent: AgentId, run: RunId) {
        self.with(|entries| entries.remove(&(agent, run)));
        self.dropped.notify_waiters();
    }

    /// Waits until there is none.
    pub(crate) async fn empty(&self) {
        loop {
            let dropped = self.dropped.notified();
            if self.len() == 0 {
                return;
            }
            dropped.await;
        }
    }

    fn find(&self, agent: AgentId, run: RunId) -> Option<Arc<dyn KillSwitch>> {
        self.with(|entries| entries.get(&(agent, run)).cloned())
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.with(|entries| entries.len())
    }
}

enum Order {
    Serve(Serve, oneshot::Sender<Result<(), Fault>>),
    Unserve(AgentId, Epoch),
    Kill { agent: AgentId, run: RunId, request: KillRequest },
    KillHere { agent: AgentId, run: RunId, request: KillRequest },
}

/// Whose commands are served, and by whom.
struct Serve {
    agent: AgentId,
    epoch: Epoch,
    core: Arc<Core>,
    to: ActorRef<agent::Msg>,
}

/// The way to the control thread.
#[derive(Clone)]
pub(crate) struct Control {
    orders: mpsc::Sender<Order>,
    /// The connection that commands come over.
    pub(crate) bus: SharedBus,
    pub(crate) switches: Arc<Switches>,
    stop: CancellationToken,
}

struct Served {
    epoch: Epoch,
    stop: CancellationToken,
}

struct Thread {
    bus: SharedBus,
    lease: Arc<Lease>,
    counters: Arc<Counters>,
    switches: Arc<Switches>,
    incarnation: acri::Incarnation,
    served: HashMap<AgentId, Served>,
    stop: CancellationToken,
}

/// What the control thread needs.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) terms: lease::Terms,
    pub(crate) lease: Arc<Lease>,
    pub(crate) clock: Arc<BusClock>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) switches: Arc<Switches>,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Control").field("switches", &self.switches).finish_non_exhaustive()
    }
}

impl Control {
    /// Starts the thread and waits until its connection stands.
    ///
    /// # Errors
    /// The connection's fault.
    pub(crate) async fn start(connect: Connect, parts: Parts) -> Result<Self, Fault> {
        let (orders, inbox) = mpsc::channel(ORDERS_WAITING_MAX);
        let stop = CancellationToken::new();
        let (switches, stopped) = (Arc::clone(&parts.switches), stop.clone());
        let (ready, standing) = oneshot::channel();
        std::thread::Builder::new()
            .name("acri-control".into())
            .spawn(move || run_thread(connect, parts, inbox, ready, stop))
            .map_err(|error| unavailable("start the control thread", &error))?;
        let bus = standing.await.map_err(|error| unavailable("start the control thread", &error))??;
        Ok(Self { orders, bus, switches, stop: stopped })
    }

    /// How often the connection that commands come over was lost.
    pub(crate) fn connections_lost(&self) -> u64 {
        self.bus.connections_lost()
    }

    /// Subscribes to an agent's commands for one owner's epoch.
    ///
    /// # Errors
    /// The subscription's fault.
    pub(crate) async fn serve(
        &self,
        agent: AgentId,
        epoch: Epoch,
        core: Arc<Core>,
        to: ActorRef<agent::Msg>,
    ) -> Result<(), Fault> {
        let (done, answer) = oneshot::channel();
        let gone = |_| unavailable("subscribe", &"the control thread has ended");
        if self.orders.send(Order::Serve(Serve { agent, epoch, core, to }, done)).await.is_err() {
            return Err(unavailable("subscribe", &"the control thread has ended"));
        }
        answer.await.map_err(gone)?
    }

    /// Ends the subscription of that epoch; a newer owner's stays.
    pub(crate) async fn unserve(&self, agent: AgentId, epoch: Epoch) {
        // Fails only when the thread has ended, and the subscription with it.
        let _ = self.orders.send(Order::Unserve(agent, epoch)).await;
    }

    /// Has the switch pulled on the control thread.
    pub(crate) async fn kill(&self, agent: AgentId, run: RunId, request: KillRequest) {
        let _ = self.orders.send(Order::Kill { agent, run, request }).await;
    }

    /// The same at the word of who has this very machine: it waits for no
    /// lease. Whether the harness is another owner's by now, its holder says.
    pub(crate) async fn kill_here(&self, agent: AgentId, run: RunId, request: KillRequest) {
        let _ = self.orders.send(Order::KillHere { agent, run, request }).await;
    }

    /// Ends the thread.
    pub(crate) fn end(&self) {
        self.stop.cancel();
    }
}

fn unavailable(operation: &'static str, error: &dyn std::fmt::Display) -> Fault {
    Fault::Unavailable { operation, detail: error.to_string() }
}

fn run_thread(
    connect: Connect,
    parts: Parts,
    inbox: mpsc::Receiver<Order>,
    ready: oneshot::Sender<Result<SharedBus, Fault>>,
    stop: CancellationToken,
) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = ready.send(Err(unavailable("start the control runtime", &error)));
            return;
        }
    };
    runtime.block_on(async move {
        let (bus, own) = match futures_util::future::try_join(connect(), connect()).await {
            Ok(both) => both,
            Err(fault) => {
                let _ = ready.send(Err(fault));
                return;
            }
        };
        let _ = ready.send(Ok(Arc::clone(&bus)));
        let keeper = lease::keep(
            Arc::clone(&own),
            parts.terms.clone(),
            Arc::clone(&parts.lease),
            Arc::clone(&parts.clock),
            stop.clone(),
        );
        tokio::spawn(keeper);
        let mut thread = Thread {
            bus: Arc::clone(&bus),
            lease: parts.lease,
            counters: parts.counters,
            switches: parts.switches,
            incarnation: parts.terms.incarnation,
            served: HashMap::new(),
            stop: stop.clone(),
        };
        thread.serve_orders(inbox).await;
        bus.drain().await;
        own.drain().await;
    });
}

impl Thread {
    async fn serve_orders(&mut self, mut inbox: mpsc::Receiver<Order>) {
        loop {
            let order = tokio::select! {
                order = inbox.recv() => order,
                () = self.stop.cancelled() => None,
            };
            match order {
                None => return,
                Some(Order::Serve(serve, done)) => self.serve(serve, done),
                Some(Order::Unserve(agent, epoch)) => self.unserve(agent, epoch),
                Some(Order::Kill { agent, run, request }) if self.lease.may_act() => self.pull(agent, run, request),
                Some(Order::Kill { .. }) => {}
                Some(Order::KillHere { agent, run, request }) => self.pull(agent, run, request),
            }
        }
    }

    fn serve(&mut self, Serve { agent, epoch, core, to }: Serve, done: oneshot::Sender<Result<(), Fault>>) {
        let stop = self.stop.child_token();
        let former = self.served.insert(agent, Served { epoch, stop: stop.clone() });
        let listener = Listener {
            agent,
            epoch,
            core,
            to,
            permits: Arc::new(Semaphore::new(COMMANDS_WAITING_MAX)),
            switches: Arc::clone(&self.switches),
            incarnation: self.incarnation,
            bus: Arc::clone(&self.bus),
        };
        tokio::spawn(async move {
            let subscribed = listener.bus.serve_agent(agent).await;
            // Only now, so that no request meets nobody.
            if let Some(former) = former {
                former.stop.cancel();
            }
            let mut requests = match subscribed {
                Ok(requests) => {
                    let _ = done.send(Ok(()));
                    requests
                }
                Err(fault) => {
                    let _ = done.send(Err(fault));
                    return;
                }
            };
            loop {
                tokio::select! {
                    biased;
                    () = stop.cancelled() => break,
                    request = requests.next() => match request {
                        Some(request) => Box::pin(listener.take(request)).await,
                        None => return,
                    },
                }
            }
            // What had arrived: its way back says that this owner stopped.
            while let Some(Some(mut request)) = requests.next().now_or_never() {
                drop(Back::of(&mut request, &listener.core.shared().lease));
            }
        });
    }

    fn unserve(&mut self, agent: AgentId, epoch: Epoch) {
        if self.served.get(&agent).is_some_and(|served| served.epoch == epoch)
            && let Some(served) = self.served.remove(&agent)
        {
            served.stop.cancel();
        }
    }

    fn pull(&self, agent: AgentId, run: RunId, request: KillRequest) {
        if let Some(switch) = self.switches.find(agent, run) {
            tokio::spawn(pull(switch, request, Arc::clone(&self.counters)));
        }
    }
}

async fn pull(switch: Arc<dyn KillSwitch>, request: KillRequest, counters: Arc<Counters>) {
    // The agent's actor repeats a kill that is not proved in time.
    match tokio::time::timeout(KILL_PROOF_MAX, switch.kill(request)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            count(&counters.kills_repeated);
            tracing::warn!(%error, "kill is not proved");
        }
        Err(_) => {
            count(&counters.kills_repeated);
            tracing::warn!("kill is not proved in time");
        }
    }
}

/// The actor is adopted anew.
fn panicked(to: &ActorRef<agent::Msg>) {
    let _ = to.cast(agent::Msg::Failed("the machine panicked on the control thread".to_owned()));
}

/// Sends answers, and wakes the actor for what is left to it: after they are on
/// their way, since it begins to work at once.
async fn answer(core: &Core, to: &ActorRef<agent::Msg>, replies: Vec<(Back, Answer)>, left: bool) {
    let any = !replies.is_empty();
    for (back, answer) in replies {
        if core.shared().lease.may_act() {
            back.answer(&answer).await;
        } else {
            count(&core.shared().counters.replies_withheld);
        }
    }
    if left {
        if any {
            tokio::task::yield_now().await;
        }
        let _ = to.cast(agent::Msg::Undone);
    }
}

/// One agent's subscription.
struct Listener {
    agent: AgentId,
    epoch: Epoch,
    core: Arc<Core>,
    to: ActorRef<agent::Msg>,
    permits: Arc<Semaphore>,
    switches: Arc<Switches>,
    incarnation: acri::Incarnation,
    bus: SharedBus,
}

impl Listener {
    async fn take(&self, mut request: Request) {
        let back = Back::of(&mut request, &self.core.shared().lease);
        if !back.is_open() {
            count(&self.core.shared().counters.requests_unanswerable);
            return;
        }
        if !self.core.shared().lease.may_act() {
            count(&self.core.shared().counters.replies_withheld);
            return;
        }
        let command = match request::to_agent(self.agent, &request) {
            Ok(command) => command,
            Err(error) => {
                count(&self.core.shared().counters.requests_malformed);
                back.refuse(&error).await;
                return;
            }
        };
        // From here, so that an answer waits for no other thread.
        if let Some(answer) = self.core.answer_to(&command, self.core.shared().clock.now()) {
            back.answer(&answer).await;
            return;
        }
        // One that came too late is never carried out; the core says so.
        if command.check_time(self.core.shared().clock.now()).is_ok() {
            self.kill_at_once(&command);
        }
        let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() else {
            count(&self.core.shared().counters.requests_overflowed);
            let text = format!("{COMMANDS_WAITING_MAX} commands wait for this agent");
            back.refuse(&ErrorBody::new(ErrorCode::ResourceExhausted, text)).await;
            return;
        };
        let is_first = self.permits.available_permits() + 1 == COMMANDS_WAITING_MAX;
        let is_start = matches!(command.order, appender::Order::Start(_));
        let mut waiting = Waiting { command, back, permit };
        if is_first && is_start {
            waiting = match self.core.begin_here(waiting) {
                Stepped::Here(here) => return self.carry_out(here).await,
                Stepped::NotHere(waiting) => waiting,
                Stepped::Panicked => return panicked(&self.to),
            };
        }
        // Fails only when the actor has ended: dropped, it says so.
        let _ = self.to.cast(agent::Msg::Command(waiting));
    }

    async fn carry_out(&self, here: Here) {
        let append = here.append;
        answer(&self.core, &self.to, here.replies, here.left).await;
        let Some(append) = append else { return };
        let (core, to, bus) = (Arc::clone(&self.core), self.to.clone(), Arc::clone(&self.bus));
        tokio::spawn(async move {
            let Some(input) = agent::append(core.shared(), &bus, append).await else { return };
            match core.settle_here(input) {
                Stepped::Here(here) => answer(&core, &to, here.replies, here.left).await,
                Stepped::NotHere(input) => {
                    let _ = to.cast(agent::Msg::Input(input));
                }
                Stepped::Panicked => panicked(&to),
            }
        });
    }

    /// The one effect that does not wait for its event.
    fn kill_at_once(&self, command: &Command) {
        let Some((run, kill)) = request::killed_run(command) else { return };
        // Another command's id, used again: the core refuses it.
        if RunId::derive(self.agent, command.id) == run || self.core.refuses_id(command) {
            return;
        }
        let Some(switch) = self.switches.find(self.agent, run) else { return };
        let request = KillRequest {
            command: command.id,
            principal: command.principal.clone(),
            reason: kill.reason.clone(),
            owner: Owner { epoch: self.epoch, incarnation: self.incarnation },
        };
        tokio::spawn(pull(switch, request, Arc::clone(&self.core.shared().counters)));
    }
}
