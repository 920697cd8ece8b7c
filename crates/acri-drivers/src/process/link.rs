//! A session's connection to its shim: one task that writes requests, brings
//! answers home by their ids, notes what the shim tells by itself, and connects
//! again when the connection breaks while the shim lives.

use super::{
    blocking,
    limits::{ANSWER_WAIT, ASKS_WAITING_MAX, GREETING_WAIT, RECONNECT_FIRST, RECONNECT_LAST, WRITE_WAIT},
};
use crate::driver::Fault;
use acri_shim::{
    Token,
    wire::{self, Body, Decoder, Hello, Op, Reply, Request, Watch},
};
use std::{
    collections::HashMap,
    fs::File,
    io,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    sync::{mpsc, oneshot, watch},
    time::timeout,
};

/// Bytes read from the socket at once: messages are small.
const READ_BYTES: usize = 1024;
/// The id of a watch, whose answer nobody waits for.
const WATCH_ID: u64 = 1;
/// The socket's name in a run directory, as the protocol says.
const SOCKET: &str = "socket";

/// What the shim told by itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// The spool reaches at least here.
    pub(super) spool_end: u64,
    /// The exit is recorded, or the shim is gone: the files do not change any more.
    pub(super) ended: bool,
}

enum Ask {
    Op { op: Op, answer: oneshot::Sender<Answer> },
    Watch(u64),
}

enum Answer {
    Body(Body),
    /// The connection broke, and the request is not one to be repeated blindly.
    Unknown,
}

/// The session's end of the connection. Dropped, it ends the task.
#[derive(Debug)]
pub(super) struct Link {
    asks: mpsc::Sender<Ask>,
    seen: watch::Receiver<Seen>,
}

impl Link {
    /// Begins to connect. `gone` is called once the shim has ended.
    pub(super) fn open(dir: PathBuf, secret: Token, gone: impl FnOnce() + Send + 'static) -> Self {
        let (asks, waiting) = mpsc::channel(ASKS_WAITING_MAX);
        let (seen, seen_by_all) = watch::channel(Seen::default());
        let task =
            Task { dir, secret, waiting, seen, pending: HashMap::new(), next_id: WATCH_ID + 1, watching: u64::MAX };
        tokio::spawn(async move {
            if task.run().await {
                gone();
            }
        });
        Self { asks, seen: seen_by_all }
    }

    /// A link to a shim that is gone already.
    pub(super) fn closed() -> Self {
        let (asks, _) = mpsc::channel(1);
        let (_, seen) = watch::channel(Seen { spool_end: 0, ended: true });
        Self { asks, seen }
    }

    pub(super) fn seen(&self) -> watch::Receiver<Seen> {
        self.seen.clone()
    }

    /// Sends a request and waits for its answer. `None`: the shim has ended.
    pub(super) async fn ask(&self, operation: &'static str, op: Op) -> Result<Option<Body>, Fault> {
        let unreachable = |detail: String| Fault::Unreachable { operation, detail };
        let asked = async {
            let (answer, answered) = oneshot::channel();
            if self.asks.send(Ask::Op { op, answer }).await.is_err() {
                return None;
            }
            answered.await.ok()
        };
        match timeout(ANSWER_WAIT, asked).await {
            Ok(Some(Answer::Body(Body::Stale(stale)))) => Err(Fault::Stale(acri::id::Epoch(stale.highest))),
            Ok(Some(Answer::Body(Body::Refused(refused)))) => {
                Err(Fault::Broken { operation, detail: format!("refused: {} ({:?})", refused.text, refused.code) })
            }
            Ok(Some(Answer::Body(body))) => Ok(Some(body)),
            Ok(Some(Answer::Unknown)) => Err(unreachable("the connection broke before the answer".to_owned())),
            Ok(None) if self.seen.borrow().ended => Ok(None),
            Ok(None) => Err(unreachable("the connection's task is gone".to_owned())),
            Err(_) => Err(unreachable(format!("no answer within {} ms", ANSWER_WAIT.as_millis()))),
        }
    }

    /// Asks to be told when the spool grows beyond `offset`.
    pub(super) async fn watch(&self, offset: u64) {
        // Nobody takes it: the shim has ended, which is what the watcher is told then.
        let _ = self.asks.send(Ask::Watch(offset)).await;
    }
}

struct Task {
    dir: PathBuf,
    secret: Token,
    waiting: mpsc::Receiver<Ask>,
    seen: watch::Sender<Seen>,
    pending: HashMap<u64, (Op, oneshot::Sender<Answer>)>,
    next_id: u64,
    /// The last watch; it is repeated on a new connection.
    watching: u64,
}

/// Why a connection is served no longer.
enum Over {
    /// Nobody has the session any more.
    Unused,
    /// The exit is recorded.
    Ended,
    Broken,
}

