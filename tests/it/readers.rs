//! Readers that go on exactly where they stood, or are told why they cannot.

use crate::site;
use acri::{AgentId, Event, RunId};
use acri_bus::{
    nats::{self, NatsBus},
    port::LeaseEntry,
};
use acri_client::{Client, EventItem, EventSelection, EventTypes, EventsSince, LogItem, Since};
use acri_tests::{
    eventually,
    line::Line,
    look::{ended, event, says, sealed, verified, written},
    site::{SHORT_LEASE, Site},
    within,
};
use futures_util::StreamExt as _;
use std::sync::Arc;

/// Writes 60 events in some 30 frames, one of them a line that is split.
const RUN: &str = "i=0; while [ $i -lt 30 ]; do echo \"out $i\"; echo \"err $i\" >&2; i=$((i+1)); sleep 0.01; done; head -c 2500000 /dev/zero | tr '\\0' x; echo; echo end";

async fn items(client: &Client, agent: AgentId, run: RunId, since: Since) -> Vec<LogItem> {
    let items = client.logs(agent, run, since, true);
    within("the log", items.map(Result::unwrap).collect()).await
}

async fn events(client: &Client, selection: EventSelection, since: EventsSince) -> Vec<EventItem> {
    let items = client.events(selection, EventTypes::All, since, false);
    within("the events", items.map(Result::unwrap).collect()).await
}

#[tokio::test]
async fn a_reader_goes_on_exactly_after_any_event_of_a_run() {
    let site = site().await;
    let _node = site.node("n1").await;
    let client = site.client().await;
    let (agent, run) = site.run(&client, RUN).await;
    sealed(&client, agent, run).await;
    let all = items(&client, agent, run, Since::Start).await;
    assert!(all.len() > 60, "{}", all.len());
    for (index, item) in all.iter().enumerate() {
        let LogItem::Event(_, cursor) = item else { panic!("{item:?}") };
        // As text, as whoever keeps it does.
        let kept = cursor.to_string().parse().unwrap();
        let rest = items(&client, agent, run, Since::Cursor(kept)).await;
        assert!(rest == all[index + 1..], "after event {index}");
    }
    for selection in [EventSelection::All, EventSelection::Agent(agent), EventSelection::Run(agent, run)] {
        let all = events(&client, selection.clone(), EventsSince::Start).await;
        for (index, item) in all.iter().enumerate() {
            let EventItem::Event(event) = item else { panic!("{item:?}") };
            let rest = events(&client, selection.clone(), EventsSince::After(event.seq)).await;
            assert!(rest == all[index + 1..], "after event {index}");
        }
    }
}

#[tokio::test]
async fn a_reader_whose_connection_breaks_after_every_event_misses_and_repeats_none() {
    let site = site().await;
    let _node = site.node("n1").await;
    let client = site.client().await;
    let line = Line::to(&site.server.url()).await;
    let far = Box::pin(NatsBus::connect(nats::Options::new([line.url()]))).await.unwrap();
    let far = Client::new(Arc::new(far), "reader".to_owned());
    let (agent, run) = site.run(&client, RUN).await;
    let mut heard = acri_tests::look::Written::default();
    let mut log = far.logs(agent, run, Since::Start, true);
    within("the log over a broken line", async {
        while let Some(item) = log.next().await {
            heard.take(item.unwrap());
            line.cut();
            line.release();
        }
    })
    .await;
    assert_eq!(heard, written(&client, agent, run).await);
    let mut told = far.events(EventSelection::Run(agent, run), EventTypes::All, EventsSince::Start, true);
    let expected = events(&client, EventSelection::Run(agent, run), EventsSince::Start).await;
    for item in expected {
        assert_eq!(within("an event", told.next()).await.unwrap().unwrap(), item);
        line.cut();
        line.release();
    }
}

