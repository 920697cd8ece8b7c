//! `up`: a bus and a node for one machine.

use crate::{
    app::App,
    bus::BusOptions,
    context::{self, ContextFile},
    failure::{Failure, PRECONDITION, Silent},
    keep::{self, chain},
    node::{self, NodeOptions, RunningNode},
    output::Format,
    parse,
    signals::Signals,
};
use acri_bus::local::{self, Find, Server, ServerOptions};
use anyhow::{Context as _, Result};
use serde_json::json;
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

/// How long runs have to stop at Ctrl-C.
const DRAIN_GRACE: Duration = Duration::from_secs(10);

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri up
  acri up --nats nats://bus.example:4222     a node here, on an existing bus
  acri up --state-dir /var/tmp/acri --port 4222

It finds a nats-server (the one in ACRI_NATS_SERVER, one on PATH, else it
fetches a pinned one), stores below the state directory, and leaves a context
file by which the other verbs find the bus. Ctrl-C asks what runs to stop, a
second one kills it; after a crash the next `acri up` takes on what still runs.
")]
pub(crate) struct Args {
    #[command(flatten)]
    node: NodeArgs,
    /// Port of the bus on 127.0.0.1 [default: a free one, kept]
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,
    /// Have each message on the disk before it is acknowledged
    #[arg(long)]
    sync_always: bool,
}

/// What a node is told, by `up` and by `node`.
#[derive(Debug, clap::Args)]
pub(crate) struct NodeArgs {
    /// Where everything is kept [default: $XDG_STATE_HOME/acri]
    #[arg(long, value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// The node's name [default: made from the machine's, and kept]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Harness types that it offers [default: all that work here]
    #[arg(long = "harness", value_name = "TYPE,TYPE", value_delimiter = ',')]
    pub(crate) harnesses: Vec<String>,
    /// Lifetime of its lease; everything that follows from it is scaled
    #[arg(long, hide = true, value_name = "DURATION", value_parser = parse::lease_ttl)]
    pub(crate) lease_ttl: Option<Duration>,
    /// How often it says that it lives
    #[arg(long, hide = true, value_name = "DURATION", value_parser = parse::heartbeat_every)]
    pub(crate) heartbeat_every: Option<Duration>,
    /// How process trees may be held, the preferred way first
    #[arg(long, hide = true, value_name = "TIER,TIER", value_delimiter = ',', value_parser = ["cgroup", "pidns", "subreaper"])]
    pub(crate) tree_control: Vec<String>,
}

impl NodeArgs {
    pub(crate) fn state_dir(&self) -> Result<PathBuf> {
        let directory = match &self.state_dir {
            Some(directory) => {
                std::path::absolute(directory).with_context(|| format!("failed to find {}", directory.display()))?
            }
            None => context::state_dir()?,
        };
        context::private_dir(&directory)?;
        Ok(directory)
    }

    pub(crate) fn options(self, bus_options: BusOptions, state_dir: &Path) -> NodeOptions {
        NodeOptions {
            bus_options,
            state_dir: state_dir.join("node"),
            name: self.name,
            harnesses: self.harnesses,
            lease_ttl: self.lease_ttl,
            heartbeat_every: self.heartbeat_every,
            tree_control: self.tree_control,
        }
    }
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let mut signals = Signals::new()?;
    let state_dir = args.node.state_dir()?;
    let context_path = context::path(app.global.context.as_deref())?;
    let mut server = None;
    let bus_options = match app.global.nats.as_ref().filter(|nats| !nats.trim().is_empty()) {
        Some(nats) => BusOptions::named(&app.global, nats.clone()),
        None => {
            let store = state_dir.join("nats");
            let starting = tokio::select! {
                started = start_server(app, store, args.port, args.sync_always) => started?,
                signal = signals.next() => return Err(Silent(128 + signal.number()).into()),
            };
            let url = starting.url();
            server = Some(starting);
            BusOptions::own(url)
        }
    };
    let store = server.as_ref().map(|server| server.store().to_owned());
    let written = ContextFile { store, ..bus_options.context() };
    let node = tokio::select! {
        node = node::start(args.node.options(bus_options, &state_dir)) => node?,
        signal = signals.next() => return Err(Silent(128 + signal.number()).into()),
    };
    context::write(&context_path, &written)?;
    say_ready(app, server.as_ref(), &context_path)?;
    let kept = keep::until_signal(app, &mut signals, &node, server.as_mut()).await;
    context::remove(&context_path, &written);
    if let Err(error) = kept {
        // What runs goes on; the next start takes it on.
        node.drain().await;
        return Err(error);
    }
    app.out.note("acri: stopping what runs; Ctrl-C again kills it")?;
    drain(app, &mut signals, node, server).await
}

async fn start_server(app: &mut App, store: PathBuf, port: Option<u16>, sync_always: bool) -> Result<Server> {
    // The finder tells its progress from within, so it is said afterwards in
    // order, and at once to the log.
    let quiet = app.out.quiet;
    let stderr = std::sync::Mutex::new(&mut app.out);
    let told = |progress: local::Progress| {
        if !quiet && let Ok(mut out) = stderr.lock() {
            // A closed terminal does not keep the server from being found.
            let _ = out.note(format_args!("acri: {progress}"));
        }
    };
    let found = local::find(&Find::from_env(), &told).await;
    let binary = found.map_err(|error| Failure::new(PRECONDITION, format!("failed to {}", chain(error))))?;
    let started = Server::start(ServerOptions { store, binary, sync_always, port }).await;
    Ok(started.map_err(|error| match error {
        local::Error::StoreInUse { .. } => Failure::new(PRECONDITION, format!("failed to {error}"))
            .hint("is another `acri up` running? use it, or give this one another --state-dir and --context"),
        error => Failure::new(PRECONDITION, format!("failed to {}", chain(error))),
    })?)
}

fn say_ready(app: &mut App, server: Option<&Server>, context_path: &Path) -> Result<()> {
    if app.out.format == Format::Table {
        let bus = server.map_or_else(
            || "the bus that was named".to_owned(),
            |server| format!("nats-server {} (pid {})", server.name(), server.pid().unwrap_or_default()),
        );
        app.out.note(format_args!(
            "acri is up: a node on {bus}\n\
             context: {}\n\
             now, in another terminal:\n  \
               acri run -- python3 -c 'print(1 + 1)'\n  \
               acri ps -a\n\
             Ctrl-C ends it",
            context_path.display()
        ))?;
    } else {
        app.out.item(&json!({"type": "ready", "context": context_path}))?;
    }
    app.out.flush()
}

/// The first signal asks every run to stop, a second one kills them, a third
/// one leaves everything as it is.
async fn drain(app: &mut App, signals: &mut Signals, node: RunningNode, server: Option<Server>) -> Result<()> {
    let left = tokio::select! {
        left = node.stop_runs(DRAIN_GRACE) => left,
        _ = signals.next() => {
            app.out.note("acri: killing what still runs")?;
            tokio::select! {
                left = node.kill_runs() => left,
                signal = signals.next() => return Err(Silent(128 + signal.number()).into()),
            }
        }
    };
    if left > 0 {
        app.out.warn(format_args!(
            "acri: the record of {left} runs is not complete; the next `acri up` goes on with it"
        ))?;
    }
    node.drain().await;
    match server {
        Some(mut server) => server.stop().await.map_err(|error| anyhow::anyhow!("failed to {}", chain(error))),
        None => Ok(()),
    }
}
