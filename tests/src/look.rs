//! Reads what was stored, and checks what must be true of it.

use crate::{eventually, within};
use acri::{AgentId, Event, Incarnation, RunId, StreamSeq, log::Stream, node::Heartbeat, status::RunStatus};
use acri_bus::port::{EventSelection, LeaseEntry, Until};
use acri_client::{Client, EventItem, EventTypes, EventsSince, LogItem, Since, StoredEvent};
use acri_core::{
    appender::Stored,
    check::{Report, verify},
};
use futures_util::StreamExt as _;

/// The first event of a type after a stream sequence; waits for it.
///
/// # Panics
/// If it does not come.
pub async fn event_after(client: &Client, agent: AgentId, after: StreamSeq, type_name: &str) -> StoredEvent {
    let types = EventTypes::Only([type_name.to_owned()].into());
    let mut events = client.events(EventSelection::Agent(agent), types, EventsSince::After(after), true);
    within(type_name, async {
        loop {
            if let EventItem::Event(event) = events.next().await.expect("it follows").expect("the bus") {
                return *event;
            }
        }
    })
    .await
}

/// The first event of a type.
pub async fn event(client: &Client, agent: AgentId, type_name: &str) -> StoredEvent {
    event_after(client, agent, StreamSeq(0), type_name).await
}

/// The types of an agent's events, in order.
///
/// # Panics
/// If they cannot be read.
pub async fn types(client: &Client, agent: AgentId) -> Vec<String> {
    let history = client.history(agent).await.expect("a history");
    history.iter().map(|event| event.envelope.event.type_name().to_owned()).collect()
}

/// Waits for the end of a run.
///
/// # Panics
/// If it does not end.
pub async fn ended(client: &Client, agent: AgentId, run: RunId) -> RunStatus {
    within("the run's end", client.wait(agent, run)).await.expect("the run's end")
}

/// Waits until a run is sealed.
pub async fn sealed(client: &Client, agent: AgentId, run: RunId) {
    let types = EventTypes::Only(["run.logs_sealed".to_owned()].into());
    let mut events = client.events(EventSelection::Run(agent, run), types, EventsSince::Start, true);
    // It follows, so the first item is the seal.
    let _ = within("the run's seal", events.next()).await;
}

/// Waits until a run wrote this line.
///
/// # Panics
/// If it does not.
pub async fn says(client: &Client, agent: AgentId, run: RunId, line: &str) {
    let mut items = client.logs(agent, run, Since::Start, true);
    within(line, async {
        loop {
            if let LogItem::Event(event, _) = items.next().await.expect("it follows").expect("the log")
                && event.payload.as_bytes() == line.as_bytes()
            {
                return;
            }
        }
    })
    .await;
}

/// What a run wrote, its lines joined, each stream by itself.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Written {
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
    /// How many log events there were.
    pub events: u64,
}

impl Written {
    /// Takes one item, which must be the next event.
    ///
    /// # Panics
    /// If it is a gap, or not the next.
    pub fn take(&mut self, item: LogItem) {
        let LogItem::Event(event, _) = item else { panic!("after {} events: {item:?}", self.events) };
        assert_eq!(event.sequence.0, self.events + 1, "the log has no hole and no repeat");
        self.events += 1;
        let into = match event.stream.expect("a stream") {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        };
        into.extend_from_slice(event.payload.as_bytes());
        if !event.more {
            into.push(b'\n');
        }
    }

    /// The lines of standard output.
    #[must_use]
    pub fn out(&self) -> Vec<String> {
        lines(&self.stdout)
    }

    /// The lines of standard error.
    #[must_use]
    pub fn err(&self) -> Vec<String> {
        lines(&self.stderr)
    }
}

fn lines(bytes: &[u8]) -> Vec<String> {
    String::from_utf8_lossy(bytes).lines().map(str::to_owned).collect()
}

/// Everything that a run wrote, up to its seal, without gap, hole or repeat.
///
/// # Panics
/// If there is one.
pub async fn written(client: &Client, agent: AgentId, run: RunId) -> Written {
    let mut items = client.logs(agent, run, Since::Start, true);
    let mut written = Written::default();
    within("the run's log", async {
        while let Some(item) = items.next().await {
            written.take(item.expect("the log"));
        }
    })
    .await;
    written
}

/// Asserts that lines are `<word> 0`, `<word> 1`, …, each once and in order.
///
/// # Panics
/// At the first that is not.
pub fn assert_numbered(lines: &[String], word: &str) {
    for (number, line) in lines.iter().enumerate() {
        assert_eq!(*line, format!("{word} {number}"), "line {number} of {}", lines.len());
    }
}

/// Verifies every history on the bus.
///
/// # Panics
/// If anything is wrong with one.
pub async fn verified(client: &Client) -> Report {
    let report = report(client).await;
    assert_eq!(report.problem_count, 0, "{:#?}", report.problems);
    report
}

/// What a verification of everything on the bus finds.
///
/// # Panics
/// If it cannot be read.
pub async fn report(client: &Client) -> Report {
    let mut history = Vec::new();
    let mut events =
        client.bus().read(EventSelection::All, StreamSeq(1), Until::Now).await.expect("a read of all events");
    while let Some(recorded) = events.next().await {
        let recorded = recorded.expect("an event");
        let stored = Stored { seq: recorded.seq, time: recorded.time, bytes: recorded.bytes.clone() };
        history.push((recorded.subject, stored));
    }
    verify(&history)
}

/// The epochs that an agent's owners claimed, in order, and that they rise by
/// one is asserted.
///
/// # Panics
/// If one is left out or comes twice.
pub async fn epochs(client: &Client, agent: AgentId) -> Vec<u64> {
    let history = client.history(agent).await.expect("a history");
    let claims: Vec<u64> = history
        .iter()
        .filter(|event| matches!(event.envelope.event, Event::AgentCreated(_) | Event::AgentAssigned(_)))
        .map(|event| event.envelope.epoch.0)
        .collect();
    assert!(claims.iter().copied().eq(1..=claims.len() as u64), "{claims:?}");
    claims
}

/// The sequence of the last event on the bus.
///
/// # Panics
/// If the bus does not say.
pub async fn last_event(client: &Client) -> StreamSeq {
    client.bus().event_facts().await.expect("facts").last
}

/// The next heartbeat of a node.
///
/// # Panics
/// If none comes.
pub async fn heartbeat(client: &Client, node: &str) -> Heartbeat {
    let mut beats = client.bus().heartbeats().await.expect("heartbeats");
    within("a heartbeat", async {
        loop {
            let bytes = beats.next().await.expect("it follows");
            if let Ok(beat) = acri::codec::from_msgpack::<Heartbeat>(&bytes)
                && beat.node.as_str() == node
            {
                return beat;
            }
        }
    })
    .await
}

/// Waits until a counter of a node has at least this value.
pub async fn counted(client: &Client, node: &str, counter: &str, at_least: u64) {
    eventually(&format!("{counter} >= {at_least}"), || async {
        let beat = heartbeat(client, node).await;
        (beat.counters.get(counter).copied().unwrap_or(0) >= at_least).then_some(())
    })
    .await;
}

/// Waits until an incarnation is fenced.
pub async fn fenced(client: &Client, incarnation: Incarnation) {
    eventually("a tombstone", || async {
        let entry = client.bus().lease(incarnation).await.ok()?;
        matches!(entry, LeaseEntry::Fenced(_)).then_some(())
    })
    .await;
}
