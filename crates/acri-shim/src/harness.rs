//! Starting the harness itself: look-up, checks, and what happens between fork and exec.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{Access, Mode, OFlags, access, open};
use rustix::process::{
    Resource, Rlimit, Signal, getpid, getppid, getrlimit, set_parent_process_death_signal, setrlimit, setsid,
};

use crate::launch::{FailureKind, Launch};
use crate::sys;

/// What the search path is where the given environment has none.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";
/// Errno by which the child says that its cgroup would not take it: exec itself never returns this one.
const JOIN_REFUSED: i32 = libc::EOWNERDEAD;

/// Why the harness cannot be started, for the node.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) kind: FailureKind,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn new(kind: FailureKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into() }
    }

    /// An error of a file of ours, with its path.
    pub(crate) fn at(path: &Path, error: &io::Error) -> Self {
        Self::new(FailureKind::Other, format!("{}: {error}", path.display()))
    }
}

/// A launch whose program and working directory were found.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    launch: &'a Launch,
    program: PathBuf,
    cwd: OwnedFd,
    /// Write ends of the harness's pipes.
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
    /// The OOM score adjustment that the shim had before it changed its own.
    oom_score: Option<Vec<u8>>,
}

impl<'a> Plan<'a> {
    pub(crate) fn new(
        launch: &'a Launch,
        stdout: OwnedFd,
        stderr: OwnedFd,
        oom_score: Option<Vec<u8>>,
    ) -> Result<Self, Failure> {
        let cwd = open_cwd(&launch.cwd)?;
        let program = resolve(launch)?;
        Ok(Self { launch, program, cwd, stdout, stderr, oom_score })
    }

    /// The descriptors that a forked stage needs to start the harness.
    pub(crate) fn descriptors(&self) -> [i32; 3] {
        [self.cwd.as_raw_fd(), self.stdout.as_raw_fd(), self.stderr.as_raw_fd()]
    }

    /// Forks and executes the harness as a child of the calling process; it dies with it. Returns its process number.
    pub(crate) fn start(&self, cgroup_procs: Option<BorrowedFd<'_>>) -> io::Result<i32> {
        let (argv0, rest) = self.launch.argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        #[expect(clippy::disallowed_methods, reason = "this is the place where harnesses are spawned")]
        let mut command = Command::new(&self.program);
        command.arg0(argv0).args(rest).env_clear();
        command.envs(self.launch.env.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null());
        command.stdout(Stdio::from(self.stdout.try_clone()?)).stderr(Stdio::from(self.stderr.try_clone()?));
        let (cwd, parent, cgroup) = (self.cwd.as_raw_fd(), getpid(), cgroup_procs.map(|fd| fd.as_raw_fd()));
        let oom_score = self.oom_score.clone();
        let open_files = self.launch.limits.open_files;
        let prepare = move || {
            setsid()?;
            set_parent_process_death_signal(Some(Signal::KILL))?;
            if getppid() != Some(parent) {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            #[expect(unsafe_code, reason = "both descriptors are open in the parent until spawn returns")]
            let (cwd, cgroup) = unsafe { (BorrowedFd::borrow_raw(cwd), cgroup.map(|fd| BorrowedFd::borrow_raw(fd))) };
            if let Some(cgroup) = cgroup {
                rustix::io::write(cgroup, b"0").map_err(|_| io::Error::from_raw_os_error(JOIN_REFUSED))?;
            }
            if let Some(score) = &oom_score {
                restore_oom_score(score);
            }
            if let Some(wanted) = open_files {
                let maximum = getrlimit(Resource::Nofile).maximum;
                let current = maximum.map_or(wanted, |maximum| maximum.min(wanted));
                setrlimit(Resource::Nofile, Rlimit { current: Some(current), maximum })?;
            }
            rustix::process::fchdir(cwd)?;
            sys::default_signals();
            Ok(())
        };
        #[expect(
            unsafe_code,
            reason = "the closure makes system calls only: no allocation, no lock; the caller has one thread"
        )]
        unsafe {
            command.pre_exec(prepare);
        }
        let child = command.spawn()?;
        i32::try_from(child.id()).map_err(|_| io::ErrorKind::InvalidData.into())
    }

    /// What a failed [`Self::start`] means. `None`: the cgroup refused, another tier may do.
    pub(crate) fn judge(&self, error: &io::Error) -> Option<Failure> {
        let kind = match error.raw_os_error() {
            Some(JOIN_REFUSED) => return None,
            // It was there a moment ago: what is missing is what its first line names.
            Some(libc::ENOENT) if self.program.exists() => {
                let text = format!("{} may not be executed: its interpreter does not exist", self.program.display());
                return Some(Failure::new(FailureKind::NotFound, text));
            }
            Some(libc::ENOENT | libc::ENOTDIR) => FailureKind::NotFound,
            Some(libc::EACCES | libc::EPERM) => FailureKind::Permission,
            Some(libc::E2BIG | libc::EAGAIN | libc::ENOMEM | libc::EMFILE | libc::ENFILE) => FailureKind::Limits,
            _ => FailureKind::Other,
        };
        Some(Failure::new(kind, format!("execute {}: {error}", self.program.display())))
    }
}

