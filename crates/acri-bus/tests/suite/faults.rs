//! Each fault of the bus in memory happens when it is injected, once, and is
//! counted by its name.

use acri::{AgentId, EventId, Incarnation, StreamSeq, Subject};
use acri_bus::{
    memory::{
        MemoryBus,
        fault::{Kind, On},
    },
    port::{Append, Appended, EventSelection, Events as _, Fault, LeaseEntry, Leased, Leases as _, Until},
};
use bytes::Bytes;
use futures_util::StreamExt as _;
use std::time::Duration;
use uuid::Uuid;

fn append(agent: AgentId, expect: u64) -> Append {
    Append {
        subject: Subject::Event(agent, None, "agent.assigned".to_owned()),
        id: EventId::from_uuid(Uuid::new_v4()),
        expect: StreamSeq(expect),
        bytes: Bytes::from_static(b"body"),
    }
}

/// What is stored after one write with a fault, and after the late ones landed.
async fn with(kind: Kind) -> (Appended, u64, u64) {
    let (bus, agent) = (MemoryBus::new(), AgentId::from_uuid(Uuid::new_v4()));
    bus.faults().inject(On::Event, kind);
    let answer = bus.append(&append(agent, 0)).await;
    let stored = bus.state().last_seq(agent).0;
    assert_eq!(bus.faults().counts().get(kind.as_str()), Some(&1), "{kind:?}");
    assert_eq!(bus.faults().waiting(), 0);
    bus.land();
    (answer, stored, bus.state().last_seq(agent).0)
}

#[tokio::test]
async fn every_fault_of_a_write_does_what_its_name_says() {
    for kind in Kind::ALL {
        let (answer, stored, landed) = with(kind).await;
        let (unknown, expected) = match kind {
            Kind::AckLost => (true, (1, 1)),
            Kind::NeverArrived => (true, (0, 0)),
            Kind::Late => (true, (0, 1)),
            Kind::Twice => (false, (1, 1)),
            Kind::Full | Kind::InFlight => (false, (0, 0)),
        };
        assert_eq!(matches!(answer, Appended::Unknown(_)), unknown, "{kind:?}: {answer:?}");
        assert_eq!((stored, landed), expected, "{kind:?}");
    }
}

#[tokio::test]
async fn a_late_write_that_was_overtaken_is_refused_when_it_lands() {
    let (bus, agent) = (MemoryBus::new(), AgentId::from_uuid(Uuid::new_v4()));
    bus.faults().inject(On::Event, Kind::Late);
    bus.append(&append(agent, 0)).await;
    assert_eq!(bus.another().append(&append(agent, 0)).await, Appended::Stored(StreamSeq(1)));
    assert_eq!(bus.land(), [Appended::Conflict]);
}

#[tokio::test]
async fn a_stale_read_is_one_event_behind_and_happens_once() {
    let (bus, agent) = (MemoryBus::new(), AgentId::from_uuid(Uuid::new_v4()));
    bus.append(&append(agent, 0)).await;
    bus.append(&append(agent, 1)).await;
    bus.faults().stale(1);
    assert_eq!(bus.last(agent).await.unwrap().unwrap().seq, StreamSeq(1));
    assert_eq!(bus.last(agent).await.unwrap().unwrap().seq, StreamSeq(2));
    assert_eq!(bus.faults().counts().get("stale_read"), Some(&1));
}

#[tokio::test]
async fn a_rolled_back_stream_ends_its_followers_with_a_fault() {
    let (bus, agent) = (MemoryBus::new(), AgentId::from_uuid(Uuid::new_v4()));
    bus.append(&append(agent, 0)).await;
    bus.append(&append(agent, 1)).await;
    let mut read = bus.read(EventSelection::All, StreamSeq(1), Until::Dropped).await.unwrap();
    read.next().await.unwrap().unwrap();
    read.next().await.unwrap().unwrap();
    bus.roll_back_events(StreamSeq(1));
    assert!(matches!(read.next().await, Some(Err(Fault::Refused { .. }))));
    assert!(read.next().await.is_none());
    assert_eq!(bus.faults().counts().get("rolled_back"), Some(&1));
}

#[tokio::test]
async fn a_bus_that_is_away_is_away_for_that_client_only() {
    let (bus, agent) = (MemoryBus::new(), AgentId::from_uuid(Uuid::new_v4()));
    let other = bus.another();
    bus.set_away(true);
    assert!(matches!(bus.append(&append(agent, 0)).await, Appended::Unknown(_)));
    assert_eq!(other.append(&append(agent, 0)).await, Appended::Stored(StreamSeq(1)));
    bus.set_away(false);
    assert_eq!(bus.append(&append(agent, 1)).await, Appended::Stored(StreamSeq(2)));
    assert_eq!(bus.faults().counts().get("away"), Some(&1));
}

#[tokio::test(start_paused = true)]
async fn a_lease_whose_acknowledgement_is_lost_is_there_and_expires_by_the_paused_clock() {
    let (bus, key) = (MemoryBus::new(), Incarnation::from_uuid(Uuid::new_v4()));
    bus.faults().inject(On::Lease, Kind::AckLost);
    let ttl = Duration::from_secs(15);
    assert!(matches!(bus.write_lease(key, &"n".parse().unwrap(), StreamSeq(0), ttl).await, Leased::Unknown(_)));
    assert!(matches!(bus.lease(key).await.unwrap(), LeaseEntry::Live { .. }));
    tokio::time::advance(ttl).await;
    assert!(matches!(bus.lease(key).await.unwrap(), LeaseEntry::Expired(_)));
}
