//! A nats-server process that belongs to a store directory.
//!
//! ```text
//!   store/  acri.lock     held by whoever uses the store, as long as he lives
//!           server.json   pid, start time, port, name, password of the server that runs there (0600)
//!           server.conf   what it was started with                                            (0600)
//!           nats.log      what it says
//!           jetstream/    what it stores
//! ```
//! A starter that is killed leaves its server running; whoever starts on the
//! same store next takes that server over, if it is what he would have
//! started, or ends it.

use super::{Binary, Error, Find, Health, find, health, io as failed};
use crate::Version;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{FlockOperation, flock},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    io::{self, Write as _},
    os::{
        fd::OwnedFd,
        unix::{fs::OpenOptionsExt as _, process::CommandExt as _},
    },
    path::{Path, PathBuf},
    process::{Child, Stdio},
    sync::Arc,
    time::Duration,
};

/// From the start to the first answer; a store of some size is read first.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// How often the file that names the port is looked for.
const READY_POLL_EVERY: Duration = Duration::from_millis(10);
/// How often it is looked whether it still runs.
const END_POLL_EVERY: Duration = Duration::from_millis(250);
/// From SIGTERM to SIGKILL.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// From SIGKILL to the end.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of one message with its headers: above the largest log frame. (What
/// the server itself answers may be larger.)
const PAYLOAD_BYTES_MAX: usize = 2 * 1024 * 1024;
/// Bytes that the streams may reserve together; a sum of limits, not of use.
const STORE_BYTES_MAX: u64 = 1 << 40;
/// Bytes of its log, after which it begins another.
const LOG_BYTES_MAX: usize = 8 * 1024 * 1024;
const USER: &str = "acri";
/// Who may ask the server about itself, and nothing else.
pub(super) const SYSTEM_USER: &str = "acri_system";

/// How to start a server.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Where it stores; made if it is missing.
    pub store: PathBuf,
    /// What to run.
    pub binary: Binary,
    /// Whether each message is on the disk before it is acknowledged. Without
    /// it a loss of power may lose what was acknowledged in the last moments;
    /// a crash of the process never does.
    pub sync_always: bool,
    /// The port on 127.0.0.1; `None` takes a free one, and the same again at
    /// each restart.
    pub port: Option<u16>,
}

/// Somebody who may connect, besides the user in [`Server::url`], who may do
/// everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Name: letters, digits, `-` and `_`.
    pub name: String,
    /// Password, of the same characters.
    pub password: String,
    /// Permissions in nats-server's own language, without the braces:
    /// `publish: { allow: [..] }, subscribe: { allow: [..] }`.
    pub permissions: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Note {
    pid: i32,
    start_time: u64,
    port: u16,
    name: String,
    password: String,
    version: String,
    sync_always: bool,
}

impl Note {
    pub(super) fn read(store: &Path) -> Option<Self> {
        serde_json::from_str(&fs::read_to_string(store.join("server.json")).ok()?).ok()
    }

    /// Whether the very process of this note lives.
    pub(super) fn runs(&self) -> bool {
        start_time(self.pid) == Some(self.start_time)
    }

    pub(super) fn url(&self, user: &str) -> String {
        format!("nats://{user}:{}@127.0.0.1:{}", self.password, self.port)
    }
}

#[derive(Debug)]
struct Process {
    /// Signals go through it: a number may by now be somebody else's.
    pidfd: Arc<OwnedFd>,
    /// There if it is our child, and then it has to be waited for.
    child: Option<Child>,
    pid: i32,
}

/// A running nats-server. Dropping it ends the process (SIGKILL: what was
/// acknowledged is stored); [`Server::stop`] does it in an orderly way.
#[derive(Debug)]
pub struct Server {
    options: ServerOptions,
    users: Vec<User>,
    process: Option<Process>,
    note: Note,
    _lock: fs::File,
    remove_store: bool,
}

fn private(path: &Path, text: &str) -> Result<(), Error> {
    let staged = path.with_extension("new");
    let mut file = fs::OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(true)
        .mode(0o600)
        .open(&staged)
        .map_err(failed("write", &staged))?;
    file.write_all(text.as_bytes()).map_err(failed("write", &staged))?;
    fs::rename(&staged, path).map_err(failed("write", path))
}

