//! The first tier's cgroup (version 2): found in the mount table, made beside the shim's, ended by `cgroup.kill`.

use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use crate::launch::timespec;
use crate::limits::KILL_LOOK;
use crate::process::Process;
use crate::sys;

/// Characters of the label in a cgroup's name.
const LABEL_CHARS_MAX: usize = 64;

#[derive(Debug)]
pub(crate) struct Cgroup {
    dir: PathBuf,
    procs: OwnedFd,
    kill: OwnedFd,
    events: OwnedFd,
    /// Somebody removed it: its events stay ready for ever.
    removed: Cell<bool>,
}

impl Cgroup {
    /// Makes a cgroup below `parent`, or below the first of the usual places that lets us. The text says why not.
    pub(crate) fn create(parent: Option<&Path>, run_dir: &Path) -> Result<Self, String> {
        let name = name(run_dir)?;
        let parents = parents(parent).map_err(|error| format!("find the hierarchy: {error}"))?;
        let mut reason = "no cgroup v2 hierarchy is mounted".to_owned();
        for parent in parents {
            let dir = parent.join(&name);
            match Self::create_at(&dir) {
                Ok(cgroup) => return Ok(cgroup),
                Err(error) => reason = format!("{}: {error}", dir.display()),
            }
        }
        Err(reason)
    }

    fn create_at(dir: &Path) -> io::Result<Self> {
        if dir.to_str().is_none() {
            return Err(io::Error::new(io::ErrorKind::InvalidFilename, "path is not UTF-8"));
        }
        std::fs::create_dir(dir)?;
        let open = || -> io::Result<Self> {
            let write = |file: &str| OpenOptions::new().write(true).open(dir.join(file)).map(OwnedFd::from);
            let events = File::open(dir.join("cgroup.events"))?.into();
            Ok(Self {
                dir: dir.to_owned(),
                procs: write("cgroup.procs")?,
                kill: write("cgroup.kill")?,
                events,
                removed: Cell::new(false),
            })
        };
        open().inspect_err(|_| {
            let _ = std::fs::remove_dir(dir);
        })
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Takes the process that writes `0`.
    pub(crate) fn procs(&self) -> BorrowedFd<'_> {
        self.procs.as_fd()
    }

    pub(crate) fn kill_fd(&self) -> BorrowedFd<'_> {
        self.kill.as_fd()
    }

    /// [`Self::events`], as long as there is anything to wait for.
    pub(crate) fn watched(&self) -> Option<BorrowedFd<'_>> {
        (!self.removed.get()).then(|| self.events())
    }

    /// Says POLLPRI when the cgroup may have become empty.
    pub(crate) fn events(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    /// Kills every member at once, those forked meanwhile included.
    pub(crate) fn kill(&self) {
        let _ = rustix::io::write(&self.kill, b"1");
    }

    /// True if no process is in it or below it. Arms [`Self::events`] again.
    pub(crate) fn is_empty(&self) -> bool {
        let mut text = [0u8; 256];
        match rustix::io::pread(&self.events, &mut text, 0) {
            Ok(n) => says_empty(&text[..n]),
            // Removed by somebody else, which takes an empty one.
            Err(error) => {
                let removed = error == rustix::io::Errno::NODEV;
                self.removed.set(removed);
                removed
            }
        }
    }

    /// Members now, those of cgroups below it not counted.
    pub(crate) fn count(&self) -> u32 {
        let text = std::fs::read(self.dir.join("cgroup.procs")).unwrap_or_default();
        u32::try_from(text.iter().filter(|b| **b == b'\n').count()).unwrap_or(u32::MAX)
    }

    /// Waits until it is empty. False: time is up.
    pub(crate) fn wait_empty(&self, limit: Duration) -> bool {
        let deadline = sys::boot_ns() + super::nanos(limit);
        while !self.is_empty() {
            if sys::boot_ns() > deadline {
                return false;
            }
            let timeout = timespec(super::nanos(KILL_LOOK));
            let _ = poll(&mut [PollFd::new(&self.events, PollFlags::PRI)], Some(&timeout));
        }
        true
    }

    /// Removes it, and cgroups that the harness made below it.
    pub(crate) fn remove(&self) {
        remove_below(&self.dir, 0);
    }
}

fn says_empty(text: &[u8]) -> bool {
    text.split(|b| *b == b'\n').any(|line| line == b"populated 0")
}

/// Directories nested deeper than this are left; a cgroup that holds nothing costs little.
const DEPTH_MAX: u32 = 16;

