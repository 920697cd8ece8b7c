//! What every adapter has to do, as a list of cases.
//!
//! A case gets a [`BusFactory`], does something through the port alone, and
//! says what was wrong. A fake that has not passed this list is used in no
//! test. [`mutants`] are adapters with one flaw each: they prove that the list
//! notices.

mod commands;
mod events;
mod leases;
mod logs;
mod memory;
pub mod mutants;
mod nats;
mod outage;

pub use memory::MemoryFactory;
pub use nats::NatsFactory;
pub use outage::chain_and_follow;

use crate::port::{Append, Appended, Fault, SharedBus};
use acri::{AgentId, EventId, Incarnation, RunId, StreamSeq, Subject};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, future::BoxFuture};
use std::time::Duration;
use uuid::Uuid;

/// How long one case may take.
pub const CASE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long something that has to come may take to come.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(20);
/// How long it is waited for something that must not come.
const ABSENCE_TIMEOUT: Duration = Duration::from_millis(150);
/// How often a state that nobody announces is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// What was wrong.
pub type Outcome = Result<(), String>;

/// A bus, seen from outside the port.
#[async_trait]
pub trait BusFactory: Send + Sync {
    /// Another client of the same bus.
    async fn client(&self) -> SharedBus;
    /// Sends a request as anybody may, with any reply subject, and says
    /// whether something was sent to that subject once `handled` is done.
    async fn raw_request(&self, subject: &str, reply: &str, content_type: &str, handled: BoxFuture<'_, ()>) -> bool;
    /// Removes the frames of one log, as retention does.
    async fn drop_frames(&self, agent: AgentId, run: Option<RunId>);
    /// Ends the bus as a crash would; clients stay.
    async fn crash(&self);
    /// Brings it back, with what it had acknowledged.
    async fn restore(&self);
}

/// One thing that an adapter has to do.
#[derive(Clone, Copy)]
pub struct Case {
    /// A sentence about behaviour, without spaces.
    pub name: &'static str,
    /// Whether it ends the bus, so that no other case can share it.
    pub crashes: bool,
    /// Does it.
    pub run: for<'a> fn(&'a dyn BusFactory) -> BoxFuture<'a, Outcome>,
}

impl std::fmt::Debug for Case {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name)
    }
}

/// Makes `Case`s of functions.
macro_rules! case_list {
    ($crashes:literal: $($name:ident),* $(,)?) => {
        pub(super) const CASES: &[super::Case] = &[$(super::Case {
            name: stringify!($name),
            crashes: $crashes,
            run: |factory| Box::pin($name(factory)),
        }),*];
    };
}
pub(crate) use case_list;

/// Ends a case with what was wrong.
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}
pub(crate) use ensure;

/// All of them.
#[must_use]
pub fn cases() -> Vec<Case> {
    [events::CASES, logs::CASES, leases::CASES, commands::CASES, outage::CASES].concat()
}

/// Runs one, within its time.
///
/// # Errors
/// What was wrong, with the case's name.
pub async fn run(case: Case, factory: &dyn BusFactory) -> Outcome {
    match tokio::time::timeout(CASE_TIMEOUT, (case.run)(factory)).await {
        Ok(outcome) => outcome.map_err(|text| format!("{}: {text}", case.name)),
        Err(_) => Err(format!("{}: not done within {CASE_TIMEOUT:?}", case.name)),
    }
}

// --- what the cases are made of

fn agent() -> AgentId {
    AgentId::from_uuid(Uuid::new_v4())
}

fn run_id() -> RunId {
    RunId::from_uuid(Uuid::new_v4())
}

fn incarnation() -> Incarnation {
    Incarnation::from_uuid(Uuid::new_v4())
}

fn event_of(agent: AgentId, run: Option<RunId>, kind: &str, expect: StreamSeq, bytes: impl Into<Bytes>) -> Append {
    Append {
        subject: Subject::Event(agent, run, kind.to_owned()),
        id: EventId::from_uuid(Uuid::new_v4()),
        expect,
        bytes: bytes.into(),
    }
}

fn event(agent: AgentId, expect: StreamSeq, bytes: impl Into<Bytes>) -> Append {
    event_of(agent, None, "agent.assigned", expect, bytes)
}

fn stored(appended: Appended) -> Result<StreamSeq, String> {
    match appended {
        Appended::Stored(seq) => Ok(seq),
        other => Err(format!("not stored: {other:?}")),
    }
}

fn text(fault: &Fault) -> String {
    fault.to_string()
}

/// Stores a chain of events of one agent, one after the other.
async fn chain(
    bus: &SharedBus,
    agent: AgentId,
    run: Option<RunId>,
    from: StreamSeq,
    count: usize,
) -> Result<Vec<StreamSeq>, String> {
    let mut seqs = Vec::with_capacity(count);
    let mut expect = from;
    for number in 0..count {
        let kind = ["run.accepted", "run.started", "usage.updated"][number % 3];
        expect = stored(bus.append(&event_of(agent, run, kind, expect, format!("{number}"))).await)?;
        seqs.push(expect);
    }
    Ok(seqs)
}

/// The next item, within the time that it may take.
async fn arrives<T>(stream: &mut (impl Stream<Item = T> + Unpin), what: &str) -> Result<T, String> {
    match tokio::time::timeout(ARRIVAL_TIMEOUT, stream.next()).await {
        Ok(Some(item)) => Ok(item),
        Ok(None) => Err(format!("the stream ended where {what} was to come")),
        Err(_) => Err(format!("{what} did not come within {ARRIVAL_TIMEOUT:?}")),
    }
}

/// Everything up to the end, which has to come.
async fn all<T>(stream: impl Stream<Item = Result<T, Fault>>) -> Result<Vec<T>, String> {
    let collected = tokio::time::timeout(ARRIVAL_TIMEOUT, stream.collect::<Vec<_>>()).await;
    let items = collected.map_err(|_| format!("the read did not end within {ARRIVAL_TIMEOUT:?}"))?;
    items.into_iter().map(|item| item.map_err(|fault| text(&fault))).collect()
}
