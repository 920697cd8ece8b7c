//! The bus as a value.

use crate::port::{
    Append, Appended, EventSelection, Fault, FrameAppend, FrameMark, LeaseEntry, Leased, Recorded, RecordedFrame,
    StreamFacts, Why,
};
use acri::{
    AgentId, EventId, Incarnation, NodeId, RunId, StreamSeq, Subject, Timestamp,
    limits::{EVENT_BODY_BYTES_MAX, FRAME_MESSAGE_BYTES_MAX},
};
use std::{collections::BTreeMap, time::Duration};

/// How long an event's id is remembered.
pub const DUPLICATE_WINDOW: Duration = Duration::from_secs(120);
/// How long an expiry marker stays.
pub const MARKER_TTL: Duration = Duration::from_secs(3600);

/// Whose log.
type Log = (AgentId, Option<RunId>);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Lease {
    Live { node: NodeId, renewed: Timestamp, expires: Timestamp },
    Expired { until: Timestamp },
    Fenced,
}

/// Everything that a bus has stored, and its time.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    now: Timestamp,
    created: Timestamp,
    replicated: bool,
    events: BTreeMap<StreamSeq, Recorded>,
    events_last: StreamSeq,
    events_first: StreamSeq,
    last_of: BTreeMap<AgentId, StreamSeq>,
    ids: BTreeMap<EventId, (StreamSeq, Timestamp)>,
    frames: BTreeMap<Log, BTreeMap<StreamSeq, RecordedFrame>>,
    frames_last: StreamSeq,
    frames_first: StreamSeq,
    leases: BTreeMap<Incarnation, (StreamSeq, Lease)>,
    leases_last: StreamSeq,
}

fn refused(operation: &'static str, why: Why, detail: String) -> Appended {
    Appended::Refused(Fault::Refused { operation, why, detail })
}

fn agent_of(subject: &Subject) -> Option<(AgentId, Option<RunId>)> {
    match subject {
        Subject::Event(agent, run, _) => Some((*agent, *run)),
        Subject::Harness(..) | Subject::Agent(..) | Subject::Run(..) | Subject::Log(..) | Subject::Heartbeat(_) => None,
    }
}

impl State {
    /// An empty bus, created `now`.
    #[must_use]
    pub fn new(now: Timestamp) -> Self {
        Self {
            now,
            created: now,
            replicated: false,
            events: BTreeMap::new(),
            events_last: StreamSeq(0),
            events_first: StreamSeq(1),
            last_of: BTreeMap::new(),
            ids: BTreeMap::new(),
            frames: BTreeMap::new(),
            frames_last: StreamSeq(0),
            frames_first: StreamSeq(1),
            leases: BTreeMap::new(),
            leases_last: StreamSeq(0),
        }
    }

    /// Answers an exact repeat as a replicated stream does: as a duplicate,
    /// where a single server says conflict.
    #[must_use]
    pub fn replicated(mut self) -> Self {
        self.replicated = true;
        self
    }

