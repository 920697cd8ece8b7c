//! Leases, their expiry, and fences.

use super::{ARRIVAL_TIMEOUT, BusFactory, LOOK_EVERY, Outcome, case_list, ensure, incarnation, text};
use crate::port::{Fault, LeaseEntry, Leased, SharedBus};
use acri::{Incarnation, NodeId, StreamSeq};
use std::time::Duration;

case_list! { false:
    a_lease_is_created_once_and_renewed_over_itself,
    an_expired_lease_leaves_a_marker_that_only_its_revision_overwrites,
    a_renewed_lease_expires_all_the_same,
    a_fenced_lease_is_never_renewed,
    a_fence_takes_the_revision_it_saw,
    a_tombstone_outlives_a_lease,
    a_collected_tombstone_is_absent_and_nothing_else_is_collected,
    all_leases_are_listed,
    the_clocks_are_compared,
}

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_secs(1);

fn node() -> NodeId {
    "node-1".parse().expect("it is a name")
}

fn written(leased: Leased) -> Result<StreamSeq, String> {
    match leased {
        Leased::Written(revision) => Ok(revision),
        other => Err(format!("not written: {other:?}")),
    }
}

async fn entry(bus: &SharedBus, key: Incarnation) -> Result<LeaseEntry, String> {
    bus.lease(key).await.map_err(|fault| text(&fault))
}

/// Nobody announces an expiry, so it is looked for.
async fn expired(bus: &SharedBus, key: Incarnation) -> Result<StreamSeq, String> {
    let look = async {
        loop {
            match entry(bus, key).await? {
                LeaseEntry::Live { .. } => tokio::time::sleep(LOOK_EVERY).await,
                LeaseEntry::Expired(revision) => return Ok(revision),
                other => return Err(format!("a lease became {other:?}")),
            }
        }
    };
    tokio::time::timeout(ARRIVAL_TIMEOUT, look).await.unwrap_or_else(|_| Err("a lease did not expire".to_owned()))
}

async fn a_lease_is_created_once_and_renewed_over_itself(factory: &dyn BusFactory) -> Outcome {
    let (bus, key) = (factory.client().await, incarnation());
    let before = entry(&bus, key).await?;
    ensure!(before == LeaseEntry::Absent, "{before:?} before it was written");
    let first = written(bus.write_lease(key, &node(), StreamSeq(0), LONG).await)?;
    let again = bus.write_lease(key, &node(), StreamSeq(0), LONG).await;
    ensure!(again == Leased::Lost, "a second creation: {again:?}");
    let mut revision = first;
    for _ in 0..4 {
        let next = written(bus.write_lease(key, &node(), revision, LONG).await)?;
        ensure!(next > revision, "revision {next} after {revision}");
        revision = next;
    }
    let stale = bus.write_lease(key, &node(), first, LONG).await;
    ensure!(stale == Leased::Lost, "at a revision of long ago: {stale:?}");
    let found = entry(&bus, key).await?;
    let live = matches!(&found, LeaseEntry::Live { node: who, revision: at, .. } if *who == node() && *at == revision);
    ensure!(live, "{found:?} at revision {revision}");
    Ok(())
}

async fn an_expired_lease_leaves_a_marker_that_only_its_revision_overwrites(factory: &dyn BusFactory) -> Outcome {
    let (bus, key) = (factory.client().await, incarnation());
    let first = written(bus.write_lease(key, &node(), StreamSeq(0), SHORT).await)?;
    let marker = expired(&bus, key).await?;
    ensure!(marker > first, "the marker of {first} is {marker}");
    for wrong in [StreamSeq(0), first] {
        let answer = bus.write_lease(key, &node(), wrong, LONG).await;
        ensure!(answer == Leased::Lost, "at {wrong}, over the marker {marker}: {answer:?}");
    }
    let second = written(bus.write_lease(key, &node(), marker, LONG).await)?;
    let found = entry(&bus, key).await?;
    ensure!(matches!(found, LeaseEntry::Live { revision, .. } if revision == second), "{found:?}");
    Ok(())
}

async fn a_renewed_lease_expires_all_the_same(factory: &dyn BusFactory) -> Outcome {
    let (bus, key) = (factory.client().await, incarnation());
    let first = written(bus.write_lease(key, &node(), StreamSeq(0), SHORT).await)?;
    written(bus.write_lease(key, &node(), first, SHORT).await)?;
    expired(&bus, key).await.map(drop)
}

