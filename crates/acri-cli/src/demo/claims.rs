//! What the demo claims, and how it checks it.

use super::stage::{Stage, exists, say};
use crate::app::App;
use acri::{
    AgentId, AgentSpec, Event, Payload, RunId, StreamSeq, Subject,
    status::{RunState, RunStatus, Termination},
};
use acri_bus::port::{EventSelection, Recorded, Until};
use acri_client::{Agent, Client, EventItem, LogItem, Since};
use acri_core::{appender::Stored, check};
use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};
use tokio::process::Command;

/// How long a part of the demo may take.
const PART_MAX: Duration = Duration::from_secs(60);
/// The node dies when the agent has said this many lines.
const LINES_BEFORE_THE_NODE_DIES: usize = 8;
/// The node stays dead until the agent has said this many more.
const LINES_WITHOUT_A_NODE: usize = 8;

/// How often the agent's own record is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);

struct Claim {
    name: &'static str,
    holds: bool,
    detail: String,
}

#[derive(Default)]
pub(super) struct Claims(Vec<Claim>);

impl Claims {
    fn check(&mut self, app: &mut App, name: &'static str, holds: bool, detail: String) -> Result<()> {
        let mark = if holds { "✓" } else { "✗ NOT" };
        say(app, format_args!("  {mark} {name}: {detail}"))?;
        self.0.push(Claim { name, holds, detail });
        Ok(())
    }

    pub(super) fn all_hold(&self) -> bool {
        !self.0.is_empty() && self.held() == self.len()
    }

