//! A node over the memory bus and scripted harnesses: what happens when an
//! actor panics, a driver fails, an answer is lost, the node dies and returns.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the finding")]

mod hooks;

use acri::{
    AgentId, AgentSpec, ErrorCode, Event, NodeId, Payload, RunId, RunState, StreamSeq,
    command::OnExpiry,
    event::FailReason,
    status::{Phase, RunStatus, Termination},
};
use acri_bus::{
    memory::MemoryBus,
    port::{EventSelection, SharedBus, Until},
};
use acri_client::{Client, EventItem, EventTypes, EventsSince, LogItem, Since};
use acri_core::{appender::Stored, check};
use acri_drivers::{
    driver::Driver,
    scripted::{Effect, Failure, ScriptedDriver, World},
};
use acri_runtime::{Config, Node, node::Connect};
use futures_util::StreamExt as _;
use hooks::{Hooked, Mishaps};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

/// How long anything may take before its test fails.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often a frame gets no answer: long enough for a flooded pump to have
/// read all that it wants.
const REPEATS: u64 = 5;

/// A bus, a world of scripts, and nodes that come and go.
struct Rig {
    bus: MemoryBus,
    world: World,
    mishaps: Arc<Mishaps>,
    state: tempfile::TempDir,
    client: Client,
}

fn connect(bus: impl Fn() -> MemoryBus + Send + Sync + 'static) -> Connect {
    Arc::new(move || {
        let bus: SharedBus = Arc::new(bus());
        Box::pin(async move { Ok(bus) })
    })
}

impl Rig {
    fn new() -> Self {
        let bus = MemoryBus::new();
        let clock = bus.another();
        let world = World::new(move || clock.state().now());
        let client = Client::new(Arc::new(bus.another()) as SharedBus, "test".to_owned());
        let state = tempfile::tempdir().unwrap();
        Self { bus, world, mishaps: Arc::default(), state, client }
    }

    fn config(&self, name: &str) -> Config {
        let node: NodeId = name.parse().unwrap();
        let mut config = Config::new(node, self.state.path().join(name));
        config.adopt_every = Duration::from_millis(50);
        config
    }

    async fn start_with(&self, config: Config) -> Node {
        // Any node reaches the rig's world.
        let inner = ScriptedDriver::new(self.world.clone());
        self.start_hooked(config, Hooked { inner, local: false, mishaps: Arc::clone(&self.mishaps) }).await
    }

    async fn start_hooked(&self, config: Config, hooked: Hooked) -> Node {
        let bus = self.bus.clone();
        Self::start_on(config, hooked, move || bus.another()).await
    }

    /// A node whose bus is at fault.
    async fn start_faulty(&self, config: Config, faulty: &MemoryBus) -> Node {
        let (bus, inner) = (faulty.clone(), ScriptedDriver::new(self.world.clone()));
        let hooked = Hooked { inner, local: false, mishaps: Arc::clone(&self.mishaps) };
        Self::start_on(config, hooked, move || bus.clone()).await
    }

    async fn start_on(config: Config, hooked: Hooked, bus: impl Fn() -> MemoryBus + Send + Sync + 'static) -> Node {
        let started = Node::start(config, connect(bus), vec![Arc::new(hooked) as Arc<dyn Driver>]);
        tokio::time::timeout(PATIENCE, started).await.unwrap().unwrap()
    }

    async fn start(&self, name: &str) -> Node {
        self.start_with(self.config(name)).await
    }

    async fn create(&self, script: &[&str]) -> AgentId {
        let script = script.iter().map(|step| (*step).to_owned()).collect();
        let spec = AgentSpec::new("scripted".parse().unwrap(), script);
        tokio::time::timeout(PATIENCE, self.client.create(spec)).await.unwrap().unwrap().agent
    }

    async fn run(&self, script: &[&str]) -> (AgentId, RunId) {
        let agent = self.create(script).await;
        let start = self.client.start(agent, Payload::text(""));
        (agent, tokio::time::timeout(PATIENCE, start).await.unwrap().unwrap().run)
    }

