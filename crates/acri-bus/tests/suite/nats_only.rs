//! What only a server, or one that pretends, can show.

use acri::{
    AgentId, EventId, HarnessType, RunId, StreamSeq, Subject,
    codec::Format,
    id::Epoch,
    subject::{AgentVerb, HarnessVerb, filter},
};
use acri_bus::{
    local::{Find, Server, ServerOptions, User, find},
    nats::{Error, NatsBus, Options},
    port::{
        Answer, Append, Appended, Commands as _, EventSelection, Events as _, Fault, FrameAppend, Logs as _,
        RequestError, Until,
    },
    suite::{BusFactory as _, NatsFactory},
};
use bytes::Bytes;
use futures_util::StreamExt as _;
use std::time::{Duration, Instant};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpListener,
};
use uuid::Uuid;

async fn connected(server: &Server) -> NatsBus {
    NatsBus::connect(Options { provision: true, ..Options::new([server.url()]) }).await.unwrap()
}

fn agent() -> AgentId {
    AgentId::from_uuid(Uuid::new_v4())
}

fn event(agent: AgentId, expect: StreamSeq, bytes: &'static [u8]) -> Append {
    Append {
        subject: Subject::Event(agent, None, "agent.assigned".to_owned()),
        id: EventId::from_uuid(Uuid::new_v4()),
        expect,
        bytes: Bytes::from_static(bytes),
    }
}

fn seq(appended: Appended) -> StreamSeq {
    match appended {
        Appended::Stored(seq) => seq,
        other => panic!("{other:?}"),
    }
}

/// Greets as a server of `version` would, and answers pings.
async fn pretender(version: &'static str, port: u16) -> (String, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let task = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (read, mut write) = stream.into_split();
            let greeting = format!(
                "INFO {{\"server_id\":\"A\",\"server_name\":\"old\",\"version\":\"{version}\",\"host\":\"127.0.0.1\",\
                 \"port\":{port},\"headers\":true,\"jetstream\":true,\"max_payload\":8388608,\"proto\":1,\"client_id\":1,\
                 \"auth_required\":false,\"tls_required\":false,\"go\":\"go1.22\"}}\r\n"
            );
            write.write_all(greeting.as_bytes()).await.unwrap();
            let mut lines = BufReader::new(read).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                if line.starts_with("PING") && write.write_all(b"PONG\r\n").await.is_err() {
                    break;
                }
            }
        }
    });
    (format!("nats://127.0.0.1:{port}"), task)
}

#[tokio::test]
async fn an_older_server_is_refused_by_its_version() {
    let (url, task) = pretender("2.9.10", 0).await;
    let error = NatsBus::connect(Options::new([url])).await.unwrap_err();
    assert!(matches!(&error, Error::TooOld { found } if found == "2.9.10"), "{error}");
    task.abort();
}

