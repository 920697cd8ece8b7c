//! Adapters with one flaw each: the proof that the suite notices.

use super::{BusFactory, MemoryFactory};
use crate::{
    memory::MemoryBus,
    port::{
        Answer, Append, Appended, Commands, EventSelection, EventStream, Events, Fault, FrameAppend, FrameStream,
        LeaseEntry, Leased, Leases, Logs, Recorded, RecordedFrame, RequestError, RequestStream, SharedBus, StreamFacts,
        Until,
    },
};
use acri::{
    AgentId, HarnessType, Incarnation, NodeId, RunId, StreamSeq, Subject, codec::Format, limits::EVENT_BODY_BYTES_MAX,
};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{
    StreamExt as _,
    future::BoxFuture,
    stream::{self, BoxStream},
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// One thing that is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flaw {
    /// An append ignores the expected sequence.
    IgnoresExpectation,
    /// The check covers the event's own subject only, as on old servers.
    ChecksOwnSubjectOnly,
    /// An append is acknowledged and not stored.
    AcknowledgesBeforeStoring,
    /// A duplicate is told as a success.
    DuplicateClaimsSuccess,
    /// A body above the limit is stored.
    TakesAnySize,
    /// `last` comes from a follower that is behind.
    StaleLast,
    /// `last_frame` does.
    StaleLastFrame,
    /// Frames ignore the expected sequence.
    FramesSeveralInFlight,
    /// A read leaves out its second event.
    ReadSkipsOne,
    /// A read gives its second event twice.
    ReadDoubles,
    /// A read that has to end follows.
    ReadNeverEnds,
    /// A read that has to end takes in what comes later.
    ReadTakesInWhatComes,
    /// A follower goes on at what is stored when the bus is back.
    FollowDropsOnReconnect,
    /// A lease is renewed over a tombstone.
    LeaseAfterTombstone,
    /// A lease is created over an expiry marker.
    LeaseCreatedOverMarker,
    /// A renewal drops the TTL.
    EternalRenewal,
    /// Anything can be collected.
    CollectsAnything,
    /// Any reply subject is answered.
    AnswersAnybody,
    /// Every listener of a harness gets the request.
    NoQueueGroup,
    /// Nobody there looks like no answer.
    SilentAbsence,
    /// An absent bus looks like nobody there.
    AbsenceIsNobody,
    /// An append has to follow the stream's last event, not its agent's.
    ChecksTheWholeStream,
    /// An agent without events is told as a fault.
    NothingIsAFault,
    /// The logs of all runs of an agent are one.
    OneLogAnAgent,
    /// A read of a log gives its second frame twice.
    FramesDoubled,
    /// A log that is to be followed ends.
    FollowedLogEnds,
    /// A log that is followed goes on at what is stored when the bus is back.
    FollowedLogForgets,
    /// A lease is written whatever its revision.
    LeaseIgnoresRevision,
    /// Tombstones go when a lease expires.
    TombstoneExpires,
    /// Only live leases are listed.
    ListsTheLivingOnly,
    /// The difference of the clocks is of another unit.
    ClocksInAnotherUnit,
    /// Whatever was asked, the answer is JSON.
    AnswersInOneFormat,
    /// An error's code is left out of its answer.
    ErrorsWithoutCode,
    /// A body of an unknown type is taken for JSON.
    GuessesTheFormat,
    /// A listener listens when it is first looked at.
    ListensLate,
    /// A listener is gone after a crash.
    ListenerEndsWithTheBus,
    /// A heartbeat is not sent.
    HeartStands,
}

