//! The loop: wait for an event, name it, apply it.
//!
//! One turn, in this order: the orphan rule (before anything is relayed), the tree, requests, output, and then what
//! follows from the new state ([`Holder::progress`]).

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixListener;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use super::connection::{Connection, Watching};
use crate::launch::{Limits, Token, timespec};
use crate::limits::{
    CONNECTIONS_MAX, DISK_RETRY, FAREWELL, KILL_LOOK, KILL_ROUND, RECORD_PAYLOAD_BYTES_MAX,
};
use crate::rundir::{
    self, EXIT, Exit, ExitReason, Files, KILL, KillRequest, META, Meta, ORPHANED, Orphaned, Owner,
};
use crate::rundir::{RESERVE, SOCKET, Tier};
use crate::spool::{Append, Stream, Writer};
use crate::sys;
use crate::tree::{Tree, nanos};
use crate::wire::{Body, Killed, Spooled};

/// What a holder is made of.
pub(super) struct Parts {
    pub(super) files: Files,
    pub(super) meta: Meta,
    pub(super) token: Token,
    pub(super) limits: Limits,
    pub(super) owner: Owner,
    pub(super) spool: Writer,
    pub(super) pipes: [OwnedFd; 2],
    pub(super) tree: Tree,
    pub(super) listener: UnixListener,
}

/// A Kill that waits for the proof.
#[derive(Debug, Clone, Copy)]
pub(super) struct Waiter {
    pub(super) connection: u64,
    pub(super) request: u64,
    pub(super) already: bool,
    pub(super) since_ns: u64,
}

/// State files that could not be written yet.
#[derive(Debug, Default)]
struct Unwritten {
    meta: bool,
    kill: bool,
    orphaned: bool,
}

pub(crate) struct Holder {
    pub(super) files: Files,
    meta: Meta,
    pub(super) token: Token,
    pub(super) limits: Limits,
    pub(super) owner: Owner,
    pub(super) last_contact_ns: u64,
    pub(super) spool: Writer,
    pipes: [Option<OwnedFd>; 2],
    /// Read and not spooled yet, in `buffer`.
    pending: Option<(Stream, usize)>,
    buffer: Box<[u8]>,
    /// The disk refused; not before this time again.
    pub(super) retry_at_ns: Option<u64>,
    pub(super) tree: Tree,
    listener: UnixListener,
    orphan_timer: OwnedFd,
    pub(super) connections: Vec<Connection>,
    next_connection: u64,
    pub(super) stop_requested: bool,
    pub(super) kill: Option<KillRequest>,
    pub(super) orphaned: Option<Orphaned>,
    unwritten: Unwritten,
    /// Since when the tree is being killed, whatever for.
    pub(super) killing_since_ns: Option<u64>,
    next_round_ns: u64,
    /// Processes seen alive when the killing began.
    pub(super) victims: u32,
    leftovers: u32,
    /// The tree is proved empty.
    pub(super) empty: bool,
    /// The reason, fixed when the tree is proved empty.
    reason: ExitReason,
    pub(super) waiters: Vec<Waiter>,
    pub(super) exit: Option<Exit>,
}

/// What is ready; connections by their place in the list.
#[derive(Debug, Default)]
struct Ready {
    listener: bool,
    tree: bool,
    pipes: [bool; 2],
    readable: u32,
    writable: u32,
}

