//! What a row is measured on: a server of its own, nodes, clients.

use acri::{AgentId, AgentSpec, HarnessType, NodeId, Payload, RunId};
use acri_bus::{
    local::{Find, Server, ServerOptions, find},
    nats::{NatsBus, Options},
    port::{Fault, SharedBus},
};
use acri_client::{Client, EventItem, EventSelection, EventTypes, EventsSince};
use acri_drivers::{driver::Driver, process, scripted};
use acri_runtime::{Config, Node, node::Connect};
use anyhow::{Context as _, Result, bail};
use async_nats::{ServerAddr, jetstream};
use futures_util::StreamExt as _;
use std::{
    path::{Path, PathBuf},
    process::{Child, Stdio},
    sync::Arc,
    time::Duration,
};
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// How long a node may take until it answers.
const READY_MAX: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A server with a store of its own, which goes when the bed goes.
pub(crate) struct Bed {
    server: Server,
    directory: TempDir,
}

impl Bed {
    pub(crate) async fn new(sync_always: bool) -> Result<Self> {
        let directory = TempDir::with_prefix("acri-benches-")?;
        let binary = find(&Find::from_env(), &|_| {}).await?;
        let store = directory.path().join("nats");
        let server = Server::start(ServerOptions { store, binary, sync_always, port: None }).await?;
        let bed = Self { server, directory };
        drop(bed.bus().await?);
        Ok(bed)
    }

