//! The socket protocol: what a node can ask of a shim.
//!
//! A message is its length (u32, little-endian) and a map in MessagePack with named fields. The first message of a
//! connection must be [`Op::Hello`] with the run's token; a wrong one closes the connection. Every request carries an id
//! and gets exactly one answer with the same id; pushes ([`Body::Spooled`], [`Body::Exited`]) carry id 0. Fields are only
//! ever added, each with a default; an unknown operation is refused with [`Refusal::Unsupported`].
//!
//! The socket is bound, and clients connect, through `/proc/self/fd/<directory>/socket`: a path of any length works.
//!
//! The shim ends by itself right after `exit` is written and pushed. A connection that closes without an answer
//! therefore means: look at the run directory.

use std::io;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::launch::Token;
use crate::limits::MESSAGE_BYTES_MAX;
use crate::rundir::{Exit, Meta, Owner};

/// Version of the protocol.
pub const VERSION: u32 = 1;

/// A message of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Comes back with the answer; any number but 0.
    #[serde(default)]
    pub id: u64,
    /// What is asked.
    pub op: Op,
}

/// What can be asked. Stale epochs are answered with [`Body::Stale`] and change nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Op {
    /// Must come first. Answer: [`Body::Welcome`].
    Hello(Hello),
    /// Takes the run over for an epoch, restarts the orphan timer. A repeat is accepted; an epoch below the highest, or
    /// the same of another incarnation, is stale. Answer: [`Body::Done`].
    Claim(Owner),
    /// Restarts the orphan timer if epoch and incarnation are those of the highest claim; otherwise stale. Answer:
    /// [`Body::Done`].
    Contact(Owner),
    /// Answer: [`Body::Status`]. Wants no epoch.
    Status,
    /// Sends a signal (SIGTERM if 0) to every process of the tree; afterwards the end of the main process no longer kills
    /// the others. Answer: [`Body::Stopping`].
    Stop(Stop),
    /// Records the Kill, ends the tree. Answer, once the tree is proved empty and not before: [`Body::Killed`].
    Kill(Kill),
    /// Lets go of the spool below an offset and saves the resume token. Answer: [`Body::Released`].
    Release(Release),
    /// Tells up to which offset this client knows the spool and asks to be told of more, once. Answer: [`Body::Done`];
    /// then one [`Body::Spooled`] as soon as there is more, and one [`Body::Exited`] at the end.
    Watch(Watch),
    /// Ends the shim, which it does by itself too, once the exit is recorded; before it is refused with
    /// [`Refusal::NotExited`]. Answer: [`Body::Done`].
    Finish(Finish),
    /// An operation of a later version.
    #[serde(other)]
    Unknown,
}

/// See [`Op::Hello`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Hello {
    /// [`VERSION`] of the client.
    pub version: u32,
    /// The run's token.
    pub token: Token,
}

/// See [`Op::Stop`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Stop {
    /// The asker's epoch.
    pub epoch: u64,
    /// The command's id.
    pub command_id: String,
    /// Signal number; 0: SIGTERM.
    pub signal: i32,
}

/// See [`Op::Kill`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Kill {
    /// The asker's epoch.
    pub epoch: u64,
    /// The command's id.
    pub command_id: String,
    /// Who asks.
    pub principal: String,
    /// Why.
    pub reason: String,
}

/// See [`Op::Release`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Release {
    /// The asker's epoch.
    pub epoch: u64,
    /// Everything below this spool offset may go.
    pub offset: u64,
    /// The resume token, at most 64 KiB; empty leaves the last one.
    #[serde(with = "serde_bytes")]
    pub token: Vec<u8>,
}

/// See [`Op::Watch`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Watch {
    /// The spool offset that the client knows of.
    pub offset: u64,
}

/// See [`Op::Finish`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Finish {
    /// The asker's epoch.
    pub epoch: u64,
}

/// A message of the shim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// The request's id, or 0 for a push.
    #[serde(default)]
    pub id: u64,
    /// What it says.
    pub body: Body,
}