/// Whether all threads of a process are stopped: they stop one by one.
fn stands_still(pid: i32) -> bool {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    tasks.flatten().all(|task| {
        // A thread that has just ended stands still as well.
        let stat = fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(')').is_none_or(|(_, rest)| rest.trim_start().starts_with(['T', 't', 'Z', 'X']))
    })
}

/// Field 22 of `/proc/<pid>/stat`: with the pid it names one process.
fn start_time(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

fn quoted(path: &Path) -> Result<String, Error> {
    let text = path.to_str().filter(|text| !text.contains(['"', '\\', '\n', '\r'])).ok_or_else(|| {
        let source = io::Error::new(io::ErrorKind::InvalidInput, "not plain text");
        failed("use", path)(source)
    })?;
    Ok(format!("\"{text}\""))
}

impl Server {
    /// Starts it, or takes over the one that a killed starter left on this
    /// store, and waits until it answers.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn start(options: ServerOptions) -> Result<Self, Error> {
        Self::start_with(options, Vec::new(), false).await
    }

    async fn start_with(options: ServerOptions, users: Vec<User>, remove_store: bool) -> Result<Self, Error> {
        fs::create_dir_all(&options.store).map_err(failed("create", &options.store))?;
        let store = fs::canonicalize(&options.store).map_err(failed("find", &options.store))?;
        let options = ServerOptions { store, ..options };
        let lock_path = options.store.join("acri.lock");
        let lock = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(&lock_path)
            .map_err(failed("open", &lock_path))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(Error::StoreInUse { path: options.store });
            }
            Err(error) => return Err(failed("lock", &lock_path)(error.into())),
        }
        let before = Note::read(&options.store);
        let note = Note {
            pid: 0,
            start_time: 0,
            port: options.port.or(before.as_ref().map(|note| note.port)).unwrap_or(0),
            name: format!("acri-{}", uuid::Uuid::new_v4().simple()),
            password: uuid::Uuid::new_v4().simple().to_string(),
            version: options.binary.version.to_string(),
            sync_always: options.sync_always,
        };
        let mut server = Self { options, users, process: None, note, _lock: lock, remove_store };
        if let Some(before) = before
            && let Some(process) = Process::left(&before)
        {
            let wanted = Note {
                pid: before.pid,
                start_time: before.start_time,
                name: before.name.clone(),
                password: before.password.clone(),
                ..server.note.clone()
            };
            server.process = Some(process);
            if wanted == before {
                server.note = before;
                match server.answers().await {
                    Ok(()) => return Ok(server),
                    Err(error) => {
                        tracing::warn!(%error, "the server left on this store does not answer, it is ended")
                    }
                }
            }
            server.kill9().await?;
        }
        match server.spawn().await {
            // Somebody took the port that this store had.
            Err(error) if server.options.port.is_none() && server.note.port != 0 => {
                tracing::debug!(%error, port = server.note.port, "started on another port");
                server.note.port = 0;
                server.spawn().await?;
            }
            outcome => outcome?,
        }
        Ok(server)
    }

    /// A server of its own for a test, with a store that goes with it.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn start_for_test() -> Result<Self, Error> {
        Self::start_for_test_with(Vec::new()).await
    }

    /// The same, with more users.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn start_for_test_with(users: Vec<User>) -> Result<Self, Error> {
        let binary = find(&Find::from_env(), &|progress| tracing::info!(%progress)).await?;
        let store = std::env::temp_dir().join(format!("acri-test-{}", uuid::Uuid::new_v4().simple()));
        let options = ServerOptions { store, binary, sync_always: false, port: None };
        Self::start_with(options, users, true).await
    }

    /// Where it answers, with the user and the password that it asks for.
    #[must_use]
    pub fn url(&self) -> String {
        self.note.url(USER)
    }

    /// The same for another of its users.
    #[must_use]
    pub fn url_of(&self, user: &User) -> String {
        format!("nats://{}:{}@127.0.0.1:{}", user.name, user.password, self.note.port)
    }

    /// The URL of the server that runs on `store` now, if one does: for
    /// another process of the same user.
    #[must_use]
    pub fn running(store: &Path) -> Option<String> {
        Note::read(store).filter(Note::runs).map(|note| note.url(USER))
    }

    /// What it says of itself.
    pub async fn health(&self) -> Health {
        health::ask(&self.note).await
    }

    /// The name that was given to it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.note.name
    }

    /// Its process, while there is one.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().and_then(|process| u32::try_from(process.pid).ok())
    }

    /// Where it stores.
    #[must_use]
    pub fn store(&self) -> &Path {
        &self.options.store
    }

    /// Kills it as a crash would, and waits until it is gone.
    ///
    /// # Errors
    /// [`Error::Start`] if it does not end.
    pub async fn kill9(&mut self) -> Result<(), Error> {
        let Some(mut process) = self.process.take() else { return Ok(()) };
        process.signal(Signal::KILL);
        if process.gone_within(KILL_TIMEOUT).await {
            Ok(())
        } else {
            Err(Error::Start { detail: format!("process {} does not end", process.pid) })
        }
    }

    /// Ends it in an orderly way, or by force after ten seconds.
    ///
    /// # Errors
    /// [`Error::Start`] if it does not end.
    pub async fn stop(&mut self) -> Result<(), Error> {
        if let Some(process) = &mut self.process {
            process.signal(Signal::TERM);
            if !process.gone_within(STOP_TIMEOUT).await {
                tracing::warn!(pid = process.pid, "nats-server does not stop, it is killed");
            }
        }
        self.kill9().await
    }

    /// Starts it again on the same store, with the same port and password; it
    /// is killed first if it still runs.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn restart(&mut self) -> Result<(), Error> {
        self.kill9().await?;
        self.spawn().await
    }

    /// Waits until its process has ended.
    pub async fn ended(&mut self) {
        while let Some(process) = &mut self.process
            && !process.gone_within(Duration::ZERO).await
        {
            tokio::time::sleep(END_POLL_EVERY).await;
        }
    }

    /// Freezes it: connections stay and nothing answers. When this returns,
    /// every thread of it stands still.
    pub async fn pause(&self) {
        let Some(process) = &self.process else { return };
        process.signal(Signal::STOP);
        let stopped = async {
            while !stands_still(process.pid) {
                tokio::time::sleep(READY_POLL_EVERY).await;
            }
        };
        if tokio::time::timeout(STOP_TIMEOUT, stopped).await.is_err() {
            tracing::warn!(pid = process.pid, "nats-server does not stand still");
        }
    }

    /// Lets it go on.
    pub fn resume(&self) {
        if let Some(process) = &self.process {
            process.signal(Signal::CONT);
        }
    }

    fn config(&self) -> Result<String, Error> {
        let port = match self.note.port {
            // Minus one is nats-server's word for any free port.
            0 => "-1".to_owned(),
            port => port.to_string(),
        };
        let store = &self.options.store;
        let mut users = format!("    {{ user: {USER}, password: \"{}\" }}\n", self.note.password);
        for User { name, password, permissions } in &self.users {
            users +=
                &format!("    {{ user: \"{name}\", password: \"{password}\", permissions: {{ {permissions} }} }}\n");
        }
        Ok(format!(
            "server_name: {name}\nhost: 127.0.0.1\nport: {port}\nports_file_dir: {ports}\n\
             max_payload: {PAYLOAD_BYTES_MAX}\nlog_file: {log}\nlogfile_size_limit: {LOG_BYTES_MAX}\nlogfile_max_num: 2\n\
             authorization {{\n  users: [\n{users}  ]\n}}\n\
             accounts {{\n  $SYS {{ users: [ {{ user: {SYSTEM_USER}, password: \"{password}\" }} ] }}\n}}\n\
             jetstream {{\n  store_dir: {jetstream}\n  max_file_store: {STORE_BYTES_MAX}\n{sync}}}\n",
            name = self.note.name,
            password = self.note.password,
            ports = quoted(store)?,
            log = quoted(&store.join("nats.log"))?,
            jetstream = quoted(store)?,
            sync = if self.options.sync_always { "  sync_interval: always\n" } else { "" },
        ))
    }

    async fn spawn(&mut self) -> Result<(), Error> {
        let config = self.options.store.join("server.conf");
        private(&config, &self.config()?)?;
        #[expect(
            clippy::disallowed_methods,
            reason = "local starts a nats-server, it is one of the places that may spawn"
        )]
        let mut command = std::process::Command::new(&self.options.binary.path);
        // In a group of its own, so that a Ctrl-C for the starter leaves him a server to say goodbye to.
        command.process_group(0);
        command.arg("-c").arg(&config).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().map_err(failed("start", &self.options.binary.path))?;
        self.process = Some(Process::own(child)?);
        if let Err(error) = self.become_ready().await {
            self.kill9().await?;
            return Err(error);
        }
        Ok(())
    }

    async fn become_ready(&mut self) -> Result<(), Error> {
        let process = self.process.as_mut().expect("it was just spawned");
        let ports = self.options.store.join(format!("nats-server_{}.ports", process.pid));
        let wait = async {
            loop {
                if let Some(port) = port_in(&ports) {
                    return Some(port);
                }
                // The server tells its port in a file only; its end is noticed at once.
                if process.gone_within(READY_POLL_EVERY).await {
                    return None;
                }
            }
        };
        let port = tokio::time::timeout(READY_TIMEOUT, wait).await.ok().flatten();
        let pid = process.pid;
        if let Err(error) = fs::remove_file(&ports) {
            tracing::debug!(%error, "no ports file to remove");
        }
        let Some(port) = port else { return Err(Error::Start { detail: self.last_words() }) };
        self.note.port = port;
        self.note.pid = pid;
        self.note.start_time = start_time(pid).unwrap_or(0);
        self.answers().await?;
        let text = serde_json::to_string_pretty(&self.note).expect("a note is plain data");
        private(&self.options.store.join("server.json"), &text)
    }

    /// A server that could not bind would leave us talking to whoever did.
    async fn answers(&self) -> Result<(), Error> {
        let failed = |detail: String| Error::Start { detail };
        let url: async_nats::ServerAddr = self.url().parse().map_err(|error| failed(format!("{error}")))?;
        let options = async_nats::ConnectOptions::new().connection_timeout(STOP_TIMEOUT);
        let client = crate::login::from_urls(options, std::slice::from_ref(&url))
            .connect(url)
            .await
            .map_err(|error| failed(format!("connect to it: {error}")))?;
        let info = client.server_info();
        if info.server_name != self.note.name {
            return Err(Error::Stranger {
                port: self.note.port,
                expected: self.note.name.clone(),
                found: info.server_name,
            });
        }
        let version: Version = info.version.parse().map_err(|error| failed(format!("{error}")))?;
        if version != self.options.binary.version || !info.jetstream {
            return Err(failed(format!("it is version {version} with JetStream {}", info.jetstream)));
        }
        Ok(())
    }

    fn last_words(&self) -> String {
        let text = fs::read_to_string(self.options.store.join("nats.log")).unwrap_or_default();
        let lines: Vec<&str> =
            text.lines().rev().filter(|line| line.contains("[FTL]") || line.contains("[ERR]")).take(2).collect();
        if lines.is_empty() { "it did not become ready".to_owned() } else { lines.join("; ") }
    }
}

