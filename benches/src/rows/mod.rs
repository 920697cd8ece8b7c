//! The rows. Each measures the raw engine and the product in turn on one
//! server, five times, and leaves both to [`crate::table`].

mod commands;
mod ingest;
mod kill;
mod memory;
mod replay;
mod restart;
mod shim;

pub(crate) use memory::{IDLE_NODE, idle_node};

use crate::table::{self, Row};
use anyhow::{Result, bail, ensure};

/// The rows by their names, in the order of the table.
pub(crate) const NAMES: [&str; 9] =
    ["ingest", "ingest-sync", "replay", "status", "start", "kill", "memory", "shim", "restart"];

/// How much is measured.
#[derive(Debug, Clone)]
pub(crate) struct Scale {
    pub(crate) rounds: usize,
    smoke: bool,
}

impl Scale {
    pub(crate) fn full() -> Self {
        Self { rounds: 5, smoke: false }
    }

    /// Whether it works at all.
    pub(crate) fn smoke() -> Self {
        Self { rounds: 1, smoke: true }
    }

    /// So many, or so many in a smoke run.
    pub(crate) fn of(&self, full: usize, smoke: usize) -> usize {
        if self.smoke { smoke } else { full }
    }
}

/// A count as a number to reckon with.
pub(crate) fn float(count: usize) -> f64 {
    f64::from(u32::try_from(count).expect("a count of the benches is far below 2^32"))
}

pub(crate) async fn measure(scale: &Scale, wanted: &[&str]) -> Result<()> {
    let (mut rows, mut failed) = (Vec::new(), Vec::new());
    for name in NAMES.into_iter().filter(|name| wanted.contains(name)) {
        table::say(name);
        match row(name, scale).await {
            Ok(row) => rows.push(row),
            // The others are worth having.
            Err(error) => {
                table::say(&format!("acri-benches: row {name} failed: {error:#}"));
                failed.push(name);
            }
        }
    }
    table::print(&rows)?;
    ensure!(failed.is_empty(), "not measured: {}", failed.join(", "));
    Ok(())
}

async fn row(name: &str, scale: &Scale) -> Result<Row> {
    match name {
        "ingest" => ingest::measure(scale, false).await,
        "ingest-sync" => ingest::measure(scale, true).await,
        "replay" => replay::measure(scale).await,
        "status" => commands::status(scale).await,
        "start" => commands::start(scale).await,
        "kill" => kill::measure(scale).await,
        "memory" => memory::measure(scale).await,
        "shim" => shim::measure(scale).await,
        "restart" => restart::measure(scale).await,
        other => bail!("no row is named {other}"),
    }
}
