//! A stranger with a connection: whatever it sends to a command subject, it
//! gets an error or nothing, and nothing changes.

use crate::site;
use acri::{
    AgentId, CommandId, ErrorCode, RunId, StreamSeq, codec,
    command::{CreateAgent, Envelope, GetStatus, KillRun, OnExpiry, RemoveAgent, StartRun, StopRun},
    limits::EVENT_BODY_BYTES_MAX,
};
use acri_client::{Client, LogItem, Since};
use acri_tests::{
    eventually,
    look::{Written, assert_numbered, counted, event, heartbeat, last_event, report, says, sealed, verified},
    raw::Raw,
    site::{Chatty, NodeProcess, SHORT_LEASE, SHORT_LEASE_TTL, Site, begin},
};
use futures_util::StreamExt as _;
use serde::Serialize;
use serde_json::json;

type Headers = &'static [(&'static str, &'static str)];

const JSON: Headers = &[("Content-Type", "application/json")];

/// Messages between two looks whether the server has taken them.
const FLOOD_BATCH: usize = 500;

struct Scene {
    site: Site,
    node: NodeProcess,
    client: Client,
    raw: Raw,
    agent: AgentId,
    run: RunId,
    last: StreamSeq,
}

impl Scene {
    async fn set() -> Self {
        let site = site().await;
        let node = site.node("n1").await;
        let client = site.client().await;
        let (agent, run) = begin(&client, site.spec("echo up; exec sleep 600")).await;
        says(&client, agent, run, "up").await;
        let raw = Raw::connect(&site.server.url()).await;
        let last = last_event(&client).await;
        Self { site, node, client, raw, agent, run, last }
    }

    async fn counter(&self, name: &str) -> u64 {
        heartbeat(&self.client, "n1").await.counters[name]
    }

    fn of_agent(&self, verb: &str) -> String {
        format!("acri.v1.cmd.agent.{}._.{verb}", self.agent)
    }

    fn of_run(&self, verb: &str) -> String {
        format!("acri.v1.cmd.agent.{}.{}.{verb}", self.agent, self.run)
    }

    /// Every command subject, with a body that would be carried out.
    fn commands(&self) -> Vec<(String, Vec<u8>)> {
        let spec = self.site.spec("true");
        vec![
            ("acri.v1.cmd.harness.process.create".to_owned(), body(CreateAgent { spec })),
            ("acri.v1.cmd.harness.process.capabilities".to_owned(), body(GetStatus {})),
            (self.of_agent("start"), body(StartRun { task: acri::Payload::text("") })),
            (self.of_agent("status"), body(GetStatus {})),
            (self.of_agent("remove"), body(RemoveAgent { reason: String::new() })),
            (self.of_run("status"), body(GetStatus {})),
            (self.of_run("stop"), body(StopRun { reason: String::new(), grace_ms: None, on_expiry: OnExpiry::Kill })),
            (self.of_run("kill"), body(KillRun { reason: String::new() })),
        ]
    }

    /// Nothing changed, and the node is as well as before.
    async fn close(mut self) {
        assert_eq!(last_event(&self.client).await, self.last, "no event was stored");
        let status = self.client.status(self.agent, Some(self.run)).await.unwrap();
        let run = status.run.unwrap();
        assert_eq!((run.state, run.phase), (acri::RunState::Running, None));
        assert!(self.node.lives());
        let log = self.node.log();
        assert!(!log.contains("panicked"), "{log}");
        assert!(self.client.kill(self.agent, self.run, "").await.unwrap().proved);
        verified(&self.client).await;
    }
}

fn id() -> CommandId {
    CommandId::from_uuid(uuid::Uuid::now_v7())
}

fn body<T: Serialize>(data: T) -> Vec<u8> {
    codec::to_msgpack(&Envelope { id: id(), principal: "stranger".to_owned(), expires: None, data }).unwrap()
}

fn number(code: ErrorCode) -> Option<u16> {
    Some(code.number())
}