    async fn wait(&self, (agent, run): (AgentId, RunId)) -> RunStatus {
        tokio::time::timeout(PATIENCE, self.client.wait(agent, run)).await.unwrap().unwrap()
    }

    /// Waits for an event of the run.
    async fn event(&self, (agent, run): (AgentId, RunId), kind: &str) -> Event {
        let types = EventTypes::Only([kind.to_owned()].into());
        let mut events = self.client.events(EventSelection::Run(agent, run), types, EventsSince::Start, true);
        let item = tokio::time::timeout(PATIENCE, events.next()).await.unwrap().unwrap().unwrap();
        let EventItem::Event(event) = item else { panic!("{item:?}") };
        event.envelope.event
    }

    /// Waits for an adoption, and tells by which node.
    async fn owner_event(&self, agent: AgentId) -> NodeId {
        let types = EventTypes::Only(["agent.assigned".to_owned()].into());
        let mut events = self.client.events(EventSelection::Agent(agent), types, EventsSince::Start, true);
        let item = tokio::time::timeout(PATIENCE, events.next()).await.unwrap().unwrap().unwrap();
        let EventItem::Event(event) = item else { panic!("{item:?}") };
        event.envelope.node
    }

    /// Waits until the agent has changed hands as told.
    async fn owners(&self, agent: AgentId, expected: &[&str]) {
        let types = EventTypes::Only(["agent.assigned".to_owned()].into());
        let mut events = self.client.events(EventSelection::Agent(agent), types, EventsSince::Start, true);
        for owner in expected {
            let item = tokio::time::timeout(PATIENCE, events.next()).await.unwrap().unwrap().unwrap();
            let EventItem::Event(event) = item else { panic!("{item:?}") };
            assert_eq!(event.envelope.node.as_str(), *owner);
        }
    }

    /// The whole log, once it is sealed.
    async fn log(&self, (agent, run): (AgentId, RunId)) -> Vec<String> {
        let mut log = self.client.logs(agent, run, Since::Start, true);
        let mut lines = Vec::new();
        while let Some(item) = tokio::time::timeout(PATIENCE, log.next()).await.unwrap() {
            match item.unwrap() {
                LogItem::Event(event, _) => {
                    assert_eq!(event.sequence.0, lines.len() as u64 + 1);
                    lines.push(String::from_utf8(event.payload.as_bytes().to_vec()).unwrap());
                }
                other => panic!("{other:?}"),
            }
        }
        lines
    }

    async fn types(&self, agent: AgentId) -> Vec<String> {
        let mut events = self.bus.another().read_all(agent).await;
        events
            .drain(..)
            .map(|(subject, _)| match subject {
                acri::Subject::Event(_, _, kind) => kind,
                other => panic!("{other}"),
            })
            .collect()
    }

    async fn assert_history_is_sound(&self, agent: AgentId) {
        let report = check::verify(&self.bus.another().read_all(agent).await);
        assert!(report.problems.is_empty(), "{:#?}", report.problems);
    }
}

trait ReadAll {
    async fn read_all(&self, agent: AgentId) -> Vec<(acri::Subject, Stored)>;
}