/// Every flaw, with a case that notices it.
pub const FLAWS: &[(Flaw, &str)] = &[
    (Flaw::IgnoresExpectation, "a_stale_expectation_is_refused"),
    (Flaw::ChecksOwnSubjectOnly, "the_check_covers_every_run_of_the_agent"),
    (Flaw::AcknowledgesBeforeStoring, "the_last_event_is_known_at_once"),
    (Flaw::DuplicateClaimsSuccess, "a_used_id_never_stores_another_body"),
    (Flaw::TakesAnySize, "a_body_at_the_limit_is_stored_and_one_byte_more_is_refused"),
    (Flaw::StaleLast, "the_last_event_is_known_at_once"),
    (Flaw::StaleLastFrame, "the_last_frame_is_known_at_once"),
    (Flaw::FramesSeveralInFlight, "a_frame_is_stored_only_after_the_one_before_it"),
    (Flaw::ReadSkipsOne, "a_read_gives_everything_once_and_in_order"),
    (Flaw::ReadDoubles, "a_read_gives_everything_once_and_in_order"),
    (Flaw::ReadNeverEnds, "a_read_of_nothing_ends"),
    (Flaw::ReadTakesInWhatComes, "a_read_that_ends_leaves_out_what_came_later"),
    (Flaw::FollowDropsOnReconnect, "a_follower_misses_nothing_over_a_crash"),
    (Flaw::LeaseAfterTombstone, "a_fenced_lease_is_never_renewed"),
    (Flaw::LeaseCreatedOverMarker, "an_expired_lease_leaves_a_marker_that_only_its_revision_overwrites"),
    (Flaw::EternalRenewal, "a_renewed_lease_expires_all_the_same"),
    (Flaw::CollectsAnything, "a_collected_tombstone_is_absent_and_nothing_else_is_collected"),
    (Flaw::AnswersAnybody, "a_hostile_reply_subject_is_not_answered"),
    (Flaw::NoQueueGroup, "a_harness_request_goes_to_one_of_many"),
    (Flaw::SilentAbsence, "nobody_answers_where_nobody_listens"),
    (Flaw::AbsenceIsNobody, "an_append_while_the_bus_is_away_is_unknown"),
    (Flaw::ChecksTheWholeStream, "another_agent_is_not_touched"),
    (Flaw::NothingIsAFault, "an_agent_without_events_has_no_last"),
    (Flaw::OneLogAnAgent, "frames_of_other_runs_are_not_in_the_way"),
    (Flaw::OneLogAnAgent, "an_agents_own_log_is_apart_from_its_runs"),
    (Flaw::FramesDoubled, "frames_are_read_once_and_in_order"),
    (Flaw::FollowedLogEnds, "a_log_that_is_followed_goes_on"),
    (Flaw::FollowedLogForgets, "a_follower_of_a_log_misses_nothing_over_crashes"),
    (Flaw::LeaseIgnoresRevision, "a_lease_is_created_once_and_renewed_over_itself"),
    (Flaw::TombstoneExpires, "a_tombstone_outlives_a_lease"),
    (Flaw::ListsTheLivingOnly, "all_leases_are_listed"),
    (Flaw::ClocksInAnotherUnit, "the_clocks_are_compared"),
    (Flaw::AnswersInOneFormat, "a_request_is_answered_in_kind"),
    (Flaw::ErrorsWithoutCode, "an_error_travels_with_its_code"),
    (Flaw::GuessesTheFormat, "an_unknown_content_type_is_told"),
    (Flaw::ListensLate, "a_listener_is_found_as_soon_as_it_listens"),
    (Flaw::ListenerEndsWithTheBus, "an_owner_is_found_again_after_a_crash"),
    (Flaw::HeartStands, "heartbeats_are_heard"),
];

/// Longer than any case: a lease without its TTL.
const ETERNITY: Duration = Duration::from_secs(1 << 32);

/// Clients of a bus in memory, all with the same flaw.
#[derive(Debug)]
pub struct MutantFactory {
    memory: MemoryFactory,
    flaw: Flaw,
    crashes: Arc<AtomicU64>,
}

impl MutantFactory {
    /// A bus of its own.
    #[must_use]
    pub fn new(flaw: Flaw) -> Self {
        Self { memory: MemoryFactory::default(), flaw, crashes: Arc::default() }
    }
}

#[async_trait]
impl BusFactory for MutantFactory {
    async fn client(&self) -> SharedBus {
        Arc::new(Mutant { bus: self.memory.another(), flaw: self.flaw, crashes: Arc::clone(&self.crashes) })
    }

    async fn raw_request(&self, subject: &str, reply: &str, content_type: &str, handled: BoxFuture<'_, ()>) -> bool {
        if self.flaw == Flaw::AnswersAnybody {
            return self.memory.raw(subject, true, content_type, handled).await;
        }
        self.memory.raw_request(subject, reply, content_type, handled).await
    }

    async fn drop_frames(&self, agent: AgentId, run: Option<RunId>) {
        self.memory.drop_frames(agent, run).await;
    }

