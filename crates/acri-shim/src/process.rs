//! Processes: identity, verified signals, and the walk over a tree's descendants.
//!
//! A process number alone means nothing, it is used again. An identity is boot id, number and start time; a signal goes
//! through a pidfd that was opened first and verified afterwards.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::limits::WALK_PROCESSES_MAX;

/// A process of this boot: its number and its start time in clock ticks since boot. Both 0: unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Process {
    /// The number, as seen from the shim's pid namespace.
    pub pid: i32,
    /// Field 22 of `/proc/<pid>/stat`.
    pub start: u64,
}

impl Process {
    /// The running process with this number, or an error if there is none.
    pub fn of(pid: i32) -> io::Result<Self> {
        Ok(Self { pid, start: Stat::read(pid)?.start })
    }

    /// Opens a pidfd and proves that it is this process. Fails with `NotFound` if it is gone.
    pub(crate) fn open(self) -> io::Result<OwnedFd> {
        let pid = Pid::from_raw(self.pid).ok_or(io::ErrorKind::NotFound)?;
        let fd = pidfd_open(pid, PidfdFlags::empty())?;
        // The number cannot be used again while the process behind the pidfd is not reaped; if it was reaped in between,
        // the start time read here is another one or the signal fails.
        if Stat::read(self.pid)?.start == self.start { Ok(fd) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Sends it a signal, if it still is this process.
    pub(crate) fn signal(self, signal: Signal) -> bool {
        self.open().is_ok_and(|pidfd| pidfd_send_signal(&pidfd, signal).is_ok())
    }

    /// True if this very process still exists (a zombie counts).
    pub fn exists(self) -> bool {
        self.pid > 0 && Stat::read(self.pid).is_ok_and(|stat| stat.start == self.start)
    }
}

/// The boot id of the running system, as text.
pub fn boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// What is needed of `/proc/<pid>/stat`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stat {
    pub(crate) state: u8,
    pub(crate) parent: i32,
    pub(crate) start: u64,
}

impl Stat {
    pub(crate) fn read(pid: i32) -> io::Result<Self> {
        let mut bytes = [0u8; 1024];
        let mut file = File::open(format!("/proc/{pid}/stat"))?;
        let n = file.read(&mut bytes)?;
        Self::parse(&bytes[..n]).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// The program's name may hold anything, a closing bracket too: fields count from the last one.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let after = bytes.iter().rposition(|b| *b == b')')?;
        let text = std::str::from_utf8(bytes.get(after + 1..)?).ok()?;
        let mut fields = text.split_ascii_whitespace();
        let state = *fields.next()?.as_bytes().first()?;
        let parent = fields.next()?.parse().ok()?;
        let start = fields.nth(17)?.parse().ok()?;
        Some(Self { state, parent, start })
    }

    fn is_dead(self) -> bool {
        matches!(self.state, b'Z' | b'X' | b'x')
    }
}

/// The processes that run under this name (the first of their arguments), each with its main thread's name. Zombies
/// have none.
pub(crate) fn named(name: &str) -> io::Result<Vec<(Process, String)>> {
    let mut found = Vec::new();
    let mut bytes = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|text| text.parse::<i32>().ok()) else { continue };
        // Before and after the look, so that a number that was used again meanwhile is not taken for it.
        let Ok(before) = Process::of(pid) else { continue };
        bytes.clear();
        let wanted = u64::try_from(name.len()).unwrap_or(u64::MAX).saturating_add(1);
        let read =
            File::open(format!("/proc/{pid}/cmdline")).and_then(|file| file.take(wanted).read_to_end(&mut bytes));
        if read.is_err() || bytes.strip_suffix(b"\0") != Some(name.as_bytes()) {
            continue;
        }
        let thread = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        if before.exists() {
            found.push((before, thread.trim_end().to_owned()));
        }
    }
    Ok(found)
}