#[tokio::test]
async fn a_reader_that_follows_hears_what_is_written_while_it_listens() {
    let site = site().await;
    let _node = site.node("n1").await;
    let client = site.client().await;
    let (agent, run) = site.run(&client, RUN).await;
    let (one, other) = tokio::join!(items(&client, agent, run, Since::Start), events_until_sealed(&client, agent, run));
    assert_eq!(one.len() as u64, written(&client, agent, run).await.events);
    assert_eq!(other, ["run.accepted", "run.started", "run.completed", "run.logs_sealed"]);
}

async fn events_until_sealed(client: &Client, agent: AgentId, run: RunId) -> Vec<String> {
    let mut types = Vec::new();
    let mut events = client.run_events(agent, run, true);
    within("the seal", async {
        while types.last().is_none_or(|name| name != "run.logs_sealed") {
            if let EventItem::Event(event) = events.next().await.unwrap().unwrap() {
                types.push(event.envelope.event.type_name().to_owned());
            }
        }
    })
    .await;
    types
}

#[tokio::test]
async fn a_cursor_before_retention_begins_with_a_gap_that_says_what_is_gone() {
    let site = site().await;
    let _node = site.node("n1").await;
    let client = site.client().await;
    let (agent, run) = site.run(&client, RUN).await;
    sealed(&client, agent, run).await;
    let all = items(&client, agent, run, Since::Start).await;
    let LogItem::Event(_, third) = &all[2] else { panic!() };
    let LogItem::Event(_, kept) = &all[40] else { panic!() };
    // Retention takes the oldest frames; here all before that of event 41.
    let mut raw = acri_tests::raw::Raw::connect(&site.server.url()).await;
    raw.api("STREAM.PURGE.ACRI_LOGS", &serde_json::json!({ "seq": kept.frame.0 })).await;
    for (since, from) in [(Since::Cursor(*third), 4), (Since::Start, 1)] {
        let rest = items(&client, agent, run, since).await;
        let LogItem::Gap { from: begins, to } = rest[0] else { panic!("{:?}", rest[0]) };
        assert_eq!(begins.0, from);
        let index = usize::try_from(to.0).unwrap();
        assert!(index <= 40, "{to}");
        assert!(rest[1..] == all[index..], "after the gap everything that is left");
    }
    // All of it gone: the gap reaches the seal.
    raw.api("STREAM.PURGE.ACRI_LOGS", &serde_json::json!({})).await;
    let rest = items(&client, agent, run, Since::Cursor(*third)).await;
    let LogItem::Gap { from, to } = rest[0] else { panic!("{rest:?}") };
    assert_eq!((from.0, to.0, rest.len()), (4, all.len() as u64, 1));
}

/// A program that writes a line for each file `go-N` that appears.
const ON_ORDER: &str = "trap '' TERM; echo one; n=2; while [ ! -e stop ]; do if [ -e go-$n ]; then echo $n; n=$((n+1)); else sleep 0.01; fi; done; echo end";

fn order(site: &Site, agent: AgentId, file: &str) {
    let work = site.state_dir("n1").join(format!("node/processes/agents/{agent}/work"));
    std::fs::write(work.join(file), "").unwrap();
}

async fn snapshot(site: &mut Site) {
    site.server.stop().await.unwrap();
    let copy = site.directory().join("copy");
    copy_tree(&site.server.store().join("jetstream"), &copy);
    site.server.restart().await.unwrap();
}

async fn restore(site: &mut Site) {
    site.server.stop().await.unwrap();
    let store = site.server.store().join("jetstream");
    std::fs::remove_dir_all(&store).unwrap();
    copy_tree(&site.directory().join("copy"), &store);
    site.server.restart().await.unwrap();
}