async fn a_fenced_lease_is_never_renewed(factory: &dyn BusFactory) -> Outcome {
    let (bus, key) = (factory.client().await, incarnation());
    let revision = written(bus.write_lease(key, &node(), StreamSeq(0), SHORT).await)?;
    let marker = expired(&bus, key).await?;
    let tombstone = written(bus.fence(key, marker).await)?;
    for stale in [StreamSeq(0), revision, marker] {
        let answer = bus.write_lease(key, &node(), stale, LONG).await;
        ensure!(answer == Leased::Lost, "a renewal at {stale} after the fence {tombstone}: {answer:?}");
    }
    let found = entry(&bus, key).await?;
    ensure!(found == LeaseEntry::Fenced(tombstone), "{found:?} after the fence");
    Ok(())
}

async fn a_fence_takes_the_revision_it_saw(factory: &dyn BusFactory) -> Outcome {
    let (bus, live, absent) = (factory.client().await, incarnation(), incarnation());
    let first = written(bus.write_lease(live, &node(), StreamSeq(0), LONG).await)?;
    let second = written(bus.write_lease(live, &node(), first, LONG).await)?;
    for stale in [StreamSeq(0), first] {
        let answer = bus.fence(live, stale).await;
        ensure!(answer == Leased::Lost, "a fence at {stale} over the renewal {second}: {answer:?}");
    }
    let tombstone = written(bus.fence(absent, StreamSeq(0)).await)?;
    let found = entry(&bus, absent).await?;
    ensure!(found == LeaseEntry::Fenced(tombstone), "{found:?}");
    let late = bus.write_lease(absent, &node(), StreamSeq(0), LONG).await;
    ensure!(late == Leased::Lost, "a creation after the fence: {late:?}");
    Ok(())
}

async fn a_tombstone_outlives_a_lease(factory: &dyn BusFactory) -> Outcome {
    let (bus, lease, fenced) = (factory.client().await, incarnation(), incarnation());
    let tombstone = written(bus.fence(fenced, StreamSeq(0)).await)?;
    written(bus.write_lease(lease, &node(), StreamSeq(0), SHORT).await)?;
    expired(&bus, lease).await?;
    let found = entry(&bus, fenced).await?;
    ensure!(found == LeaseEntry::Fenced(tombstone), "{found:?}");
    Ok(())
}

async fn a_collected_tombstone_is_absent_and_nothing_else_is_collected(factory: &dyn BusFactory) -> Outcome {
    let (bus, live, fenced) = (factory.client().await, incarnation(), incarnation());
    let revision = written(bus.write_lease(live, &node(), StreamSeq(0), LONG).await)?;
    let tombstone = written(bus.fence(fenced, StreamSeq(0)).await)?;
    let answer = bus.collect_tombstone(live, revision).await;
    ensure!(matches!(answer, Err(Fault::Refused { .. })), "the collection of a live lease: {answer:?}");
    bus.collect_tombstone(fenced, tombstone).await.map_err(|fault| text(&fault))?;
    let found = entry(&bus, fenced).await?;
    ensure!(found == LeaseEntry::Absent, "{found:?} after its collection");
    // A repeat, after an answer that was lost.
    bus.collect_tombstone(fenced, tombstone).await.map_err(|fault| text(&fault))?;
    let found = entry(&bus, live).await?;
    ensure!(matches!(found, LeaseEntry::Live { .. }), "{found:?}");
    Ok(())
}

async fn all_leases_are_listed(factory: &dyn BusFactory) -> Outcome {
    let bus = factory.client().await;
    let (live, fenced, absent) = (incarnation(), incarnation(), incarnation());
    written(bus.write_lease(live, &node(), StreamSeq(0), LONG).await)?;
    let tombstone = written(bus.fence(fenced, StreamSeq(0)).await)?;
    let list = bus.leases().await.map_err(|fault| text(&fault))?;
    let of = |key| list.iter().find(|(found, _)| *found == key).map(|(_, entry)| entry.clone());
    ensure!(matches!(of(live), Some(LeaseEntry::Live { .. })), "{:?}", of(live));
    ensure!(of(fenced) == Some(LeaseEntry::Fenced(tombstone)), "{:?}", of(fenced));
    ensure!(of(absent).is_none(), "{:?}", of(absent));
    Ok(())
}

async fn the_clocks_are_compared(factory: &dyn BusFactory) -> Outcome {
    let bus = factory.client().await;
    let offset = bus.clock_offset_micros().await.map_err(|fault| text(&fault))?;
    // The same machine: what is measured is the exchange.
    ensure!(offset.abs() < 2_000_000, "{offset} us between two clocks that are one");
    Ok(())
}