    async fn crash(&self) {
        self.crashes.fetch_add(1, Ordering::SeqCst);
        self.memory.crash().await;
    }

    async fn restore(&self) {
        self.memory.restore().await;
    }
}

struct Mutant {
    bus: MemoryBus,
    flaw: Flaw,
    crashes: Arc<AtomicU64>,
}

impl Mutant {
    fn is(&self, flaw: Flaw) -> bool {
        self.flaw == flaw
    }

    fn log(&self, run: Option<RunId>) -> Option<RunId> {
        run.filter(|_| !self.is(Flaw::OneLogAnAgent))
    }

    fn own_subject_last(&self, subject: &Subject) -> StreamSeq {
        let state = self.bus.state();
        let last = state.read(&EventSelection::All, StreamSeq(1)).filter(|event| event.subject == *subject).last();
        last.map(|event| event.seq).unwrap_or_default()
    }

    fn agent_last(&self, subject: &Subject) -> StreamSeq {
        match subject {
            Subject::Event(agent, ..) => self.bus.state().last_seq(*agent),
            _ => StreamSeq(0),
        }
    }
}

#[async_trait]
impl Events for Mutant {
    async fn append(&self, append: &Append) -> Appended {
        let mut append = append.clone();
        match self.flaw {
            Flaw::IgnoresExpectation => append.expect = self.agent_last(&append.subject),
            Flaw::ChecksOwnSubjectOnly => {
                if self.own_subject_last(&append.subject) != append.expect {
                    return Appended::Conflict;
                }
                append.expect = self.agent_last(&append.subject);
            }
            Flaw::ChecksTheWholeStream => {
                if self.bus.state().event_facts().last != append.expect {
                    return Appended::Conflict;
                }
                append.expect = self.agent_last(&append.subject);
            }
            Flaw::AcknowledgesBeforeStoring => {
                return Appended::Stored(self.bus.state().event_facts().last.next());
            }
            Flaw::TakesAnySize if append.bytes.len() > EVENT_BODY_BYTES_MAX => {
                return self.bus.with(|state| match &append.subject {
                    Subject::Event(agent, ..) => state.store_event(&append, *agent),
                    _ => Appended::Conflict,
                });
            }
            _ => {}
        }
        match self.bus.append(&append).await {
            Appended::Duplicate(seq) if self.is(Flaw::DuplicateClaimsSuccess) => Appended::Stored(seq),
            answer => answer,
        }
    }

    async fn last(&self, agent: AgentId) -> Result<Option<Recorded>, Fault> {
        if self.is(Flaw::StaleLast) {
            self.bus.faults().stale(1);
        }
        match self.bus.last(agent).await {
            Ok(None) if self.is(Flaw::NothingIsAFault) => {
                Err(Fault::Unavailable { operation: "last", detail: "no message found".to_owned() })
            }
            last => last,
        }
    }

    async fn read(&self, selection: EventSelection, from: StreamSeq, until: Until) -> Result<EventStream, Fault> {
        let until = match (self.flaw, until) {
            (Flaw::ReadNeverEnds, Until::Now) => Until::Dropped,
            (_, until) => until,
        };
        let read = self.bus.read(selection.clone(), from, until).await?;
        Ok(match self.flaw {
            Flaw::ReadSkipsOne => {
                read.enumerate().filter_map(|(at, item)| async move { (at != 1).then_some(item) }).boxed()
            }
            Flaw::ReadDoubles => doubled(read),
            Flaw::ReadTakesInWhatComes if until == Until::Now => {
                let bus = self.bus.clone();
                let later = stream::once(async move {
                    let from = bus.state().event_facts().last;
                    bus.read(selection, from, Until::Now).await
                });
                read.chain(later.flat_map(|read| match read {
                    Ok(read) => read,
                    Err(fault) => stream::iter([Err(fault)]).boxed(),
                }))
                .boxed()
            }
            Flaw::FollowDropsOnReconnect if until == Until::Dropped => forgetful(self.bus.clone(), selection, from),
            _ => read,
        })
    }

    async fn event_facts(&self) -> Result<StreamFacts, Fault> {
        self.bus.event_facts().await
    }
}