    pub(crate) fn url(&self) -> String {
        self.server.url()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The product's connection.
    pub(crate) async fn bus(&self) -> Result<SharedBus> {
        bus(&self.url()).await
    }

    pub(crate) async fn client(&self) -> Result<Client> {
        Ok(Client::new(self.bus().await?, "bench".to_owned()))
    }

    /// The library's connection, as one would use it without the product.
    pub(crate) async fn raw(&self) -> Result<async_nats::Client> {
        raw(&self.url()).await
    }

    /// A node as a process, with the harnesses that the product has.
    pub(crate) async fn node_process(&self) -> Result<NodeProcess> {
        let state = self.path("node-process");
        let arguments = ["node", "--name", "bench", "--nats", &self.url(), "--state-dir"];
        let node = NodeProcess(spawn(|command| command.args(arguments).arg(&state))?);
        answers(&self.client().await?, process::HARNESS).await?;
        Ok(node)
    }

    /// A node in a runtime of its own in this process.
    pub(crate) async fn node(&self, state: &str, drivers: Vec<Arc<dyn Driver>>) -> Result<OwnNode> {
        OwnNode::start(self.url(), self.path(state), drivers).await
    }
}

pub(crate) async fn bus(url: &str) -> Result<SharedBus> {
    let options = Options { provision: true, ..Options::new([url]) };
    Ok(Arc::new(NatsBus::connect(options).await?))
}

pub(crate) async fn raw(url: &str) -> Result<async_nats::Client> {
    let url: ServerAddr = url.parse()?;
    let (user, password) = (url.username().unwrap_or_default(), url.password().unwrap_or_default());
    let options = async_nats::ConnectOptions::new().user_and_password(user.to_owned(), password.to_owned());
    Ok(options.connect(url).await?)
}

/// Makes a stream that stores as the product's do.
pub(crate) async fn raw_stream(
    client: &async_nats::Client,
    name: &str,
    subjects: &str,
) -> Result<(jetstream::Context, jetstream::stream::Stream)> {
    let context = jetstream::new(client.clone());
    let _ = context.delete_stream(name).await;
    let config = jetstream::stream::Config {
        name: name.to_owned(),
        subjects: vec![subjects.to_owned()],
        storage: jetstream::stream::StorageType::File,
        ..jetstream::stream::Config::default()
    };
    let stream = context.create_stream(config).await?;
    Ok((context, stream))
}

/// Waits until a node offers the harness.
pub(crate) async fn answers(client: &Client, harness: &str) -> Result<()> {
    let harness = harness_type(harness);
    let waiting = async {
        while client.capabilities(&harness).await.is_err() {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    tokio::time::timeout(READY_MAX, waiting).await.context("the node does not answer")
}

pub(crate) fn harness_type(name: &str) -> HarnessType {
    name.parse().expect("the name is a constant that fits")
}

/// An agent that is this binary under another name.
pub(crate) fn own_program(arguments: &[&str]) -> Result<AgentSpec> {
    let exe = own_exe()?.to_string_lossy().into_owned();
    let command = std::iter::once(exe).chain(arguments.iter().map(|text| (*text).to_owned()));
    Ok(local_spec(command.collect()))
}

/// An agent that is a process, and is not left behind for long by benches
/// that were interrupted.
pub(crate) fn local_spec(command: Vec<String>) -> AgentSpec {
    AgentSpec {
        orphan_after_ms: Some(30_000),
        node_lost_after_ms: Some(120_000),
        ..AgentSpec::new(harness_type(process::HARNESS), command)
    }
}

/// An agent whose script is each run's task.
pub(crate) fn scripted_spec() -> AgentSpec {
    AgentSpec::new(harness_type(scripted::HARNESS), Vec::new())
}

pub(crate) fn task(text: &str) -> Payload {
    Payload::text(text)
}

pub(crate) fn own_exe() -> Result<PathBuf> {
    std::env::current_exe().context("failed to find this program's file")
}

#[expect(clippy::disallowed_methods, reason = "benches start the processes that they measure")]
pub(crate) fn spawn(with: impl FnOnce(&mut std::process::Command) -> &mut std::process::Command) -> Result<Child> {
    let mut command = std::process::Command::new(own_exe()?);
    command.stdin(Stdio::piped()).stdout(Stdio::null());
    Ok(with(&mut command).spawn()?)
}

/// A node process; it ends with this.
pub(crate) struct NodeProcess(pub(crate) Child);

impl Drop for NodeProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A node in this process, on threads of its own, as it has them when it is
/// alone in one.
pub(crate) struct OwnNode {
    pub(crate) node: Arc<Node>,
    threads: Threads,
}

/// A runtime that may be dropped anywhere.
pub(crate) struct Threads(Option<Runtime>);

impl Threads {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self(Some(tokio::runtime::Builder::new_multi_thread().enable_all().build()?)))
    }

    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> tokio::task::JoinHandle<T> {
        self.0.as_ref().expect("it is there until it is dropped").spawn(work)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

impl OwnNode {
    pub(crate) async fn start(url: String, state: PathBuf, drivers: Vec<Arc<dyn Driver>>) -> Result<Self> {
        let threads = Threads::new()?;
        let node = threads.spawn(start_node(url, state, drivers)).await??;
        Ok(Self { node: Arc::new(node), threads })
    }

    /// Leaves; its harnesses live on.
    pub(crate) async fn leave(self) -> Result<()> {
        let Self { node, threads } = self;
        threads.spawn(async move { node.leave().await }).await?;
        Ok(())
    }

    /// Waits until no run is open.
    pub(crate) async fn idle(&self) {
        while self.node.runs() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Starts a node here.
pub(crate) async fn start_node(url: String, state: PathBuf, drivers: Vec<Arc<dyn Driver>>) -> Result<Node> {
    let connect: Connect = Arc::new(move || {
        let url = url.clone();
        Box::pin(async move {
            let connected = NatsBus::connect(Options::new([url])).await;
            let bus =
                connected.map_err(|error| Fault::Unavailable { operation: "connect", detail: error.to_string() })?;
            Ok(Arc::new(bus) as SharedBus)
        })
    });
    let name: NodeId = "bench".parse().context("the node's name")?;
    Ok(Node::start(Config::new(name, state), connect, drivers).await?)
}

/// A world of scripted harnesses that tells the machine's time.
pub(crate) fn world() -> scripted::World {
    scripted::World::new(|| {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        acri::Timestamp::from_micros(i64::try_from(since.as_micros()).unwrap_or(i64::MAX))
    })
}

pub(crate) fn scripted_driver(world: &scripted::World) -> Vec<Arc<dyn Driver>> {
    vec![Arc::new(scripted::ScriptedDriver::new(world.clone()))]
}

/// Waits until the run's log is complete, and tells how many events it has.
pub(crate) async fn sealed(client: &Client, agent: AgentId, run: RunId) -> Result<u64> {
    let types = EventTypes::Only(["run.logs_sealed".to_owned()].into());
    let mut events = client.events(EventSelection::Run(agent, run), types, EventsSince::Start, true);
    while let Some(item) = events.next().await {
        if let EventItem::Event(event) = item?
            && let acri::Event::RunLogsSealed(sealed) = event.envelope.event
        {
            return Ok(sealed.count.0);
        }
    }
    bail!("the events of run {run} ended before its log was complete")
}

/// A number of kibibytes from a file of `/proc/<pid>`.
pub(crate) fn kibibytes(pid: u32, file: &str, field: &str) -> Result<f64> {
    let path = Path::new("/proc").join(pid.to_string()).join(file);
    let text = std::fs::read_to_string(&path).context("failed to read /proc")?;
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))
        .and_then(|rest| rest.split_ascii_whitespace().next())
        .context("failed to find the field in /proc")?;
    Ok(value.parse()?)
}