/// What a walk saw.
#[derive(Debug, Default)]
pub(crate) struct Walk {
    /// Every descendant that proved to be one, parents before children, zombies included: the leader of a process may
    /// be one while its other threads go on.
    pub(crate) seen: Vec<Process>,
    /// How many of them are no zombies.
    pub(crate) living: u32,
}

/// Looks at the descendants of `root`, without `root` itself, and sends each of them a signal if one is given.
///
/// Not atomic: who forks meanwhile may be missed, so callers repeat it until the kernel says that nothing is left.
/// `spare` and what is below it is left out. One pidfd is open at a time, so the size of a tree meets no limit but
/// [`WALK_PROCESSES_MAX`].
pub(crate) fn walk(root: i32, spare: Option<i32>, signal: Option<Signal>) -> Walk {
    let mut walk = Walk::default();
    let mut list = String::new();
    let mut next = 0;
    let mut parent = root;
    loop {
        if read_children(parent, &mut list).is_err() {
            list.clear();
        }
        for pid in list.split_ascii_whitespace().filter_map(|word| word.parse::<i32>().ok()) {
            if Some(pid) != spare && walk.seen.len() < WALK_PROCESSES_MAX {
                visit(pid, parent, root, signal, &mut walk);
            }
        }
        let Some(child) = walk.seen.get(next) else { return walk };
        parent = child.pid;
        next += 1;
    }
}

/// Opens `pid`, checks that it is a child of `parent`, or of `root` if its parent has ended meanwhile, and only then
/// signals it: through the pidfd, which was opened before the check.
fn visit(pid: i32, parent: i32, root: i32, signal: Option<Signal>, walk: &mut Walk) {
    let opened = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let (Some(pidfd), Ok(stat)) = (opened, Stat::read(pid)) else { return };
    if stat.parent != parent && stat.parent != root {
        return;
    }
    walk.seen.push(Process { pid, start: stat.start });
    if let Some(signal) = signal {
        let _ = pidfd_send_signal(&pidfd, signal);
    }
    walk.living += u32::from(!stat.is_dead());
}

/// The children of a process.
pub(crate) fn children(parent: i32) -> Vec<Process> {
    let mut list = String::new();
    if read_children(parent, &mut list).is_err() {
        return Vec::new();
    }
    let pids = list.split_ascii_whitespace().filter_map(|word| word.parse::<i32>().ok());
    pids.filter_map(|pid| Process::of(pid).ok()).collect()
}

/// Appends the children of all threads of `pid` to `list`.
fn read_children(pid: i32, list: &mut String) -> io::Result<()> {
    list.clear();
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let thread = thread?.file_name();
        let path = format!("/proc/{pid}/task/{}/children", thread.to_string_lossy());
        match File::open(path) {
            Ok(mut file) => {
                let _ = file.read_to_string(list);
                list.push(' ');
            }
            // A thread that ended meanwhile; or a kernel without these files, then the whole table is read.
            Err(_) if has_children_files() => {}
            Err(_) => return scan_children(pid, list),
        }
    }
    Ok(())
}

fn has_children_files() -> bool {
    std::path::Path::new("/proc/thread-self/children").exists()
}

fn scan_children(parent: i32, list: &mut String) -> io::Result<()> {
    list.clear();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|text| text.parse::<i32>().ok()) else { continue };
        if Stat::read(pid).is_ok_and(|stat| stat.parent == parent) {
            let _ = write!(list, "{pid} ");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_name_with_brackets_and_spaces_does_not_shift_the_fields() {
        let line = b"42 (a) b ) S 7 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 99887 0 0\n";
        let stat = Stat::parse(line).expect("a whole line");
        assert_eq!((stat.state, stat.parent, stat.start), (b'S', 7, 99887));
        assert!(Stat::parse(b"42 (x").is_none());
        assert!(Stat::parse(b"").is_none());
    }

    #[test]
    fn another_start_time_is_another_process() {
        let own = Process::of(i32::try_from(std::process::id()).expect("small")).expect("self");
        assert!(own.exists() && own.open().is_ok());
        let other = Process { start: own.start + 1, ..own };
        assert!(!other.exists() && other.open().is_err());
    }
}