#[tokio::test]
async fn a_body_that_is_no_command_gets_an_error_and_is_counted() {
    let mut scene = Scene::set().await;
    let before = scene.counter("requests_malformed").await;
    let mut sent = 0;
    for (subject, good) in scene.commands() {
        let mut trailing = good.clone();
        trailing.push(0xc0);
        let deep = vec![0x91; 5_000];
        let huge_length = [0x81, 0xa4, b'd', b'a', b't', b'a', 0xdd, 0xff, 0xff, 0xff, 0xff];
        let bodies: Vec<(Headers, Vec<u8>)> = vec![
            (&[], Vec::new()),
            (&[], b"hello".to_vec()),
            (&[], vec![0xff; 64]),
            (&[], good[..good.len() / 2].to_vec()),
            (&[], trailing),
            (&[], deep),
            (&[], huge_length.to_vec()),
            (JSON, Vec::new()),
            (JSON, b"{".to_vec()),
            (JSON, b"[[[[".repeat(500)),
            (JSON, b"{\"id\":1}".to_vec()),
            (JSON, b"null".to_vec()),
            (&[("Content-Type", "text/plain")], good.clone()),
        ];
        for (headers, bytes) in bodies {
            let answer = scene.raw.request(&subject, headers, &bytes).await;
            let shown = String::from_utf8_lossy(&answer.body).into_owned();
            assert_eq!(answer.error(), number(ErrorCode::Malformed), "{subject} {bytes:x?}: {shown}");
            sent += 1;
        }
        let oversize = vec![0xc0; EVENT_BODY_BYTES_MAX + 1];
        let answer = scene.raw.request(&subject, &[], &oversize).await;
        assert_eq!(answer.error(), number(ErrorCode::TooLarge), "{subject}");
        sent += 1;
    }
    counted(&scene.client, "n1", "requests_malformed", before + sent).await;
    scene.close().await;
}

#[tokio::test]
async fn a_field_beyond_its_limit_or_unknown_is_refused_by_name() {
    let mut scene = Scene::set().await;
    let envelope = |data: serde_json::Value| json!({ "id": id(), "principal": "stranger", "data": data });
    let spec = json!({ "harness": "process", "command": ["true"] });
    let with = |key: &str, value: serde_json::Value| {
        let mut spec = spec.clone();
        spec[key] = value;
        json!({ "spec": spec })
    };
    let create = "acri.v1.cmd.harness.process.create".to_owned();
    let cases = [
        (create.clone(), envelope(with("sandbox", json!("strict"))), "sandbox"),
        (create.clone(), envelope(with("working_directory", json!("relative"))), "working_directory"),
        (create.clone(), envelope(with("harness", json!("scripted"))), "harness"),
        (create.clone(), envelope(with("harness", json!("a.b"))), "HarnessType"),
        (create.clone(), envelope(with("stdin", json!("records"))), "stdin"),
        (create.clone(), envelope(with("completion", json!("record"))), "completion"),
        (create.clone(), envelope(with("orphan_after_ms", json!(1))), "orphan_after_ms"),
        (create.clone(), envelope(with("orphan_after_ms", json!(u64::MAX))), "orphan_after_ms"),
        (create.clone(), envelope(with("node_lost_after_ms", json!(u64::MAX))), "node_lost_after_ms"),
        (create.clone(), envelope(with("command", json!(vec!["x"; 5_000]))), "command"),
        (create, envelope(with("environment", json!({ "A=B": "c" }))), "environment"),
        (scene.of_run("kill"), envelope(json!({ "reason": "x".repeat(5_000) })), "reason"),
        (scene.of_run("stop"), envelope(json!({ "reason": "", "grace_ms": u64::MAX })), "grace_ms"),
        (scene.of_agent("start"), envelope(json!({ "task": { "type": "video" } })), "video"),
        (scene.of_run("kill"), json!({ "id": id(), "principal": "", "data": { "reason": "" } }), "principal"),
        (scene.of_run("kill"), json!({ "id": uuid::Uuid::new_v4(), "principal": "x", "data": { "reason": "" } }), "id"),
        (scene.of_run("kill"), json!({ "id": "not-an-id", "principal": "x", "data": { "reason": "" } }), "id"),
    ];
    for (subject, body, word) in cases {
        let answer = scene.raw.request(&subject, JSON, body.to_string().as_bytes()).await;
        let said = String::from_utf8_lossy(&answer.body).into_owned();
        assert!(answer.error().is_some(), "{word}: {said}");
        assert!(said.to_lowercase().contains(&word.to_lowercase()), "{word}: {said}");
    }
    scene.close().await;
}