impl Task {
    /// True: the shim has ended.
    async fn run(mut self) -> bool {
        let mut pause = RECONNECT_FIRST;
        loop {
            if let Ok((stream, decoder)) = connect(&self.dir, &self.secret, GREETING_WAIT).await {
                pause = RECONNECT_FIRST;
                match self.serve(stream, decoder).await {
                    Over::Unused => return false,
                    Over::Ended => break,
                    Over::Broken => {}
                }
                self.drop_what_cannot_be_repeated();
            }
            if self.waiting.is_closed() {
                return false;
            }
            let dir = self.dir.clone();
            // An error of the file system is no proof of an end.
            if blocking(move || acri_shim::scan(&dir)).await.is_ok_and(|scan| !scan.alive) {
                break;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RECONNECT_LAST);
        }
        self.seen.send_modify(|seen| seen.ended = true);
        true
    }

    /// All requests are such that a repeat does nothing new, but for a Stop: a second signal may cut short what the
    /// first one began.
    fn drop_what_cannot_be_repeated(&mut self) {
        for (_, (_, answer)) in self.pending.extract_if(|_, (op, _)| matches!(op, Op::Stop(_))) {
            let _ = answer.send(Answer::Unknown);
        }
    }

    async fn serve(&mut self, mut stream: UnixStream, mut decoder: Decoder) -> Over {
        let mut bytes = wire::encode(&watch(self.watching));
        for (id, (op, _)) in &self.pending {
            bytes.extend(wire::encode(&Request { id: *id, op: op.clone() }));
        }
        if write(&mut stream, &bytes).await.is_err() {
            return Over::Broken;
        }
        let mut buffer = [0; READ_BYTES];
        loop {
            loop {
                match decoder.pop::<Reply>() {
                    Ok(Some(reply)) => {
                        if self.take(reply) {
                            return Over::Ended;
                        }
                    }
                    Ok(None) => break,
                    Err(_) => return Over::Broken,
                }
            }
            tokio::select! {
                read = stream.read(&mut buffer) => match read {
                    Ok(0) | Err(_) => return Over::Broken,
                    Ok(n) => decoder.push(&buffer[..n]),
                },
                ask = self.waiting.recv(), if self.pending.len() < ASKS_WAITING_MAX => {
                    let Some(ask) = ask else { return Over::Unused };
                    let request = self.note(ask);
                    if write(&mut stream, &wire::encode(&request)).await.is_err() {
                        return Over::Broken;
                    }
                }
            }
        }
    }

    fn note(&mut self, ask: Ask) -> Request {
        match ask {
            Ask::Watch(offset) => {
                self.watching = offset;
                watch(offset)
            }
            Ask::Op { op, answer } => {
                // Who asked and waits no longer is forgotten here, so that they do not pile up.
                self.pending.retain(|_, (_, answer)| !answer.is_closed());
                let id = self.next_id;
                self.next_id += 1;
                self.pending.insert(id, (op.clone(), answer));
                Request { id, op }
            }
        }
    }

    /// True: the exit is recorded.
    fn take(&mut self, reply: Reply) -> bool {
        match reply.body {
            Body::Spooled(spooled) => self.seen.send_modify(|seen| seen.spool_end = seen.spool_end.max(spooled.end)),
            Body::Exited(_) => return true,
            body => {
                if let Some((_, answer)) = self.pending.remove(&reply.id) {
                    let _ = answer.send(Answer::Body(body));
                }
            }
        }
        false
    }
}

fn watch(offset: u64) -> Request {
    Request { id: WATCH_ID, op: Op::Watch(Watch { offset }) }
}

