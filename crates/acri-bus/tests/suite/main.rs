//! The suite, against both adapters and against the broken ones, and what
//! only NATS can show.

#![expect(clippy::unwrap_used, reason = "the helpers of tests are tests")]

mod faults;
mod nats_only;

use acri::Timestamp;
use acri_bus::{
    memory::{MemoryBus, State},
    nats::Options,
    suite::{
        MemoryFactory, NatsFactory, cases, chain_and_follow,
        mutants::{FLAWS, MutantFactory},
        run,
    },
};
use futures_util::StreamExt as _;

/// Cases that share one server run at the same time.
const AT_ONCE: usize = 6;

#[tokio::test(start_paused = true)]
async fn the_bus_in_memory_passes() {
    for case in cases() {
        run(case, &MemoryFactory::default()).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn the_bus_in_memory_passes_as_a_replicated_one() {
    for case in cases() {
        let bus = MemoryBus::with_state(State::new(Timestamp::from_micros(1_764_500_000_000_000)).replicated());
        run(case, &MemoryFactory::of(bus)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nats_passes() {
    all_that_share(&NatsFactory::start().await.unwrap()).await;
}

/// For a cluster: `ACRI_TEST_BUS` holds its URLs, `ACRI_TEST_REPLICAS` how
/// often each stream is kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "wants a bus that is given"]
async fn a_given_bus_passes() {
    let Some(options) = given() else { return };
    all_that_share(&NatsFactory::of(options).await.unwrap()).await;
}

fn given() -> Option<Options> {
    let urls = std::env::var("ACRI_TEST_BUS").ok()?;
    let replicas = std::env::var("ACRI_TEST_REPLICAS").map_or(1_u64, |text| text.parse().unwrap());
    let mut options = Options::new(urls.split(','));
    for stream in ["ACRI_EVENTS", "ACRI_LOGS", "KV_ACRI_NODES", "KV_ACRI_INDEX"] {
        let fields = [("num_replicas".to_owned(), replicas.into())].into_iter().collect();
        options.overrides.insert(stream.to_owned(), fields);
    }
    Some(options)
}

/// The same, while somebody kills its servers in turn, for as many seconds as
/// `ACRI_TEST_SECONDS` says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "wants a bus that is given, and somebody who kills it"]
async fn a_given_bus_loses_nothing_while_its_servers_die() {
    let Some(options) = given() else { return };
    let seconds = std::env::var("ACRI_TEST_SECONDS").map_or(20, |text| text.parse().unwrap());
    let factory = NatsFactory::of(options).await.unwrap();
    let stored = chain_and_follow(&factory, std::time::Duration::from_secs(seconds)).await.unwrap();
    println!("{stored} events");
}

async fn all_that_share(factory: &NatsFactory) {
    let shared = cases().into_iter().filter(|case| !case.crashes);
    let failures: Vec<String> = futures_util::stream::iter(shared)
        .map(|case| run(case, factory))
        .buffer_unordered(AT_ONCE)
        .filter_map(|outcome| std::future::ready(outcome.err()))
        .collect()
        .await;
    assert!(failures.is_empty(), "{failures:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nats_passes_when_its_server_is_killed() {
    let factory = NatsFactory::start().await.unwrap();
    for case in cases().into_iter().filter(|case| case.crashes) {
        run(case, &factory).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn every_flaw_is_noticed_by_the_case_that_is_there_for_it_and_every_case_notices_one() {
    let mut useful = std::collections::BTreeSet::new();
    for (flaw, expected) in FLAWS {
        let mut noticed = Vec::new();
        for case in cases() {
            if run(case, &MutantFactory::new(*flaw)).await.is_err() {
                noticed.push(case.name);
            }
        }
        println!("{flaw:?}: {noticed:?}");
        assert!(noticed.contains(expected), "{flaw:?} is noticed by {noticed:?}");
        useful.extend(noticed);
    }
    let useless: Vec<_> = cases().into_iter().map(|case| case.name).filter(|name| !useful.contains(name)).collect();
    assert!(useless.is_empty(), "no flaw makes these fail: {useless:?}");
}
