//! Starting a node: its drivers, its two connections, and its next life when
//! it was fenced.

use crate::{
    app,
    bus::{self, BusOptions, Role},
    failure::{Failure, PRECONDITION},
};
use acri::NodeId;
use acri_bus::port::{Fault, SharedBus};
use acri_drivers::{
    driver::Driver,
    process::{self, ProcessDriver},
};
use acri_runtime::{Config, Node, node::Connect};
use acri_shim::Tier;
use anyhow::{Context as _, Result, bail};
use futures_util::{FutureExt as _, future::BoxFuture};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::Duration,
};
use tokio::sync::{mpsc, oneshot};

/// Orders that wait for the node.
const ORDERS_WAITING_MAX: usize = 4;
/// Pause before a fenced node that could not start again tries once more.
const START_AGAIN_AFTER: Duration = Duration::from_secs(5);
/// Where a node's name is kept, in its state directory.
const NAME_FILE: &str = "name";
/// Open files that a node asks for.
const OPEN_FILES: u64 = 65_536;
/// Most characters of the machine's name in a node's.
const HOST_CHARS_MAX: usize = 40;

/// What a node is told.
#[derive(Debug, Clone)]
pub(crate) struct NodeOptions {
    /// How its bus is reached.
    pub(crate) bus_options: BusOptions,
    /// Where it keeps what outlives it.
    pub(crate) state_dir: PathBuf,
    /// Its name; missing: made once and kept in the state directory.
    pub(crate) name: Option<String>,
    /// The harness types that it offers; none named: all that work here.
    pub(crate) harnesses: Vec<String>,
    /// Lifetime of its lease; missing: the default.
    pub(crate) lease_ttl: Option<Duration>,
    /// How often it says that it lives; missing: the default.
    pub(crate) heartbeat_every: Option<Duration>,
    /// How process trees may be held; none named: every way.
    pub(crate) tree_control: Vec<String>,
}

enum Order {
    StopRuns(Duration, oneshot::Sender<usize>),
    KillRuns(oneshot::Sender<usize>),
    MayAct(oneshot::Sender<bool>),
    Leave(oneshot::Sender<()>),
}

/// A node at work.
#[derive(Debug)]
pub(crate) struct RunningNode {
    orders: mpsc::Sender<Order>,
}

impl RunningNode {
    /// Gives up its work in an orderly way; its harnesses live on.
    pub(crate) async fn drain(self) {
        self.order(Order::Leave).await;
    }

    /// Stops all its runs with a grace, kills what is left then, and tells how
    /// many have not ended all the same.
    pub(crate) async fn stop_runs(&self, grace: Duration) -> usize {
        self.order(|done| Order::StopRuns(grace, done)).await.unwrap_or_default()
    }

    /// Kills all its runs, and tells how many have not ended all the same.
    pub(crate) async fn kill_runs(&self) -> usize {
        self.order(Order::KillRuns).await.unwrap_or_default()
    }

    /// Whether it holds its lease.
    pub(crate) async fn may_act(&self) -> bool {
        self.order(Order::MayAct).await.unwrap_or_default()
    }

    async fn order<T>(&self, order: impl FnOnce(oneshot::Sender<T>) -> Order) -> Option<T> {
        let (done, answer) = oneshot::channel();
        self.orders.send(order(done)).await.ok()?;
        answer.await.ok()
    }
}

/// Starts a node, which makes what its bus lacks.
pub(crate) async fn start(options: NodeOptions) -> Result<RunningNode> {
    crate::context::private_dir(&options.state_dir)?;
    raise_open_files();
    let name = node_name(&options)?;
    // Makes streams and buckets once; the node's own connections check them.
    drop(bus::open(&options.bus_options, "acri node set-up", Role::SetUp).await?);
    let node = start_once(&options, name.clone()).await?;
    keep_name(&options, &name)?;
    let (orders, inbox) = mpsc::channel(ORDERS_WAITING_MAX);
    tokio::spawn(live(options, name, node, inbox));
    Ok(RunningNode { orders })
}