async fn write(stream: &mut UnixStream, bytes: &[u8]) -> io::Result<()> {
    timeout(WRITE_WAIT, stream.write_all(bytes)).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

/// Connects and shows the token.
pub(super) async fn connect(dir: &Path, secret: &Token, limit: Duration) -> io::Result<(UnixStream, Decoder)> {
    let connected = async {
        // Through the descriptor, because a socket's path may not be long.
        let directory = File::open(dir)?;
        let path = format!("/proc/self/fd/{}/{SOCKET}", directory.as_raw_fd());
        let mut stream = UnixStream::connect(path).await?;
        let hello = Op::Hello(Hello { version: wire::VERSION, token: secret.clone() });
        stream.write_all(&wire::encode(&Request { id: WATCH_ID, op: hello })).await?;
        let mut decoder = Decoder::default();
        match receive(&mut stream, &mut decoder).await?.body {
            Body::Welcome(_) => Ok((stream, decoder)),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    };
    timeout(limit, connected).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

/// The next message of a shim.
pub(super) async fn receive(stream: &mut UnixStream, decoder: &mut Decoder) -> io::Result<Reply> {
    let mut buffer = [0; READ_BYTES];
    loop {
        if let Some(reply) = decoder.pop().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))? {
            return Ok(reply);
        }
        match stream.read(&mut buffer).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => decoder.push(&buffer[..n]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use acri_shim::{Exit, Owner, wire::Spooled};
    use rustix::fs::{FlockOperation, flock};
    use tempfile::TempDir;
    use tokio::net::UnixListener;

    /// A shim that does what a test tells it.
    struct Fake {
        dir: TempDir,
        listener: UnixListener,
        /// Locked, as long as it lives.
        lock: Option<File>,
    }

    struct Client {
        stream: UnixStream,
        decoder: Decoder,
    }

    impl Fake {
        fn new() -> Self {
            let dir = TempDir::new().unwrap();
            let listener = UnixListener::bind(dir.path().join(SOCKET)).unwrap();
            let lock = File::create(dir.path().join("lock")).unwrap();
            flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
            Self { dir, listener, lock: Some(lock) }
        }

        fn link(&self) -> Link {
            Link::open(self.dir.path().to_owned(), Token::from_bytes([1; 32]), || {})
        }

        /// Takes a connection, its greeting and its watch.
        async fn accept(&self) -> Client {
            let (stream, _) = self.listener.accept().await.unwrap();
            let mut client = Client { stream, decoder: Decoder::default() };
            let hello = client.request().await;
            assert!(matches!(hello.op, Op::Hello(_)), "{hello:?}");
            client.send(hello.id, Body::Welcome(wire::Welcome { version: wire::VERSION })).await;
            let watch = client.request().await;
            assert!(matches!(watch.op, Op::Watch(_)), "{watch:?}");
            client
        }
    }

    impl Client {
        async fn request(&mut self) -> Request {
            loop {
                if let Some(request) = self.decoder.pop().unwrap() {
                    return request;
                }
                let mut buffer = [0; 256];
                let n = self.stream.read(&mut buffer).await.unwrap();
                assert_ne!(n, 0, "the connection ended");
                self.decoder.push(&buffer[..n]);
            }
        }

        async fn send(&mut self, id: u64, body: Body) {
            self.stream.write_all(&wire::encode(&Reply { id, body })).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_connection_that_breaks_is_made_again_and_its_requests_are_repeated() {
        let fake = Fake::new();
        let link = fake.link();
        let serve = async {
            let first = fake.accept().await.request().await;
            let mut again = fake.accept().await;
            assert_eq!(again.request().await, first);
            again.send(first.id, Body::Done).await;
            again
        };
        let (answer, _client) = tokio::join!(link.ask("contact", Op::Contact(Owner::default())), serve);
        assert_eq!(answer.unwrap(), Some(Body::Done));
    }

    #[tokio::test]
    async fn a_stop_whose_answer_is_lost_is_not_repeated_by_itself() {
        let fake = Fake::new();
        let link = fake.link();
        let serve = async {
            fake.accept().await.request().await;
            fake.accept().await
        };
        let (answer, mut client) = tokio::join!(link.ask("stop", Op::Stop(wire::Stop::default())), serve);
        assert!(matches!(answer, Err(Fault::Unreachable { operation: "stop", .. })), "{answer:?}");
        let ask = tokio::spawn(async move { link.ask("contact", Op::Contact(Owner::default())).await });
        assert!(matches!(client.request().await.op, Op::Contact(_)));
        ask.abort();
    }

    #[tokio::test]
    async fn what_the_shim_tells_is_seen_and_after_its_end_nothing_is_asked() {
        let fake = Fake::new();
        let link = fake.link();
        let mut seen = link.seen();
        let mut client = fake.accept().await;
        client.send(0, Body::Spooled(Spooled { end: 7 })).await;
        assert!(!seen.wait_for(|seen| seen.spool_end == 7).await.unwrap().ended);
        client.send(0, Body::Exited(Exit::default())).await;
        seen.wait_for(|seen| seen.ended).await.unwrap();
        assert_eq!(link.ask("contact", Op::Contact(Owner::default())).await.unwrap(), None);
    }

    #[tokio::test]
    async fn a_shim_that_dies_is_an_end_and_what_was_asked_gets_no_answer() {
        let mut fake = Fake::new();
        let link = fake.link();
        let mut client = fake.accept().await;
        let serve = async {
            client.request().await;
            fake.lock = None;
            drop(client);
        };
        let (answer, ()) = tokio::join!(link.ask("contact", Op::Contact(Owner::default())), serve);
        assert_eq!(answer.unwrap(), None);
        assert!(link.seen().borrow().ended);
    }

    #[tokio::test]
    async fn a_link_that_nobody_has_leaves_its_shim() {
        let fake = Fake::new();
        let link = fake.link();
        let mut client = fake.accept().await;
        drop(link);
        assert_eq!(client.stream.read(&mut [0; 8]).await.unwrap(), 0);
    }
}
