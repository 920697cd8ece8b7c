//! What an idle run costs a node: its resident memory with ten thousand of
//! them less that with none.

use super::{Scale, float};
use crate::{
    bed::{self, Bed, NodeProcess},
    load::many,
    table::{self, Row, Target},
};
use anyhow::{Context as _, Result};
use std::{ffi::OsString, io::Read as _, path::PathBuf, process::ExitCode, time::Duration};

/// This binary as a node of scripted harnesses; arguments: URL and state.
pub(crate) const IDLE_NODE: &str = "idle-node";
const AT_ONCE: usize = 64;
/// Until what a start left behind is given back.
const SETTLE: Duration = Duration::from_secs(3);

pub(crate) fn idle_node(arguments: &[OsString]) -> ExitCode {
    match serve(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            table::say(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Until standard input ends.
fn serve(arguments: &[OsString]) -> Result<()> {
    let text = |at: usize| arguments.get(at).and_then(|text| text.to_str()).context("arguments");
    let (url, state) = (text(0)?.to_owned(), PathBuf::from(text(1)?));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let node = runtime.block_on(bed::start_node(url, state, bed::scripted_driver(&bed::world())))?;
    let mut nothing = Vec::new();
    std::io::stdin().read_to_end(&mut nothing)?;
    drop(node);
    runtime.shutdown_background();
    Ok(())
}

pub(super) async fn measure(scale: &Scale) -> Result<Row> {
    let runs = scale.of(10_000, 100);
    let mut row = Row::new("node memory per idle run", "KiB", Target::AtMost(32.0));
    for _ in 0..scale.rounds {
        let bed = Bed::new(false).await?;
        let state = bed.path("idle-node");
        let node = NodeProcess(bed::spawn(|command| command.arg(IDLE_NODE).arg(bed.url()).arg(&state))?);
        let client = bed.client().await?;
        bed::answers(&client, acri_drivers::scripted::HARNESS).await?;
        tokio::time::sleep(SETTLE).await;
        let resident = || bed::kibibytes(node.0.id(), "smaps_rollup", "Rss");
        let empty = resident()?;
        let client = &client;
        many(runs, AT_ONCE, |_| async move {
            let agent = client.create(bed::scripted_spec()).await?.agent;
            client.start(agent, bed::task("idle")).await?;
            Ok(())
        })
        .await?;
        tokio::time::sleep(SETTLE).await;
        let loaded = resident()?;
        row.notes.push(format!("{empty:.0} KiB empty, {loaded:.0} KiB with {runs} runs"));
        row.alone((loaded - empty) / float(runs));
    }
    Ok(row)
}