impl ReadAll for MemoryBus {
    async fn read_all(&self, agent: AgentId) -> Vec<(acri::Subject, Stored)> {
        use acri_bus::port::Events as _;
        let events = self.read(EventSelection::Agent(agent), StreamSeq(1), Until::Now).await.unwrap();
        events
            .map(|recorded| {
                let recorded = recorded.unwrap();
                let (seq, time) = (recorded.seq, recorded.time);
                (recorded.subject, Stored { seq, time, bytes: recorded.bytes })
            })
            .collect()
            .await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_goes_through_its_events_and_its_log_is_exact() {
    let rig = Rig::new();
    let node = rig.start("one").await;
    let run = rig.run(&["say a", "err b", "say c", "exit 0"]).await;
    assert_eq!(rig.wait(run).await.state, RunState::Completed);
    assert_eq!(rig.log(run).await, ["a", "b", "c"]);
    assert_eq!(
        rig.types(run.0).await,
        ["agent.created", "run.accepted", "run.started", "run.completed", "run.logs_sealed"]
    );
    rig.assert_history_is_sound(run.0).await;
    node.leave().await;
}

type Mishap = (&'static str, fn(&Mishaps) -> &AtomicU32);

/// Where it panics, once each.
const PANICS: &[Mishap] = &[
    ("the agent's actor, deciding", |mishaps| &mishaps.check_task_panics),
    ("the start of a harness", |mishaps| &mishaps.start_panics),
    ("the pump of a run's log", |mishaps| &mishaps.output_panics),
    ("the watcher of a run's end", |mishaps| &mishaps.exit_panics),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_anywhere_is_answered_by_an_adoption_and_the_harness_does_not_notice() {
    for (what, mishap) in PANICS {
        let rig = Rig::new();
        let node = rig.start("one").await;
        let agent = rig.create(&["say a", "wait go", "say b", "exit 0"]).await;
        mishap(&rig.mishaps).store(1, Ordering::SeqCst);
        let start = rig.client.start(agent, Payload::text(""));
        let run = tokio::time::timeout(PATIENCE, start).await.unwrap().unwrap().run;
        rig.event((agent, run), "run.started").await;
        rig.owner_event(agent).await;
        // Before the end: then the world forgets it.
        assert_eq!(rig.world.starts(agent, run), 1, "{what}");
        rig.world.release(agent, run, "go");
        assert_eq!(rig.wait((agent, run)).await.state, RunState::Completed, "{what}");
        assert_eq!(rig.log((agent, run)).await, ["a", "b"], "{what}");
        let types = rig.types(agent).await;
        assert_eq!(types.iter().filter(|kind| *kind == "agent.assigned").count(), 1, "{what}: {types:?}");
        rig.assert_history_is_sound(agent).await;
        assert_eq!(mishap(&rig.mishaps).load(Ordering::SeqCst), 0, "{what} did not panic");
        node.leave().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_while_adopting_is_answered_by_the_next_adoption() {
    let rig = Rig::new();
    let node = rig.start("one").await;
    let run = rig.run(&["say a", "wait go", "exit 0"]).await;
    rig.event(run, "run.started").await;
    node.leave().await;
    drop(node);
    rig.mishaps.attach_panics.store(2, Ordering::SeqCst);
    let node = rig.start("one").await;
    rig.owner_event(run.0).await;
    assert_eq!(rig.world.starts(run.0, run.1), 1);
    rig.world.release(run.0, run.1, "go");
    assert_eq!(rig.wait(run).await.state, RunState::Completed);
    assert_eq!(rig.log(run).await, ["a"]);
    rig.assert_history_is_sound(run.0).await;
    node.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_effect_may_fail_or_lose_its_answer_and_the_run_is_none_the_worse() {
    for effect in [Effect::Start, Effect::Output, Effect::Release, Effect::Contact, Effect::Stop] {
        for failure in [Failure::Before, Failure::After] {
            let rig = Rig::new();
            let node = rig.start("one").await;
            let agent = rig.create(&["say a", "on stop exit 0", "wait go", "say b", "exit 0"]).await;
            rig.world.fail_next(effect, failure);
            let start = rig.client.start(agent, Payload::text(""));
            let run = tokio::time::timeout(PATIENCE, start).await.unwrap().unwrap().run;
            rig.event((agent, run), "run.started").await;
            assert_eq!(rig.world.starts(agent, run), 1, "{effect:?} {failure:?}");
            rig.world.release(agent, run, "go");
            assert_eq!(rig.wait((agent, run)).await.state, RunState::Completed, "{effect:?} {failure:?}");
            assert_eq!(rig.log((agent, run)).await, ["a", "b"], "{effect:?} {failure:?}");
            rig.assert_history_is_sound(agent).await;
            node.leave().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_that_fails_or_loses_its_answer_is_repeated_until_it_is_proved() {
    for failure in [Failure::Before, Failure::After] {
        let rig = Rig::new();
        let node = rig.start("one").await;
        let run = rig.run(&["ignore stop", "hang"]).await;
        rig.event(run, "run.started").await;
        rig.world.fail_next(Effect::Kill, failure);
        let ack = tokio::time::timeout(PATIENCE, rig.client.kill(run.0, run.1, "enough")).await.unwrap().unwrap();
        let status = rig.wait(run).await;
        assert_eq!(status.termination, Some(Termination::Killed), "{failure:?} {ack:?}");
        assert!(!rig.world.is_alive(run.0, run.1));
        rig.assert_history_is_sound(run.0).await;
        node.leave().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_that_cannot_be_proved_stays_in_the_phase_killing() {
    let rig = Rig::new();
    let node = rig.start("one").await;
    let run = rig.run(&["hang"]).await;
    rig.event(run, "run.started").await;
    rig.world.set_unkillable(run.0, run.1, true);
    let ack = tokio::time::timeout(PATIENCE, rig.client.kill(run.0, run.1, "enough")).await.unwrap().unwrap();
    assert!(!ack.proved);
    let status = rig.client.status(run.0, Some(run.1)).await.unwrap().run.unwrap();
    assert_eq!((status.state, status.phase), (RunState::Running, Some(Phase::Killing)));
    rig.world.set_unkillable(run.0, run.1, false);
    assert_eq!(rig.wait(run).await.termination, Some(Termination::Killed));
    node.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_in_grace_stops_and_an_expired_one_kills_or_keeps() {
    let rig = Rig::new();
    let node = rig.start("one").await;
    let grace = Some(Duration::from_millis(200));
    let in_grace = rig.run(&["hang"]).await;
    rig.event(in_grace, "run.started").await;
    rig.client.stop(in_grace.0, in_grace.1, "enough", grace, OnExpiry::Kill).await.unwrap();
    assert_eq!(rig.wait(in_grace).await.state, RunState::Stopped);
    let killed = rig.run(&["ignore stop", "hang"]).await;
    rig.event(killed, "run.started").await;
    rig.client.stop(killed.0, killed.1, "enough", grace, OnExpiry::Kill).await.unwrap();
    assert_eq!(rig.wait(killed).await.termination, Some(Termination::Killed));
    let kept = rig.run(&["ignore stop", "wait go", "exit 0"]).await;
    rig.event(kept, "run.started").await;
    rig.client.stop(kept.0, kept.1, "enough", grace, OnExpiry::Keep).await.unwrap();
    rig.event(kept, "run.stop_expired").await;
    rig.world.release(kept.0, kept.1, "go");
    assert_eq!(rig.wait(kept).await.state, RunState::Completed);
    node.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acknowledgement_lost_after_the_commit_costs_nothing_and_doubles_nothing() {
    use acri_bus::memory::fault::{Kind, On};
    let rig = Rig::new();
    let faulty = rig.bus.another();
    for _ in 0..4 {
        faulty.faults().inject(On::Event, Kind::AckLost);
    }
    for _ in 0..3 {
        faulty.faults().inject(On::Frame, Kind::AckLost);
    }
    let node = rig.start_faulty(rig.config("one"), &faulty).await;
    let run = rig.run(&["say a", "wait go", "say b", "exit 0"]).await;
    rig.event(run, "run.started").await;
    rig.world.release(run.0, run.1, "go");
    assert_eq!(rig.wait(run).await.state, RunState::Completed);
    assert_eq!(rig.log(run).await, ["a", "b"]);
    rig.assert_history_is_sound(run.0).await;
    assert!(faulty.faults().counts().values().sum::<u64>() >= 5, "{:?}", faulty.faults().counts());
    node.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_former_owners_late_frame_does_not_hold_is_read_again_though_the_harness_is_silent() {
    let rig = Rig::new();
    *rig.mishaps.late_frame.lock().unwrap() = Some(rig.bus.another());
    let node = rig.start("one").await;
    let run = rig.run(&["say a", "say b", "say c", "wait go", "exit 0"]).await;
    // The frame of the first line is refused, and the harness says nothing more.
    let mut log = rig.client.logs(run.0, run.1, Since::Start, true);
    for line in ["a", "b", "c"] {
        let item = tokio::time::timeout(PATIENCE, log.next()).await.unwrap().unwrap().unwrap();
        let LogItem::Event(event, _) = item else { panic!("{item:?}") };
        assert_eq!(event.payload.as_bytes(), line.as_bytes());
    }
    rig.world.release(run.0, run.1, "go");
    assert_eq!(rig.log(run).await, ["a", "b", "c"]);
    node.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_former_owners_late_frame_comes_while_more_is_read_than_the_writer_takes() {
    use acri_bus::memory::fault::{Kind, On};
    let rig = Rig::new();
    *rig.mishaps.late_frame.lock().unwrap() = Some(rig.bus.another());
    let faulty = rig.bus.another();
    // While the first frame is repeated, the pump reads until nothing more is wanted.
    for _ in 0..REPEATS {
        faulty.faults().inject(On::Frame, Kind::NeverArrived);
    }
    let node = rig.start_faulty(rig.config("one"), &faulty).await;
    let run = rig.run(&["flood 64 65536", "wait go", "exit 0"]).await;
    let mut log = rig.client.logs(run.0, run.1, Since::Start, true);
    for line in 0..64 {
        let item = tokio::time::timeout(PATIENCE, log.next()).await.unwrap().unwrap().unwrap();
        let LogItem::Event(event, _) = item else { panic!("{item:?}") };
        assert_eq!(event.payload.as_bytes(), format!("{line:065535}").as_bytes());
    }
    rig.world.release(run.0, run.1, "go");
    assert_eq!(rig.wait(run).await.state, RunState::Completed);
    let repeats = faulty.faults().counts().values().sum::<u64>();
    assert_eq!(repeats, REPEATS);
    node.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_clock_is_more_than_two_seconds_off_does_not_start() {
    let rig = Rig::new();
    let millis_max = i64::try_from(acri::limits::CLOCK_SKEW_MAX.as_millis()).unwrap();
    for (millis, starts) in [(millis_max, true), (millis_max + 1, false), (-millis_max, true), (-millis_max - 1, false)]
    {
        let bus = rig.bus.another();
        bus.faults().set_clock_offset_micros(millis * 1_000);
        let driver: Arc<dyn Driver> = Arc::new(ScriptedDriver::new(rig.world.clone()));
        let config = rig.config(&format!("n{}", millis.unsigned_abs()));
        match Node::start(config, connect(move || bus.clone()), vec![driver]).await {
            Ok(node) => {
                assert!(starts, "{millis} ms");
                node.leave().await;
            }
            Err(error) => {
                assert!(!starts, "{millis} ms: {error}");
                assert!(error.to_string().contains(&format!("by {millis} ms")), "{error}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_returns_goes_on_with_what_ran() {
    let rig = Rig::new();
    let node = rig.start("one").await;
    let mut runs = Vec::new();
    for _ in 0..20 {
        runs.push(rig.run(&["say a", "wait go", "say b", "exit 0"]).await);
    }
    for run in &runs {
        rig.event(*run, "run.started").await;
    }
    node.leave().await;
    drop(node);
    let node = rig.start("one").await;
    for (agent, run) in &runs {
        rig.owner_event(*agent).await;
        assert_eq!(rig.world.starts(*agent, *run), 1);
        rig.world.release(*agent, *run, "go");
    }
    for run in &runs {
        assert_eq!(rig.wait(*run).await.state, RunState::Completed);
        assert_eq!(rig.log(*run).await, ["a", "b"]);
        rig.assert_history_is_sound(run.0).await;
    }
    node.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_stops_what_runs_and_a_second_word_kills_it() {
    let rig = Rig::new();
    let node = rig.start("one").await;
    let polite = rig.run(&["hang"]).await;
    rig.event(polite, "run.started").await;
    assert_eq!(node.stop_runs(Duration::from_secs(5)).await, 0);
    assert_eq!(rig.wait(polite).await.state, RunState::Stopped);
    let stubborn = rig.run(&["ignore stop", "hang"]).await;
    rig.event(stubborn, "run.started").await;
    assert_eq!(node.kill_runs().await, 0);
    assert_eq!(rig.wait(stubborn).await.termination, Some(Termination::Killed));
    node.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_nodes_agents_go_to_another_that_reaches_their_harness() {
    let rig = Rig::new();
    let mut config = rig.config("one");
    config.lease_ttl = Duration::from_secs(1);
    config.lease_renew_every = Duration::from_millis(200);
    config.lease_stop_after = Duration::from_millis(700);
    let mut second = config.clone();
    second.node = "two".parse().unwrap();
    second.state_dir = rig.state.path().join("two");
    let away = rig.bus.another();
    let bus = away.clone();
    let driver: Arc<dyn Driver> = Arc::new(ScriptedDriver::new(rig.world.clone()));
    let one = Node::start(config, connect(move || bus.clone()), vec![driver]).await.unwrap();
    let run = rig.run(&["say a", "wait go", "say b", "exit 0"]).await;
    rig.event(run, "run.started").await;
    let two = rig.start_with(second).await;
    away.set_away(true);
    assert_eq!(rig.owner_event(run.0).await.as_str(), "two");
    away.set_away(false);
    assert_eq!(rig.world.starts(run.0, run.1), 1);
    rig.world.release(run.0, run.1, "go");
    assert_eq!(rig.wait(run).await.state, RunState::Completed);
    assert_eq!(rig.log(run).await, ["a", "b"]);
    rig.assert_history_is_sound(run.0).await;
    tokio::time::timeout(PATIENCE, one.ended()).await.expect("the fenced node notices");
    two.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_state_directory_holds_one_node() {
    let rig = Rig::new();
    let node = rig.start("one").await;
    let connect: Connect = {
        let bus = rig.bus.clone();
        Arc::new(move || {
            let bus: SharedBus = Arc::new(bus.another());
            Box::pin(async move { Ok(bus) })
        })
    };
    let again = Node::start(rig.config("one"), connect, Vec::new()).await;
    assert!(matches!(again, Err(acri_runtime::node::Error::Locked(_))), "{again:?}");
    node.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_starts_that_come_at_once_one_is_accepted_and_each_is_answered() {
    const AT_ONCE: usize = 32;
    let rig = Rig::new();
    let node = rig.start("one").await;
    let agent = rig.create(&["hang"]).await;
    for round in 1..=8 {
        let starts = (0..AT_ONCE).map(|_| {
            let client = rig.client.clone();
            tokio::spawn(async move { client.start(agent, Payload::text("")).await })
        });
        let answers = tokio::time::timeout(PATIENCE, futures_util::future::join_all(starts)).await.unwrap();
        let (mut runs, mut refused) = (Vec::new(), 0);
        for answer in answers {
            match answer.unwrap() {
                Ok(handle) => runs.push(handle.run),
                Err(acri_client::Error::Refused { body, .. }) if body.code == ErrorCode::FailedPrecondition => {
                    refused += 1
                }
                Err(other) => panic!("{other:?}"),
            }
        }
        assert_eq!((runs.len(), refused), (1, AT_ONCE - 1), "round {round}");
        rig.event((agent, runs[0]), "run.started").await;
        let killed = tokio::time::timeout(PATIENCE, rig.client.kill(agent, runs[0], "enough")).await.unwrap().unwrap();
        assert!(killed.proved);
        rig.wait((agent, runs[0])).await;
        // Until it is sealed another Start is refused.
        assert!(rig.log((agent, runs[0])).await.is_empty());
    }
    rig.assert_history_is_sound(agent).await;
    let accepted = rig.types(agent).await.iter().filter(|kind| *kind == "run.accepted").count();
    assert_eq!(accepted, 8);
    node.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removed_agent_is_gone_and_its_start_is_refused() {
    let rig = Rig::new();
    let node = rig.start("one").await;
    let run = rig.run(&["exit 0"]).await;
    rig.event(run, "run.logs_sealed").await;
    rig.client.remove(run.0, "done").await.unwrap();
    let error = rig.client.start(run.0, Payload::text("")).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::FailedPrecondition, "{error}");
    node.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_local_run_that_was_given_up_is_its_own_nodes_to_settle_and_no_other_looks_for_it() {
    let rig = Rig::new();
    let short = |name: &str| {
        let mut config = rig.config(name);
        config.lease_ttl = Duration::from_secs(1);
        config.lease_renew_every = Duration::from_millis(200);
        config.lease_stop_after = Duration::from_millis(700);
        config
    };
    let world = || {
        let clock = rig.bus.another();
        World::new(move || clock.state().now())
    };
    let local = |world: World, mishaps: &Arc<Mishaps>| Hooked {
        inner: ScriptedDriver::new(world),
        local: true,
        mishaps: Arc::clone(mishaps),
    };
    let (home, mishaps) = (world(), Arc::default());
    // Its Start is accepted, and nothing begins before its node goes.
    for _ in 0..40 {
        home.fail_next(Effect::Start, Failure::Before);
    }
    let one = rig.start_hooked(short("one"), local(home, &mishaps)).await;
    let mut spec = AgentSpec::new("scripted".parse().unwrap(), vec!["exit 0".to_owned()]);
    (spec.orphan_after_ms, spec.node_lost_after_ms) = (Some(1_000), Some(31_000));
    let agent = rig.client.create(spec).await.unwrap().agent;
    let run = (agent, rig.client.start(agent, Payload::text("")).await.unwrap().run);
    one.leave().await;
    drop(one);
    let elsewhere: Arc<Mishaps> = Arc::default();
    let two = rig.start_hooked(short("two"), local(world(), &elsewhere)).await;
    let failed = rig.event(run, "run.failed").await;
    assert!(matches!(&failed, Event::RunFailed(data) if data.reason == FailReason::NodeLost), "{failed:?}");
    // Whoever gave it up is restarted: it is out of reach all the same.
    two.leave().await;
    drop(two);
    let two = rig.start_hooked(short("two"), local(world(), &elsewhere)).await;
    rig.owners(agent, &["two", "two"]).await;
    assert_eq!(elsewhere.attaches.load(Ordering::SeqCst), 0, "a run that lives on another node was looked for");
    // Its own node knows that it never began.
    let one = rig.start_hooked(short("one"), local(world(), &mishaps)).await;
    let sealed = rig.event(run, "run.logs_sealed").await;
    assert!(matches!(&sealed, Event::RunLogsSealed(data) if data.count.0 == 0 && !data.gap), "{sealed:?}");
    let next = (agent, rig.client.start(agent, Payload::text("")).await.unwrap().run);
    assert_eq!(rig.wait(next).await.state, RunState::Completed);
    rig.assert_history_is_sound(agent).await;
    one.leave().await;
    two.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_owner_notices_that_the_stream_was_put_back() {
    let rig = Rig::new();
    let away = rig.bus.another();
    let bus = away.clone();
    let driver: Arc<dyn Driver> = Arc::new(ScriptedDriver::new(rig.world.clone()));
    let node = Node::start(rig.config("one"), connect(move || bus.clone()), vec![driver]).await.unwrap();
    let untouched = rig.run(&["hang"]).await;
    rig.event(untouched, "run.started").await;
    let run = rig.run(&["hang"]).await;
    rig.event(run, "run.started").await;
    away.set_away(true);
    // What was stored last is gone: `run.started`.
    rig.bus.with(|state| {
        let last = state.event_facts().last;
        state.truncate_events(StreamSeq(last.0 - 1));
    });
    away.set_away(false);
    let failed = rig.event(run, "run.failed").await;
    assert!(matches!(&failed, Event::RunFailed(data) if data.reason == FailReason::HistoryLost), "{failed:?}");
    // What lived of it is ended, and nothing is owed any more.
    rig.event(run, "run.logs_sealed").await;
    let (agent, other) = untouched;
    let status = rig.client.status(agent, Some(other)).await.unwrap();
    assert_eq!((status.run.unwrap().state, status.epoch.0), (RunState::Running, 1), "the other one is left alone");
    node.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_waits_in_the_mailbox_of_an_actor_that_ends_is_answered_and_so_repeated() {
    let rig = Rig::new();
    let node = rig.start("one").await;
    let (agent, run) = rig.run(&["hang"]).await;
    rig.event((agent, run), "run.started").await;
    // A client that would wait for ever for an answer, and repeats what is refused.
    let limits = acri_client::Limits {
        attempt_timeout_first: PATIENCE * 10,
        attempt_timeout: PATIENCE * 10,
        command_deadline: PATIENCE * 10,
        ..acri_client::Limits::default()
    };
    let client = Client::with_limits(Arc::new(rig.bus.another()) as SharedBus, "test".to_owned(), limits);
    let (open, gate) = std::sync::mpsc::channel();
    *rig.mishaps.check_task_gate.lock().unwrap() = Some(gate);
    rig.mishaps.check_task_panics.store(1, Ordering::SeqCst);
    // The actor stands in this one, and the Kill waits behind it.
    let starter = client.clone();
    let start = tokio::spawn(async move { starter.start(agent, Payload::text("")).await });
    let stands = async {
        while rig.mishaps.check_task_gate.lock().unwrap().is_some() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, stands).await.unwrap();
    let kill = tokio::spawn(async move { client.kill(agent, run, "enough").await });
    // The switch is pulled by who has put the command into the mailbox before.
    let pulled = async {
        while rig.world.is_alive(agent, run) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, pulled).await.unwrap();
    open.send(()).unwrap();
    let killed = tokio::time::timeout(PATIENCE, kill).await.expect("the Kill is answered").unwrap().unwrap();
    assert!(killed.proved);
    // The Start that the actor died of was answered too.
    tokio::time::timeout(PATIENCE, start).await.expect("the Start is answered").unwrap().unwrap();
    rig.assert_history_is_sound(agent).await;
    node.leave().await;
}

/// A lease that nobody in a test can wait for.
fn long_lease(mut config: Config) -> Config {
    config.lease_ttl = PATIENCE * 10;
    config.lease_stop_after = PATIENCE * 5;
    config
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_left_gave_its_lease_back_and_another_takes_its_agents_at_once() {
    let rig = Rig::new();
    let one = rig.start_with(long_lease(rig.config("one"))).await;
    let run = rig.run(&["exit 0"]).await;
    rig.event(run, "run.logs_sealed").await;
    let mut config = rig.config("two");
    // What it must have held its own for before it may conclude anything.
    config.lease_ttl = Duration::from_secs(1);
    config.lease_renew_every = Duration::from_millis(200);
    config.lease_stop_after = Duration::from_millis(700);
    let two = rig.start_with(config).await;
    one.leave().await;
    assert_eq!(rig.owner_event(run.0).await.as_str(), "two");
    let next = rig.client.start(run.0, Payload::text("")).await.unwrap().run;
    assert_eq!(rig.wait((run.0, next)).await.state, RunState::Completed);
    rig.assert_history_is_sound(run.0).await;
    two.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_left_frees_its_name_at_once() {
    let rig = Rig::new();
    let one = rig.start_with(long_lease(rig.config("one"))).await;
    let agent = rig.create(&["exit 0"]).await;
    one.leave().await;
    // From another state directory, which proves nothing of the former's end.
    let mut config = long_lease(rig.config("one"));
    config.state_dir = rig.state.path().join("elsewhere");
    let again = rig.start_with(config).await;
    rig.owners(agent, &["one"]).await;
    again.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_harness_lives_on_keeps_its_lease_until_it_runs_out() {
    use acri_bus::port::{LeaseEntry, Leases as _};
    let rig = Rig::new();
    let one = rig.start_with(long_lease(rig.config("one"))).await;
    let run = rig.run(&["wait go", "exit 0"]).await;
    rig.event(run, "run.started").await;
    let incarnation = one.incarnation();
    one.leave().await;
    let entry = rig.bus.another().lease(incarnation).await.unwrap();
    assert!(matches!(entry, LeaseEntry::Live { .. }), "{entry:?}");
    assert!(rig.world.is_alive(run.0, run.1));
}