/// What a shim says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Body {
    /// The token was right.
    Welcome(Welcome),
    /// It was done.
    Done,
    /// Answer to [`Op::Status`].
    Status(Box<Status>),
    /// The signal was sent to this many processes.
    Stopping(Stopping),
    /// The tree is proved empty.
    Killed(Killed),
    /// Segments below the offset are gone.
    Released(Released),
    /// The epoch or incarnation is not the highest claim's.
    Stale(Stale),
    /// It cannot be done.
    Refused(Refused),
    /// Push: the spool now ends here.
    Spooled(Spooled),
    /// Push: the file `exit` was written.
    Exited(Exit),
    /// A message of a later version.
    #[serde(other)]
    Unknown,
}

/// See [`Body::Welcome`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Welcome {
    /// [`VERSION`] of the shim.
    pub version: u32,
}

/// Where a shim stands in its run's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activity {
    /// The main process lives.
    #[default]
    Running,
    /// A Stop was sent; processes are left.
    Stopping,
    /// The tree is being killed, or what the main process left of it.
    Killing,
    /// The tree is empty; the rest of its output is being spooled.
    Draining,
    /// The exit is recorded.
    Exited,
}

/// See [`Body::Status`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// The file `meta` as it stands.
    pub meta: Meta,
    /// Where it stands.
    pub activity: Activity,
    /// The highest claim.
    pub owner: Owner,
    /// The spool's end offset.
    pub spool_end: u64,
    /// Below this offset the spool was released.
    pub released: u64,
    /// Payload bytes of stdout spooled.
    pub stdout_bytes: u64,
    /// Payload bytes of stderr spooled.
    pub stderr_bytes: u64,
    /// The shim does not read because the spool is at its limit.
    pub spool_full: bool,
    /// The shim does not read because the disk refuses.
    pub disk_refuses: bool,
    /// A Kill is recorded.
    pub kill_recorded: bool,
    /// Milliseconds until the orphan rule strikes.
    pub orphan_in_ms: u64,
    /// The exit, if it is recorded.
    pub exit: Option<Exit>,
}

/// See [`Body::Stopping`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Stopping {
    /// Processes that got the signal.
    pub processes: u32,
}

/// See [`Body::Killed`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Killed {
    /// A Kill was recorded before; this one changed nothing.
    pub already: bool,
    /// Processes seen alive when the killing began.
    pub processes: u32,
    /// Microseconds from the request to the proof.
    pub took_us: u64,
}

/// See [`Body::Released`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Released {
    /// What is released now, never less than before.
    pub offset: u64,
    /// False: the disk refused the resume token; segments are released all the same.
    pub token_saved: bool,
}

/// See [`Body::Stale`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Stale {
    /// The highest epoch claimed.
    pub highest: u64,
}

/// See [`Body::Spooled`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Spooled {
    /// The spool's end offset.
    pub end: u64,
}

/// Why something cannot be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Refusal {
    /// Not known to this version.
    #[default]
    Unsupported,
    /// A field is out of its limits.
    Invalid,
    /// The exit is not recorded yet.
    NotExited,
    /// Too many of these wait.
    Busy,
    /// A file could not be written.
    Disk,
}

/// See [`Body::Refused`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Refused {
    /// What stands in the way.
    pub code: Refusal,
    /// The same for people.
    pub text: String,
}

/// A message with its length prefix.
pub fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    let mut bytes = vec![0u8; 4];
    let mut serializer = rmp_serde::Serializer::new(&mut bytes).with_struct_map();
    message.serialize(&mut serializer).expect("the messages have no map keys or lengths that MessagePack cannot take");
    let len = u32::try_from(bytes.len() - 4).expect("a message is far smaller than 4 GiB");
    bytes[..4].copy_from_slice(&len.to_le_bytes());
    bytes
}

/// Why bytes are not a message. The connection they came from is of no use any more.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The announced length is above the limit.
    #[error("message of {bytes} bytes exceeds the limit of {limit}")]
    TooLong {
        /// Announced.
        bytes: usize,
        /// Allowed.
        limit: usize,
    },
    /// Not a message of this protocol.
    #[error("message cannot be decoded")]
    Malformed(#[source] rmp_serde::decode::Error),
    /// Bytes behind the message inside its length.
    #[error("message has trailing bytes")]
    Trailing,
}

/// Takes bytes as they come and yields messages. Holds at most one message and what was pushed behind it.
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    taken: usize,
    limit: usize,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new(MESSAGE_BYTES_MAX)
    }
}

