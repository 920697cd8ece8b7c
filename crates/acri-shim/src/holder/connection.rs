//! One client's connection: bounded in both directions, never waited for.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use crate::limits::{HELLO_BYTES_MAX, OUTGOING_BYTES_MAX};
use crate::wire::{self, Body, Decoder, Reply, Request};

/// Bytes read from a connection in one turn.
const READ_BYTES: usize = 8 * 1024;

/// What a client watches.
#[derive(Debug, Clone, Copy)]
pub(super) struct Watching {
    /// The end offset that it knows of.
    pub(super) known: u64,
    /// It is to be told of more. False while a push is not acknowledged.
    pub(super) armed: bool,
}

#[derive(Debug)]
pub(super) struct Connection {
    /// Unique for the shim's life.
    pub(super) id: u64,
    stream: UnixStream,
    decoder: Decoder,
    outgoing: Vec<u8>,
    /// It has shown the token.
    pub(super) greeted: bool,
    pub(super) watching: Option<Watching>,
    /// To be dropped at the end of the turn.
    pub(super) broken: bool,
}

impl Connection {
    pub(super) fn new(id: u64, stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            id,
            stream,
            decoder: Decoder::new(HELLO_BYTES_MAX),
            outgoing: Vec::new(),
            greeted: false,
            watching: None,
            broken: false,
        })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Bytes wait for the client to take them.
    pub(super) fn has_outgoing(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// The token was right: longer messages are allowed from now on.
    pub(super) fn greet(&mut self) {
        self.greeted = true;
        self.decoder.set_limit(wire_limit());
    }

    /// Reads once what is there.
    pub(super) fn receive(&mut self) {
        let mut bytes = [0u8; READ_BYTES];
        match self.stream.read(&mut bytes) {
            Ok(0) => self.broken = true,
            Ok(n) => self.decoder.push(&bytes[..n]),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(_) => self.broken = true,
        }
    }

    /// The next request that was received whole. Garbage breaks the connection.
    pub(super) fn next_request(&mut self) -> Option<Request> {
        if self.broken {
            return None;
        }
        self.decoder.pop().unwrap_or_else(|_| {
            self.broken = true;
            None
        })
    }

    /// Sends a message, or as much as the client takes; who lets too much pile up is dropped.
    pub(super) fn send(&mut self, id: u64, body: Body) {
        if self.broken {
            return;
        }
        let bytes = wire::encode(&Reply { id, body });
        if self.outgoing.len() + bytes.len() > OUTGOING_BYTES_MAX {
            self.broken = true;
            return;
        }
        self.outgoing.extend_from_slice(&bytes);
        self.flush();
    }

    pub(super) fn flush(&mut self) {
        let mut done = 0;
        while done < self.outgoing.len() {
            match self.stream.write(&self.outgoing[done..]) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    self.broken = true;
                    break;
                }
            }
        }
        if done == self.outgoing.len() {
            self.outgoing = Vec::new();
        } else {
            self.outgoing.drain(..done);
        }
    }
}

fn wire_limit() -> usize {
    crate::limits::MESSAGE_BYTES_MAX
}
