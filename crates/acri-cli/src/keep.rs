//! Keeping a node's bus going: a server of our own that ends, fails or falls
//! silent is started again, and whatever is wrong is said.

use crate::{
    app::App,
    failure::{Failure, UNAVAILABLE},
    node::RunningNode,
    signals::Signals,
};
use acri_bus::local::{self, Health, Server};
use anyhow::Result;
use std::{path::Path, time::Duration};
use tokio::time::Instant;

/// How often server and node are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// How long a node may be without its lease before its bus is suspected: its
/// lifetime, a reconnection, and as much again.
const LEASE_MISSED_AFTER: Duration = Duration::from_secs(45);
/// How often a server is started again within [`RESTARTS_WITHIN`].
const RESTARTS_MAX: usize = 5;
const RESTARTS_WITHIN: Duration = Duration::from_secs(300);
/// Pause after a start that failed; each doubles the one before.
const RESTART_PAUSE_FIRST: Duration = Duration::from_millis(500);
/// Below this a disk counts as full: a server started on it would fail again.
const STORE_FREE_BYTES_MIN: u64 = 16 << 20;
/// How often it is looked whether there is room again.
const ROOM_LOOK_EVERY: Duration = Duration::from_secs(1);

/// What is wrong with a bus.
enum Trouble {
    /// Its process has ended.
    Ended,
    /// It says itself that it cannot do its work.
    Fails(String),
    /// The node has not held its lease for [`LEASE_MISSED_AFTER`].
    NoLease,
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ended => formatter.write_str("has ended"),
            Self::Fails(detail) => write!(formatter, "takes nothing more: {detail}"),
            Self::NoLease => {
                write!(formatter, "has let the node renew no lease for {} s", LEASE_MISSED_AFTER.as_secs())
            }
        }
    }
}

/// Waits for a signal, and meanwhile keeps the node's bus going.
///
/// # Errors
/// The server cannot be kept running, or the terminal is gone.
pub(crate) async fn until_signal(
    app: &mut App,
    signals: &mut Signals,
    node: &RunningNode,
    server: Option<&mut Server>,
) -> Result<()> {
    let kept = async {
        match server {
            Some(server) => keep(app, node, server).await,
            None => tell_of(app, node).await,
        }
    };
    tokio::select! {
        kept = kept => kept,
        _ = signals.next() => Ok(()),
    }
}

/// A bus of somebody else's is only spoken of: once for each time that the
/// node is without its lease.
async fn tell_of(app: &mut App, node: &RunningNode) -> Result<()> {
    let mut lease = LeaseWatch::default();
    let mut told = false;
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let missed = lease.is_missed(node).await;
        if missed && !told {
            app.out.warn(format_args!("acri: the bus {}; no command is answered", Trouble::NoLease))?;
        } else if told && !missed {
            app.out.note("acri: the node holds its lease again")?;
        }
        told = missed;
    }
}

async fn keep(app: &mut App, node: &RunningNode, server: &mut Server) -> Result<()> {
    let mut restarts: Vec<Instant> = Vec::new();
    let mut pause = RESTART_PAUSE_FIRST;
    loop {
        let trouble = trouble(node, server).await;
        app.out.warn(format_args!("acri: nats-server {trouble}"))?;
        let mut last = trouble.to_string();
        loop {
            wait_for_room(app, server.store()).await?;
            restarts.retain(|at| at.elapsed() < RESTARTS_WITHIN);
            if restarts.len() >= RESTARTS_MAX {
                return Err(given_up(server.store(), &last));
            }
            restarts.push(Instant::now());
            let Err(error) = server.restart().await else { break };
            last = format!("failed to {}", chain(error));
            app.out.warn(format_args!("acri: {last}"))?;
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
        pause = RESTART_PAUSE_FIRST;
        app.out.warn("acri: nats-server was started again")?;
    }
}

fn given_up(store: &Path, last: &str) -> anyhow::Error {
    let within = RESTARTS_WITHIN.as_secs() / 60;
    let text = format!("nats-server was started {RESTARTS_MAX} times in {within} minutes and does not keep: {last}");
    Failure::new(UNAVAILABLE, text).hint(format!("its log: {}", store.join("nats.log").display())).into()
}

/// Waits until something is wrong.
async fn trouble(node: &RunningNode, server: &mut Server) -> Trouble {
    let mut lease = LeaseWatch::default();
    loop {
        tokio::select! {
            () = server.ended() => return Trouble::Ended,
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
        if let Health::Fails(detail) = server.health().await {
            return Trouble::Fails(detail);
        }
        if lease.is_missed(node).await {
            return Trouble::NoLease;
        }
    }
}

/// A server that met a full disk has to be started again, and cannot be before
/// there is room.
async fn wait_for_room(app: &mut App, store: &Path) -> Result<()> {
    if free(store) >= STORE_FREE_BYTES_MIN {
        return Ok(());
    }
    let wanted = STORE_FREE_BYTES_MIN >> 20;
    app.out.warn(format_args!(
        "acri: the disk of {} is full; the server is started again when {wanted} MiB are free",
        store.display()
    ))?;
    while free(store) < STORE_FREE_BYTES_MIN {
        // A file system tells nobody that there is room.
        tokio::time::sleep(ROOM_LOOK_EVERY).await;
    }
    Ok(())
}

/// A place that cannot be asked is no reason to wait for it.
fn free(store: &Path) -> u64 {
    rustix::fs::statvfs(store).map_or(u64::MAX, |space| space.f_bavail.saturating_mul(space.f_frsize))
}

#[derive(Default)]
struct LeaseWatch {
    without_since: Option<Instant>,
}

impl LeaseWatch {
    async fn is_missed(&mut self, node: &RunningNode) -> bool {
        if node.may_act().await {
            self.without_since = None;
            return false;
        }
        self.without_since.get_or_insert_with(Instant::now).elapsed() >= LEASE_MISSED_AFTER
    }
}

/// A local server's error with its causes.
pub(crate) fn chain(error: local::Error) -> String {
    anyhow::Error::from(error).chain().map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
