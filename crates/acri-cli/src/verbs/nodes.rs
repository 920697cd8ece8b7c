//! `nodes`: who is there.

use crate::{
    app::App,
    output::{self, Format},
    parse,
    verbs::{inspect, show},
};
use acri_bus::port::LeaseEntry;
use acri_client::NodeView;
use anyhow::Result;
use serde_json::json;
use std::time::Duration;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri nodes
  acri nodes -a -o json        those that are gone, too
")]
pub(crate) struct Args {
    /// Also nodes whose lease is expired or fenced
    #[arg(long, short = 'a')]
    all: bool,
    /// How long to listen for heartbeats, which bear the load
    #[arg(long, value_name = "DURATION", default_value = "4s", value_parser = parse::duration)]
    listen: Duration,
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let client = app.client().await?;
    let mut nodes = client.nodes(args.listen).await?;
    nodes.retain(|node| args.all || matches!(node.lease, LeaseEntry::Live { .. }));
    match app.out.format {
        _ if app.out.quiet => nodes.iter().try_for_each(|node| app.out.line(name(node))),
        Format::Table => {
            let rows: Vec<_> = nodes.iter().map(row).collect();
            app.out.table(&["NODE", "INCARNATION", "LEASE", "AGENTS", "RUNS", "UP", "HARNESSES"], &rows)
        }
        Format::Json | Format::Yaml => {
            let nodes = nodes.iter().map(object).collect::<Vec<_>>();
            app.out.document(&json!({"nodes": nodes}))
        }
    }
}

fn name(node: &NodeView) -> String {
    match (&node.lease, &node.heartbeat) {
        (LeaseEntry::Live { node, .. }, _) => node.to_string(),
        (_, Some(beat)) => beat.node.to_string(),
        _ => "-".to_owned(),
    }
}

fn row(node: &NodeView) -> Vec<String> {
    let mut row = vec![name(node), output::short(node.incarnation), inspect::lease(&node.lease).to_owned()];
    match &node.heartbeat {
        Some(beat) => {
            let harnesses: Vec<_> = beat.harnesses.iter().map(|set| set.harness.to_string()).collect();
            let up = show::duration(beat.time.since(beat.started));
            row.extend([beat.agents.to_string(), beat.runs.to_string(), up, harnesses.join(",")]);
        }
        None => row.extend(["-", "-", "-", "-"].map(str::to_owned)),
    }
    row
}

fn object(node: &NodeView) -> serde_json::Value {
    let renewed = match &node.lease {
        LeaseEntry::Live { renewed, .. } => Some(*renewed),
        LeaseEntry::Expired(_) | LeaseEntry::Fenced(_) | LeaseEntry::Absent => None,
    };
    json!({
        "node": name(node),
        "incarnation": node.incarnation,
        "lease": inspect::lease(&node.lease),
        "renewed": renewed,
        "heartbeat": node.heartbeat,
    })
}
