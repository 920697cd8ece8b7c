//! `node`: a node on a bus that is there.

use crate::{app::App, failure::Silent, keep, node, output::Format, signals::Signals, verbs::up::NodeArgs};
use anyhow::Result;
use serde_json::json;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri node --nats nats://bus.example:4222 --creds node.creds
  acri node --name builder-1 --harness process

Streams and buckets that the bus lacks are made. Ctrl-C drains, a second one
ends at once; programs that run outlive both, and the node's next start takes
them on.
")]
pub(crate) struct Args {
    #[command(flatten)]
    node: NodeArgs,
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let mut signals = Signals::new()?;
    let bus_options = app.bus_options()?;
    let state_dir = args.node.state_dir()?;
    let running = tokio::select! {
        running = node::start(args.node.options(bus_options, &state_dir)) => running?,
        signal = signals.next() => return Err(Silent(128 + signal.number()).into()),
    };
    if app.out.format == Format::Table {
        app.out.note("acri: the node is up; Ctrl-C ends it")?;
    } else {
        app.out.item(&json!({"type": "ready"}))?;
    }
    app.out.flush()?;
    keep::until_signal(app, &mut signals, &running, None).await?;
    app.out.note("acri: draining; Ctrl-C again ends at once")?;
    tokio::select! {
        () = running.drain() => Ok(()),
        signal = signals.next() => Err(Silent(128 + signal.number()).into()),
    }
}
