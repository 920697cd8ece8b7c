//! A bus of a test's own, nodes as processes on it, and what ends them all.

use crate::{PATIENCE, look, process, within};
use acri::{AgentId, AgentSpec, NodeId, Payload, RunId};
use acri_bus::{
    local::{Server, User},
    nats::{self, NatsBus},
};
use acri_client::{Client, Limits, SharedBus};
use rustix::process::Signal;
use std::{
    path::{Path, PathBuf},
    process::{Output, Stdio},
    sync::Arc,
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
};

/// The variable by which everything of a site is found again.
pub const MARK: &str = "ACRI_TEST_SITE";

/// How long a client here waits before it asks again: a request that was sent
/// to a node as it died has no answer.
const ATTEMPT: Duration = Duration::from_secs(2);

/// A bus with a store of its own, and a directory for nodes. Dropped, it ends
/// everything that was started on it.
#[derive(Debug)]
pub struct Site {
    /// The bus.
    pub server: Server,
    program: PathBuf,
    directory: tempfile::TempDir,
    mark: String,
}

impl Site {
    /// A site for the program under test, with a server that was just started.
    pub async fn start(program: &str) -> Self {
        Self::start_with(program, Vec::new()).await
    }

    /// The same, with further users of the bus.
    pub async fn start_with(program: &str, users: Vec<User>) -> Self {
        let server = within("a nats-server", Box::pin(Server::start_for_test_with(users))).await;
        Self {
            server: server.expect("a nats-server of one's own"),
            program: program.into(),
            directory: tempfile::tempdir().expect("a directory"),
            mark: uuid::Uuid::new_v4().simple().to_string(),
        }
    }

    /// A directory of this site.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// What marks every process of this site.
    #[must_use]
    pub fn mark(&self) -> &str {
        &self.mark
    }

    /// Processes of this site that live, harnesses and nodes.
    #[must_use]
    pub fn processes(&self) -> Vec<i32> {
        process::with_variable(MARK, &self.mark).into_iter().filter(|pid| process::lives(*pid)).collect()
    }

