//! Kill: from the request on the bus until the tree of five is proved gone,
//! while a hundred runs write and every thread on which a run's actor could
//! run is held up; against SIGKILL and a wait for the same five.

use super::Scale;
use crate::{
    bed::{self, Bed, OwnNode},
    harness,
    load::many,
    table::{Row, Target, percentile},
};
use acri::{AgentId, AgentSpec, CapabilitySet, CommandId, HarnessType, Payload, RunId, event::FailReason};
use acri_client::Client;
use acri_drivers::{
    driver::{
        Attached, Chunk, Driver, Exit, Fault, Held, Info, KillRequest, KillSwitch, Owner, Provisioned, Refusal,
        Session, Start, StartError,
    },
    process::{self, ProcessDriver},
};
use anyhow::{Context as _, Result, ensure};
use async_trait::async_trait;
use bytes::Bytes;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open},
};
use std::{
    collections::HashMap,
    fs,
    os::{fd::OwnedFd, unix::process::CommandExt as _},
    process::{Child, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::sync::oneshot;

const CHATTERERS: usize = 100;
/// A shell and four that sleep.
const TREE: &str = "sleep 1000 & sleep 1000 & sleep 1000 & sleep 1000 & wait";
const TREE_PROCESSES: usize = 5;
/// How long a thread of the node is held up, each time that output is read.
const HELD_UP: Duration = Duration::from_millis(50);
const AT_ONCE: usize = 8;
/// What a kill may take before the row gives up.
const GONE_MAX: Duration = Duration::from_secs(10);

type Proofs = Mutex<HashMap<(AgentId, RunId), oneshot::Sender<Instant>>>;

/// The process driver; while `hold` is on, its sessions hold up the thread
/// that reads their output. It tells when a kill is proved.
struct Holding {
    inner: ProcessDriver,
    hold: Arc<AtomicBool>,
    proofs: Arc<Proofs>,
}

struct HoldingSession {
    inner: Arc<dyn Session>,
    hold: Arc<AtomicBool>,
}

struct TellingSwitch {
    inner: Arc<dyn KillSwitch>,
    of: (AgentId, RunId),
    proofs: Arc<Proofs>,
}

fn proofs(proofs: &Proofs) -> std::sync::MutexGuard<'_, HashMap<(AgentId, RunId), oneshot::Sender<Instant>>> {
    proofs.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Holding {
    fn holding(&self, inner: Arc<dyn Session>) -> Arc<dyn Session> {
        Arc::new(HoldingSession { inner, hold: Arc::clone(&self.hold) })
    }

    fn telling(&self, of: (AgentId, RunId), inner: Arc<dyn KillSwitch>) -> Arc<dyn KillSwitch> {
        Arc::new(TellingSwitch { inner, of, proofs: Arc::clone(&self.proofs) })
    }
}

#[async_trait]
impl KillSwitch for TellingSwitch {
    async fn kill(&self, request: KillRequest) -> Result<(), Fault> {
        self.inner.kill(request).await?;
        let proved = Instant::now();
        if let Some(waiting) = proofs(&self.proofs).remove(&self.of) {
            let _ = waiting.send(proved);
        }
        Ok(())
    }
}

#[async_trait]
impl Session for HoldingSession {
    fn info(&self) -> Info {
        self.inner.info()
    }
    async fn stop(&self, owner: Owner, command: CommandId) -> Result<(), Fault> {
        self.inner.stop(owner, command).await
    }
    async fn contact(&self, owner: Owner) -> Result<(), Fault> {
        self.inner.contact(owner).await
    }
    #[expect(clippy::disallowed_methods, reason = "to hold up the thread is what is measured")]
    async fn output(&self, offset: u64, bytes_max: usize) -> Result<Chunk, Fault> {
        let chunk = self.inner.output(offset, bytes_max).await;
        if self.hold.load(Ordering::Relaxed) {
            std::thread::sleep(HELD_UP);
        }
        chunk
    }
    async fn exit(&self) -> Result<Exit, Fault> {
        self.inner.exit().await
    }
    fn lost_reason(&self) -> FailReason {
        self.inner.lost_reason()
    }
    async fn release(&self, owner: Owner, offset: u64, token: Bytes) -> Result<(), Fault> {
        self.inner.release(owner, offset, token).await
    }
    async fn resume_token(&self) -> Result<Option<Bytes>, Fault> {
        self.inner.resume_token().await
    }
}

#[async_trait]
impl Driver for Holding {
    fn harness(&self) -> &HarnessType {
        self.inner.harness()
    }
    fn capabilities(&self) -> CapabilitySet {
        self.inner.capabilities()
    }
    fn is_local(&self) -> bool {
        self.inner.is_local()
    }
    async fn create(&self, agent: AgentId, spec: &AgentSpec) -> Result<Provisioned, Refusal> {
        self.inner.create(agent, spec).await
    }
    fn check_task(&self, spec: &AgentSpec, task: &Payload) -> Result<(), Refusal> {
        self.inner.check_task(spec, task)
    }
    async fn start(&self, start: &Start) -> Result<Arc<dyn Session>, StartError> {
        Ok(self.holding(self.inner.start(start).await?))
    }
    async fn attach(&self, agent: AgentId, run: RunId, owner: Owner) -> Result<Attached, Fault> {
        Ok(match self.inner.attach(agent, run, owner).await? {
            Attached::Session(session) => Attached::Session(self.holding(session)),
            other => other,
        })
    }
    async fn give_up(&self, agent: AgentId, run: RunId, owner: Owner) -> Result<(), Fault> {
        self.inner.give_up(agent, run, owner).await
    }
    async fn scan(&self) -> Vec<Held> {
        self.inner.scan().await
    }
    fn kill_switch(&self, agent: AgentId, run: RunId) -> Arc<dyn KillSwitch> {
        self.telling((agent, run), self.inner.kill_switch(agent, run))
    }
    async fn forget(&self, agent: AgentId, run: RunId) {
        self.inner.forget(agent, run).await;
    }
    async fn remove(&self, agent: AgentId) {
        self.inner.remove(agent).await;
    }
}

/// A tree of five of the benches' own.
struct RawTree {
    shell: Child,
    group: Pid,
    all: Vec<OwnedFd>,
}

impl RawTree {
    #[expect(clippy::disallowed_methods, reason = "what is compared with is a plain child")]
    fn plant() -> Result<Self> {
        let shell = std::process::Command::new("sh")
            .args(["-c", TREE])
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()?;
        let pid = i32::try_from(shell.id())?;
        let group = Pid::from_raw(pid).context("a process without an id")?;
        let children = format!("/proc/{pid}/task/{pid}/children");
        let began = Instant::now();
        let pids = loop {
            let text = fs::read_to_string(&children)?;
            let pids: Vec<i32> = text.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect();
            if pids.len() == TREE_PROCESSES - 1 {
                break pids;
            }
            ensure!(began.elapsed() < GONE_MAX, "the tree does not grow");
            std::thread::yield_now();
        };
        let open = |pid: i32| {
            let pid = Pid::from_raw(pid).context("a process without an id")?;
            Ok(pidfd_open(pid, PidfdFlags::empty())?)
        };
        let all = pids.into_iter().chain([pid]).map(open).collect::<Result<Vec<_>>>()?;
        Ok(Self { shell, group, all })
    }

    /// Milliseconds from the signal until all five are gone.
    fn fell(mut self) -> Result<f64> {
        let began = Instant::now();
        kill_process_group(self.group, Signal::KILL)?;
        for process in &self.all {
            let patience = Timespec::try_from(GONE_MAX)?;
            let gone = poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&patience))?;
            ensure!(gone == 1, "a process survives SIGKILL");
        }
        self.shell.wait()?;
        Ok(began.elapsed().as_secs_f64() * 1e3)
    }
}

