//! Ending a shim and its tree without the help of its files: they may be damaged, or gone with their directory.
//!
//! A shim runs under a name that holds its directory, and so do its forks, the guardian and the init of a namespace; a
//! cgroup's name holds it too. Whatever else takes such a name only offers itself to be killed.

use std::io;
use std::path::Path;

use rustix::process::Signal;

use super::{SWEEP, cgroup, guardian, nanos, pause, stop_and_kill};
use crate::process::{Process, named, walk};
use crate::{launch, sys};

/// Kills every shim of this run directory with all that descends from it, and what is left in its cgroups, and waits
/// until nothing of that is left. Returns how many shims were found. Waits up to 3 seconds, then fails with `TimedOut`.
///
/// What a shim of the third tier left when it died is not found: nothing names it.
pub(crate) fn hunt(cgroup_parent: Option<&Path>, run_dir: &Path) -> io::Result<usize> {
    let deadline = sys::boot_ns() + nanos(SWEEP);
    let name = launch::process_name(run_dir);
    let mut found = Vec::new();
    loop {
        let alive = named(&name)?;
        let (guardians, shims): (Vec<_>, Vec<_>) = alive.iter().partition(|(_, thread)| thread == guardian::NAME);
        // The guardian ends by itself once its shim is gone and the cgroup with it.
        let spare = guardians.first().map(|(process, _)| process.pid);
        let mut left = !alive.is_empty();
        for (shim, _) in &shims {
            if !found.contains(shim) {
                found.push(*shim);
            }
            end(*shim, spare, deadline);
        }
        left |= cgroup::sweep_named(cgroup_parent, run_dir)?;
        if !left {
            return Ok(found.len());
        }
        if sys::boot_ns() > deadline {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "a shim whose files are unusable does not end"));
        }
        pause();
    }
}

/// Kills a shim that does not answer, with all that descends from it. Its guardian, if there is one, is left to its duty.
pub(crate) fn end_shim(shim: Process, run_dir: &Path) -> io::Result<()> {
    let alive = named(&launch::process_name(run_dir))?;
    let guardian = alive.iter().find(|(_, thread)| thread == guardian::NAME);
    if shim.exists() {
        end(shim, guardian.map(|(process, _)| process.pid), sys::boot_ns() + nanos(SWEEP));
    }
    Ok(())
}

/// Held still while its tree is killed: as long as it lives, whatever is orphaned becomes its child and is found.
fn end(shim: Process, spare: Option<i32>, deadline: u64) {
    shim.signal(Signal::STOP);
    while stop_and_kill(|signal| walk(shim.pid, spare, Some(signal))).living > 0 && sys::boot_ns() <= deadline {
        pause();
    }
    shim.signal(Signal::KILL);
}