    pub(super) fn held(&self) -> usize {
        self.0.iter().filter(|claim| claim.holds).count()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn summary(&self, took: Duration) -> Value {
        let claims: Vec<_> = self
            .0
            .iter()
            .map(|claim| json!({"claim": claim.name, "holds": claim.holds, "detail": claim.detail}))
            .collect();
        json!({"type": "demo", "ok": self.all_hold(), "seconds": took.as_secs_f64(), "claims": claims})
    }
}

async fn run(client: &Client, directory: &Path, script: &str, task: &str) -> Result<(AgentId, RunId)> {
    let mut spec = AgentSpec::new("process".parse()?, vec!["sh".to_owned(), script.to_owned()]);
    spec.working_directory = Some(directory.display().to_string());
    spec.environment.insert("PACE".to_owned(), "0.15".to_owned());
    let agent = client.create(spec).await.context("failed to create the agent")?.agent;
    let run = client.start(agent, Payload::text(task)).await.context("failed to start the run")?.run;
    Ok((agent, run))
}

/// The demo's own look at the agent's work: the tests are run once more, by us.
async fn tests_pass(directory: &Path) -> Result<bool> {
    let mut tests = Command::new("sh");
    tests.arg("test.sh").current_dir(directory).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(tests.status().await.context("failed to run the agent's tests")?.success())
}

async fn started_pid(client: &Client, agent: AgentId, run: RunId) -> Result<u32> {
    let mut events = client.run_events(agent, run, true);
    while let Some(item) = events.next().await {
        if let EventItem::Event(event) = item?
            && let Event::RunStarted(started) = event.envelope.event
        {
            return started.pid.context("the run tells no process id");
        }
    }
    bail!("the run did not start")
}

pub(super) async fn work_survives_the_nodes_death(app: &mut App, stage: &mut Stage, claims: &mut Claims) -> Result<()> {
    say(app, "1. an agent repairs a library until its tests pass; half-way its node is killed with SIGKILL\n")?;
    let directory = stage.work();
    let before = tests_pass(&directory).await?;
    claims.check(app, "the work is real", !before, "the tests fail before the agent begins".to_owned())?;
    let (agent, run) = run(&stage.client, &directory, "agent.sh", "make the tests pass").await?;
    let pid = started_pid(&stage.client, agent, run).await?;
    let watched = tokio::time::timeout(PART_MAX, watch(app, stage, claims, (agent, run), pid, &directory));
    let said = watched.await.context("the agent did not end in time")??;
    let status = wait(&stage.client, agent, run).await?;
    let kept = fs::read_to_string(directory.join("said.txt")).context("failed to read what the agent kept")?;
    let exact = said == kept.lines().collect::<Vec<_>>();
    let detail = format!("{} lines, each once and in order, as the agent itself kept them", said.len());
    claims.check(app, "the log is exact", exact, detail)?;
    let completed = status.state == RunState::Completed;
    claims.check(app, "the run completed", completed, format!("state {:?}", status.state).to_lowercase())?;
    let passed = tests_pass(&directory).await?;
    claims.check(app, "the work is done", passed, "the tests pass, run once more by the demo".to_owned())?;
    let owner = owner_epoch(&stage.client, agent).await?;
    let detail = format!("the restarted node owns the agent as epoch {owner}");
    claims.check(app, "the run was taken on", owner == 2, detail)
}

async fn owner_epoch(client: &Client, agent: AgentId) -> Result<u64> {
    let folded: Agent = client.agent(agent).await?;
    Ok(folded.owner().epoch.0)
}

async fn wait(client: &Client, agent: AgentId, run: RunId) -> Result<RunStatus> {
    let status = tokio::time::timeout(PART_MAX, client.wait(agent, run)).await;
    Ok(status.context("the run did not end in time")??)
}

/// Follows the log over the death of the node; returns the lines.
async fn watch(
    app: &mut App,
    stage: &mut Stage,
    claims: &mut Claims,
    (agent, run): (AgentId, RunId),
    pid: u32,
    directory: &Path,
) -> Result<Vec<String>> {
    let mut log = stage.client.logs(agent, run, Since::Start, true);
    let mut lines = Vec::new();
    while let Some(item) = log.next().await {
        let LogItem::Event(event, _) = item? else { bail!("the log has a gap") };
        let line = String::from_utf8_lossy(event.payload.as_bytes()).into_owned();
        say(app, format_args!("     {:>2} │ {line}", event.sequence.0))?;
        lines.push(line);
        if lines.len() == LINES_BEFORE_THE_NODE_DIES {
            let node = stage.node_pid();
            stage.kill_node().await?;
            say(app, format_args!("        ┆ SIGKILL to the node, process {node}"))?;
            claims.check(app, "the node is dead", !exists(node), format!("no process {node}"))?;
            let kept = goes_on(directory, pid).await;
            let detail =
                format!("process {pid} has said {} lines since", kept.saturating_sub(LINES_BEFORE_THE_NODE_DIES));
            claims.check(app, "the agent goes on without it", exists(pid), detail)?;
            stage.start_node().await?;
            say(app, format_args!("        ┆ a node again, process {}", stage.node_pid()))?;
        }
    }
    Ok(lines)
}

/// Waits until the agent has said some lines more, or is no more; returns how
/// many it has said.
async fn goes_on(directory: &Path, pid: u32) -> usize {
    let mut look = tokio::time::interval(LOOK_EVERY);
    loop {
        look.tick().await;
        let said = fs::read_to_string(directory.join("said.txt")).unwrap_or_default().lines().count();
        if said >= LINES_BEFORE_THE_NODE_DIES + LINES_WITHOUT_A_NODE || !exists(pid) {
            return said;
        }
    }
}

pub(super) async fn a_runaway_is_gone(app: &mut App, stage: &mut Stage, claims: &mut Claims) -> Result<()> {
    say(app, "\n2. a runaway: processes in sessions of their own that ignore SIGTERM\n")?;
    let directory = stage.runaway();
    let (agent, run) = run(&stage.client, &directory, "runaway.sh", "").await?;
    let mut log = stage.client.logs(agent, run, Since::Start, true);
    let first = tokio::time::timeout(PART_MAX, log.next()).await.context("the runaway said nothing")?;
    if let Some(LogItem::Event(event, _)) = first.transpose()? {
        say(app, format_args!("     {:>2} │ {}", event.sequence.0, String::from_utf8_lossy(event.payload.as_bytes())))?;
    }
    let pids = pids(&directory.join("pids"))?;
    let alive = pids.iter().filter(|pid| exists(**pid)).count();
    claims.check(app, "it runs away", alive == 5, format!("{alive} processes: {pids:?}"))?;
    let began = Instant::now();
    let ack = stage.client.kill(agent, run, "it runs away").await.context("failed to kill the runaway")?;
    let took = began.elapsed();
    // Looked at as soon as the answer is here, not later.
    let left: Vec<_> = pids.iter().filter(|pid| exists(**pid)).collect();
    let detail =
        format!("answered in {:.1} ms, then {} of {} processes exist", took.as_secs_f64() * 1e3, left.len(), alive);
    claims.check(app, "the whole tree is gone", ack.proved && left.is_empty(), detail)?;
    let status = wait(&stage.client, agent, run).await?;
    let killed = status.termination == Some(Termination::Killed);
    claims.check(app, "the history says so", killed, "run.killed, requested: it runs away".to_owned())
}

fn pids(directory: &Path) -> Result<Vec<u32>> {
    let mut pids = Vec::new();
    for entry in fs::read_dir(directory).context("failed to read the runaway's pids")? {
        pids.push(entry?.file_name().to_string_lossy().parse().context("failed to read a pid")?);
    }
    pids.sort_unstable();
    Ok(pids)
}

pub(super) async fn history_is_tamper_evident(app: &mut App, stage: &Stage, claims: &mut Claims) -> Result<()> {
    say(app, "\n3. the history, verified; then one byte of a copy is changed\n")?;
    let mut history = Vec::new();
    let bus = stage.client.bus();
    let mut events =
        bus.read(EventSelection::All, StreamSeq(1), Until::Now).await.context("failed to read the events")?;
    while let Some(recorded) = events.next().await {
        let Recorded { seq, time, subject, bytes } = recorded.context("failed to read the events")?;
        history.push((subject, Stored { seq, time, bytes }));
    }
    let report = check::verify(&history);
    let detail = format!("{} events of {} agents and {} runs", report.events, report.agents, report.runs);
    claims.check(app, "the history verifies", report.problems.is_empty() && report.events > 0, detail)?;
    let at = history.len() / 2;
    history[at].1.bytes = changed_by_one_byte(&history[at].1.bytes)?;
    let report = check::verify(&history);
    let detail = report
        .problems
        .first()
        .map_or_else(|| "nobody noticed".to_owned(), |problem| format!("event {}: {}", problem.seq, problem.what));
    claims.check(app, "a changed byte is noticed", !report.problems.is_empty(), detail)?;
    let kinds = kinds(&history);
    say(
        app,
        format_args!("     {}", kinds.iter().map(|(kind, n)| format!("{n} {kind}")).collect::<Vec<_>>().join(", ")),
    )
}

/// Changes a letter within a text of the event, so that it still decodes: the
/// kind of change that only the hash chain notices.
fn changed_by_one_byte(bytes: &[u8]) -> Result<Bytes> {
    let at = bytes.windows(4).rposition(|window| window == b"demo").context("the event names no node")?;
    let mut changed = bytes.to_vec();
    changed[at] = b'D' + 32 + 1;
    Ok(changed.into())
}

fn kinds(history: &[(Subject, Stored)]) -> BTreeMap<&str, usize> {
    let mut kinds = BTreeMap::new();
    for (subject, _) in history {
        if let Subject::Event(_, _, kind) = subject {
            *kinds.entry(kind.as_str()).or_default() += 1;
        }
    }
    kinds
}
