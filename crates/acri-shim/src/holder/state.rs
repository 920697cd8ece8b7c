//! The loop: wait for an event, name it, apply it.
//!
//! One turn, in this order: the orphan rule (before anything is relayed), the tree, requests, output, and then what
//! follows from the new state ([`Holder::progress`]).

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixListener;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};

use super::connection::{Connection, Watching};
use crate::launch::{Limits, Token, timespec};
use crate::limits::{CONNECTIONS_MAX, FAREWELL, RECORD_PAYLOAD_BYTES_MAX};
use crate::rundir::{Exit, ExitReason, Files, KillRequest, Meta, Orphaned, Owner};
use crate::rundir::{RESERVE, SOCKET, Tier};
use crate::spool::{Stream, Writer};
use crate::sys;
use crate::tree::{Tree, nanos};
use crate::wire::{Body, Spooled};

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
pub(super) struct Unwritten {
    pub(super) meta: bool,
    pub(super) kill: bool,
    pub(super) orphaned: bool,
}

pub(crate) struct Holder {
    pub(super) files: Files,
    pub(super) meta: Meta,
    pub(super) token: Token,
    pub(super) limits: Limits,
    pub(super) owner: Owner,
    pub(super) last_contact_ns: u64,
    pub(super) spool: Writer,
    pub(super) pipes: [Option<OwnedFd>; 2],
    /// Read and not spooled yet, in `buffer`.
    pub(super) pending: Option<(Stream, usize)>,
    pub(super) buffer: Box<[u8]>,
    /// The disk refused; not before this time again.
    pub(super) retry_at_ns: Option<u64>,
    pub(super) tree: Tree,
    pub(super) listener: UnixListener,
    pub(super) orphan_timer: OwnedFd,
    pub(super) connections: Vec<Connection>,
    pub(super) next_connection: u64,
    pub(super) stop_requested: bool,
    pub(super) kill: Option<KillRequest>,
    pub(super) orphaned: Option<Orphaned>,
    pub(super) unwritten: Unwritten,
    /// Since when the tree is being killed, whatever for.
    pub(super) killing_since_ns: Option<u64>,
    pub(super) next_round_ns: u64,
    /// Processes seen alive when the killing began.
    pub(super) victims: u32,
    pub(super) leftovers: u32,
    /// The tree is proved empty.
    pub(super) empty: bool,
    /// The reason, fixed when the tree is proved empty.
    pub(super) reason: ExitReason,
    pub(super) waiters: Vec<Waiter>,
    pub(super) exit: Option<Exit>,
}

/// What is ready; connections by their place in the list.
#[derive(Debug, Default)]
pub(super) struct Ready {
    pub(super) listener: bool,
    pub(super) tree: bool,
    pub(super) pipes: [bool; 2],
    pub(super) readable: u32,
    pub(super) writable: u32,
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
        // Not while the disk is to be left alone: nobody would read, and the descriptor would stay ready.
        let reading = self.pending.is_none() && self.retry_at_ns.is_none() && !self.spool_full();
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

    /// Everything is recorded: hands out what clients have not taken yet, for a moment, and cleans up.
    fn depart(mut self) {
        let until = sys::boot_ns() + nanos(FAREWELL);
        while self.connections.iter().any(|c| c.has_outgoing() && !c.broken) && sys::boot_ns() < until {
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