#[tokio::test]
async fn a_missing_stream_and_a_field_that_is_not_echoed_are_named() {
    let server = Server::start_for_test().await.unwrap();
    let error = NatsBus::connect(Options::new([server.url()])).await.unwrap_err();
    assert!(matches!(&error, Error::Missing { stream } if stream == "ACRI_EVENTS"), "{error}");
    let overrides = [(
        "KV_ACRI_NODES".to_owned(),
        serde_json::from_str(r#"{"allow_msg_ttl":false,"subject_delete_marker_ttl":0}"#).unwrap(),
    )];
    let options = Options { provision: true, overrides: overrides.into(), ..Options::new([server.url()]) };
    NatsBus::connect(options).await.unwrap();
    let error = NatsBus::connect(Options { provision: true, ..Options::new([server.url()]) }).await.unwrap_err();
    assert!(
        matches!(&error, Error::Config { stream, field, .. } if stream == "KV_ACRI_NODES" && field == "allow_msg_ttl"),
        "{error}"
    );
}

/// Waits, within reason, for what nobody announces.
async fn until(what: &str, mut look: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !look().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.unwrap_or_else(|_| panic!("{what}"));
}

#[tokio::test]
async fn an_older_server_at_a_later_connection_is_refused_in_every_operation() {
    let mut server = Server::start_for_test().await.unwrap();
    let bus = connected(&server).await;
    let agent = agent();
    seq(bus.append(&event(agent, StreamSeq(0), b"one")).await);
    let port = server.url().rsplit_once(':').unwrap().1.parse().unwrap();
    server.kill9().await.unwrap();
    let (_, task) = pretender("2.9.10", port).await;
    until("the older server is not refused", async || {
        matches!(bus.append(&event(agent, StreamSeq(1), b"two")).await,
            Appended::Refused(Fault::Refused { detail, .. }) if detail.contains("2.9.10"))
    })
    .await;
    assert!(matches!(bus.last(agent).await, Err(Fault::Refused { .. })));
    task.abort();
}

#[tokio::test]
async fn a_stream_that_was_changed_is_noticed_at_the_next_connection() {
    let factory = NatsFactory::start().await.unwrap();
    let bus = factory.client().await;
    let info = factory.raw().request("$JS.API.STREAM.INFO.ACRI_EVENTS", Bytes::new()).await.unwrap();
    let mut info: serde_json::Value = serde_json::from_slice(&info.payload).unwrap();
    info["config"]["duplicate_window"] = 1_000_000_000_u64.into();
    let changed = Bytes::from(info["config"].to_string());
    let answer = factory.raw().request("$JS.API.STREAM.UPDATE.ACRI_EVENTS", changed).await.unwrap();
    assert!(!String::from_utf8_lossy(&answer.payload).contains("\"error\""), "{answer:?}");
    factory.crash().await;
    factory.restore().await;
    until("the changed stream is not noticed", async || {
        matches!(bus.append(&event(agent(), StreamSeq(0), b"one")).await,
            Appended::Refused(Fault::Refused { detail, .. }) if detail.contains("duplicate_window of stream ACRI_EVENTS"))
    })
    .await;
}

#[tokio::test]
async fn a_server_that_stands_still_is_unknown_and_then_goes_on() {
    let server = Server::start_for_test().await.unwrap();
    connected(&server).await;
    let options = Options { ack_timeout: Some(Duration::from_millis(300)), ..Options::new([server.url()]) };
    let bus = NatsBus::connect(options).await.unwrap();
    let append = event(agent(), StreamSeq(0), b"one");
    server.pause().await;
    assert!(matches!(bus.append(&append).await, Appended::Unknown(Fault::Unavailable { .. })));
    server.resume();
    // The first attempt was in the socket all the time.
    until("the append is not settled", async || {
        matches!(bus.append(&append).await, Appended::Stored(_) | Appended::Conflict | Appended::Duplicate(_))
    })
    .await;
}

#[tokio::test]
async fn what_is_not_permitted_is_refused_and_does_not_time_out() {
    let reader = User {
        name: "reader".into(),
        password: "reader".into(),
        permissions: format!(
            "publish: {{ allow: [\"$JS.API.STREAM.INFO.*\", \"$JS.API.STREAM.MSG.GET.*\", \"$JS.API.CONSUMER.>\"] }}, \
             subscribe: {{ allow: [\"_INBOX_reader.>\"], deny: [\"{}\"] }}",
            filter::heartbeats()
        ),
    };
    let server = Server::start_for_test_with(vec![reader.clone()]).await.unwrap();
    let owner = connected(&server).await;
    let agent = agent();
    seq(owner.append(&event(agent, StreamSeq(0), b"one")).await);
    let options = Options {
        inbox_prefix: Some("_INBOX_reader".into()),
        ack_timeout: Some(Duration::from_secs(30)),
        client_only: true,
        ..Options::new([server.url_of(&reader)])
    };
    let bus = NatsBus::connect(options).await.unwrap();
    let begun = Instant::now();
    let append = event(agent, StreamSeq(1), b"two");
    assert!(matches!(bus.append(&append).await, Appended::Refused(Fault::Refused { .. })));
    assert!(matches!(bus.heartbeats().await, Err(Fault::Refused { .. })));
    let read: Vec<_> = bus.read(EventSelection::Agent(agent), StreamSeq(1), Until::Now).await.unwrap().collect().await;
    assert_eq!(read.len(), 1, "{read:?}");
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_full_stream_refuses_and_keeps_what_it_has() {
    let server = Server::start_for_test().await.unwrap();
    let small = serde_json::from_str(r#"{"max_bytes":2097152}"#).unwrap();
    let overrides = [("ACRI_EVENTS".to_owned(), small)].into();
    let options = Options { provision: true, overrides, ..Options::new([server.url()]) };
    let bus = NatsBus::connect(options).await.unwrap();
    let (agent, mut last) = (agent(), StreamSeq(0));
    let refused = loop {
        let append = event(agent, last, &[0x5a; 200 * 1024]);
        match bus.append(&append).await {
            Appended::Stored(seq) => last = seq,
            other => break other,
        }
    };
    assert!(
        matches!(&refused, Appended::Refused(Fault::Refused { detail, .. }) if detail.contains("10077")),
        "{refused:?}"
    );
    assert_eq!(bus.last(agent).await.unwrap().unwrap().seq, last);
}

#[tokio::test]
async fn a_client_that_forgets_its_inbox_prefix_gets_an_error() {
    let user = User {
        name: "reader".into(),
        password: "reader".into(),
        permissions: "publish: { allow: [\"$JS.API.>\"] }, subscribe: { allow: [\"_INBOX_reader.>\"] }".into(),
    };
    let server = Server::start_for_test_with(vec![user.clone()]).await.unwrap();
    let options = Options { ack_timeout: Some(Duration::from_millis(300)), ..Options::new([server.url_of(&user)]) };
    assert!(NatsBus::connect(options).await.is_err());
}

#[tokio::test]
async fn the_node_is_listed_as_a_service_with_its_endpoints() {
    let factory = NatsFactory::start().await.unwrap();
    let bus = connected(&*factory.server().await).await;
    let harness: HarnessType = "acp:gemini".parse().unwrap();
    let mut requests = bus.serve_harness(&harness).await.unwrap();
    let ask = async |subject: &str| -> serde_json::Value {
        let answer = factory.raw().request(subject.to_owned(), Bytes::new()).await.unwrap();
        serde_json::from_slice(&answer.payload).unwrap()
    };
    let ping = ask("$SRV.PING").await;
    assert_eq!((ping["name"].as_str(), ping["type"].as_str()), (Some("acri"), Some("io.nats.micro.v1.ping_response")));
    let info = ask(&format!("$SRV.INFO.acri.{}", ping["id"].as_str().unwrap())).await;
    assert_eq!(info["endpoints"][0]["name"], "acp_gemini");
    assert_eq!(info["endpoints"][0]["subject"], filter::harness_commands(&harness));
    let subject = Subject::Harness(harness, HarnessVerb::Capabilities);
    let serve = async {
        let reply = requests.next().await.unwrap().reply.unwrap();
        let error = Some((404, "no such harness\r\nX-Injected: yes".to_owned()));
        reply.send(Answer { format: Format::Json, body: Bytes::new(), error }).await;
    };
    let asked = bus.request(&subject, Format::Json, Bytes::new(), Duration::from_secs(20));
    let (answer, ()) = tokio::join!(asked, serve);
    assert_eq!(answer.unwrap().error, Some((404, "no such harness  X-Injected: yes".to_owned())));
    let stats = ask("$SRV.STATS.acri").await;
    assert_eq!(
        (stats["endpoints"][0]["num_requests"].as_u64(), stats["endpoints"][0]["num_errors"].as_u64()),
        (Some(1), Some(1))
    );
    drop(requests);
    assert_eq!(ask("$SRV.INFO").await["endpoints"], serde_json::json!([]));
}

#[tokio::test]
async fn a_follower_whose_consumer_is_deleted_or_that_stands_still_misses_nothing() {
    let factory = NatsFactory::start().await.unwrap();
    let (bus, agent) = (factory.client().await, agent());
    let mut read = bus.read(EventSelection::Agent(agent), StreamSeq(1), Until::Dropped).await.unwrap();
    let mut expect = StreamSeq(0);
    let mut stored = Vec::new();
    for round in 0..3 {
        // More than was asked for, while nobody looks.
        for _ in 0..1500 {
            expect = seq(bus.append(&event(agent, expect, b"x")).await);
            stored.push(expect);
        }
        for _ in 0..700 {
            let at = stored.remove(0);
            assert_eq!(read.next().await.unwrap().unwrap().seq, at, "round {round}");
        }
        let names = factory.raw().request("$JS.API.CONSUMER.NAMES.ACRI_EVENTS", Bytes::new()).await.unwrap();
        let names: serde_json::Value = serde_json::from_slice(&names.payload).unwrap();
        for name in names["consumers"].as_array().unwrap() {
            let method = format!("$JS.API.CONSUMER.DELETE.ACRI_EVENTS.{}", name.as_str().unwrap());
            factory.raw().request(method, Bytes::new()).await.unwrap();
        }
    }
    for at in stored {
        let found = tokio::time::timeout(Duration::from_secs(30), read.next()).await.unwrap();
        assert_eq!(found.unwrap().unwrap().seq, at);
    }
}

#[tokio::test]
async fn a_read_ends_although_retention_takes_its_end_away() {
    let factory = NatsFactory::start().await.unwrap();
    let (bus, agent, run) = (factory.client().await, agent(), Some(RunId::from_uuid(Uuid::new_v4())));
    let mut expect = StreamSeq(0);
    for _ in 0..20 {
        let append = FrameAppend {
            agent,
            run,
            expect,
            epoch: Epoch(1),
            resume: Bytes::new(),
            bytes: Bytes::from(vec![0; 1024 * 1024]),
        };
        expect = seq(bus.append_frame(&append).await);
    }
    let mut read = bus.read_frames(agent, run, StreamSeq(1), Until::Now).await.unwrap();
    read.next().await.unwrap().unwrap();
    factory.drop_frames(agent, run).await;
    // What was on its way comes, the rest is gone, and the read ends.
    let rest = tokio::time::timeout(Duration::from_secs(30), read.collect::<Vec<_>>()).await.unwrap();
    assert!(rest.len() < 20 && rest.iter().all(Result::is_ok), "{}", rest.len());
}

#[tokio::test]
async fn a_read_of_a_stream_that_was_made_anew_ends_with_a_fault() {
    let factory = NatsFactory::start().await.unwrap();
    let (bus, agent) = (factory.client().await, agent());
    seq(bus.append(&event(agent, StreamSeq(0), b"one")).await);
    let mut read = bus.read(EventSelection::All, StreamSeq(1), Until::Dropped).await.unwrap();
    read.next().await.unwrap().unwrap();
    factory.raw().request("$JS.API.STREAM.DELETE.ACRI_EVENTS", Bytes::new()).await.unwrap();
    NatsBus::connect(Options { provision: true, ..factory.options().clone() }).await.unwrap();
    let found = tokio::time::timeout(Duration::from_secs(30), read.next()).await.unwrap().unwrap();
    assert!(matches!(&found, Err(Fault::Refused { detail, .. }) if detail.contains("another now")), "{found:?}");
    assert!(read.next().await.is_none());
}

#[tokio::test]
async fn a_drained_bus_sends_what_it_had_and_then_refuses() {
    let factory = NatsFactory::start().await.unwrap();
    let (leaving, other, agent) = (factory.client().await, factory.client().await, agent());
    let mut requests = leaving.serve_agent(agent).await.unwrap();
    let subject = Subject::Agent(agent, AgentVerb::Status);
    let serve = async {
        let reply = requests.next().await.unwrap().reply.unwrap();
        reply.send(Answer { format: Format::Json, body: Bytes::from_static(b"bye"), error: None }).await;
        leaving.drain().await;
    };
    let asked = other.request(&subject, Format::Json, Bytes::new(), Duration::from_secs(20));
    let (answer, ()) = tokio::join!(asked, serve);
    assert_eq!(answer.unwrap().body, "bye".as_bytes());
    assert!(requests.next().await.is_none());
    assert!(matches!(leaving.append(&event(agent, StreamSeq(0), b"x")).await, Appended::Refused(_)));
    let asked = other.request(&subject, Format::Json, Bytes::new(), Duration::from_secs(20)).await;
    assert!(matches!(asked, Err(RequestError::NoResponders(_))), "{asked:?}");
}

const STORE: &str = "ACRI_TEST_STORE";

/// Runs in a process of its own, for the next test to kill.
#[tokio::test]
#[ignore = "started by another test"]
async fn a_starter() {
    let Some(store) = std::env::var_os(STORE) else { return };
    let binary = find(&Find::from_env(), &|_| {}).await.unwrap();
    let options = ServerOptions { store: store.into(), binary, sync_always: false, port: None };
    let server = Server::start(options).await.unwrap();
    println!("started {}", server.pid().unwrap());
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn a_server_outlives_a_killed_starter_and_is_found_by_the_next() {
    let directory = tempfile::tempdir().unwrap();
    let mut starter = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", "nats_only::a_starter"])
        .env(STORE, directory.path())
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(starter.stdout.take().unwrap()).lines();
    let started = async {
        loop {
            let line = lines.next_line().await.unwrap().expect("the starter ended");
            if let Some((_, pid)) = line.split_once("started ") {
                return pid.parse::<u32>().unwrap();
            }
        }
    };
    let pid = tokio::time::timeout(Duration::from_secs(60), started).await.unwrap();
    starter.kill().await.unwrap();
    let binary = find(&Find::from_env(), &|_| {}).await.unwrap();
    let options = ServerOptions { store: directory.path().into(), binary, sync_always: false, port: None };
    let server = Server::start(options).await.unwrap();
    assert_eq!(server.pid(), Some(pid), "taken over, not started again");
    connected(&server).await;
}

/// Resident kilobytes of a process.
fn resident_kib(pid: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_ascii_whitespace().nth(1).unwrap().parse().unwrap()
}

#[tokio::test]
#[ignore = "a measurement"]
async fn how_much_ten_thousand_agents_take() {
    let server = Server::start_for_test().await.unwrap();
    let bus = connected(&server).await;
    let pid = server.pid().unwrap().to_string();
    let before = (resident_kib("self"), resident_kib(&pid));
    let begun = Instant::now();
    let streams: Vec<_> = futures_util::stream::iter(0..10_000)
        .map(|_| bus.serve_agent(agent()))
        .buffer_unordered(100)
        .map(Result::unwrap)
        .collect()
        .await;
    println!("10,000 subscriptions in {:?}", begun.elapsed());
    let after = (resident_kib("self"), resident_kib(&pid));
    println!(
        "each: {} bytes here, {} bytes in the server",
        (after.0 - before.0) * 1024 / 10_000,
        (after.1 - before.1) * 1024 / 10_000
    );
    assert!((after.0 - before.0) / 10_000 < 32);
    drop(streams);
}

/// Prints what it measures; asserts only that nothing is lost.
#[tokio::test]
#[ignore = "a measurement"]
async fn how_fast() {
    let server = Server::start_for_test().await.unwrap();
    let bus = connected(&server).await;
    let (agent, run) = (agent(), Some(RunId::from_uuid(Uuid::new_v4())));
    let frame = Bytes::from(vec![b'x'; 256 * 300]);
    let begun = Instant::now();
    let mut expect = StreamSeq(0);
    let frames = 2_000_u32;
    for _ in 0..frames {
        let append = FrameAppend {
            agent,
            run,
            expect,
            epoch: Epoch(1),
            resume: Bytes::from_static(&[0; 200]),
            bytes: frame.clone(),
        };
        match bus.append_frame(&append).await {
            Appended::Stored(seq) => expect = seq,
            other => panic!("{other:?}"),
        }
    }
    let rate = f64::from(frames * 256) / begun.elapsed().as_secs_f64();
    println!("write: {rate:.0} events/s");
    let begun = Instant::now();
    let read = bus.read_frames(agent, run, StreamSeq(1), Until::Now).await.unwrap().count().await;
    assert_eq!(read, frames as usize);
    println!("read: {:.0} events/s", f64::from(frames * 256) / begun.elapsed().as_secs_f64());
    let many = 20_000_u32;
    let begun = Instant::now();
    let bus = &bus;
    futures_util::stream::iter(0..many)
        .for_each_concurrent(64, |_| async move {
            let agent = AgentId::from_uuid(Uuid::new_v4());
            assert!(matches!(bus.append(&event(agent, StreamSeq(0), &[b'x'; 256])).await, Appended::Stored(_)));
        })
        .await;
    println!("append, 64 agents: {:.0}/s", f64::from(many) / begun.elapsed().as_secs_f64());
    let begun = Instant::now();
    let read = bus.read(EventSelection::All, StreamSeq(1), Until::Now).await.unwrap().count().await;
    assert_eq!(read, many as usize);
    println!("read all: {:.0}/s", f64::from(many) / begun.elapsed().as_secs_f64());
}