#[tokio::test]
async fn a_kill_under_the_id_of_another_command_kills_nothing() {
    let mut scene = Scene::set().await;
    let id = id();
    let stop = StopRun { reason: "at leisure".to_owned(), grace_ms: Some(600_000), on_expiry: OnExpiry::Keep };
    // One that the harness does not notice.
    let (agent, run) =
        begin(&scene.client, scene.site.spec("trap '' TERM; echo up; while :; do sleep 0.05; done")).await;
    says(&scene.client, agent, run, "up").await;
    let subject = |verb: &str| format!("acri.v1.cmd.agent.{agent}.{run}.{verb}");
    let of = |data: serde_json::Value| json!({ "id": id, "principal": "x", "data": data }).to_string();
    let stopped = scene.raw.request(&subject("stop"), JSON, of(serde_json::to_value(stop).unwrap()).as_bytes()).await;
    assert_eq!(stopped.error(), None, "{:?}", String::from_utf8_lossy(&stopped.body));
    let killed = scene.raw.request(&subject("kill"), JSON, of(json!({ "reason": "" })).as_bytes()).await;
    assert_eq!(killed.error(), number(ErrorCode::IdReused), "{:?}", String::from_utf8_lossy(&killed.body));
    let status = scene.client.status(agent, Some(run)).await.unwrap().run.unwrap();
    assert_eq!(status.state, acri::RunState::Running);
    // It would be told within the time that a Kill's proof takes at most.
    let ended = tokio::time::timeout(acri::limits::KILL_PROOF_MAX, scene.client.wait(agent, run)).await;
    assert!(ended.is_err(), "it was killed: {ended:?}");
    assert!(scene.client.kill(agent, run, "").await.unwrap().proved);
}

#[tokio::test]
async fn the_content_type_is_read_however_its_header_is_written() {
    let mut scene = Scene::set().await;
    let subject = scene.of_agent("status");
    let (id, expires) = (id(), None);
    let asked = Envelope { id, principal: "x".to_owned(), expires, data: GetStatus {} };
    let body = codec::encode(codec::Format::Json, &asked).unwrap();
    for name in ["Content-Type", "content-type", "CONTENT-TYPE"] {
        let answer = scene.raw.request(&subject, &[(name, "application/json")], &body).await;
        assert_eq!(answer.error(), None, "{name}: {:?}", String::from_utf8_lossy(&answer.body));
        assert_eq!(answer.body.first(), Some(&b'{'), "{name}: an answer in kind");
    }
    scene.close().await;
}

#[tokio::test]
async fn unknown_verbs_and_foreign_ids_are_told_apart() {
    let mut scene = Scene::set().await;
    let kill = body(KillRun { reason: String::new() });
    let other = scene.client.create(scene.site.spec("true")).await.unwrap().agent;
    scene.last = last_event(&scene.client).await;
    let nobody = uuid::Uuid::new_v4();
    let (agent, run) = (scene.agent, scene.run);
    let cases = [
        ("acri.v1.cmd.harness.process.dance".to_owned(), number(ErrorCode::UnknownVerb)),
        (scene.of_agent("dance"), number(ErrorCode::UnknownVerb)),
        (scene.of_run("dance"), number(ErrorCode::UnknownVerb)),
        (scene.of_agent("kill"), number(ErrorCode::UnknownVerb)),
        (scene.of_run("start"), number(ErrorCode::UnknownVerb)),
        (format!("acri.v1.cmd.agent.{agent}.no-run.kill"), number(ErrorCode::InvalidArgument)),
        (format!("acri.v1.cmd.agent.{agent}.{nobody}.kill"), number(ErrorCode::NotFound)),
        // The run of another agent.
        (format!("acri.v1.cmd.agent.{other}.{run}.kill"), number(ErrorCode::NotFound)),
    ];
    for (subject, expected) in cases {
        let answer = scene.raw.request(&subject, &[], &kill).await;
        let said = String::from_utf8_lossy(&answer.body).into_owned();
        assert_eq!(answer.error(), expected, "{subject}: {said}");
    }
    for subject in [
        format!("acri.v1.cmd.agent.{nobody}._.remove"),
        format!("acri.v1.cmd.agent.{}.{run}.kill", agent.to_string().to_uppercase()),
        "acri.v1.cmd.harness.nothing.create".to_owned(),
        "acri.v2.cmd.harness.process.create".to_owned(),
    ] {
        let answer = scene.raw.request(&subject, &[], &kill).await;
        assert_eq!(answer.status, Some(503), "nobody listens to {subject}");
    }
    scene.close().await;
}