    /// Where a node keeps its state.
    #[must_use]
    pub fn state_dir(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Starts a node and waits until it says that it is ready. Started again
    /// under the same name, it is that node's next life.
    pub async fn node(&self, name: &str) -> NodeProcess {
        self.node_with(name, &self.server.url(), &[]).await
    }

    /// The same, over another way to the bus and with further options.
    pub async fn node_with(&self, name: &str, url: &str, options: &[&str]) -> NodeProcess {
        let mut node = self.spawn_node(name, url, options);
        within("the node to be ready", node.ready()).await;
        node
    }

    /// Starts a node, and waits for nothing.
    pub fn spawn_node(&self, name: &str, url: &str, options: &[&str]) -> NodeProcess {
        let mut command = self.command();
        command
            .args(["--nats", url, "--output", "json", "node", "--name", name, "--state-dir"])
            .arg(self.state_dir(name))
            .args(["--heartbeat-every", "250ms"])
            .args(options);
        self.spawn(name, command)
    }

    /// Starts `up` with its usual places below this site's directory, and waits
    /// until it says that it is ready.
    pub async fn up(&self, global: &[&str]) -> NodeProcess {
        self.up_with(global, &[]).await
    }

    /// The same, with further options of its own.
    pub async fn up_with(&self, global: &[&str], options: &[&str]) -> NodeProcess {
        let mut up = self.spawn_up(|command| {
            command.args(global).arg("up").args(options);
        });
        within("it to be up", up.ready()).await;
        up
    }

    /// Starts it as `change` says, and waits for nothing.
    pub fn spawn_up(&self, change: impl FnOnce(&mut Command)) -> NodeProcess {
        let mut command = self.command();
        change(command.args(["--output", "json"]));
        self.spawn("up", command)
    }

    fn spawn(&self, name: &str, mut command: Command) -> NodeProcess {
        let log = self.directory.path().join(format!("{name}.log"));
        let file = std::fs::File::options().create(true).append(true).open(&log);
        let mut child = command
            .env("ACRI_LOG", std::env::var("ACRI_TEST_LOG").unwrap_or_else(|_| "info".to_owned()))
            .env("RUST_BACKTRACE", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(file.expect("the node's log"))
            .spawn()
            .expect("the program under test");
        let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        NodeProcess { child, stdout, log }
    }

    /// The program under test, with nothing of our own environment but what
    /// finds a nats-server.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.env_clear();
        for name in ["PATH", "HOME", "XDG_CACHE_HOME", "ACRI_NATS_SERVER", "TMPDIR"] {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        command.env(MARK, &self.mark).env("XDG_STATE_HOME", self.directory.path());
        command.kill_on_drop(true);
        command
    }

    /// Runs the program under test on this bus, and waits for its end.
    pub async fn acri(&self, arguments: &[&str]) -> Output {
        let mut command = self.command();
        command.args(["--nats", &self.server.url(), "--principal", "test"]).args(arguments);
        let output = within("the program to end", command.stdin(Stdio::null()).output()).await;
        output.expect("the program under test")
    }

    /// A connection to the bus that makes what is missing there.
    pub async fn bus(&self) -> SharedBus {
        let options = nats::Options { provision: true, ..nats::Options::new([self.server.url()]) };
        Arc::new(within("the bus", Box::pin(NatsBus::connect(options))).await.expect("the bus"))
    }

    /// A client on a connection of its own.
    pub async fn client(&self) -> Client {
        let limits = Limits {
            command_deadline: PATIENCE,
            create_deadline: PATIENCE,
            attempt_timeout: ATTEMPT,
            create_attempt_timeout: ATTEMPT,
            ..Limits::default()
        };
        Client::with_limits(self.bus().await, "test".to_owned(), limits)
    }

    /// A spec that runs a shell script.
    #[must_use]
    pub fn spec(&self, script: &str) -> AgentSpec {
        self.command_spec(&["/bin/sh", "-c", script])
    }

    /// A spec that runs a command.
    #[must_use]
    pub fn command_spec(&self, command: &[&str]) -> AgentSpec {
        let command = command.iter().map(|&word| word.to_owned()).collect();
        let mut spec = AgentSpec::new("process".parse().expect("a name"), command);
        spec.environment.insert(MARK.to_owned(), self.mark.clone());
        spec
    }

    /// Creates an agent that runs a shell script, and starts it.
    pub async fn run(&self, client: &Client, script: &str) -> (AgentId, RunId) {
        begin(client, self.spec(script)).await
    }
}

/// Creates an agent and starts a run without a task.
pub async fn begin(client: &Client, spec: AgentSpec) -> (AgentId, RunId) {
    let agent = client.create(spec).await.expect("create").agent;
    let run = client.start(agent, Payload::text("")).await.expect("start").run;
    (agent, run)
}

impl Drop for Site {
    fn drop(&mut self) {
        // `ACRI_TEST_KEEP` leaves the nodes' logs where one can read them.
        if std::env::var_os("ACRI_TEST_KEEP").is_some() {
            self.directory.disable_cleanup(true);
        }
        // Nodes first, so that none starts anything more; then the holders,
        // whose harnesses mostly go with them; then the rest.
        for pid in self.processes() {
            if is_ours(pid, &self.program) {
                process::kill(pid);
            }
        }
        if let Ok(entries) = std::fs::read_dir(self.directory.path()) {
            for entry in entries.flatten() {
                process::end_holders(&entry.path());
            }
        }
        for _ in 0..100 {
            let left = self.processes();
            if left.is_empty() {
                break;
            }
            left.into_iter().for_each(process::kill);
        }
    }
}

fn is_ours(pid: i32, program: &Path) -> bool {
    std::fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == program)
}

/// A node as a process. Dropped, it is killed; its harnesses live on.
#[derive(Debug)]
pub struct NodeProcess {
    child: Child,
    stdout: BufReader<tokio::process::ChildStdout>,
    log: PathBuf,
}

impl NodeProcess {
    /// Waits until it says that it is ready.
    ///
    /// # Panics
    /// If it ends before.
    pub async fn ready(&mut self) {
        let mut line = String::new();
        let read = self.stdout.read_line(&mut line).await;
        assert!(read.is_ok() && line.contains("\"ready\""), "the node did not start: {line:?}\n{}", self.log());
    }

    /// Its process.
    ///
    /// # Panics
    /// If it was waited for already.
    #[must_use]
    pub fn pid(&self) -> i32 {
        let pid = self.child.id().expect("the node runs");
        i32::try_from(pid).expect("a pid")
    }