impl Drop for RawTree {
    fn drop(&mut self) {
        let _ = kill_process_group(self.group, Signal::KILL);
        let _ = self.shell.wait();
    }
}

struct Ground {
    client: Client,
    node: OwnNode,
    hold: Arc<AtomicBool>,
    proofs: Arc<Proofs>,
}

pub(super) async fn measure(scale: &Scale) -> Result<Row> {
    let (chatterers, kills) = (scale.of(CHATTERERS, 5), scale.of(200, 5));
    let bed = Bed::new(false).await?;
    let (hold, proofs) = (Arc::new(AtomicBool::new(false)), Arc::new(Proofs::default()));
    let config = process::Config::new(bed.path("processes"), bed::own_exe()?);
    let driver = Holding { inner: ProcessDriver::new(config)?, hold: Arc::clone(&hold), proofs: Arc::clone(&proofs) };
    let node = bed.node("node", vec![Arc::new(driver)]).await?;
    let ground = Ground { client: bed.client().await?, node, hold, proofs };
    let chatter = bed::own_program(&[harness::CHATTER])?;
    let load = ground.started(chatterers, &chatter).await?;
    let target = Target::TimesAndMillisAtMost(2.0, 10.0);
    let mut row = Row::new("Kill → tree of five gone, p99, actors held up", "ms", target);
    for _ in 0..scale.rounds {
        let (raw, ours) = ground.round(kills).await?;
        row.notes.push(format!(
            "p50 {:.2} ms raw and {:.2} ms ours, most {:.1} and {:.1}",
            percentile(&raw, 50),
            percentile(&ours, 50),
            percentile(&raw, 100),
            percentile(&ours, 100)
        ));
        row.round(percentile(&raw, 99), percentile(&ours, 99));
    }
    let (client, load) = (&ground.client, &load);
    many(load.len(), AT_ONCE, |at| async move {
        let (agent, run) = load[at];
        client.kill(agent, run, "measured").await?;
        Ok(())
    })
    .await?;
    ground.node.idle().await;
    ground.node.leave().await?;
    Ok(row)
}