#[tokio::test]
async fn a_reader_of_a_restored_store_is_told_that_it_was_put_back_and_the_run_writes_on() {
    let mut site = site().await;
    let url = site.server.url();
    let mut node = site.node_with("n1", &url, &SHORT_LEASE).await;
    let client = site.client().await;
    let (agent, run) = site.run(&client, ON_ORDER).await;
    says(&client, agent, run, "one").await;
    // The store is copied while nobody writes.
    assert!(node.drain().await.success());
    snapshot(&mut site).await;

    let mut node = site.node_with("n1", &url, &SHORT_LEASE).await;
    let place = event(&client, agent, "agent.assigned").await.seq;
    for line in ["2", "3", "4"] {
        order(&site, agent, &format!("go-{line}"));
        says(&client, agent, run, line).await;
    }
    let log: Vec<_> = client.logs(agent, run, Since::Start, false).map(Result::unwrap).collect().await;
    let Some(LogItem::Event(_, cursor)) = log.last() else { panic!("{log:?}") };
    node.kill9().await;
    restore(&mut site).await;

    let client = site.client().await;
    let mut told = client.events(EventSelection::All, EventTypes::All, EventsSince::After(place), true);
    assert_eq!(within("an item", told.next()).await.unwrap().unwrap(), EventItem::Rewound);
    // The store has the lease of the node's first life, for a moment more.
    let former = event(&client, agent, "agent.created").await.envelope.incarnation;
    eventually("the old lease to lapse", || async {
        let entry = client.bus().lease(former).await.unwrap();
        (!matches!(entry, LeaseEntry::Live { .. })).then_some(())
    })
    .await;
    let _node = site.node_with("n1", &url, &SHORT_LEASE).await;
    order(&site, agent, "go-5");
    says(&client, agent, run, "5").await;
    order(&site, agent, "stop");
    ended(&client, agent, run).await;
    // What the store lost of the log is in the program's spool still, or was
    // given up there once it was stored: then the gap is told.
    let mut next = 1;
    for item in items(&client, agent, run, Since::Start).await {
        match item {
            LogItem::Event(event, _) => {
                assert_eq!(event.sequence.0, next);
                let line = ["one", "2", "3", "4", "5", "end"][usize::try_from(next).unwrap() - 1];
                assert_eq!(event.payload.as_bytes(), line.as_bytes());
                next += 1;
            }
            LogItem::Gap { from, to } => {
                assert!(from.0 == next && from.0 > 1 && to.0 < 5, "{from} to {to}");
                next = to.0 + 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(next, 7);
    let again = items(&client, agent, run, Since::Cursor(*cursor)).await;
    assert!(matches!(again.first(), Some(LogItem::Rewound { .. })), "{again:?}");
    let lines: Vec<_> = again
        .iter()
        .filter_map(|item| match item {
            LogItem::Event(event, _) => Some(event.payload.as_bytes().to_vec()),
            _ => None,
        })
        .collect();
    assert_eq!(lines, [b"5".to_vec(), b"end".to_vec()], "nothing twice, nothing left out");
    verified(&client).await;
}

#[tokio::test]
async fn an_owner_whose_acknowledged_events_are_gone_ends_the_run_and_says_so() {
    let mut site = site().await;
    let mut node = site.node("n1").await;
    let client = site.client().await;
    let (agent, run) = site.run(&client, ON_ORDER).await;
    says(&client, agent, run, "one").await;
    snapshot(&mut site).await;
    let grace = Some(std::time::Duration::from_millis(10));
    let stop = client.stop(agent, run, "please", grace, acri::command::OnExpiry::Keep);
    within("a stop", stop).await.unwrap();
    restore(&mut site).await;
    // The next thing that the owner wants to record shows him.
    let stop = client.stop(agent, run, "again", None, acri::command::OnExpiry::Keep);
    let _ = within("an answer", stop).await;
    let Event::RunFailed(failed) = event(&client, agent, "run.failed").await.envelope.event else {
        panic!("another event")
    };
    assert_eq!(failed.reason, acri::event::FailReason::HistoryLost);
    let id = run.to_string();
    eventually("the program's end", || async {
        acri_tests::process::with_variable("ACRI_RUN", &id).is_empty().then_some(())
    })
    .await;
    verified(&client).await;
    assert!(node.lives());
}

fn copy_tree(from: &std::path::Path, to: &std::path::Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_tree(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}