    /// Ends it as a crash would.
    pub async fn kill9(&mut self) {
        process::signal(self.pid(), Signal::KILL);
        let _ = within("the node's end", self.child.wait()).await;
    }

    /// Has it drain, and waits for its end.
    pub async fn drain(&mut self) -> std::process::ExitStatus {
        process::signal(self.pid(), Signal::INT);
        within("the node to drain", self.child.wait()).await.expect("an exit status")
    }

    /// Sends it a Ctrl-C.
    pub fn interrupt(&self) {
        process::signal(self.pid(), Signal::INT);
    }

    /// Waits until it has written this to its log.
    pub async fn says(&self, words: &str) {
        crate::eventually(words, || async { self.log().contains(words).then_some(()) }).await;
    }

    /// Waits for its end.
    pub async fn ended(&mut self) -> std::process::ExitStatus {
        within("its end", self.child.wait()).await.expect("an exit status")
    }

    /// The same, once.
    pub async fn drain_if_alive(&mut self) {
        if self.lives() {
            self.drain().await;
        }
    }

    /// Freezes it, and waits until it stands still.
    pub async fn pause(&self) {
        process::signal(self.pid(), Signal::STOP);
        crate::eventually("the node to stand still", || async { process::stands_still(self.pid()).then_some(()) })
            .await;
    }

    /// Lets it go on.
    pub fn resume(&self) {
        process::signal(self.pid(), Signal::CONT);
    }

    /// Whether it lives.
    pub fn lives(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// What it wrote to its log, in all its lives.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

/// A program that writes numbered lines to both streams in turn, `batch` at a
/// time, until its `stop` file is there.
#[derive(Debug)]
pub struct Chatty {
    /// Its agent.
    pub agent: AgentId,
    /// Its run.
    pub run: RunId,
    stop: PathBuf,
}

impl Chatty {
    /// Starts one.
    ///
    /// # Panics
    /// If that does not work.
    pub async fn start(site: &Site, client: &Client, batch: u32, pause: &str) -> Self {
        let script = format!(
            "i=0; while [ ! -e stop ]; do n=$((i+{batch})); while [ $i -lt $n ]; do \
             echo \"out $i\"; echo \"err $i\" >&2; i=$((i+1)); done; sleep {pause}; done"
        );
        let directory = site.directory().join(format!("work-{}", uuid::Uuid::new_v4().simple()));
        std::fs::create_dir(&directory).expect("a directory");
        let mut spec = site.spec(&script);
        spec.working_directory = directory.to_str().map(str::to_owned);
        let (agent, run) = begin(client, spec).await;
        Self { agent, run, stop: directory.join("stop") }
    }

    /// The file that has it end by itself.
    #[must_use]
    pub fn stop(&self) -> &Path {
        &self.stop
    }

    /// Has it end by itself, and checks that it wrote everything once and in
    /// order. Tells how many lines each stream had.
    ///
    /// # Panics
    /// If anything is missing, or not as it should be.
    pub async fn finish(&self, client: &Client) -> usize {
        std::fs::write(&self.stop, "").expect("a file");
        let status = look::ended(client, self.agent, self.run).await;
        assert_eq!(status.state, acri::RunState::Completed, "{status:?}");
        let written = look::written(client, self.agent, self.run).await;
        let (out, err) = (written.out(), written.err());
        look::assert_numbered(&out, "out");
        look::assert_numbered(&err, "err");
        assert_eq!(out.len(), err.len(), "both streams to their end");
        let starts = look::types(client, self.agent).await;
        let starts = starts.iter().filter(|name| *name == "run.started").count();
        assert_eq!(starts, 1, "its program was started once");
        out.len()
    }
}

/// The name of a node, as an id.
///
/// # Panics
/// If it is none.
#[must_use]
pub fn node_id(name: &str) -> NodeId {
    name.parse().expect("a node's name")
}

/// A lease of two seconds: the shortest with which a slow machine keeps up.
pub const SHORT_LEASE: [&str; 2] = ["--lease-ttl", "2s"];
/// The same as a time.
pub const SHORT_LEASE_TTL: Duration = Duration::from_secs(2);