#[tokio::test]
async fn a_command_whose_answer_would_go_to_a_command_or_an_api_is_not_carried_out() {
    let mut scene = Scene::set().await;
    let before = scene.counter("requests_unanswerable").await;
    let frames = scene.client.bus().log_facts().await.unwrap();
    let mut sent = 0;
    let targets = [
        None,
        Some("$JS.API.STREAM.PURGE.ACRI_LOGS".to_owned()),
        Some("$JS.API.STREAM.DELETE.ACRI_EVENTS".to_owned()),
        Some(scene.of_agent("remove")),
        Some(scene.of_run("kill")),
        Some("acri.v1.node.n1.heartbeat".to_owned()),
        Some(format!("acri.v1.event.0.{}._.agent.removed", scene.agent)),
        Some("somewhere.else".to_owned()),
        Some("_INBOX".to_owned()),
    ];
    for (subject, good) in scene.commands() {
        for target in &targets {
            scene.raw.publish(&subject, target.as_deref(), &[], &good).await;
            scene.raw.publish(&subject, target.as_deref(), &[], b"garbage").await;
            sent += 2;
        }
    }
    scene.raw.flush().await;
    counted(&scene.client, "n1", "requests_unanswerable", before + sent).await;
    assert_eq!(scene.client.bus().log_facts().await.unwrap(), frames);
    scene.close().await;
}

#[tokio::test]
async fn what_the_server_itself_is_made_to_send_to_a_command_is_no_command() {
    let mut scene = Scene::set().await;
    let before = scene.counter("requests_unanswerable").await;
    let mut sent = 0;
    for (subject, _) in scene.commands() {
        for api in [
            "$JS.API.INFO",
            "$JS.API.STREAM.INFO.ACRI_EVENTS",
            "$JS.API.STREAM.NAMES",
            "$JS.API.STREAM.MSG.GET.ACRI_EVENTS",
            "$JS.API.DIRECT.GET.ACRI_EVENTS",
        ] {
            let body = if api.contains("GET") { "{\"seq\":1}" } else { "" };
            scene.raw.publish(api, Some(&subject), &[], body.as_bytes()).await;
            sent += 1;
        }
    }
    scene.raw.flush().await;
    counted(&scene.client, "n1", "requests_unanswerable", before + sent).await;
    scene.close().await;
}

#[tokio::test]
async fn garbage_in_the_streams_and_heartbeats_ends_neither_node_nor_reader() {
    let mut scene = Scene::set().await;
    // An own event's subject, but no event; and a foreign agent's.
    let stranger = AgentId::from_uuid(uuid::Uuid::new_v4());
    let subject = |kind: &str| format!("acri.v1.event.{}.{stranger}._.{kind}", stranger.shard());
    scene.raw.publish(&subject("agent.created"), None, &[], b"garbage").await;
    scene.raw.publish(&subject("agent.assigned"), None, &[], &[0x91; 4_000]).await;
    scene.raw.publish_head(&subject("agent.removed"), "", NO_TEXT, b"no text").await;
    scene.raw.publish("acri.v1.node.n1.heartbeat", None, &[], b"garbage").await;
    scene.raw.publish("acri.v1.node.ghost.heartbeat", None, &[], b"").await;
    scene.raw.publish("acri.v1.log.0.x.y", None, &[], b"garbage").await;
    scene.raw.flush().await;
    // A node that starts on such a store serves what it can.
    let mut node = scene.node;
    node.kill9().await;
    scene.node = scene.site.node("n1").await;
    let status = scene.client.status(scene.agent, Some(scene.run)).await.unwrap();
    assert_eq!(status.run.unwrap().state, acri::RunState::Running);
    let overview = scene.client.agents().await.unwrap();
    assert!(overview.agents.iter().any(|agent| agent.id() == scene.agent));
    let (agent, run) = begin(&scene.client, scene.site.spec("echo fine")).await;
    assert_eq!(acri_tests::look::written(&scene.client, agent, run).await.out(), ["fine"]);
    let report = report(&scene.client).await;
    assert!(report.problem_count > 0, "a verification names the garbage");
    assert!(scene.client.kill(scene.agent, scene.run, "").await.unwrap().proved);
}

/// Messages of which no owner says that it wrote them, and what is in none.
const STRAYS: [(Headers, &[u8]); 6] = [
    (&[], b"garbage"),
    (&[], b""),
    (&[("Acri-Epoch", "1")], b"half"),
    (&[("Acri-Epoch", "one"), ("Acri-Resume", "gA==")], b"no epoch"),
    (&[("Acri-Epoch", "1"), ("Acri-Resume", "%")], b"no base64"),
    (&[("Acri-Epoch", "1"), ("Acri-Resume", "aGVsbG8=")], b"no token"),
];

/// Headers on which a client gives its connection up.
const NO_TEXT: &[u8] = b"NATS/1.0\r\nA: \xff\xfe\r\n\r\n";

