//! The few system calls that have no safe wrapper, and the clocks.
//!
//! All `unsafe` of the crate is here and in the harness's `pre_exec`.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::process::Pid;
use rustix::time::{ClockId, clock_gettime};

fn nanoseconds(clock: ClockId) -> u64 {
    let t = clock_gettime(clock);
    let seconds = u64::try_from(t.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(t.tv_nsec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(nanos)
}

/// CLOCK_BOOTTIME in nanoseconds: it goes on in suspend.
pub(crate) fn boot_ns() -> u64 {
    nanoseconds(ClockId::Boottime)
}

/// Wall time in nanoseconds since the epoch.
pub(crate) fn wall_ns() -> u64 {
    nanoseconds(ClockId::Realtime)
}

/// Fills an array with random bytes from the system.
pub(crate) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0u8; N];
    let mut filled = 0;
    while filled < N {
        filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

/// What [`fork_with`] returned in: the caller or the new process.
pub(crate) enum Forked {
    Parent(Pid),
    Child,
}

/// Forks the calling, single-threaded process with clone flags (`CLONE_NEWPID`, ...) and an exit signal (0: the child is
/// not reported by a plain wait).
pub(crate) fn fork_with(flags: libc::c_int, exit_signal: libc::c_int) -> io::Result<Forked> {
    let word = libc::c_long::from(flags | exit_signal);
    #[expect(
        unsafe_code,
        reason = "clone without a stack is fork: no memory is shared; the shim has one thread, so no lock can be held by another one"
    )]
    // The order of the remaining arguments differs between architectures; all of them are zero.
    let pid = unsafe { libc::syscall(libc::SYS_clone, word, 0usize, 0usize, 0usize, 0usize) };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    match i32::try_from(pid).ok().and_then(Pid::from_raw) {
        Some(pid) => Ok(Forked::Parent(pid)),
        None => Ok(Forked::Child),
    }
}

/// Ends the process at once, without destructors or exit handlers: for forked stages.
pub(crate) fn exit_now(code: i32) -> ! {
    #[expect(
        unsafe_code,
        reason = "_exit has no preconditions; rustix hides its own behind a feature for libc authors"
    )]
    unsafe {
        libc::_exit(code)
    }
}

/// Reaps a child with exit signal 0. True if it has ended (or was never there).
pub(crate) fn reap_quiet_child(pid: Pid) -> bool {
    let mut status = 0;
    #[expect(unsafe_code, reason = "__WCLONE is missing from the safe wrapper; the status pointer is valid")]
    let got = unsafe { libc::waitpid(pid.as_raw_nonzero().get(), &raw mut status, libc::__WCLONE | libc::WNOHANG) };
    got != 0
}

/// Blocks SIGCHLD and returns a descriptor that becomes readable with it.
pub(crate) fn child_signal_fd() -> io::Result<OwnedFd> {
    #[expect(unsafe_code, reason = "signalfd has no safe wrapper in rustix; the set is initialised by sigemptyset")]
    unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGCHLD);
        if libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
        let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Ignores a signal.
pub(crate) fn ignore_signal(signal: libc::c_int) {
    #[expect(unsafe_code, reason = "no handler is installed, so nothing runs asynchronously")]
    unsafe {
        libc::signal(signal, libc::SIG_IGN);
    }
}

/// Gives every signal its default disposition and unblocks all. Safe between fork and exec: system calls only.
pub(crate) fn default_signals() {
    #[expect(unsafe_code, reason = "async-signal-safe calls with valid arguments")]
    unsafe {
        for signal in 1..=64 {
            // The kernel's call: the C library refuses to touch 32 and 33. Zeros are SIG_DFL, no flags, empty mask.
            libc::syscall(libc::SYS_rt_sigaction, signal, [0u64; 8].as_ptr(), std::ptr::null::<u64>(), 8usize);
        }
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&raw mut set);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut());
    }
}

/// Closes every descriptor from 3 up but those of `keep`.
///
/// Only for a process that owns none of them in a live value: at start-up, and in forked stages that never return.
pub(crate) fn close_others(keep: &[RawFd]) {
    let mut sorted: Vec<u32> = keep.iter().filter_map(|fd| u32::try_from(*fd).ok()).filter(|fd| *fd > 2).collect();
    sorted.sort_unstable();
    let mut from = 3u32;
    for fd in sorted {
        if fd > from {
            close_span(from, fd - 1);
        }
        from = fd + 1;
    }
    close_span(from, u32::MAX);
}

fn close_span(first: u32, last: u32) {
    #[expect(unsafe_code, reason = "see close_others: nothing in this process uses these descriptors any more")]
    unsafe {
        libc::syscall(libc::SYS_close_range, first, last, 0u32);
    }
}

/// Takes over an inherited descriptor.
pub(crate) fn take_inherited(fd: RawFd) -> io::Result<OwnedFd> {
    #[expect(
        unsafe_code,
        reason = "called once at start-up for 0 and 1, which nothing else in the process owns; duplicated, not taken"
    )]
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    Ok(rustix::io::fcntl_dupfd_cloexec(borrowed, 3)?)
}

/// Points 0, 1 and 2 at /dev/null.
pub(crate) fn null_stdio() -> io::Result<()> {
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    for fd in 0..3 {
        #[expect(unsafe_code, reason = "dup2 onto the standard descriptors, which std treats as always open")]
        let got = unsafe { libc::dup2(null.as_raw_fd(), fd) };
        if got < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// The user id of a unix socket's peer, as it was when it connected.
pub(crate) fn peer_uid(socket: BorrowedFd<'_>) -> io::Result<u32> {
    let mut cred = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = libc::socklen_t::try_from(size_of::<libc::ucred>()).expect("a small struct");
    #[expect(
        unsafe_code,
        reason = "rustix's own wrapper cannot express a peer of another pid namespace, whose number is 0"
    )]
    let got = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut cred).cast(), &raw mut len)
    };
    if got == 0 { Ok(cred.uid) } else { Err(io::Error::last_os_error()) }
}
