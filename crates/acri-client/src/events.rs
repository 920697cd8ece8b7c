//! The runtime events as a stream that resumes (spec, section 6).

use crate::{error::Error, operations::Client, outage::Outage};
use acri::{AgentId, EventEnvelope, RunId, StreamSeq, Timestamp, codec};
use acri_bus::port::{EventSelection, EventStream, Fault, Recorded, Until};
use bytes::Bytes;
use futures_util::{
    StreamExt as _,
    stream::{self, BoxStream},
};
use std::collections::BTreeSet;

/// An event with its place in the stream.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredEvent {
    /// Its sequence in the stream; where to go on after it.
    pub seq: StreamSeq,
    /// When the bus stored it.
    pub time: Timestamp,
    /// What happened.
    pub envelope: EventEnvelope,
    /// The stored bytes, over which hashes go.
    pub bytes: Bytes,
}

impl StoredEvent {
    pub(crate) fn read(recorded: &Recorded) -> Result<Self, codec::Error> {
        let envelope = codec::from_msgpack(&recorded.bytes)?;
        Ok(Self { seq: recorded.seq, time: recorded.time, envelope, bytes: recorded.bytes.clone() })
    }
}

/// What a stream of events yields.
#[derive(Debug, Clone, PartialEq)]
pub enum EventItem {
    /// Something happened.
    Event(Box<StoredEvent>),
    /// The stream was restored or replaced: what follows may repeat, or lack,
    /// what was told before.
    Rewound,
    /// A message under an event's subject that cannot be read. The stream
    /// goes on behind it.
    Unreadable {
        /// Where it is stored.
        seq: StreamSeq,
        /// What is wrong with it.
        detail: String,
    },
}

/// Where a stream of events begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EventsSince {
    /// With the first that is stored.
    #[default]
    Start,
    /// With the next to be stored.
    Now,
    /// With the first that was stored at this time or later.
    Time(Timestamp),
    /// Just after this sequence.
    After(StreamSeq),
}

/// Which types a stream of events yields.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum EventTypes {
    /// The eleven of the spec.
    #[default]
    Spec,
    /// Every type, those that this version does not know too.
    All,
    /// Those with these names; `run.*` stands for a family.
    Only(BTreeSet<String>),
}

impl EventTypes {
    /// The eleven names of the spec.
    pub const SPEC: &[&str] = &[
        "run.started",
        "run.waiting",
        "run.resumed",
        "run.completed",
        "run.stopped",
        "run.failed",
        "run.killed",
        "injection.received",
        "injection.applied",
        "context.updated",
        "escalation.raised",
    ];

    /// Whether a type is among them.
    #[must_use]
    pub fn matches(&self, type_name: &str) -> bool {
        match self {
            Self::Spec => Self::SPEC.contains(&type_name),
            Self::All => true,
            Self::Only(names) => names.iter().any(|name| match name.strip_suffix('*') {
                Some(family) => type_name.starts_with(family),
                None => name == type_name,
            }),
        }
    }
}

impl Client {
    /// Events in the order of the stream. It reconnects and goes on after the
    /// last one told; without `follow` it ends with what was stored when it
    /// began.
    #[must_use]
    pub fn events(
        &self,
        selection: EventSelection,
        types: EventTypes,
        since: EventsSince,
        follow: bool,
    ) -> BoxStream<'static, Result<EventItem, Error>> {
        let reader = Reader {
            outage: Outage::new("events", self.limits()),
            client: self.clone(),
            selection,
            types,
            follow,
            begin: Some(since),
            position: StreamSeq(0),
            floor: None,
            created: None,
            source: None,
            ended: false,
        };
        stream::unfold(reader, async |mut reader| match reader.next().await {
            Ok(Some(item)) => Some((Ok(item), reader)),
            Ok(None) => None,
            Err(error) => {
                reader.ended = true;
                Some((Err(error), reader))
            }
        })
        .boxed()
    }

    /// The events of a run, all types.
    #[must_use]
    pub fn run_events(&self, agent: AgentId, run: RunId, follow: bool) -> BoxStream<'static, Result<EventItem, Error>> {
        self.events(EventSelection::Run(agent, run), EventTypes::All, EventsSince::Start, follow)
    }
}

struct Reader {
    client: Client,
    selection: EventSelection,
    types: EventTypes,
    follow: bool,
    /// Where to begin, until the first read began.
    begin: Option<EventsSince>,
    /// The last sequence that was told or skipped.
    position: StreamSeq,
    /// Nothing stored before this is told.
    floor: Option<Timestamp>,
    /// Of which stream that position is.
    created: Option<Timestamp>,
    source: Option<EventStream>,
    outage: Outage,
    ended: bool,
}

impl Reader {
    async fn next(&mut self) -> Result<Option<EventItem>, Error> {
        while !self.ended {
            let Some(source) = &mut self.source else {
                match self.open().await {
                    Ok(false) => {}
                    Ok(true) => return Ok(Some(EventItem::Rewound)),
                    Err(fault) => self.outage.bear(fault).await?,
                }
                continue;
            };
            match source.next().await {
                Some(Ok(recorded)) => {
                    self.outage.over();
                    self.position = recorded.seq;
                    if let Some(item) = self.tell(&recorded) {
                        return Ok(Some(item));
                    }
                }
                Some(Err(fault)) => {
                    self.source = None;
                    self.outage.bear(fault).await?;
                }
                None if self.follow => {
                    self.source = None;
                    let detail = "the reader ended".to_owned();
                    self.outage.bear(Fault::Unavailable { operation: "events", detail }).await?;
                }
                None => self.ended = true,
            }
        }
        Ok(None)
    }

    /// Begins to read, and tells whether the stream is another than before.
    async fn open(&mut self) -> Result<bool, Fault> {
        let bus = self.client.bus().clone();
        let facts = bus.event_facts().await?;
        match self.begin {
            None | Some(EventsSince::Start) => {}
            Some(EventsSince::Now) => self.position = facts.last,
            Some(EventsSince::Time(time)) => self.floor = Some(time),
            Some(EventsSince::After(seq)) => self.position = seq,
        }
        let replaced = self.created.is_some_and(|created| created != facts.created);
        let rewound = replaced || facts.last < self.position;
        if replaced {
            self.position = StreamSeq(0);
        } else if rewound {
            self.position = facts.last;
        }
        let until = if self.follow { Until::Dropped } else { Until::Now };
        self.source = Some(bus.read(self.selection.clone(), self.position.next(), until).await?);
        self.created = Some(facts.created);
        self.begin = None;
        Ok(rewound)
    }

    fn tell(&self, recorded: &Recorded) -> Option<EventItem> {
        if self.floor.is_some_and(|floor| recorded.time < floor) {
            return None;
        }
        match StoredEvent::read(recorded) {
            Ok(event) if self.types.matches(event.envelope.event.type_name()) => {
                Some(EventItem::Event(Box::new(event)))
            }
            Ok(_) => None,
            Err(error) => Some(EventItem::Unreadable { seq: recorded.seq, detail: error.to_string() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_types_are_the_eleven_of_the_spec_and_a_star_stands_for_a_family() {
        assert_eq!(EventTypes::SPEC.len(), 11);
        assert!(EventTypes::Spec.matches("run.killed") && !EventTypes::Spec.matches("run.accepted"));
        let only = EventTypes::Only(["run.*".to_owned(), "agent.created".to_owned()].into());
        assert!(only.matches("run.teleported") && only.matches("agent.created") && !only.matches("agent.removed"));
    }
}