/// Open files that this program was started with, which is what its harnesses
/// get: some programs cannot use more.
static OPEN_FILES_BEFORE: OnceLock<Option<u64>> = OnceLock::new();

/// Each local process costs the node three descriptors, and many systems begin
/// with room for a thousand.
fn raise_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    OPEN_FILES_BEFORE.get_or_init(|| limit.current);
    let wanted = limit.maximum.map_or(OPEN_FILES, |maximum| maximum.min(OPEN_FILES));
    if limit.current.is_some_and(|current| current < wanted)
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum })
    {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
}

async fn start_once(options: &NodeOptions, name: NodeId) -> Result<Node> {
    let connect: Connect = {
        let (options, name) = (options.bus_options.clone(), format!("acri node {name}"));
        Arc::new(move || {
            let (options, name) = (options.clone(), name.clone());
            Box::pin(async move { connected(&options, &name).await })
        })
    };
    let drivers = drivers(options)?;
    Node::start(config(options, name), connect, drivers).await.context("failed to start the node")
}

fn config(options: &NodeOptions, name: NodeId) -> Config {
    let mut config = Config::new(name, options.state_dir.clone());
    if let Some(ttl) = options.lease_ttl {
        // In the proportions of the defaults.
        config.lease_renew_every = ttl / 5;
        config.lease_stop_after = ttl * 11 / 15;
        config.adopt_every = config.adopt_every.min(ttl / 3);
        config.lease_ttl = ttl;
    }
    config.heartbeat_every = options.heartbeat_every.unwrap_or(config.heartbeat_every);
    config
}

async fn connected(options: &BusOptions, name: &str) -> Result<SharedBus, Fault> {
    let unavailable = |error: anyhow::Error| Fault::Unavailable { operation: "connect", detail: format!("{error:#}") };
    bus::connect(options, name, Role::Node).await.map_err(unavailable)
}

fn drivers(options: &NodeOptions) -> Result<Vec<Arc<dyn Driver>>> {
    for harness in &options.harnesses {
        if harness != process::HARNESS {
            bail!("failed to offer the harness {harness:?}: this build has {}", process::HARNESS);
        }
    }
    let exe = std::env::current_exe().context("failed to find this program's file")?;
    let mut config = process::Config::new(options.state_dir.join("processes"), exe);
    config.limits.open_files = OPEN_FILES_BEFORE.get().copied().flatten();
    if !options.tree_control.is_empty() {
        config.tiers = options.tree_control.iter().map(|tier| self::tier(tier)).collect::<Result<_>>()?;
    }
    let driver = ProcessDriver::new(config).context("failed to prepare the process harness")?;
    Ok(vec![Arc::new(driver)])
}

fn tier(name: &str) -> Result<Tier> {
    Ok(match name {
        "cgroup" => Tier::Cgroup,
        "pidns" => Tier::Pidns,
        "subreaper" => Tier::Subreaper,
        other => bail!("failed to hold process trees by {other:?}"),
    })
}

