//! Processes by pid: found in `/proc`, signalled through a pidfd, never by name.

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use std::{fs, path::Path};

/// Signals a process; false if there is none.
pub fn signal(pid: i32, signal: Signal) -> bool {
    let Some(pid) = Pid::from_raw(pid) else { return false };
    pidfd_open(pid, PidfdFlags::empty()).is_ok_and(|pidfd| pidfd_send_signal(&pidfd, signal).is_ok())
}

/// Kills a process and waits until it has ended, at most ten seconds.
pub fn kill(pid: i32) {
    let Some(pid) = Pid::from_raw(pid) else { return };
    let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { return };
    // One that ended meanwhile is what is wanted.
    let _ = pidfd_send_signal(&pidfd, Signal::KILL);
    let _ = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&Timespec { tv_sec: 10, tv_nsec: 0 }));
}

/// Whether a process is there and no zombie.
#[must_use]
pub fn lives(pid: i32) -> bool {
    !matches!(state(Path::new(&format!("/proc/{pid}"))), None | Some('Z' | 'X' | 'x'))
}

/// Whether every thread of a process is stopped.
#[must_use]
pub fn stands_still(pid: i32) -> bool {
    let threads = children(Path::new(&format!("/proc/{pid}/task")));
    !threads.is_empty() && threads.iter().all(|thread| matches!(state(thread), Some('T') | None))
}

fn state(process: &Path) -> Option<char> {
    let stat = fs::read_to_string(process.join("stat")).ok()?;
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

/// Every process whose environment holds `NAME=value`.
#[must_use]
pub fn with_variable(name: &str, value: &str) -> Vec<i32> {
    with_entry("environ", &format!("{name}={value}"))
}

/// Every process that has this among its arguments.
#[must_use]
pub fn with_argument(argument: &str) -> Vec<i32> {
    with_entry("cmdline", argument)
}

fn with_entry(file: &str, wanted: &str) -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid: &i32| {
            fs::read(format!("/proc/{pid}/{file}"))
                .is_ok_and(|bytes| bytes.split(|byte| *byte == 0).any(|entry| entry == wanted.as_bytes()))
        })
        .collect()
}

/// The most memory that a process ever used, in bytes.
#[must_use]
pub fn peak_memory(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Ends the holders of all runs below a node's state directory, and what they
/// leave.
pub(crate) fn end_holders(state_dir: &Path) {
    let runs = state_dir.join("node/processes/runs");
    for agent in children(&runs) {
        for run in children(&agent) {
            if let Ok(scan) = acri_shim::scan(&run)
                && let (true, Some(meta)) = (scan.alive, scan.meta)
            {
                kill(meta.shim.pid);
            }
            // A helper of the holder ends a moment after it. What is left after
            // this is found by its environment.
            for _ in 0..200 {
                match acri_shim::sweep(&run, None) {
                    Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
                        let _ = poll(&mut [], Some(&Timespec { tv_sec: 0, tv_nsec: 5_000_000 }));
                    }
                    _ => break,
                }
            }
        }
    }
}

fn children(directory: &Path) -> Vec<std::path::PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
}