fn port_in(path: &Path) -> Option<u16> {
    #[derive(Deserialize)]
    struct Ports {
        nats: Vec<String>,
    }
    let ports: Ports = serde_json::from_str(&fs::read_to_string(path).ok()?).ok()?;
    ports.nats.first()?.rsplit_once(':')?.1.parse().ok()
}

impl Process {
    fn own(child: Child) -> Result<Self, Error> {
        let pid = i32::try_from(child.id()).map_err(|_| Error::Start { detail: "its pid is no pid".to_owned() })?;
        Self::of(pid, Some(child)).ok_or_else(|| Error::Start { detail: "it ended at once".to_owned() })
    }

    /// The server that a killed starter left, if that very process lives.
    fn left(note: &Note) -> Option<Self> {
        let process = Self::of(note.pid, None)?;
        // Read after the pidfd was opened: from here on it is this process or none.
        note.runs().then_some(process)
    }

    fn of(pid: i32, child: Option<Child>) -> Option<Self> {
        let pidfd = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
        Some(Self { pidfd: Arc::new(pidfd), child, pid })
    }

    fn signal(&self, signal: Signal) {
        if let Err(error) = pidfd_send_signal(&self.pidfd, signal) {
            tracing::debug!(%error, pid = self.pid, "signal not sent");
        }
    }