    /// The bus's time.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.now
    }

    /// Lets time pass, up to `now`: leases expire, markers go, ids are
    /// forgotten. Time does not run backwards.
    pub fn advance_to(&mut self, now: Timestamp) {
        if now <= self.now {
            return;
        }
        self.now = now;
        self.ids.retain(|_, (_, stored)| now.since(*stored) < DUPLICATE_WINDOW);
        // A marker is stored when its lease expires, in the order of expiry.
        let mut due: Vec<(Timestamp, Incarnation)> = self
            .leases
            .iter()
            .filter_map(|(key, (_, lease))| match lease {
                Lease::Live { expires, .. } if *expires <= now => Some((*expires, *key)),
                Lease::Live { .. } | Lease::Expired { .. } | Lease::Fenced => None,
            })
            .collect();
        due.sort();
        for (expired, key) in due {
            self.leases_last = self.leases_last.next();
            self.leases.insert(key, (self.leases_last, Lease::Expired { until: expired.plus(MARKER_TTL) }));
        }
        self.leases.retain(|_, (_, lease)| !matches!(lease, Lease::Expired { until } if *until <= now));
    }

    // --- events

    /// One attempt to store an event, as a server settles it.
    pub fn append(&mut self, append: &Append) -> Appended {
        const OPERATION: &str = "append an event";
        let Some((agent, _)) = agent_of(&append.subject) else {
            return refused(OPERATION, Why::State, format!("{} is no event's subject", append.subject));
        };
        if append.bytes.len() > EVENT_BODY_BYTES_MAX {
            return refused(
                OPERATION,
                Why::TooLarge,
                format!("{} bytes, and {EVENT_BODY_BYTES_MAX} is the limit", append.bytes.len()),
            );
        }
        let known = self.ids.get(&append.id).map(|(seq, _)| *seq);
        if self.replicated
            && let Some(seq) = known
        {
            return Appended::Duplicate(seq);
        }
        if self.last_seq(agent) != append.expect {
            return Appended::Conflict;
        }
        if let Some(seq) = known {
            return Appended::Duplicate(seq);
        }
        self.store_event(append, agent)
    }

    /// The same whatever is there: for a broken adapter.
    pub(crate) fn store_event(&mut self, append: &Append, agent: AgentId) -> Appended {
        let seq = self.events_last.next();
        self.events_last = seq;
        let (time, subject, bytes) = (self.now, append.subject.clone(), append.bytes.clone());
        self.events.insert(seq, Recorded { seq, time, subject, bytes });
        self.last_of.insert(agent, seq);
        self.ids.insert(append.id, (seq, self.now));
        Appended::Stored(seq)
    }

    /// The agent's last sequence; 0 if it has no event.
    #[must_use]
    pub fn last_seq(&self, agent: AgentId) -> StreamSeq {
        self.last_of.get(&agent).copied().unwrap_or_default()
    }

    /// The agent's last event.
    #[must_use]
    pub fn last(&self, agent: AgentId) -> Option<&Recorded> {
        self.events.get(self.last_of.get(&agent)?)
    }

    /// The events selected, from a sequence on.
    pub fn read<'a>(&'a self, selection: &'a EventSelection, from: StreamSeq) -> impl Iterator<Item = &'a Recorded> {
        self.events.range(from..).map(|(_, recorded)| recorded).filter(move |recorded| {
            match (selection, agent_of(&recorded.subject)) {
                (EventSelection::All, _) => true,
                (EventSelection::Agent(wanted), Some((agent, _))) => *wanted == agent,
                (EventSelection::Run(wanted, run), Some((agent, place))) => *wanted == agent && Some(*run) == place,
                (EventSelection::Agent(_) | EventSelection::Run(..), None) => false,
            }
        })
    }

    /// Facts about the event stream.
    #[must_use]
    pub fn event_facts(&self) -> StreamFacts {
        let bytes = self.events.values().map(|recorded| recorded.bytes.len() as u64).sum();
        let (first, last) = (self.events_first, self.events_last);
        StreamFacts { created: self.created, first, last, bytes, bytes_max: None }
    }

    /// Rolls the event stream back to `last`, as a restored backup does: what
    /// was acknowledged after it is gone, and its sequences come again.
    pub fn truncate_events(&mut self, last: StreamSeq) {
        self.events.split_off(&last.next());
        self.events_last = self.events_last.min(last);
        self.ids.retain(|_, (seq, _)| *seq <= last);
        self.index();
    }

    /// Removes a run's events, as the archive job does.
    pub fn purge_run(&mut self, agent: AgentId, run: RunId) {
        self.events.retain(|_, recorded| agent_of(&recorded.subject) != Some((agent, Some(run))));
        self.events_first = self.events.keys().next().copied().unwrap_or(self.events_last.next());
        self.index();
    }

    fn index(&mut self) {
        self.last_of =
            self.events.values().filter_map(|recorded| Some((agent_of(&recorded.subject)?.0, recorded.seq))).collect();
    }

    // --- frames

    /// One attempt to store a log frame, as a server settles it.
    pub fn append_frame(&mut self, append: &FrameAppend) -> Appended {
        const OPERATION: &str = "append a log frame";
        // What the headers cost, about: base64 and names.
        let bytes = append.bytes.len() + append.resume.len() * 4 / 3 + 128;
        if bytes > FRAME_MESSAGE_BYTES_MAX {
            return refused(
                OPERATION,
                Why::TooLarge,
                format!("{bytes} bytes, and {FRAME_MESSAGE_BYTES_MAX} is the limit"),
            );
        }
        if self.last_frame_seq(append.agent, append.run) != append.expect {
            return Appended::Conflict;
        }
        self.store_frame(append)
    }

    /// The same whatever is there: for a broken adapter.
    pub(crate) fn store_frame(&mut self, append: &FrameAppend) -> Appended {
        let seq = self.frames_last.next();
        self.frames_last = seq;
        let mark = Some(FrameMark { epoch: append.epoch, resume: append.resume.clone() });
        let frame = RecordedFrame { seq, time: self.now, mark, bytes: append.bytes.clone() };
        self.frames.entry((append.agent, append.run)).or_default().insert(seq, frame);
        Appended::Stored(seq)
    }

    fn last_frame_seq(&self, agent: AgentId, run: Option<RunId>) -> StreamSeq {
        self.last_frame(agent, run).map_or(StreamSeq(0), |frame| frame.seq)
    }

    /// The run's last frame.
    #[must_use]
    pub fn last_frame(&self, agent: AgentId, run: Option<RunId>) -> Option<&RecordedFrame> {
        self.frames.get(&(agent, run))?.values().next_back()
    }

    /// The run's frames, from a sequence on.
    pub fn read_frames(
        &self,
        agent: AgentId,
        run: Option<RunId>,
        from: StreamSeq,
    ) -> impl Iterator<Item = &RecordedFrame> {
        self.frames.get(&(agent, run)).into_iter().flat_map(move |frames| frames.range(from..).map(|(_, frame)| frame))
    }

    /// Facts about the log stream.
    #[must_use]
    pub fn log_facts(&self) -> StreamFacts {
        let frames = self.frames.values().flat_map(BTreeMap::values);
        let bytes = frames.map(|frame| frame.bytes.len() as u64).sum();
        let (first, last) = (self.frames_first, self.frames_last);
        StreamFacts { created: self.created, first, last, bytes, bytes_max: None }
    }

    /// Removes the frames before `first`, as retention does.
    pub fn drop_frames_before(&mut self, first: StreamSeq) {
        for frames in self.frames.values_mut() {
            *frames = frames.split_off(&first);
        }
        self.frames.retain(|_, frames| !frames.is_empty());
        self.frames_first = self.frames_first.max(first).min(self.frames_last.next());
    }

    /// Rolls the log stream back to `last`.
    pub fn truncate_logs(&mut self, last: StreamSeq) {
        for frames in self.frames.values_mut() {
            frames.split_off(&last.next());
        }
        self.frames.retain(|_, frames| !frames.is_empty());
        self.frames_last = self.frames_last.min(last);
    }

    // --- leases

    fn lease_seq(&self, incarnation: Incarnation) -> StreamSeq {
        self.leases.get(&incarnation).map(|(seq, _)| *seq).unwrap_or_default()
    }

    fn put_lease(&mut self, incarnation: Incarnation, expect: StreamSeq, lease: Lease) -> Leased {
        if self.lease_seq(incarnation) != expect {
            return Leased::Lost;
        }
        self.store_lease(incarnation, lease)
    }

    fn store_lease(&mut self, incarnation: Incarnation, lease: Lease) -> Leased {
        self.leases_last = self.leases_last.next();
        self.leases.insert(incarnation, (self.leases_last, lease));
        Leased::Written(self.leases_last)
    }

    fn live(&self, node: &NodeId, ttl: Duration) -> Lease {
        Lease::Live { node: node.clone(), renewed: self.now, expires: self.now.plus(ttl.max(Duration::from_secs(1))) }
    }

    /// Writes a lease with its TTL.
    pub fn write_lease(&mut self, incarnation: Incarnation, node: &NodeId, expect: StreamSeq, ttl: Duration) -> Leased {
        let lease = self.live(node, ttl);
        self.put_lease(incarnation, expect, lease)
    }

    /// The same whatever is there: for a broken adapter.
    #[cfg(feature = "testing")]
    pub(crate) fn write_lease_unchecked(&mut self, incarnation: Incarnation, node: &NodeId, ttl: Duration) -> Leased {
        let lease = self.live(node, ttl);
        self.store_lease(incarnation, lease)
    }

    /// Writes the permanent tombstone.
    pub fn fence(&mut self, incarnation: Incarnation, expect: StreamSeq) -> Leased {
        self.put_lease(incarnation, expect, Lease::Fenced)
    }

    /// One entry.
    #[must_use]
    pub fn lease(&self, incarnation: Incarnation) -> LeaseEntry {
        match self.leases.get(&incarnation) {
            None => LeaseEntry::Absent,
            Some((revision, Lease::Live { node, renewed, .. })) => {
                LeaseEntry::Live { node: node.clone(), revision: *revision, renewed: *renewed }
            }
            Some((revision, Lease::Expired { .. })) => LeaseEntry::Expired(*revision),
            Some((revision, Lease::Fenced)) => LeaseEntry::Fenced(*revision),
        }
    }

    /// All entries.
    #[must_use]
    pub fn leases(&self) -> Vec<(Incarnation, LeaseEntry)> {
        self.leases.keys().map(|key| (*key, self.lease(*key))).collect()
    }

    /// Deletes a tombstone.
    ///
    /// # Errors
    /// [`Fault::Refused`] if there is something else at that revision.
    pub fn collect_tombstone(&mut self, incarnation: Incarnation, revision: StreamSeq) -> Result<(), Fault> {
        match self.leases.get(&incarnation) {
            Some((seq, Lease::Fenced)) if *seq == revision => {
                self.leases.remove(&incarnation);
                Ok(())
            }
            Some((seq, _)) if *seq == revision => {
                let detail = format!("revision {revision} is no tombstone of {incarnation}");
                Err(Fault::Refused { operation: "collect a tombstone", why: Why::State, detail })
            }
            Some(_) | None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use uuid::Uuid;

    fn append(agent: u128, id: u128, expect: u64, bytes: &'static str) -> Append {
        Append {
            subject: Subject::Event(AgentId::from_uuid(Uuid::from_u128(agent)), None, "agent.assigned".to_owned()),
            id: EventId::from_uuid(Uuid::from_u128(id)),
            expect: StreamSeq(expect),
            bytes: Bytes::from_static(bytes.as_bytes()),
        }
    }

    #[test]
    fn equal_histories_are_equal_values() {
        let mut one = State::new(Timestamp::from_micros(0));
        let mut other = one.clone();
        assert_eq!(one.append(&append(1, 1, 0, "a")), Appended::Stored(StreamSeq(1)));
        assert_ne!(one, other);
        other.append(&append(1, 1, 0, "a"));
        assert_eq!(one, other);
    }

    #[test]
    fn an_exact_repeat_is_a_conflict_or_replicated_a_duplicate() {
        let mut single = State::new(Timestamp::from_micros(0));
        let mut replicated = single.clone().replicated();
        for state in [&mut single, &mut replicated] {
            state.append(&append(1, 1, 0, "a"));
        }
        assert_eq!(single.append(&append(1, 1, 0, "a")), Appended::Conflict);
        assert_eq!(replicated.append(&append(1, 1, 0, "a")), Appended::Duplicate(StreamSeq(1)));
    }

    #[test]
    fn a_reused_id_with_another_body_is_confirmed_and_lost_until_it_is_forgotten() {
        let mut state = State::new(Timestamp::from_micros(0));
        state.append(&append(1, 1, 0, "a"));
        assert_eq!(state.append(&append(1, 1, 1, "b")), Appended::Duplicate(StreamSeq(1)));
        state.advance_to(state.now().plus(DUPLICATE_WINDOW));
        assert_eq!(state.append(&append(1, 1, 1, "b")), Appended::Stored(StreamSeq(2)));
    }

    #[test]
    fn a_rolled_back_stream_gives_its_sequences_again() {
        let mut state = State::new(Timestamp::from_micros(0));
        state.append(&append(1, 1, 0, "a"));
        state.append(&append(1, 2, 1, "b"));
        state.truncate_events(StreamSeq(1));
        assert_eq!(state.last_seq(AgentId::from_uuid(Uuid::from_u128(1))), StreamSeq(1));
        assert_eq!(state.append(&append(1, 3, 1, "c")), Appended::Stored(StreamSeq(2)));
    }

    #[test]
    fn a_lease_expires_into_a_marker_and_the_marker_goes() {
        let key = Incarnation::from_uuid(Uuid::from_u128(1));
        let mut state = State::new(Timestamp::from_micros(0));
        let node = "n".parse().unwrap();
        let Leased::Written(revision) = state.write_lease(key, &node, StreamSeq(0), Duration::from_secs(15)) else {
            panic!()
        };
        state.advance_to(state.now().plus(Duration::from_secs(15)));
        let LeaseEntry::Expired(marker) = state.lease(key) else { panic!() };
        assert!(marker > revision);
        state.advance_to(state.now().plus(MARKER_TTL));
        assert_eq!(state.lease(key), LeaseEntry::Absent);
    }
}