#[tokio::test]
async fn messages_on_a_runs_log_subject_that_no_owner_wrote_are_named_and_cost_no_line() {
    let site = site().await;
    let mut node = site.node("n1").await;
    let client = site.client().await;
    let mut raw = Raw::connect(&site.server.url()).await;
    let chatty = Chatty::start(&site, &client, 10, "0.01").await;
    let (agent, run) = (chatty.agent, chatty.run);
    let subject = format!("acri.v1.log.{}.{agent}.{run}", agent.shard());
    says(&client, agent, run, "out 20").await;
    let mut strays = 0;
    for stray in STRAYS.into_iter().map(Some).chain([None]) {
        match stray {
            Some((headers, body)) => raw.publish(&subject, None, headers, body).await,
            None => raw.publish_head(&subject, "", NO_TEXT, b"no text").await,
        }
        raw.flush().await;
        strays += 1;
        // The log goes on behind it.
        let stray = client.bus().last_frame(agent, Some(run)).await.unwrap().unwrap().seq;
        eventually("the log goes on", async || {
            let last = client.bus().last_frame(agent, Some(run)).await.ok()??;
            (last.seq > stray && last.mark.is_some()).then_some(())
        })
        .await;
    }
    // A frame that was stored, by somebody else, as the last thing that the next owner finds.
    node.kill9().await;
    let frame = client.bus().last_frame(agent, Some(run)).await.unwrap().unwrap();
    raw.publish(&subject, None, &[], &frame.bytes).await;
    raw.flush().await;
    strays += 1;
    let _node = site.node("n1").await;
    std::fs::write(chatty.stop(), "").unwrap();
    sealed(&client, agent, run).await;
    raw.publish(&subject, None, &[], b"behind the seal").await;
    raw.flush().await;
    let (mut written, mut named) = (Written::default(), 0);
    let mut items = client.logs(agent, run, Since::Start, true);
    while let Some(item) = items.next().await {
        match item.unwrap() {
            LogItem::Malformed { .. } => named += 1,
            item => written.take(item),
        }
    }
    assert_numbered(&written.out(), "out");
    assert_numbered(&written.err(), "err");
    assert!(!written.out().is_empty() && written.out().len() == written.err().len());
    assert_eq!(named, strays, "each is named, and the log ends at its seal");
    let seal = event(&client, agent, "run.logs_sealed").await;
    let acri::Event::RunLogsSealed(seal) = seal.envelope.event else { panic!("{seal:?}") };
    assert_eq!((seal.count.0, seal.gap), (written.events, false));
    let verify = site.acri(&["verify", "--logs", "-o", "json"]).await;
    let report: serde_json::Value = serde_json::from_slice(&verify.stdout).unwrap();
    assert_eq!(report["logs"]["whole"], 1, "{report}");
    let problems = report["other_problems"].as_array().unwrap();
    assert_eq!(problems.len(), strays + 1, "{report}");
}

#[tokio::test]
async fn a_flood_of_headers_that_are_no_text_costs_neither_lease_nor_owner_nor_a_line() {
    let site = site().await;
    let _node = site.node_with("n1", &site.server.url(), &SHORT_LEASE).await;
    let client = site.client().await;
    let chatty = Chatty::start(&site, &client, 10, "0.02").await;
    let (agent, run) = begin(&client, site.spec("echo up; exec sleep 600")).await;
    says(&client, agent, run, "up").await;
    let before = heartbeat(&client, "n1").await;
    let mut subjects = vec!["acri.v1.cmd.harness.process.create".to_owned()];
    for (agent, run) in [(agent, run), (chatty.agent, chatty.run)] {
        subjects.push(format!("acri.v1.cmd.agent.{agent}._.status"));
        subjects.push(format!("acri.v1.cmd.agent.{agent}.{run}.kill"));
    }
    // Longer than a lease lives.
    let began = std::time::Instant::now();
    let flood = async || {
        let mut raw = Raw::connect(&site.server.url()).await;
        while began.elapsed() < SHORT_LEASE_TTL * 2 {
            for subject in subjects.iter().cycle().take(FLOOD_BATCH) {
                raw.publish_head(subject, " _INBOX.x", NO_TEXT, b"").await;
            }
            // As fast as the server takes them, and no faster.
            raw.flush().await;
        }
    };
    futures_util::future::join_all([flood(), flood(), flood()]).await;
    let after = heartbeat(&client, "n1").await;
    assert_eq!(after.incarnation, before.incarnation, "the node was fenced");
    assert!(after.counters["connections_lost"] > before.counters["connections_lost"], "{after:?}");
    assert!(client.kill(agent, run, "enough").await.unwrap().proved);
    for agent in [agent, chatty.agent] {
        let types = acri_tests::look::types(&client, agent).await;
        assert!(!types.iter().any(|kind| kind == "agent.assigned"), "{types:?}");
    }
    assert!(chatty.finish(&client).await > 0);
}