    /// A pidfd becomes readable when its process has ended.
    async fn gone_within(&mut self, timeout: Duration) -> bool {
        let pidfd = Arc::clone(&self.pidfd);
        let wait = move || {
            let timeout = Timespec::try_from(timeout).ok();
            poll(&mut [PollFd::new(&*pidfd, PollFlags::IN)], timeout.as_ref()).is_ok_and(|ready| ready > 0)
        };
        let gone = tokio::task::spawn_blocking(wait).await.unwrap_or(false);
        if gone && let Some(child) = &mut self.child {
            // Only reaps: it has ended.
            if let Err(error) = child.wait() {
                tracing::debug!(%error, pid = self.pid, "not reaped");
            }
        }
        gone
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.signal(Signal::KILL);
            if let Some(child) = &mut process.child
                && let Err(error) = child.wait()
            {
                tracing::debug!(%error, pid = process.pid, "not reaped");
            }
        }
        if self.remove_store
            && let Err(error) = fs::remove_dir_all(&self.options.store)
        {
            tracing::debug!(%error, store = %self.options.store.display(), "left behind");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn binary() -> Binary {
        find(&Find::from_env(), &|_| {}).await.unwrap()
    }

    #[tokio::test]
    async fn a_server_starts_restarts_on_its_port_and_goes_with_its_owner() {
        let mut server = Server::start_for_test().await.unwrap();
        let (url, first, store) = (server.url(), server.pid().unwrap(), server.store().to_owned());
        assert_eq!(Server::running(&store).as_deref(), Some(url.as_str()));
        server.kill9().await.unwrap();
        assert_eq!(Server::running(&store), None);
        server.restart().await.unwrap();
        assert_eq!(server.url(), url);
        assert_ne!(server.pid().unwrap(), first);
        let last = i32::try_from(server.pid().unwrap()).unwrap();
        drop(server);
        assert_eq!(start_time(last), None, "reaped");
        assert!(!store.exists());
    }

    #[tokio::test]
    async fn a_store_has_one_user_at_a_time() {
        let server = Server::start_for_test().await.unwrap();
        let options =
            ServerOptions { store: server.store().to_owned(), binary: binary().await, sync_always: false, port: None };
        assert!(matches!(Server::start(options).await, Err(Error::StoreInUse { .. })));
    }

    #[tokio::test]
    async fn a_server_left_by_a_killed_starter_is_taken_over_or_ended() {
        let directory = tempfile::tempdir().unwrap();
        let options = ServerOptions {
            store: directory.path().to_owned(),
            binary: binary().await,
            sync_always: false,
            port: None,
        };
        let mut server = Server::start(options.clone()).await.unwrap();
        let (url, pid) = (server.url(), server.pid());
        // As after a kill of the starter: the lock is gone, the server is not.
        let mut orphan = server.process.take().unwrap();
        drop(server);
        let server = Server::start(options.clone()).await.unwrap();
        assert_eq!((server.url(), server.pid()), (url, pid), "the same one");
        let mut server = server;
        server.process.take();
        drop(server);
        let other = Server::start(ServerOptions { sync_always: true, ..options }).await.unwrap();
        assert_ne!(other.pid(), pid, "another one, since the old one did not sync");
        assert!(orphan.gone_within(Duration::from_secs(5)).await);
    }

    #[tokio::test]
    async fn a_taken_port_is_an_error_and_no_conversation_with_a_stranger() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let directory = tempfile::tempdir().unwrap();
        let options = ServerOptions {
            store: directory.path().to_owned(),
            binary: binary().await,
            sync_always: false,
            port: Some(port),
        };
        let error = Server::start(options).await.unwrap_err();
        assert!(matches!(error, Error::Start { .. }), "{error}");
    }
}