impl Ground {
    async fn started(&self, count: usize, spec: &AgentSpec) -> Result<Vec<(AgentId, RunId)>> {
        let client = &self.client;
        let runs = many(count, AT_ONCE, |_| async move {
            let agent = client.create(spec.clone()).await?.agent;
            Ok((agent, client.start(agent, bed::task("")).await?.run))
        })
        .await?;
        for (agent, run) in &runs {
            let pending =
                |status: acri::AgentStatus| status.run.is_none_or(|run| run.state == acri::status::RunState::Pending);
            while pending(client.status(*agent, Some(*run)).await?) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        Ok(runs)
    }

    /// Milliseconds of each kill, raw and ours.
    async fn round(&self, kills: usize) -> Result<(Vec<f64>, Vec<f64>)> {
        let tree = bed::local_spec(["sh", "-c", TREE].map(str::to_owned).to_vec());
        let victims = self.started(kills, &tree).await?;
        let trees =
            tokio::task::spawn_blocking(move || (0..kills).map(|_| RawTree::plant()).collect::<Result<Vec<_>>>())
                .await??;
        self.hold.store(true, Ordering::Relaxed);
        tokio::time::sleep(HELD_UP * 4).await;
        let (mut raw, mut ours, mut answers) = (Vec::new(), Vec::new(), Vec::new());
        for (tree, (agent, run)) in trees.into_iter().zip(victims) {
            raw.push(tokio::task::spawn_blocking(move || tree.fell()).await??);
            let (proof, proved) = oneshot::channel();
            proofs(&self.proofs).insert((agent, run), proof);
            let client = self.client.clone();
            let began = Instant::now();
            // Its answer waits for the run's actor, which is held up.
            answers.push(tokio::spawn(async move { client.kill(agent, run, "measured").await }));
            let proved = tokio::time::timeout(GONE_MAX, proved).await??;
            ours.push(proved.saturating_duration_since(began).as_secs_f64() * 1e3);
        }
        self.hold.store(false, Ordering::Relaxed);
        for answer in answers {
            answer.await??;
        }
        Ok((raw, ours))
    }
}