impl Holder {
    pub(super) fn new(parts: Parts) -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let orphan_timer = timerfd_create(TimerfdClockId::Boottime, flags)?;
        let Parts { files, meta, token, limits, owner, spool, pipes, tree, listener } = parts;
        let mut holder = Self {
            files,
            meta,
            token,
            limits,
            owner,
            last_contact_ns: 0,
            spool,
            pipes: pipes.map(Some),
            pending: None,
            buffer: vec![0; RECORD_PAYLOAD_BYTES_MAX].into_boxed_slice(),
            retry_at_ns: None,
            tree,
            listener,
            orphan_timer,
            connections: Vec::new(),
            next_connection: 1,
            stop_requested: false,
            kill: None,
            orphaned: None,
            unwritten: Unwritten::default(),
            killing_since_ns: None,
            next_round_ns: 0,
            victims: 0,
            leftovers: 0,
            empty: false,
            reason: ExitReason::Exited,
            waiters: Vec::new(),
            exit: None,
        };
        holder.contacted();
        Ok(holder)
    }

    pub(super) fn meta(&self) -> &Meta {
        &self.meta
    }

    pub(super) fn tier(&self) -> Tier {
        self.tree.tier()
    }

    /// The running `meta` could not be written: the disk is full already.
    pub(super) fn retry_meta(&mut self) {
        self.unwritten.meta = true;
        self.retry_at_ns = Some(sys::boot_ns());
    }

    /// A Kill that was recorded by the node while the harness was being started.
    pub(super) fn honour_latch(&mut self) {
        if let Ok(Some(request)) = rundir::read::<KillRequest>(self.files.dir(), KILL) {
            self.kill = Some(request);
            self.begin_killing();
        }
    }

    /// The loop.
    pub(super) fn run(mut self) {
        self.tree.look();
        self.progress();
        while self.exit.is_none() {
            let ready = self.wait();
            self.check_orphaned();
            if ready.tree || self.killing_since_ns.is_some() {
                self.tree.look();
            }
            self.serve(&ready);
            self.read_output(&ready);
            self.progress();
        }
        self.depart();
    }

    /// A valid owner was heard: the orphan timer starts anew.
    pub(super) fn contacted(&mut self) {
        self.last_contact_ns = sys::boot_ns();
        // A timer of its own, since poll's time-out stands still in suspend.
        let value = timespec(self.orphan_at_ns());
        let spec = Itimerspec { it_interval: timespec(0), it_value: value };
        let _ = timerfd_settime(&self.orphan_timer, TimerfdTimerFlags::ABSTIME, &spec);
    }

    pub(super) fn orphan_at_ns(&self) -> u64 {
        self.last_contact_ns.saturating_add(nanos(self.limits.orphan_after))
    }

    fn check_orphaned(&mut self) {
        let now = sys::boot_ns();
        if self.empty || self.orphaned.is_some() || now < self.orphan_at_ns() {
            return;
        }
        let orphaned = Orphaned {
            last_contact_boot_ns: self.last_contact_ns,
            wall_ns: sys::wall_ns(),
            boot_ns: now,
            owner: self.owner,
        };
        self.unwritten.orphaned = self.files.write_surely(ORPHANED, &orphaned).is_err();
        self.orphaned = Some(orphaned);
        self.disarm_timer();
        self.begin_killing();
    }

    fn disarm_timer(&self) {
        let spec = Itimerspec { it_interval: timespec(0), it_value: timespec(0) };
        let _ = timerfd_settime(&self.orphan_timer, TimerfdTimerFlags::empty(), &spec);
    }

    /// Records a Kill: in its file before the first signal. The first one stays. True if there was one already.
    pub(super) fn record_kill(&mut self, request: KillRequest) -> bool {
        if self.kill.is_some() {
            return true;
        }
        // A full disk must not save the tree: the file is written later, before the exit.
        self.unwritten.kill = self.files.write_surely(KILL, &request).is_err();
        self.kill = Some(request);
        false
    }

    /// Sends the first signals; [`Self::progress`] goes on until the tree is empty.
    pub(super) fn begin_killing(&mut self) {
        if self.killing_since_ns.is_some() || self.empty {
            return;
        }
        self.victims = self.tree.count();
        let now = sys::boot_ns();
        self.killing_since_ns = Some(now);
        self.next_round_ns = now + nanos(KILL_ROUND);
        self.tree.kill_round();
        self.tree.look();
    }

    /// Does what follows from the state.
    fn progress(&mut self) {
        if !self.empty {
            self.kill_leftovers();
            self.prove_empty();
        }
        if self.empty && self.drained() {
            self.record_exit();
        }
        self.notify_watchers();
        self.connections.retain(|connection| !connection.broken);
    }

    /// Without a Stop, what outlives the main process is killed after a short drain.
    fn kill_leftovers(&mut self) {
        let Some(ended) = self.tree.ended() else { return };
        if self.stop_requested || self.killing_since_ns.is_some() || self.tree.is_empty() {
            return;
        }
        let closed = self.pipes.iter().all(Option::is_none);
        if closed || sys::boot_ns() >= ended.boot_ns + nanos(self.limits.stop_drain) {
            self.begin_killing();
            self.leftovers = self.victims;
        }
    }

    fn prove_empty(&mut self) {
        if !self.tree.is_empty() {
            let now = sys::boot_ns();
            if self.killing_since_ns.is_some() && now >= self.next_round_ns {
                self.tree.kill_round();
                self.next_round_ns = now + nanos(KILL_ROUND);
            }
            return;
        }
        self.tree.look();
        self.empty = true;
        self.disarm_timer();
        self.reason = match (&self.kill, &self.orphaned) {
            (Some(_), _) => ExitReason::Killed,
            (None, Some(_)) => ExitReason::Orphaned,
            (None, None) if self.stop_requested => ExitReason::Stopped,
            (None, None) => ExitReason::Exited,
        };
        let now = sys::boot_ns();
        for waiter in std::mem::take(&mut self.waiters) {
            let took_us = now.saturating_sub(waiter.since_ns) / 1000;
            let killed = Killed { already: waiter.already, processes: self.victims, took_us };
            if let Some(connection) =
                self.connections.iter_mut().find(|c| c.id == waiter.connection)
            {
                connection.send(waiter.request, Body::Killed(killed));
            }
        }
    }

    /// Reads what the dead tree left in its pipes, whatever the spool's limit: at most what two pipes hold. True when
    /// everything is spooled.
    fn drained(&mut self) -> bool {
        if !self.retry_pending() {
            return false;
        }
        for stream in Stream::ALL {
            while self.pipes[stream.index()].is_some() {
                // Nobody of the tree is left to write: an empty pipe is at its end, even if its other end was handed out.
                if !self.read_pipe(stream) && self.pending.is_none() {
                    self.pipes[stream.index()] = None;
                }
                if self.pending.is_some() {
                    return false;
                }
            }
        }
        true
    }

    fn record_exit(&mut self) {
        let due = self.retry_at_ns.is_none_or(|at| sys::boot_ns() >= at);
        if !due {
            return;
        }
        let [stdout_bytes, stderr_bytes] = self.spool.streams();
        let ended = self.tree.ended();
        let status =
            ended.map(|ended| std::os::unix::process::ExitStatusExt::from_raw(ended.status));
        let mut exit = Exit {
            reason: self.reason,
            leftovers: self.leftovers,
            wall_ns: ended.map_or_else(sys::wall_ns, |ended| ended.wall_ns),
            boot_ns: ended.map_or_else(sys::boot_ns, |ended| ended.boot_ns),
            spool_end: self.spool.end(),
            stdout_bytes,
            stderr_bytes,
            ..Exit::default()
        };
        match status {
            Some(status) => describe(status, &mut exit),
            // The init of the namespace was killed before it could tell: its main process died of the same.
            None => exit.signal = Some(libc::SIGKILL),
        }
        if self.write_rest() && self.files.write_surely(EXIT, &exit).is_ok() {
            for connection in self.connections.iter_mut().filter(|c| c.watching.is_some()) {
                connection.send(0, Body::Exited(exit.clone()));
            }
            self.exit = Some(exit);
        } else {
            self.retry_at_ns = Some(sys::boot_ns() + nanos(DISK_RETRY));
        }
    }

    /// Writes state files that the disk refused before. True when none is left.
    fn write_rest(&mut self) -> bool {
        if self.unwritten.meta {
            self.unwritten.meta = self.files.write_surely(META, &self.meta).is_err();
        }
        if let Some(request) = self.kill.as_ref().filter(|_| self.unwritten.kill) {
            self.unwritten.kill = self.files.write_surely(KILL, request).is_err();
        }
        if let Some(orphaned) = self.orphaned.as_ref().filter(|_| self.unwritten.orphaned) {
            self.unwritten.orphaned = self.files.write_surely(ORPHANED, orphaned).is_err();
        }
        !(self.unwritten.meta || self.unwritten.kill || self.unwritten.orphaned)
    }

    fn notify_watchers(&mut self) {
        let end = self.spool.end();
        for connection in &mut self.connections {
            if let Some(Watching { known, armed: true }) = connection.watching
                && known < end
            {
                connection.watching = Some(Watching { known, armed: false });
                connection.send(0, Body::Spooled(Spooled { end }));
            }
        }
    }

    pub(super) fn spool_full(&self) -> bool {
        !self.empty && self.spool.held() >= self.limits.spool_bytes_max
    }

    fn read_output(&mut self, ready: &Ready) {
        if self.empty || !self.retry_pending() {
            return;
        }
        for stream in Stream::ALL {
            if ready.pipes[stream.index()] && self.pending.is_none() && !self.spool_full() {
                self.read_pipe(stream);
            }
        }
    }

    /// Reads once and spools it. False: there was nothing to read.
    fn read_pipe(&mut self, stream: Stream) -> bool {
        let Some(pipe) = &self.pipes[stream.index()] else { return false };
        match rustix::io::read(pipe, &mut *self.buffer) {
            Ok(0) => {
                self.pipes[stream.index()] = None;
                true
            }
            Ok(n) => {
                self.pending = Some((stream, n));
                self.retry_at_ns = None;
                self.retry_pending();
                true
            }
            Err(rustix::io::Errno::INTR) => true,
            Err(rustix::io::Errno::AGAIN) => false,
            Err(_) => {
                self.pipes[stream.index()] = None;
                true
            }
        }
    }

    /// Spools what was read before. False while the disk refuses.
    pub(super) fn retry_pending(&mut self) -> bool {
        let now = sys::boot_ns();
        if self.retry_at_ns.is_some_and(|at| now < at) {
            return false;
        }
        self.retry_at_ns = None;
        if self.unwritten.meta {
            self.unwritten.meta = self.files.write_surely(META, &self.meta).is_err();
        }
        let Some((stream, n)) = self.pending else { return true };
        match self.spool.append(stream, &self.buffer[..n]) {
            Append::Done => {
                self.pending = None;
                true
            }
            Append::DiskRefused => {
                self.retry_at_ns = Some(now + nanos(DISK_RETRY));
                false
            }
        }
    }

    fn serve(&mut self, ready: &Ready) {
        for index in 0..self.connections.len() {
            let bit = 1u32 << index;
            if ready.writable & bit != 0 {
                self.connections[index].flush();
            }
            if ready.readable & bit != 0 {
                self.connections[index].receive();
                while let Some(request) = self.connections[index].next_request() {
                    let id = request.id;
                    if let Some(body) = self.answer(index, request) {
                        self.connections[index].send(id, body);
                    }
                }
            }
        }
        if ready.listener {
            self.accept();
        }
    }

    fn accept(&mut self) {
        let Ok((stream, _)) = self.listener.accept() else { return };
        let own = rustix::process::geteuid().as_raw();
        if !sys::peer_uid(stream.as_fd()).is_ok_and(|uid| uid == 0 || uid == own) {
            return;
        }
        if self.connections.len() >= CONNECTIONS_MAX {
            // Whoever has shown nothing yet must not keep an owner out.
            let Some(idle) = self.connections.iter().position(|c| !c.greeted) else { return };
            self.connections.remove(idle);
        }
        if let Ok(connection) = Connection::new(self.next_connection, stream) {
            self.next_connection += 1;
            self.connections.push(connection);
        }
    }

    fn wait(&self) -> Ready {
        let mut fds = Vec::with_capacity(CONNECTIONS_MAX + 8);
        fds.push(PollFd::new(&self.listener, PollFlags::IN));
        fds.push(PollFd::new(&self.orphan_timer, PollFlags::IN));
        let tree_from = fds.len();
        fds.extend(self.tree.watched().map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)));
        let pipes_from = fds.len();
        let reading = self.pending.is_none() && !self.spool_full();
        let open = |stream: &Stream| reading && self.pipes[stream.index()].is_some();
        let polled: Vec<Stream> = Stream::ALL.into_iter().filter(open).collect();
        for pipe in polled.iter().filter_map(|stream| self.pipes[stream.index()].as_ref()) {
            fds.push(PollFd::new(pipe, PollFlags::IN));
        }
        let connections_from = fds.len();
        for connection in &self.connections {
            let out = if connection.has_outgoing() { PollFlags::OUT } else { PollFlags::empty() };
            fds.push(PollFd::from_borrowed_fd(connection.fd(), PollFlags::IN | out));
        }
        let timeout = self.deadline_ns().map(|at| timespec(at.saturating_sub(sys::boot_ns())));
        let mut ready = Ready::default();
        if poll(&mut fds, timeout.as_ref()).is_err() {
            return ready;
        }
        let event = |fd: &PollFd<'_>| !fd.revents().is_empty();
        ready.listener = event(&fds[0]);
        ready.tree = fds[tree_from..pipes_from].iter().any(event);
        for (stream, fd) in polled.iter().zip(&fds[pipes_from..connections_from]) {
            ready.pipes[stream.index()] = event(fd);
        }
        for (index, fd) in fds[connections_from..].iter().enumerate() {
            let readable = fd.revents().intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR);
            ready.readable |= u32::from(readable) << index;
            ready.writable |= u32::from(fd.revents().contains(PollFlags::OUT)) << index;
        }
        ready
    }

    /// When the loop must go on without an event.
    fn deadline_ns(&self) -> Option<u64> {
        let now = sys::boot_ns();
        let killing =
            (self.killing_since_ns.is_some() && !self.empty).then(|| now + nanos(KILL_LOOK));
        let leaving = self
            .tree
            .ended()
            .filter(|_| !self.empty && self.killing_since_ns.is_none() && !self.stop_requested);
        let leaving = leaving.map(|ended| ended.boot_ns + nanos(self.limits.stop_drain));
        [self.retry_at_ns, killing, leaving].into_iter().flatten().min()
    }

    /// Everything is recorded: hands out what clients have not taken yet, for a moment, and cleans up.
    fn depart(mut self) {
        let until = sys::boot_ns() + nanos(FAREWELL);
        while self.connections.iter().any(|c| c.has_outgoing() && !c.broken)
            && sys::boot_ns() < until
        {
            crate::tree::pause();
            for connection in &mut self.connections {
                connection.flush();
            }
        }
        self.tree.close();
        self.files.remove(SOCKET);
        self.files.remove(RESERVE);
    }
}

fn describe(status: std::process::ExitStatus, exit: &mut Exit) {
    use std::os::unix::process::ExitStatusExt as _;
    exit.code = status.code();
    exit.signal = status.signal();
    exit.core_dumped = status.core_dumped();
}
