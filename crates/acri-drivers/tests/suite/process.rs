//! The driver of real processes, with a shim that is the tests' own program.

use acri::{
    AgentId, AgentSpec, ErrorCode, RunId,
    spec::{Completion, Stdin},
};
use acri_drivers::{
    driver::Driver,
    process::{Config, ProcessDriver},
    suite::{Fixture, Refused},
};
use acri_shim::Tier;
use async_trait::async_trait;
use rustix::{
    fs::{Mode, OFlags, mkfifoat, open},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use std::{
    fmt::Write as _,
    fs::File,
    io::Write as _,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};
use tempfile::TempDir;

pub(crate) const SHIM: &str = env!("CARGO_BIN_EXE_acri-drivers-test-shim");

pub(crate) struct Processes {
    pub(crate) state: TempDir,
    tiers: Vec<Tier>,
    /// Ends of fifos that stay open, or what is in them would be gone.
    fifos: Mutex<Vec<File>>,
}

impl Processes {
    pub(crate) fn new(tiers: &[Tier]) -> Self {
        let state = TempDir::new().unwrap();
        Self { state, tiers: tiers.to_vec(), fifos: Mutex::default() }
    }

    pub(crate) fn config(&self) -> Config {
        Config { tiers: self.tiers.clone(), ..Config::new(self.state.path(), SHIM) }
    }

    pub(crate) fn run_dir(&self, agent: AgentId, run: RunId) -> PathBuf {
        self.state.path().join(format!("runs/{agent}/{run}"))
    }
}

impl Drop for Processes {
    /// Leaves nothing alive, whatever the test left.
    fn drop(&mut self) {
        for agent in std::fs::read_dir(self.state.path().join("runs")).into_iter().flatten().flatten() {
            for run in std::fs::read_dir(agent.path()).into_iter().flatten().flatten() {
                signal_shim(&run.path(), Signal::KILL);
                while acri_shim::sweep(&run.path(), None)
                    .is_err_and(|error| error.kind() == std::io::ErrorKind::ResourceBusy)
                {
                    std::thread::yield_now();
                }
            }
        }
    }
}

/// Signals the very shim that holds a run directory.
pub(crate) fn signal_shim(dir: &Path, signal: Signal) {
    let Ok(scan) = acri_shim::scan(dir) else { return };
    let Some(meta) = scan.meta.filter(|_| scan.alive) else { return };
    let Some(pid) = Pid::from_raw(meta.shim.pid) else { return };
    let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { return };
    if meta.shim.exists() {
        let _ = pidfd_send_signal(&pidfd, signal);
    }
}

pub(crate) fn spec_of(command: &[&str]) -> AgentSpec {
    AgentSpec::new("process".parse().unwrap(), command.iter().map(|&word| word.to_owned()).collect())
}

/// The script's language as a shell's.
fn shell(script: &[&str]) -> String {
    if let [stop, say, "idle"] = script
        && let (Some(code), Some(text)) = (stop.strip_prefix("on stop exit "), say.strip_prefix("say "))
    {
        return format!("exec '{SHIM}' listen {code} '{text}'");
    }
    let mut lines = String::new();
    for step in script {
        let (verb, rest) = step.split_once(' ').unwrap_or((step, ""));
        let quoted = rest.replace('\'', r"'\''");
        match (verb, rest) {
            ("say", _) => writeln!(lines, "printf '%s\\n' '{quoted}'"),
            ("ask", _) => writeln!(lines, "printf '%s\\n' '!ask {quoted}'"),
            ("err", _) => writeln!(lines, "printf '%s\\n' '{quoted}' >&2"),
            ("raw", hex) => {
                let digits = hex.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
                let octal: String =
                    digits.map(|byte| format!("\\{:03o}", u8::from_str_radix(byte, 16).unwrap())).collect();
                writeln!(lines, "printf '{octal}'")
            }
            ("wait", name) => writeln!(lines, "mkfifo {name} 2>/dev/null; read -r _ < {name}"),
            ("flood", rest) => {
                let (count, bytes) = rest.split_once(' ').unwrap();
                let (last, width) = (count.parse::<u64>().unwrap() - 1, bytes.parse::<u64>().unwrap() - 1);
                writeln!(lines, "seq -f '%0{width}.0f' 0 {last}")
            }
            ("exit", code) => writeln!(lines, "exit {code}"),
            ("signal", number) => writeln!(lines, "kill -{number} $$"),
            ("ignore", "stop") => writeln!(lines, "trap '' TERM"),
            // No second process: a signal to all of a tree may miss one that begins just then.
            ("idle" | "hang", "") => writeln!(lines, "exec sleep infinity"),
            _ => panic!("no step: {step}"),
        }
        .unwrap();
    }
    lines
}

#[async_trait]
impl Fixture for Processes {
    fn driver(&self) -> Arc<dyn Driver> {
        Arc::new(ProcessDriver::new(self.config()).unwrap())
    }

    fn spec(&self, script: &[&str]) -> AgentSpec {
        spec_of(&["sh", "-c", &shell(script)])
    }

    async fn let_go(&self, agent: AgentId, _run: RunId, name: &str) {
        let path = self.state.path().join(format!("agents/{agent}/work/{name}"));
        // Whoever comes first makes it.
        let _ = mkfifoat(rustix::fs::CWD, &path, Mode::RWXU);
        // Reading and writing, so that opening does not wait for the harness.
        let fd = open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let mut fifo = File::from(fd);
        fifo.write_all(b"go\n").unwrap();
        self.fifos.lock().unwrap().push(fifo);
    }

    async fn crash(&self, agent: AgentId, run: RunId) {
        signal_shim(&self.run_dir(agent, run), Signal::KILL);
    }

    async fn lose(&self, agent: AgentId, run: RunId) {
        let dir = self.run_dir(agent, run);
        signal_shim(&dir, Signal::KILL);
        while acri_shim::scan(&dir).unwrap().alive {
            tokio::task::yield_now().await;
        }
        for entry in std::fs::read_dir(&dir).unwrap().flatten() {
            if entry.file_name().to_string_lossy().starts_with("spool-") {
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
    }

    fn refused(&self) -> Vec<Refused> {
        let plain = self.state.path().join("plain");
        std::fs::write(&plain, "#!/bin/sh\n").unwrap();
        std::fs::set_permissions(&plain, std::fs::Permissions::from_mode(0o600)).unwrap();
        let plain = plain.to_str().unwrap();
        let sh = || spec_of(&["sh", "-c", "exit 0"]);
        let within = |directory: &str| AgentSpec { working_directory: Some(directory.to_owned()), ..sh() };
        let elsewhere = AgentSpec { environment: [("PATH".to_owned(), "/nowhere".to_owned())].into(), ..sh() };
        let refused = |why, spec, code, field| Refused { why, spec, code, field };
        let node = ErrorCode::FailedPrecondition;
        vec![
            refused("no program", spec_of(&[]), ErrorCode::InvalidArgument, "command"),
            refused("a missing program", spec_of(&["no-such-program-of-acri"]), node, "command"),
            refused("a missing path", spec_of(&["/no/such/program"]), node, "command"),
            refused("a file without permission", spec_of(&[plain]), node, "command"),
            refused("a directory", spec_of(&["/bin"]), node, "command"),
            refused("a program that is not on the spec's PATH", elsewhere, node, "command"),
            refused("a relative working directory", within("tmp"), ErrorCode::InvalidArgument, "working_directory"),
            refused("a missing working directory", within("/no/such/directory"), node, "working_directory"),
            refused("a working directory that is a file", within(plain), node, "working_directory"),
            refused(
                "records on standard input",
                AgentSpec { stdin: Stdin::Records, ..sh() },
                ErrorCode::Unsupported,
                "stdin",
            ),
            refused(
                "completion by record",
                AgentSpec { completion: Completion::Record, ..sh() },
                ErrorCode::Unsupported,
                "completion",
            ),
            refused(
                "a variable of the node's",
                AgentSpec { environment: [("ACRI_TASK".to_owned(), String::new())].into(), ..sh() },
                ErrorCode::InvalidArgument,
                "environment",
            ),
        ]
    }
}

pub(crate) fn best_tier() -> Processes {
    Processes::new(&[Tier::Cgroup, Tier::Pidns, Tier::Subreaper])
}

pub(crate) fn second_tier() -> Processes {
    Processes::new(&[Tier::Pidns, Tier::Subreaper])
}

pub(crate) fn last_tier() -> Processes {
    Processes::new(&[Tier::Subreaper])
}

acri_drivers::driver_suite!(in_the_best_tier, super::best_tier);
acri_drivers::driver_suite!(in_the_second_tier, super::second_tier);
acri_drivers::driver_suite!(in_the_last_tier, super::last_tier);