/// Goes on with what comes after the bus is back, whatever it had not given
/// out before.
fn forgetful(bus: MemoryBus, selection: EventSelection, from: StreamSeq) -> EventStream {
    stream::unfold((bus, selection, from), |(bus, selection, from)| async move {
        // A connection was lost if it was away since the last look.
        let from =
            if bus.faults().counts().contains_key("away") { from.max(bus.state().event_facts().last) } else { from };
        let mut read = bus.read(selection.clone(), from, Until::Dropped).await.ok()?;
        let item = read.next().await?;
        let next = item.as_ref().map_or(from, |event| event.seq.next());
        Some((item, (bus, selection, next)))
    })
    .boxed()
}

/// The same of a log, at each crash.
fn forgetful_log(
    bus: MemoryBus,
    crashes: Arc<AtomicU64>,
    log: (AgentId, Option<RunId>),
    from: StreamSeq,
) -> FrameStream {
    let start = (bus, crashes, log, from, 0);
    stream::unfold(start, |(bus, crashes, log, from, before)| async move {
        let now = crashes.load(Ordering::SeqCst);
        let from = if now > before { from.max(bus.state().log_facts().last) } else { from };
        let mut read = bus.read_frames(log.0, log.1, from, Until::Dropped).await.ok()?;
        let item = read.next().await?;
        let next = item.as_ref().map_or(from, |frame| frame.seq.next());
        Some((item, (bus, crashes, log, next, now)))
    })
    .boxed()
}

/// Gives the second item twice.
fn doubled<T: Clone + Send + 'static>(read: BoxStream<'static, T>) -> BoxStream<'static, T> {
    read.enumerate().flat_map(|(at, item)| stream::iter(vec![item; if at == 1 { 2 } else { 1 }])).boxed()
}

#[async_trait]
impl Logs for Mutant {
    async fn append_frame(&self, append: &FrameAppend) -> Appended {
        if self.is(Flaw::FramesSeveralInFlight) {
            return self.bus.with(|state| state.store_frame(append));
        }
        self.bus.append_frame(&FrameAppend { run: self.log(append.run), ..append.clone() }).await
    }

    async fn last_frame(&self, agent: AgentId, run: Option<RunId>) -> Result<Option<RecordedFrame>, Fault> {
        if self.is(Flaw::StaleLastFrame) {
            self.bus.faults().stale(1);
        }
        self.bus.last_frame(agent, self.log(run)).await
    }

    async fn read_frames(
        &self,
        agent: AgentId,
        run: Option<RunId>,
        from: StreamSeq,
        until: Until,
    ) -> Result<FrameStream, Fault> {
        let until = if self.is(Flaw::FollowedLogEnds) { Until::Now } else { until };
        if self.is(Flaw::FollowedLogForgets) && until == Until::Dropped {
            return Ok(forgetful_log(self.bus.clone(), Arc::clone(&self.crashes), (agent, run), from));
        }
        let read = self.bus.read_frames(agent, self.log(run), from, until).await?;
        Ok(if self.is(Flaw::FramesDoubled) { doubled(read) } else { read })
    }

    async fn log_facts(&self) -> Result<StreamFacts, Fault> {
        self.bus.log_facts().await
    }
}

#[async_trait]
impl Leases for Mutant {
    async fn write_lease(&self, incarnation: Incarnation, node: &NodeId, expect: StreamSeq, ttl: Duration) -> Leased {
        let entry = self.bus.state().lease(incarnation);
        let flawed = match (self.flaw, entry) {
            (Flaw::LeaseAfterTombstone, LeaseEntry::Fenced(_)) => true,
            (Flaw::LeaseCreatedOverMarker, LeaseEntry::Expired(_)) => expect == StreamSeq(0),
            (Flaw::LeaseIgnoresRevision, LeaseEntry::Live { .. }) => true,
            _ => false,
        };
        if flawed {
            return self.bus.with(|state| state.write_lease_unchecked(incarnation, node, ttl));
        }
        let ttl = if self.is(Flaw::EternalRenewal) && expect > StreamSeq(0) { ETERNITY } else { ttl };
        self.bus.write_lease(incarnation, node, expect, ttl).await
    }

    async fn fence(&self, incarnation: Incarnation, expect: StreamSeq) -> Leased {
        self.bus.fence(incarnation, expect).await
    }

