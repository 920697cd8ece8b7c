use super::author::Author;
use crate::{EventItem, EventSelection, EventTypes, EventsSince, LogItem, Since};
use acri::{RunState, StreamSeq, status::Phase};
use futures_util::StreamExt as _;

/// Log items in a few characters: lines, `[gap a-b]`, `[rewound]`.
async fn told(mut logs: impl futures_util::Stream<Item = Result<LogItem, crate::Error>> + Unpin) -> String {
    let mut told = Vec::new();
    while let Some(item) = logs.next().await {
        told.push(match item.unwrap() {
            LogItem::Event(event, _) => String::from_utf8_lossy(event.payload.as_bytes()).into_owned(),
            LogItem::Gap { from, to } => format!("[gap {from}-{to}]"),
            LogItem::Rewound { after } => format!("[rewound {after}]"),
            LogItem::Malformed { frame, .. } => format!("[malformed {frame}]"),
        });
    }
    told.join(" ")
}

#[tokio::test(start_paused = true)]
async fn a_followed_log_ends_by_itself_when_the_run_is_sealed_and_everything_was_told() {
    let mut author = Author::begin().await;
    let (client, _) = author.client();
    author.write(&["a", "b"]).await;
    let follow = tokio::spawn(told(client.logs(author.agent, author.run, Since::Start, true)));
    tokio::task::yield_now().await;
    author.write(&["c"]).await;
    author.complete().await;
    author.write(&["d"]).await;
    author.seal().await;
    assert_eq!(follow.await.unwrap(), "a b c d");
}

#[tokio::test(start_paused = true)]
async fn without_follow_it_ends_with_what_is_stored() {
    let mut author = Author::begin().await;
    author.write(&["a", "b"]).await;
    let (client, _) = author.client();
    assert_eq!(told(client.logs(author.agent, author.run, Since::Start, false)).await, "a b");
    assert_eq!(told(client.logs(author.agent, author.run, Since::Now, false)).await, "");
}