/// What a node is at.
enum Life {
    Standing(Arc<Node>),
    /// On its way to the next one; orders do not begin it anew.
    Between(BoxFuture<'static, Node>),
}

enum Happened {
    Order(Option<Order>),
    Fenced(Arc<Node>),
    Begun(Node),
}

/// One life after the other: a node that was fenced leaves and starts as a new
/// incarnation.
async fn live(options: NodeOptions, name: NodeId, node: Node, mut inbox: mpsc::Receiver<Order>) {
    let mut life = Life::Standing(Arc::new(node));
    loop {
        let happened = match &mut life {
            Life::Standing(node) => tokio::select! {
                order = inbox.recv() => Happened::Order(order),
                _ = node.ended() => Happened::Fenced(Arc::clone(node)),
            },
            Life::Between(next) => tokio::select! {
                order = inbox.recv() => Happened::Order(order),
                node = next => Happened::Begun(node),
            },
        };
        match happened {
            Happened::Fenced(node) => {
                tracing::error!("the node was fenced: it starts again");
                life = Life::Between(next_life(options.clone(), name.clone(), node).boxed());
            }
            Happened::Begun(node) => life = Life::Standing(Arc::new(node)),
            Happened::Order(None) => return,
            Happened::Order(Some(Order::Leave(done))) => {
                if let Life::Standing(node) = life {
                    node.leave().await;
                }
                let _ = done.send(());
                return;
            }
            Happened::Order(Some(order)) => match &life {
                Life::Standing(node) => carry_out(order, node),
                Life::Between(_) => answer_between(order, &options),
            },
        }
    }
}

async fn next_life(options: NodeOptions, name: NodeId, former: Arc<Node>) -> Node {
    former.leave().await;
    // Its state directory is locked until it is gone.
    drop(former);
    loop {
        match start_once(&options, name.clone()).await {
            Ok(node) => return node,
            Err(error) => tracing::error!("{error:#}"),
        }
        tokio::time::sleep(START_AGAIN_AFTER).await;
    }
}

/// Beside the loop: a Kill need not wait for a Stop's grace.
fn carry_out(order: Order, node: &Arc<Node>) {
    let node = Arc::clone(node);
    match order {
        Order::StopRuns(grace, done) => drop(tokio::spawn(async move { done.send(node.stop_runs(grace).await) })),
        Order::KillRuns(done) => drop(tokio::spawn(async move { done.send(node.kill_runs().await) })),
        Order::MayAct(done) => drop(done.send(node.may_act())),
        Order::Leave(done) => drop(done),
    }
}

/// Nobody owns what runs now; what is left is told.
fn answer_between(order: Order, options: &NodeOptions) {
    match order {
        Order::StopRuns(_, done) | Order::KillRuns(done) => {
            let options = options.clone();
            drop(tokio::spawn(async move { done.send(held(&options).await) }));
        }
        Order::MayAct(done) => drop(done.send(false)),
        Order::Leave(done) => drop(done),
    }
}

/// How many runs have a directory here: a living harness, or one that ended
/// and is not recorded yet.
async fn held(options: &NodeOptions) -> usize {
    let mut held = 0;
    for driver in drivers(options).unwrap_or_default() {
        held += driver.scan().await.len();
    }
    held
}

/// The name that was given, or the one of the last start, or a new one.
fn node_name(options: &NodeOptions) -> Result<NodeId> {
    let name = match (&options.name, kept(&options.state_dir.join(NAME_FILE))?) {
        (Some(name), Some(kept)) if *name != kept => {
            // Its agents would wait for a node of the old name for ever.
            let text = format!("the state directory belongs to the node {kept}, and --name says {name}");
            return Err(Failure::new(PRECONDITION, text)
                .hint("leave --name away, or give the new node another --state-dir")
                .into());
        }
        (_, Some(kept)) => kept,
        (Some(name), None) => name.clone(),
        (None, None) => made_name(),
    };
    name.parse().context("failed to take the node's name")
}

/// Keeps the name, once the node has shown that the directory is its own.
fn keep_name(options: &NodeOptions, name: &NodeId) -> Result<()> {
    let path = options.state_dir.join(NAME_FILE);
    fs::write(&path, name.as_str()).with_context(|| format!("failed to write {}", path.display()))
}

fn kept(path: &Path) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(name) => Ok(Some(name.trim().to_owned())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("failed to read {}", path.display())),
    }
}

/// The machine's name and eight random digits: clones of a machine are told
/// apart.
fn made_name() -> String {
    let plain = |character: char| {
        if character.is_ascii_alphanumeric() { character.to_ascii_lowercase() } else { '-' }
    };
    let host: String = app::host().chars().take(HOST_CHARS_MAX).map(plain).collect();
    let host = host.trim_matches('-');
    let digits = uuid::Uuid::new_v4().simple().to_string();
    format!("{}-{}", if host.is_empty() { "node" } else { host }, &digits[..8])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_made_name_is_a_node_id_whatever_the_machine_is_called() {
        let name: NodeId = made_name().parse().unwrap();
        assert!(name.as_str().len() > 9);
    }
}