    async fn lease(&self, incarnation: Incarnation) -> Result<LeaseEntry, Fault> {
        let entry = self.bus.lease(incarnation).await?;
        if self.is(Flaw::TombstoneExpires) && matches!(entry, LeaseEntry::Fenced(_)) {
            let all = self.bus.leases().await?;
            if all.iter().any(|(_, entry)| matches!(entry, LeaseEntry::Expired(_))) {
                return Ok(LeaseEntry::Absent);
            }
        }
        Ok(entry)
    }

    async fn leases(&self) -> Result<Vec<(Incarnation, LeaseEntry)>, Fault> {
        let mut all = self.bus.leases().await?;
        if self.is(Flaw::ListsTheLivingOnly) {
            all.retain(|(_, entry)| matches!(entry, LeaseEntry::Live { .. }));
        }
        Ok(all)
    }

    async fn collect_tombstone(&self, incarnation: Incarnation, revision: StreamSeq) -> Result<(), Fault> {
        match self.bus.collect_tombstone(incarnation, revision).await {
            Err(_) if self.is(Flaw::CollectsAnything) => Ok(()),
            outcome => outcome,
        }
    }

    async fn clock_offset_micros(&self) -> Result<i64, Fault> {
        let offset = self.bus.clock_offset_micros().await?;
        // A bus in memory has our own clock: what is confused is its time of day.
        let confused = i64::from(self.is(Flaw::ClocksInAnotherUnit)) * self.bus.state().now().as_micros();
        Ok(offset + confused)
    }
}

#[async_trait]
impl Commands for Mutant {
    async fn serve_harness(&self, harness: &HarnessType) -> Result<RequestStream, Fault> {
        let requests = self.bus.serve_harness(harness).await?;
        if !self.is(Flaw::NoQueueGroup) {
            return Ok(requests);
        }
        // What another member of the group gets comes here as well.
        Ok(requests
            .flat_map(|request| {
                let copy = crate::port::Request {
                    subject: request.subject.clone(),
                    format: request.format,
                    body: request.body.clone(),
                    reply: None,
                };
                stream::iter([copy, request])
            })
            .boxed())
    }

    async fn serve_agent(&self, agent: AgentId) -> Result<RequestStream, Fault> {
        if self.is(Flaw::ListensLate) {
            let bus = self.bus.clone();
            let late = async move { bus.serve_agent(agent).await.unwrap_or_else(|_| stream::empty().boxed()) };
            return Ok(stream::once(late).flatten().boxed());
        }
        let requests = self.bus.serve_agent(agent).await?;
        let (crashes, before) = (Arc::clone(&self.crashes), self.crashes.load(Ordering::SeqCst));
        Ok(match self.flaw {
            Flaw::GuessesTheFormat => requests
                .map(|mut request| {
                    request.format.get_or_insert(Format::Json);
                    request
                })
                .boxed(),
            Flaw::ListenerEndsWithTheBus => {
                requests.take_while(move |_| std::future::ready(crashes.load(Ordering::SeqCst) == before)).boxed()
            }
            _ => requests,
        })
    }

    async fn request(
        &self,
        subject: &Subject,
        format: Format,
        body: Bytes,
        timeout: Duration,
    ) -> Result<Answer, RequestError> {
        match self.bus.request(subject, format, body, timeout).await {
            Err(RequestError::NoResponders(subject)) if self.is(Flaw::SilentAbsence) => {
                Err(RequestError::Fault(Fault::Unavailable { operation: "ask", detail: subject }))
            }
            Err(RequestError::Fault(_)) if self.is(Flaw::AbsenceIsNobody) => {
                Err(RequestError::NoResponders(subject.to_string()))
            }
            Ok(answer) if self.is(Flaw::AnswersInOneFormat) => Ok(Answer { format: Format::Json, ..answer }),
            Ok(answer) if self.is(Flaw::ErrorsWithoutCode) => Ok(Answer { error: None, ..answer }),
            answer => answer,
        }
    }

    async fn heartbeat(&self, node: &NodeId, body: Bytes) {
        if !self.is(Flaw::HeartStands) {
            self.bus.heartbeat(node, body).await;
        }
    }

    async fn heartbeats(&self) -> Result<BoxStream<'static, Bytes>, Fault> {
        self.bus.heartbeats().await
    }

    fn connections_lost(&self) -> u64 {
        self.bus.connections_lost()
    }

    async fn drain(&self) {
        self.bus.drain().await;
    }
}