#[tokio::test(start_paused = true)]
async fn nothing_is_lost_or_doubled_when_the_bus_goes_away_after_every_single_event() {
    let lines: Vec<String> = (1..=12).map(|number| number.to_string()).collect();
    for away_after in 0..lines.len() {
        let mut author = Author::begin().await;
        let (client, bus) = author.client();
        let mut logs = client.logs(author.agent, author.run, Since::Start, true);
        for frame in lines.chunks(3) {
            author.write(&frame.iter().map(String::as_str).collect::<Vec<_>>()).await;
        }
        author.complete().await;
        author.seal().await;
        let mut seen = Vec::new();
        for _ in 0..away_after {
            let Some(Ok(LogItem::Event(event, _))) = logs.next().await else { panic!("{seen:?}") };
            seen.push(String::from_utf8_lossy(event.payload.as_bytes()).into_owned());
        }
        bus.set_away(true);
        let back = tokio::spawn(async move {
            tokio::time::sleep(std::time::Duration::from_secs(20)).await;
            bus.set_away(false);
        });
        seen.extend(told(logs).await.split(' ').map(str::to_owned));
        back.await.unwrap();
        assert_eq!(seen, lines, "away after {away_after}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_cursor_goes_on_exactly_after_its_event() {
    let mut author = Author::begin().await;
    author.write(&["a", "b", "c"]).await;
    author.write(&["d"]).await;
    author.complete().await;
    author.seal().await;
    let (client, _) = author.client();
    let mut logs = client.logs(author.agent, author.run, Since::Start, false);
    let expected = ["b c d", "c d", "d", ""];
    for rest in expected {
        let Some(Ok(LogItem::Event(_, cursor))) = logs.next().await else { panic!("{rest}") };
        let again = client.logs(author.agent, author.run, Since::Cursor(cursor), true);
        assert_eq!(told(again).await, rest);
    }
}

#[tokio::test(start_paused = true)]
async fn what_retention_took_is_a_gap_at_the_beginning_and_at_the_end() {
    let mut author = Author::begin().await;
    author.write(&["a", "b"]).await;
    author.write(&["c"]).await;
    author.complete().await;
    author.seal().await;
    let (client, bus) = author.client();
    bus.with(|state| state.drop_frames_before(StreamSeq(2)));
    assert_eq!(told(client.logs(author.agent, author.run, Since::Start, true)).await, "[gap 1-2] c");
    bus.with(|state| state.drop_frames_before(StreamSeq(3)));
    assert_eq!(told(client.logs(author.agent, author.run, Since::Start, true)).await, "[gap 1-3]");
    assert_eq!(told(client.logs(author.agent, author.run, Since::Start, false)).await, "[gap 1-3]");
    assert_eq!(told(client.logs(author.agent, author.run, Since::Now, true)).await, "");
}

#[tokio::test(start_paused = true)]
async fn the_log_of_an_unknown_run_is_not_found() {
    let author = Author::begin().await;
    let (client, _) = author.client();
    let unknown = "bbbb1111-0000-8000-8000-000000000011".parse().unwrap();
    for follow in [true, false] {
        let mut logs = client.logs(author.agent, unknown, Since::Start, follow);
        assert_eq!(logs.next().await.unwrap().unwrap_err().code(), acri::ErrorCode::NotFound);
        assert!(logs.next().await.is_none());
    }
}

async fn types(mut events: impl futures_util::Stream<Item = Result<EventItem, crate::Error>> + Unpin) -> String {
    let mut told = Vec::new();
    while let Some(item) = events.next().await {
        told.push(match item.unwrap() {
            EventItem::Event(event) => event.envelope.event.type_name().to_owned(),
            EventItem::Rewound => "[rewound]".to_owned(),
            EventItem::Unreadable { seq, .. } => format!("[unreadable {seq}]"),
        });
    }
    told.join(" ")
}

#[tokio::test(start_paused = true)]
async fn events_are_told_from_where_they_are_asked_for_and_by_default_only_those_of_the_spec() {
    let mut author = Author::begin().await;
    author.complete().await;
    let (client, _) = author.client();
    let of_agent = EventSelection::Agent(author.agent);
    let told = async |kinds, since| types(client.events(of_agent.clone(), kinds, since, false)).await;
    assert_eq!(told(EventTypes::Spec, EventsSince::Start).await, "run.started run.completed");
    let all = "agent.created run.accepted run.started run.completed";
    assert_eq!(told(EventTypes::All, EventsSince::Start).await, all);
    assert_eq!(told(EventTypes::All, EventsSince::After(StreamSeq(2))).await, "run.started run.completed");
    assert_eq!(told(EventTypes::All, EventsSince::Now).await, "");
}

#[tokio::test(start_paused = true)]
async fn followed_events_go_on_after_an_outage() {
    let mut author = Author::begin().await;
    let (client, bus) = author.client();
    let mut events = client.events(EventSelection::All, EventTypes::All, EventsSince::Start, true);
    for expected in ["agent.created", "run.accepted", "run.started"] {
        let Some(Ok(EventItem::Event(event))) = events.next().await else { panic!("{expected}") };
        assert_eq!(event.envelope.event.type_name(), expected);
    }
    bus.set_away(true);
    author.complete().await;
    let (next, ()) = tokio::join!(events.next(), async {
        tokio::time::sleep(std::time::Duration::from_secs(20)).await;
        bus.set_away(false);
    });
    let Some(Ok(EventItem::Event(event))) = next else { panic!("{next:?}") };
    assert_eq!(event.envelope.event.type_name(), "run.completed");
}

#[tokio::test(start_paused = true)]
async fn wait_ends_with_the_run_and_says_how() {
    let mut author = Author::begin().await;
    let (client, _) = author.client();
    let (agent, run) = (author.agent, author.run);
    let waiting = tokio::spawn(async move { client.wait(agent, run).await });
    tokio::task::yield_now().await;
    author.complete().await;
    let status = waiting.await.unwrap().unwrap();
    assert_eq!((status.state, status.exit.and_then(|exit| exit.code)), (RunState::Completed, Some(0)));
}

#[tokio::test(start_paused = true)]
async fn without_a_node_the_status_is_folded_and_an_open_run_is_unreachable() {
    let mut author = Author::begin().await;
    let (client, _) = author.client();
    let run = client.status(author.agent, None).await.unwrap().run.unwrap();
    assert_eq!((run.state, run.phase), (RunState::Running, Some(Phase::Unreachable)));
    author.lease().await;
    let run = client.status(author.agent, Some(author.run)).await.unwrap().run.unwrap();
    assert_eq!((run.state, run.phase), (RunState::Running, None));
    author.complete().await;
    let overview = client.agents().await.unwrap();
    assert_eq!(overview.agents.len(), 1);
    let statuses = client.statuses(&overview.agents).await.unwrap();
    assert_eq!(statuses[0].run.as_ref().unwrap().state, RunState::Completed);
    assert_eq!(client.history(author.agent).await.unwrap().len(), 4);
}