impl Decoder {
    /// A decoder for messages of at most `limit` bytes, without the prefix.
    pub fn new(limit: usize) -> Self {
        Self { buffer: Vec::new(), taken: 0, limit }
    }

    /// Changes the limit for the messages to come.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole message, or `None` if more bytes are needed.
    pub fn pop<T: DeserializeOwned>(&mut self) -> Result<Option<T>, DecodeError> {
        let waiting = &self.buffer[self.taken..];
        let Some((prefix, body)) = waiting.split_first_chunk::<4>() else {
            self.compact();
            return Ok(None);
        };
        let bytes = usize::try_from(u32::from_le_bytes(*prefix)).unwrap_or(usize::MAX);
        if bytes > self.limit {
            return Err(DecodeError::TooLong { bytes, limit: self.limit });
        }
        let Some(mut body) = body.get(..bytes) else {
            self.compact();
            return Ok(None);
        };
        let message = rmp_serde::from_read(&mut body).map_err(DecodeError::Malformed)?;
        if !body.is_empty() {
            return Err(DecodeError::Trailing);
        }
        self.taken += 4 + bytes;
        Ok(Some(message))
    }

    /// Drops what was taken, and the memory of a large message with it.
    fn compact(&mut self) {
        if self.taken == self.buffer.len() {
            if self.buffer.capacity() > 4096 {
                self.buffer = Vec::new();
            }
            self.buffer.clear();
        } else if self.taken > 0 {
            self.buffer.drain(..self.taken);
        }
        self.taken = 0;
    }
}

/// Connects to the socket of a run directory, however long its path is. Not yet greeted, blocking.
pub fn connect(dir: &std::path::Path) -> io::Result<std::os::unix::net::UnixStream> {
    use std::os::fd::AsRawFd as _;
    let directory = std::fs::File::open(dir)?;
    std::os::unix::net::UnixStream::connect(format!(
        "/proc/self/fd/{}/{}",
        directory.as_raw_fd(),
        crate::rundir::SOCKET
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_out_whole_from_any_split() {
        let first = Request { id: 1, op: Op::Release(Release { epoch: 3, offset: 9, token: vec![0, 255, 7] }) };
        let second = Request { id: 2, op: Op::Status };
        let bytes = [encode(&first), encode(&second)].concat();
        for size in 1..bytes.len() {
            let mut decoder = Decoder::default();
            let mut seen = Vec::new();
            for part in bytes.chunks(size) {
                decoder.push(part);
                while let Some(message) = decoder.pop::<Request>().expect("valid") {
                    seen.push(message);
                }
            }
            assert_eq!(seen, [first.clone(), second.clone()]);
        }
    }

    #[test]
    fn an_unknown_operation_is_recognised_as_such_and_unknown_fields_are_skipped() {
        #[derive(Serialize)]
        struct Later {
            id: u64,
            extra: u8,
            op: LaterOp,
        }
        #[derive(Serialize)]
        #[serde(tag = "type", rename_all = "snake_case")]
        enum LaterOp {
            Teleport { to: String },
            Watch { offset: u64, speed: u8 },
        }
        let mut decoder = Decoder::default();
        decoder.push(&encode(&Later { id: 4, extra: 1, op: LaterOp::Teleport { to: "x".to_owned() } }));
        decoder.push(&encode(&Later { id: 5, extra: 1, op: LaterOp::Watch { offset: 2, speed: 3 } }));
        assert_eq!(decoder.pop().expect("valid"), Some(Request { id: 4, op: Op::Unknown }));
        assert_eq!(decoder.pop().expect("valid"), Some(Request { id: 5, op: Op::Watch(Watch { offset: 2 }) }));
    }

    #[test]
    fn trailing_bytes_and_oversize_messages_are_refused() {
        let mut bytes = encode(&Request { id: 1, op: Op::Status });
        bytes.push(0xc0);
        bytes[0] += 1;
        let mut decoder = Decoder::default();
        decoder.push(&bytes);
        assert!(matches!(decoder.pop::<Request>(), Err(DecodeError::Trailing)));
        let mut decoder = Decoder::default();
        decoder.push(&u32::MAX.to_le_bytes());
        assert!(matches!(decoder.pop::<Request>(), Err(DecodeError::TooLong { .. })));
    }
}
