//! What only a server, or one that pretends, can show.

use acri::{AgentId, EventId, RunId, StreamSeq, Subject, id::Epoch};
use acri_bus::{
    local::Server,
    nats::{Error, NatsBus, Options},
    port::{
        Append, Appended, Bus, EventSelection, Events as _, FrameAppend, Leases as _, Logs as _,
        Until,
    },
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

/// Greets as a server of `version` would, and answers pings.
async fn pretender(version: &'static str) -> (String, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
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
    let (url, task) = pretender("2.9.10").await;
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
    let options =
        Options { provision: true, overrides: overrides.into(), ..Options::new([server.url()]) };
    NatsBus::connect(options).await.unwrap();
    let error = NatsBus::connect(Options { provision: true, ..Options::new([server.url()]) })
        .await
        .unwrap_err();
    assert!(
        matches!(&error, Error::Config { stream, field, .. } if stream == "KV_ACRI_NODES" && field == "allow_msg_ttl"),
        "{error}"
    );
}

#[tokio::test]
async fn smoke() {
    let server = Server::start_for_test().await.unwrap();
    let bus = connected(&server).await;
    let agent = agent();
    let Appended::Stored(one) = bus.append(&event(agent, StreamSeq(0), b"one")).await else {
        panic!()
    };
    let second = event(agent, one, b"two");
    let Appended::Stored(two) = bus.append(&second).await else { panic!() };
    assert!(matches!(bus.append(&second).await, Appended::Conflict | Appended::Duplicate(_)));
    assert_eq!(bus.last(agent).await.unwrap().unwrap().seq, two);
    let read: Vec<_> =
        bus.read(EventSelection::All, StreamSeq(1), Until::Now).await.unwrap().collect().await;
    assert_eq!(read.len(), 2, "{read:?}");
    let recorded = read.into_iter().map(Result::unwrap).next_back().unwrap();
    assert_eq!(Some(recorded), bus.last(agent).await.unwrap());
    println!("offset {}", bus.clock_offset_micros().await.unwrap());
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
            assert!(matches!(
                bus.append(&event(agent, StreamSeq(0), &[b'x'; 256])).await,
                Appended::Stored(_)
            ));
        })
        .await;
    println!("append, 64 agents: {:.0}/s", f64::from(many) / begun.elapsed().as_secs_f64());
    let begun = Instant::now();
    let read = bus.read(EventSelection::All, StreamSeq(1), Until::Now).await.unwrap().count().await;
    assert_eq!(read, many as usize);
    println!("read all: {:.0}/s", f64::from(many) / begun.elapsed().as_secs_f64());
}
