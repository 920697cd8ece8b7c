//! What a run directory means.

use super::{Inner, limits::SWEEPS_AGAIN_MAX, session::Outcome};
use crate::driver::{Exit, KillRequest, Owner};
use acri::{CommandId, Incarnation, id::Epoch};
use acri_shim::{Scan, Tier};
use std::{io, path::Path};

/// What is in a run directory.
#[derive(Debug)]
pub(super) enum Found {
    /// Nothing was ever started. A Kill may be latched.
    Nothing { kill: Option<KillRequest> },
    /// A shim is about to start it.
    Launching,
    /// A shim holds it.
    Alive(Box<Scan>),
    /// A shim held it and is gone.
    Over(Box<Scan>),
}

/// Looks. Blocks.
pub(super) fn look(dir: &Path) -> io::Result<Found> {
    if !dir.try_exists()? {
        return Ok(Found::Nothing { kill: None });
    }
    let scan = acri_shim::scan(dir)?;
    if !scan.damaged.is_empty() {
        tracing::warn!(dir = %dir.display(), files = ?scan.damaged, "run directory is damaged");
    }
    Ok(match (scan.alive, scan.was_started()) {
        (true, true) => Found::Alive(Box::new(scan)),
        (true, false) => Found::Launching,
        (false, true) => Found::Over(Box::new(scan)),
        (false, false) => Found::Nothing { kill: kill_request(&scan) },
    })
}

/// Ends what a dead shim left, or one that lost its files. Blocks. Returns how much was found.
pub(super) fn sweep(inner: &Inner, dir: &Path) -> io::Result<usize> {
    let parent = inner.config.cgroup_parent.as_deref();
    let gone = |error: &io::Error| {
        error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error())
    };
    for _ in 1..SWEEPS_AGAIN_MAX {
        match acri_shim::sweep(dir, parent) {
            // Somebody else, the tree's guardian, removes it at this moment: look again.
            Err(error) if gone(&error) => {}
            other => return provable(inner, dir, other?),
        }
    }
    provable(inner, dir, acri_shim::sweep(dir, parent)?)
}

/// Refuses to call a tree swept of which nothing names what a dead shim may have left.
fn provable(inner: &Inner, dir: &Path, found: usize) -> io::Result<usize> {
    if found == 0 && inner.tier == Tier::Subreaper && acri_shim::scan(dir)?.is_unidentified() {
        return Err(io::Error::other("meta is damaged: what the shim held when it died is not known"));
    }
    Ok(found)
}

/// The Kill that a run directory records.
pub(super) fn kill_request(scan: &Scan) -> Option<KillRequest> {
    let kill = scan.kill.as_ref()?;
    // The record names the epoch only; its incarnation is known if it is still the owner's.
    let incarnation = scan.owner.filter(|owner| owner.epoch == kill.epoch).map_or([0; 16], |owner| owner.incarnation);
    Some(KillRequest {
        // Only ids are ever written; should another hand have written something else, the Kill still counts.
        command: kill.command_id.parse().unwrap_or(CommandId::from_uuid(uuid::Uuid::nil())),
        principal: kill.principal.clone(),
        reason: kill.reason.clone(),
        owner: Owner {
            epoch: Epoch(kill.epoch),
            incarnation: Incarnation::from_uuid(uuid::Uuid::from_bytes(incarnation)),
        },
    })
}

/// How a run ended whose shim was ended with it, after it had recorded why.
pub(super) fn ended_unseen(scan: &Scan) -> Option<Outcome> {
    let (killed, orphaned) = (kill_request(scan), scan.orphaned.is_some());
    let told = killed.is_some() || orphaned;
    told.then_some(Outcome::Ended { exit: Exit { status: None, killed, orphaned }, spool_end: None })
}

/// The owner as the shim writes it.
pub(super) fn shim_owner(owner: Owner) -> acri_shim::Owner {
    acri_shim::Owner { epoch: owner.epoch.0, incarnation: *owner.incarnation.as_uuid().as_bytes() }
}

/// The request as a run directory records it.
pub(super) fn shim_request(request: &KillRequest, wall_ns: u64) -> acri_shim::KillRequest {
    acri_shim::KillRequest {
        command_id: request.command.to_string(),
        principal: request.principal.clone(),
        reason: request.reason.clone(),
        epoch: request.owner.epoch.0,
        wall_ns,
        boot_ns: 0,
    }
}