fn remove_below(dir: &Path, depth: u32) {
    if std::fs::remove_dir(dir).is_ok() || depth >= DEPTH_MAX {
        return;
    }
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_below(&entry.path(), depth + 1);
        }
    }
    let _ = std::fs::remove_dir(dir);
}

/// Kills and removes the cgroup of a dead shim. True if something is left in it.
pub(super) fn sweep(dir: &Path) -> io::Result<bool> {
    let events = match std::fs::read(dir.join("cgroup.events")) {
        Ok(events) => events,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return Ok(false),
        Err(error) => return Err(error),
    };
    if says_empty(&events) {
        remove_below(dir, 0);
        return Ok(false);
    }
    std::fs::write(dir.join("cgroup.kill"), "1")?;
    Ok(true)
}

/// Kills and removes the cgroups of a run directory whose shim is dead, found by their names where the usual places or
/// `parent` are. True if something is left in one.
pub(super) fn sweep_named(parent: Option<&Path>, run_dir: &Path) -> io::Result<bool> {
    let prefix = prefix(run_dir);
    let mut left = false;
    for parent in parents(parent)? {
        for entry in std::fs::read_dir(&parent).into_iter().flatten().flatten() {
            if entry.file_name().to_str().is_some_and(|name| name.starts_with(&prefix)) {
                left |= sweep(&entry.path())?;
            }
        }
    }
    Ok(left)
}

/// `acri-<last part of the run directory>-<CRC-32C of its path>-`: two directories of one name are told apart.
fn prefix(run_dir: &Path) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '-' || c == '_' { c } else { '_' };
    let label = run_dir.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    let label: String = label.chars().map(plain).take(LABEL_CHARS_MAX).collect();
    format!("acri-{label}-{:08x}-", crc32c::crc32c(run_dir.as_os_str().as_encoded_bytes()))
}

/// [`prefix`], then the shim's number and start time: unique for this boot.
fn name(run_dir: &Path) -> Result<String, String> {
    let own = Process::of(super::own_pid()).map_err(|error| format!("read the own start time: {error}"))?;
    Ok(format!("{}{}-{}", prefix(run_dir), own.pid, own.start))
}

/// Where cgroups are made and looked for.
fn parents(given: Option<&Path>) -> io::Result<Vec<PathBuf>> {
    given.map_or_else(discover, |parent| Ok(vec![parent.to_owned()]))
}

/// The places to try: the own cgroup, then the root of the hierarchy.
fn discover() -> io::Result<Vec<PathBuf>> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    let own = std::fs::read_to_string("/proc/self/cgroup")?;
    let own = own.lines().find_map(|line| line.strip_prefix("0::"));
    let mut places = Vec::new();
    for (root, point) in mounts.lines().filter_map(cgroup2_mount) {
        if let Some(below) = own.and_then(|own| Path::new(own).strip_prefix(&root).ok()) {
            places.push(point.join(below));
        }
        places.push(point);
    }
    places.dedup();
    Ok(places)
}

/// Root within the file system and mount point of a cgroup2 line of mountinfo.
fn cgroup2_mount(line: &str) -> Option<(PathBuf, PathBuf)> {
    let (head, tail) = line.split_once(" - ")?;
    if tail.split(' ').next() != Some("cgroup2") {
        return None;
    }
    let mut fields = head.split(' ').skip(3);
    Some((unescape(fields.next()?).into(), unescape(fields.next()?).into()))
}

/// mountinfo writes space, tab, newline and backslash as three octal digits.
fn unescape(field: &str) -> String {
    let replaced = field.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n");
    replaced.replace("\\134", "\\")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup2_mount_is_found_wherever_it_is() {
        let hybrid = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw";
        assert_eq!(cgroup2_mount(hybrid), Some(("/".into(), "/sys/fs/cgroup/unified".into())));
        let nested = "41 31 0:38 /pod\\040x /sys/fs/cgroup ro shared:9 master:3 - cgroup2 none rw,nsdelegate";
        assert_eq!(cgroup2_mount(nested), Some(("/pod x".into(), "/sys/fs/cgroup".into())));
        assert_eq!(cgroup2_mount("32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"), None);
        assert_eq!(cgroup2_mount("nonsense"), None);
    }

    #[test]
    fn only_populated_0_means_empty() {
        assert!(says_empty(b"populated 0\nfrozen 0\n"));
        assert!(!says_empty(b"populated 1\nfrozen 0\n"));
        assert!(!says_empty(b""));
    }
}
