//! Nodes that contend for an agent, and one that wakes up after it was fenced.

use crate::site;
use acri::{AgentId, AgentSpec, CapabilitySet, HarnessType, Payload, RunId, StreamSeq, Timestamp, command::OnExpiry};
use acri_bus::{
    nats::{self, NatsBus},
    port::{Fault as BusFault, SharedBus},
};
use acri_drivers::{
    driver::{Attached, Driver, Fault, Held, KillSwitch, Owner, Provisioned, Refusal, Session, Start, StartError},
    scripted::{ScriptedDriver, World},
};
use acri_runtime::{Config, Ended, Node, node::Connect};
use acri_tests::{
    line::Line,
    look::{ended, epochs, event_after, fenced, says, types, verified, written},
    site::{Chatty, SHORT_LEASE, SHORT_LEASE_TTL, Site, begin, node_id},
    within,
};
use std::{sync::Arc, time::Duration};

/// Scripts that every node reaches: as harnesses behind an endpoint are.
struct Remote(ScriptedDriver);

#[async_trait::async_trait]
impl Driver for Remote {
    fn harness(&self) -> &HarnessType {
        self.0.harness()
    }
    fn capabilities(&self) -> CapabilitySet {
        self.0.capabilities()
    }
    fn is_local(&self) -> bool {
        false
    }
    async fn create(&self, agent: AgentId, spec: &AgentSpec) -> Result<Provisioned, Refusal> {
        self.0.create(agent, spec).await
    }
    fn check_task(&self, spec: &AgentSpec, task: &Payload) -> Result<(), Refusal> {
        self.0.check_task(spec, task)
    }
    async fn start(&self, start: &Start) -> Result<Arc<dyn Session>, StartError> {
        self.0.start(start).await
    }
    async fn attach(&self, agent: AgentId, run: RunId, owner: Owner) -> Result<Attached, Fault> {
        self.0.attach(agent, run, owner).await
    }
    async fn give_up(&self, agent: AgentId, run: RunId, owner: Owner) -> Result<(), Fault> {
        self.0.give_up(agent, run, owner).await
    }
    async fn scan(&self) -> Vec<Held> {
        self.0.scan().await
    }
    fn kill_switch(&self, agent: AgentId, run: RunId) -> Arc<dyn KillSwitch> {
        self.0.kill_switch(agent, run)
    }
    async fn forget(&self, agent: AgentId, run: RunId) {
        self.0.forget(agent, run).await;
    }
    async fn remove(&self, agent: AgentId) {
        self.0.remove(agent).await;
    }
}

fn world() -> World {
    World::new(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        Timestamp::from_micros(i64::try_from(now.as_micros()).unwrap())
    })
}

/// A node within this process, on short leases.
async fn node(site: &Site, name: &str, url: &str, world: &World) -> Node {
    let mut config = Config::new(node_id(name), site.state_dir(name));
    config.lease_ttl = SHORT_LEASE_TTL;
    config.lease_renew_every = SHORT_LEASE_TTL / 5;
    config.lease_stop_after = SHORT_LEASE_TTL * 11 / 15;
    config.adopt_every = SHORT_LEASE_TTL / 4;
    let url = url.to_owned();
    let connect: Connect = Arc::new(move || {
        let options = nats::Options::new([url.clone()]);
        Box::pin(async move {
            let bus = NatsBus::connect(options).await;
            let bus = bus.map_err(|error| BusFault::Unavailable { operation: "connect", detail: error.to_string() })?;
            Ok(Arc::new(bus) as SharedBus)
        })
    });
    let drivers: Vec<Arc<dyn Driver>> = vec![Arc::new(Remote(ScriptedDriver::new(world.clone())))];
    Box::pin(Node::start(config, connect, drivers)).await.unwrap()
}