/// Between fork and exec: system calls only. A harness must not inherit the shim's protection from the OOM killer.
fn restore_oom_score(score: &[u8]) {
    if let Ok(file) = open(c"/proc/self/oom_score_adj", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()) {
        let _ = rustix::io::write(&file, score);
    }
}

fn open_cwd(cwd: &Path) -> Result<OwnedFd, Failure> {
    let fail =
        |error: io::Error| Failure::new(FailureKind::Cwd, format!("working directory {}: {error}", cwd.display()));
    if !cwd.is_absolute() {
        return Err(fail(io::Error::new(io::ErrorKind::InvalidInput, "is not an absolute path")));
    }
    let fd =
        open(cwd, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).map_err(|e| fail(e.into()))?;
    access(cwd, Access::EXEC_OK).map_err(|e| fail(e.into()))?;
    Ok(fd)
}

/// Finds the program as a shell would, on the PATH of the environment that the harness will have.
fn resolve(launch: &Launch) -> Result<PathBuf, Failure> {
    let name = launch.argv.first().filter(|name| !name.is_empty());
    let Some(name) = name else {
        return Err(Failure::new(FailureKind::NotFound, "no program is named"));
    };
    if name.contains('/') {
        let path = launch.cwd.join(name);
        return check_program(&path).map(|()| path.clone()).map_err(|kind| unusable(kind, &path.display()));
    }
    let given = launch.env.iter().rev().find(|(key, _)| key == "PATH").map(|(_, value)| value.as_str());
    let mut kind = FailureKind::NotFound;
    for directory in given.unwrap_or(DEFAULT_PATH).split(':') {
        // An empty or relative entry counts from the working directory.
        let path = launch.cwd.join(directory).join(name);
        match check_program(&path) {
            Ok(()) => return Ok(path),
            Err(FailureKind::Permission) => kind = FailureKind::Permission,
            Err(_) => {}
        }
    }
    Err(unusable(kind, &format_args!("{name} on PATH {}", given.unwrap_or(DEFAULT_PATH))))
}

fn unusable(kind: FailureKind, what: &dyn std::fmt::Display) -> Failure {
    let why = if kind == FailureKind::Permission { "is not permitted to be executed" } else { "does not exist" };
    Failure::new(kind, format!("program {what} {why}"))
}

fn check_program(path: &Path) -> Result<(), FailureKind> {
    let kind = |error: &io::Error| match error.kind() {
        io::ErrorKind::PermissionDenied => FailureKind::Permission,
        _ => FailureKind::NotFound,
    };
    let metadata = std::fs::metadata(path).map_err(|e| kind(&e))?;
    if !metadata.is_file() {
        return Err(FailureKind::Permission);
    }
    access(path, Access::EXEC_OK).map_err(|_| FailureKind::Permission)
}
