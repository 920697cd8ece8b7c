//! What a shim costs: the proportional set size of its processes, with a
//! hundred of them alive.

use super::{Scale, float};
use crate::{
    bed::{self, Bed},
    load::many,
    table::{Row, Target},
};
use acri::{AgentId, RunId, status::RunState};
use anyhow::{Context as _, Result};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    time::Duration,
};

const AT_ONCE: usize = 16;
const SETTLE: Duration = Duration::from_millis(500);

pub(super) async fn measure(scale: &Scale) -> Result<Row> {
    let shims = scale.of(100, 5);
    let bed = Bed::new(false).await?;
    let _node = bed.node_process().await?;
    let client = bed.client().await?;
    let mut row = Row::new("shim, mean proportional set size", "MiB", Target::AtMost(2.5));
    let sleeper = || bed::local_spec(["sleep", "1000"].map(str::to_owned).to_vec());
    let client = &client;
    for _ in 0..scale.rounds {
        let runs = many(shims, AT_ONCE, |_| async move {
            let agent = client.create(sleeper()).await?.agent;
            Ok((agent, client.start(agent, bed::task("")).await?.run))
        })
        .await?;
        for (agent, run) in &runs {
            let pending = |status: acri::AgentStatus| status.run.is_none_or(|run| run.state == RunState::Pending);
            while pending(client.status(*agent, Some(*run)).await?) {
                tokio::time::sleep(SETTLE / 10).await;
            }
        }
        tokio::time::sleep(SETTLE).await;
        let mut kinds: BTreeMap<String, (usize, f64)> = BTreeMap::new();
        for (pid, kind) in holders(&bed.path("node-process/node/processes/runs"), &runs)? {
            let kind = kinds.entry(kind).or_default();
            kind.0 += 1;
            kind.1 += bed::kibibytes(pid, "smaps_rollup", "Pss")? / 1024.0;
        }
        let all: f64 = kinds.values().map(|(_, mebibytes)| mebibytes).sum();
        let parts = kinds
            .iter()
            .map(|(kind, (count, mebibytes))| format!("{count} {kind} of {:.2} MiB", mebibytes / float(*count)));
        row.notes.push(parts.collect::<Vec<_>>().join(", "));
        row.alone(all / float(shims));
        let runs = &runs;
        many(runs.len(), AT_ONCE, |at| async move {
            let (agent, run) = runs[at];
            client.kill(agent, run, "measured").await?;
            bed::sealed(client, agent, run).await?;
            Ok(())
        })
        .await?;
    }
    Ok(row)
}

/// The holders of these runs and their helpers, each with its name: a helper
/// is a child that runs the holder's program.
fn holders(runs_dir: &Path, runs: &[(AgentId, RunId)]) -> Result<Vec<(u32, String)>> {
    let mut shims = BTreeSet::new();
    for (agent, run) in runs {
        let scan = acri_shim::scan(&runs_dir.join(agent.to_string()).join(run.to_string()))?;
        let shim = scan.meta.context("a run without a holder")?.shim;
        shims.insert(u32::try_from(shim.pid)?);
    }
    let exe = bed::own_exe()?;
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        // Any process but ours may end at any time.
        let read = |name: &str| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
        let parent = read("status").lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse::<u32>().ok());
        let helps = parent.is_some_and(|parent| shims.contains(&parent))
            && fs::read_link(entry.path().join("exe")).is_ok_and(|path| path == exe);
        if shims.contains(&pid) {
            found.push((pid, "holders".to_owned()));
        } else if helps {
            found.push((pid, format!("helpers ({})", read("comm").trim())));
        }
    }
    Ok(found)
}
