//! The demo's stage: a private bus, a node in a process of its own that can be
//! killed, and a directory for what the agents do.

use crate::{
    app::App,
    bus::{self, BUS_VARIABLES, BusOptions},
    output::Format,
};
use acri_bus::local::{self, Find, Server, ServerOptions};
use acri_client::Client;
use anyhow::{Context as _, Result, bail};
use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};
use tokio::process::{Child, Command};

/// How long the node may take to answer.
const NODE_READY_MAX: Duration = Duration::from_secs(30);
/// How long the node may take to leave.
const NODE_LEAVE_MAX: Duration = Duration::from_secs(10);

const FILES: &[(&str, &str, &str)] = &[
    ("work", "agent.sh", include_str!("agent.sh")),
    ("work", "lib.sh", include_str!("lib.sh")),
    ("work", "test.sh", include_str!("test.sh")),
    ("runaway", "runaway.sh", include_str!("runaway.sh")),
    ("runaway", "spin.sh", include_str!("spin.sh")),
];

pub(super) struct Stage {
    directory: PathBuf,
    server: Server,
    bus_options: BusOptions,
    node: Option<Child>,
    pub(super) client: Client,
}

/// Says something to a viewer; with `-o json` nobody is told.
pub(super) fn say(app: &mut App, line: impl std::fmt::Display) -> Result<()> {
    if app.out.format == Format::Table {
        app.out.line(line)?;
        app.out.flush()?;
    }
    Ok(())
}

impl Stage {
    pub(super) async fn set(app: &mut App) -> Result<Self> {
        say(app, "acri demo: a bus and a node of its own, real programs as agents\n")?;
        let directory = std::env::temp_dir().join(format!("acri-demo-{}", uuid::Uuid::new_v4().simple()));
        crate::context::private_dir(&directory)?;
        for (place, name, text) in FILES {
            let place = directory.join(place);
            fs::create_dir_all(&place)?;
            fs::File::create(place.join(name))?.write_all(text.as_bytes())?;
        }
        let binary = {
            let out = std::sync::Mutex::new(&mut app.out);
            let progress = |progress: local::Progress| {
                if let Ok(mut out) = out.lock() {
                    // A closed terminal does not keep the server from being found.
                    let _ = out.note(format_args!("acri: {progress}"));
                }
            };
            local::find(&Find::from_env(), &progress).await.context("failed to find a nats-server")?
        };
        say(app, format_args!("· nats-server {} on a free loopback port", binary.version))?;
        let store = directory.join("nats");
        let server = Server::start(ServerOptions { store, binary, sync_always: false, port: None }).await?;
        let bus_options = BusOptions::own(server.url());
        let bus = bus::connect(&bus_options, "acri demo", bus::Role::SetUp).await?;
        let client = app.client_on(bus);
        let mut stage = Self { directory, server, bus_options, node: None, client };
        stage.start_node().await?;
        say(app, format_args!("· node, process {}\n", stage.node_pid()))?;
        Ok(stage)
    }

    pub(super) fn work(&self) -> PathBuf {
        self.directory.join("work")
    }

    pub(super) fn runaway(&self) -> PathBuf {
        self.directory.join("runaway")
    }

    pub(super) fn node_pid(&self) -> u32 {
        self.node.as_ref().and_then(Child::id).unwrap_or_default()
    }

    /// Starts the node as a process of its own and waits until it answers.
    pub(super) async fn start_node(&mut self) -> Result<()> {
        let program = std::env::current_exe().context("failed to find this program's file")?;
        let log = fs::File::options().create(true).append(true).open(self.directory.join("node.log"))?;
        let mut command = Command::new(program);
        // They speak of another bus than the demo's own.
        for variable in BUS_VARIABLES {
            command.env_remove(variable);
        }
        let child = command
            .args(["node", "--name", "demo", "--nats", &self.bus_options.nats, "--state-dir"])
            .arg(self.directory.join("state"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .context("failed to start the node")?;
        self.node = Some(child);
        let harness = "process".parse()?;
        let began = Instant::now();
        loop {
            if self.client.capabilities(&harness).await.is_ok() {
                return Ok(());
            }
            if let Some(status) = self.node.as_mut().and_then(|node| node.try_wait().ok().flatten()) {
                bail!("the node ended with {status}: {}", self.node_log());
            }
            if began.elapsed() > NODE_READY_MAX {
                bail!("the node does not answer: {}", self.node_log());
            }
        }
    }

    fn node_log(&self) -> String {
        fs::read_to_string(self.directory.join("node.log")).unwrap_or_default()
    }

    /// SIGKILL, and waits until it is dead.
    pub(super) async fn kill_node(&mut self) -> Result<()> {
        if let Some(mut node) = self.node.take() {
            node.kill().await.context("failed to kill the node")?;
        }
        Ok(())
    }

    /// Ends everything and removes the directory, unless it is to be kept.
    pub(super) async fn strike(mut self, keep: bool) -> Option<PathBuf> {
        if let Some(mut node) = self.node.take() {
            if let Some(pid) =
                node.id().and_then(|pid| i32::try_from(pid).ok()).and_then(rustix::process::Pid::from_raw)
            {
                // Our child, not yet waited for: the number is still its own.
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            }
            if tokio::time::timeout(NODE_LEAVE_MAX, node.wait()).await.is_err() {
                let _ = node.kill().await;
            }
        }
        self.client.bus().drain().await;
        if let Err(error) = self.server.stop().await {
            tracing::warn!(%error, "the demo's bus did not end in order");
        }
        if keep {
            return Some(self.directory);
        }
        if let Err(error) = fs::remove_dir_all(&self.directory) {
            tracing::warn!(%error, "the demo's directory is left");
        }
        None
    }
}

/// Whether a process of that number exists.
pub(super) fn exists(pid: u32) -> bool {
    Path::new("/proc").join(pid.to_string()).exists()
}