fn script(steps: &[&str]) -> AgentSpec {
    AgentSpec::new("scripted".parse().unwrap(), steps.iter().map(|&step| step.to_owned()).collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_fenced_owner_sent_too_late_is_refused_and_told_by_its_successor() {
    let site = site().await;
    let client = site.client().await;
    let line = Line::to(&site.server.url()).await;
    let world = world();
    let one = node(&site, "n1", &line.url(), &world).await;
    let (agent, run) = begin(&client, script(&["say one", "wait go", "say two", "exit 0"])).await;
    says(&client, agent, run, "one").await;
    let other = node(&site, "n2", &site.server.url(), &world).await;
    // Everything that the owner says from here on is on its way until he is
    // fenced: a frame, and the event that ends the run.
    line.hold();
    world.release(agent, run, "go");
    fenced(&client, one.incarnation()).await;
    let taken = event_after(&client, agent, StreamSeq(0), "agent.assigned").await;
    assert_eq!(taken.envelope.incarnation, other.incarnation());
    ended(&client, agent, run).await;
    line.release();
    assert_eq!(within("the former owner's end", one.ended()).await, Ended::Fenced);
    // A command finds the successor, and him alone.
    let (second, second_run) = begin(&client, script(&["say hello"])).await;
    ended(&client, second, second_run).await;
    let handle = client.status(agent, None).await.unwrap();
    assert_eq!(handle.node.as_str(), "n2");

    assert_eq!(written(&client, agent, run).await.out(), ["one", "two"]);
    let history = client.history(agent).await.unwrap();
    for event in &history {
        let late = event.seq >= taken.seq;
        assert_eq!(event.envelope.incarnation == other.incarnation(), late, "{:?}", event.envelope);
    }
    let ends = types(&client, agent).await;
    assert_eq!(ends.iter().filter(|name| *name == "run.completed").count(), 1, "{ends:?}");
    assert_eq!(ends.iter().filter(|name| *name == "run.started").count(), 1, "{ends:?}");
    verified(&client).await;
    within("the nodes to leave", async {
        one.leave().await;
        other.leave().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_that_contend_for_agents_get_each_of_them_once() {
    let site = site().await;
    let client = site.client().await;
    let line = Line::to(&site.server.url()).await;
    let world = world();
    let one = node(&site, "n1", &line.url(), &world).await;
    let mut runs = Vec::new();
    for _ in 0..12 {
        runs.push(begin(&client, script(&["say one", "wait go", "say two"])).await);
    }
    for (agent, run) in &runs {
        says(&client, *agent, *run, "one").await;
    }
    let url = site.server.url();
    let (second, third) = tokio::join!(node(&site, "n2", &url, &world), node(&site, "n3", &url, &world));
    line.cut();
    for (agent, _) in &runs {
        event_after(&client, *agent, StreamSeq(0), "agent.assigned").await;
    }
    let mut owners = Vec::new();
    for (agent, run) in &runs {
        assert_eq!(world.starts(*agent, *run), 1);
        world.release(*agent, *run, "go");
        ended(&client, *agent, *run).await;
        assert_eq!(written(&client, *agent, *run).await.out(), ["one", "two"]);
        assert_eq!(epochs(&client, *agent).await, [1, 2], "taken once, and kept");
        let status = client.status(*agent, None).await.unwrap();
        owners.push(status.node.as_str().to_owned());
    }
    assert!(owners.iter().all(|owner| owner == "n2" || owner == "n3"), "{owners:?}");
    line.release();
    within("the former owner's end", one.ended()).await;
    verified(&client).await;
    within("the nodes to leave", async {
        one.leave().await;
        second.leave().await;
        third.leave().await;
    })
    .await;
}

#[tokio::test]
async fn a_node_that_slept_past_its_lease_does_nothing_until_it_lives_anew() {
    let site = site().await;
    let url = site.server.url();
    let mut sleeper = site.node_with("n1", &url, &SHORT_LEASE).await;
    let client = site.client().await;
    let chatty = Chatty::start(&site, &client, 5, "0.02").await;
    says(&client, chatty.agent, chatty.run, "out 20").await;
    let former = client.history(chatty.agent).await.unwrap()[0].envelope.incarnation;
    let _watcher = site.node_with("n2", &url, &SHORT_LEASE).await;
    sleeper.pause().await;
    // Asked while nobody listens, by a client that goes on asking.
    let asked = tokio::spawn({
        let (client, agent, run) = (client.clone(), chatty.agent, chatty.run);
        async move { client.stop(agent, run, "asked of a sleeper", Some(Duration::from_secs(3600)), OnExpiry::Keep).await }
    });
    fenced(&client, former).await;
    let last = acri_tests::look::last_event(&client).await;
    sleeper.resume();
    let stopped = event_after(&client, chatty.agent, last, "run.stop_requested").await;
    within("an answer", asked).await.unwrap().unwrap();
    assert_ne!(stopped.envelope.incarnation, former, "the fenced incarnation answered");
    let history: Vec<_> = client.history(chatty.agent).await.unwrap();
    for event in history.iter().filter(|event| event.seq > last) {
        assert_ne!(event.envelope.incarnation, former, "{:?}", event.envelope);
    }
    // TERM ends the shell; what it wrote until then is whole.
    let status = ended(&client, chatty.agent, chatty.run).await;
    assert!(status.state.is_terminal());
    let written = written(&client, chatty.agent, chatty.run).await;
    acri_tests::look::assert_numbered(&written.out(), "out");
    acri_tests::look::assert_numbered(&written.err(), "err");
    assert_eq!(epochs(&client, chatty.agent).await, [1, 2]);
    assert!(sleeper.lives(), "{}", sleeper.log());
    verified(&client).await;
}

#[tokio::test]
async fn a_second_node_of_the_same_name_is_refused_while_the_first_lives() {
    let site = site().await;
    let _node = site.node("n1").await;
    let client = site.client().await;
    client.create(site.spec("true")).await.unwrap();
    let elsewhere = site.directory().join("elsewhere");
    let elsewhere = elsewhere.to_str().unwrap();
    let output = site.acri(&["node", "--name", "n1", "--state-dir", elsewhere]).await;
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("alive"), "{said}");
    let here = site.state_dir("n1");
    let output = site.acri(&["node", "--name", "n1", "--state-dir", here.to_str().unwrap()]).await;
    assert!(!output.status.success(), "the state directory is locked");
}
