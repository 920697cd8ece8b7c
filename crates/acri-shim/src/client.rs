//! A small blocking client, for tests and tools. The node has an asynchronous one of its own, over [`crate::wire`].

use std::collections::VecDeque;
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::launch::Token;
use crate::wire::{self, Body, Decoder, Hello, Op, Reply, Request};

/// A greeted connection to a shim.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    decoder: Decoder,
    pushed: VecDeque<Body>,
    next_id: u64,
}

impl Client {
    /// Connects and shows the token. `limit` bounds the wait for each message.
    pub fn connect(dir: &Path, token: &Token, limit: Duration) -> io::Result<Self> {
        let stream = wire::connect(dir)?;
        stream.set_read_timeout(Some(limit))?;
        stream.set_write_timeout(Some(limit))?;
        let mut client = Self { stream, decoder: Decoder::default(), pushed: VecDeque::new(), next_id: 1 };
        match client.call(Op::Hello(Hello { version: wire::VERSION, token: token.clone() }))? {
            Body::Welcome(_) => Ok(client),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Sends a request and waits for its answer; pushes that come before it are kept for [`Self::pushed`].
    pub fn call(&mut self, op: Op) -> io::Result<Body> {
        let id = self.send(op)?;
        loop {
            let reply = self.receive()?;
            if reply.id == id {
                return Ok(reply.body);
            }
            if reply.id == 0 {
                self.pushed.push_back(reply.body);
            }
        }
    }

    /// Sends a request without waiting. Returns its id.
    pub fn send(&mut self, op: Op) -> io::Result<u64> {
        let id = self.next_id;
        self.next_id += 1;
        self.stream.write_all(&wire::encode(&Request { id, op }))?;
        Ok(id)
    }

    /// The next push, waited for if none is there.
    pub fn pushed(&mut self) -> io::Result<Body> {
        loop {
            if let Some(body) = self.pushed.pop_front() {
                return Ok(body);
            }
            let reply = self.receive()?;
            if reply.id == 0 {
                self.pushed.push_back(reply.body);
            }
        }
    }

    /// The next message, whatever it is.
    pub fn receive(&mut self) -> io::Result<Reply> {
        let mut bytes = [0u8; 4096];
        loop {
            if let Some(reply) =
                self.decoder.pop().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?
            {
                return Ok(reply);
            }
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => self.decoder.push(&bytes[..n]),
                // With a time-out set, stopping and going on is enough for that.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}
