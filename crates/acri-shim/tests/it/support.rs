//! What the tests share: a run that is ended by its number whatever happens, and bounded waits for events.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use acri_shim::client::Client;
use acri_shim::spool::{Progress, Reader, Scratch, Stream};
use acri_shim::wire::{Body, Op, Watch};
use acri_shim::{Exit, FailureKind, Launch, Limits, Owner, Scan, SpawnError, Spawned, Tier, scan, spawn};

/// The bound of every wait.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);
pub(crate) const EXE: &str = env!("CARGO_BIN_EXE_acri-shim-test");
pub(crate) const OWNER: Owner = Owner { epoch: 3, incarnation: [9; 16] };
const ALL_TIERS: [Tier; 3] = [Tier::Cgroup, Tier::Pidns, Tier::Subreaper];

/// A directory of one run inside a temporary state directory.
pub(crate) struct Place {
    pub(crate) state: tempfile::TempDir,
    pub(crate) dir: PathBuf,
}

impl Place {
    pub(crate) fn new() -> Self {
        Self::named("run-1")
    }

    pub(crate) fn named(name: &str) -> Self {
        let state = tempfile::tempdir().expect("a temporary directory");
        let dir = state.path().join(name);
        make_private(&dir);
        Self { state, dir }
    }

    pub(crate) fn launch(&self, script: &str) -> Launch {
        Launch {
            dir: self.dir.clone(),
            argv: ["sh", "-c", script].map(str::to_owned).to_vec(),
            cwd: self.state.path().to_owned(),
            env: vec![("PATH".to_owned(), std::env::var("PATH").expect("a PATH"))],
            owner: OWNER,
            limits: Limits::default(),
            tiers: ALL_TIERS.to_vec(),
            cgroup_parent: None,
        }
    }
}

pub(crate) fn make_private(dir: &Path) {
    std::fs::create_dir_all(dir).expect("create the run directory");
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700)).expect("make it private");
}

/// A started run. Dropped: the shim is killed by its number and what it left is swept.
pub(crate) struct Run {
    pub(crate) place: Place,
    pub(crate) spawned: Spawned,
}

impl Run {
    pub(crate) fn start(script: &str) -> Self {
        Self::launch(script, |_| {})
    }

    pub(crate) fn in_tier(tier: Tier, script: &str) -> Self {
        let run = Self::launch(script, |launch| launch.tiers = vec![tier]);
        assert_eq!(run.spawned.info.tier, tier);
        run
    }

    pub(crate) fn launch(script: &str, change: impl FnOnce(&mut Launch)) -> Self {
        let place = Place::new();
        let mut launch = place.launch(script);
        change(&mut launch);
        Self::try_launch(place, &launch).expect("start the run")
    }

    pub(crate) fn try_launch(place: Place, launch: &Launch) -> Result<Self, SpawnError> {
        let spawned = spawn(Path::new(EXE), launch)?;
        Ok(Self { place, spawned })
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.place.dir
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(self.dir(), &self.spawned.token, LIMIT).expect("connect to the shim")
    }

    pub(crate) fn scan(&self) -> Scan {
        scan(self.dir()).expect("scan")
    }

    /// Waits until the shim has ended by itself, and says how the run ended.
    pub(crate) fn finished(&mut self) -> Exit {
        let status = until("the shim ends", || self.spawned.child.try_wait().expect("wait"));
        assert!(status.success(), "the shim ended with {status}");
        let scan = self.scan();
        assert!(!scan.alive, "the lock is given back");
        assert!(!self.dir().join("socket").exists(), "the socket is removed");
        scan.exit.expect("the exit is recorded")
    }

    /// Waits until stdout holds this text, and returns all of stdout.
    pub(crate) fn until_says(&self, text: &str) -> String {
        let mut client = self.client();
        let deadline = Instant::now() + LIMIT;
        let mut end = 0;
        loop {
            let seen = String::from_utf8_lossy(&self.stream(Stream::Stdout)).into_owned();
            if seen.contains(text) {
                return seen;
            }
            assert!(Instant::now() < deadline, "no {text:?} in {seen:?}");
            client.call(Op::Watch(Watch { offset: end })).expect("watch");
            match client.pushed().expect("a push") {
                Body::Spooled(spooled) => end = spooled.end,
                other => panic!("{other:?} before {text:?}"),
            }
        }
    }

    pub(crate) fn records(&self) -> Vec<Record> {
        read_all(self.dir(), 0).0
    }

    pub(crate) fn stream(&self, stream: Stream) -> Vec<u8> {
        let records = self.records();
        records.iter().filter(|r| r.stream == stream).flat_map(|r| r.payload.clone()).collect()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.spawned.child.kill();
        let _ = self.spawned.child.wait();
        let _ = acri_shim::sweep(self.dir(), None);
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) offset: u64,
    pub(crate) next: u64,
    pub(crate) stream: Stream,
    pub(crate) stream_offset: u64,
    pub(crate) payload: Vec<u8>,
}

/// All whole records from an offset on, and what stopped the reader.
pub(crate) fn read_all(dir: &Path, offset: u64) -> (Vec<Record>, Progress) {
    let mut reader = Reader::open(dir, offset);
    let (mut scratch, mut records) = (Scratch::default(), Vec::new());
    loop {
        let progress = reader.read_batch(&mut scratch, 1 << 20, |r| {
            records.push(Record {
                offset: r.offset,
                next: r.next,
                stream: r.stream,
                stream_offset: r.stream_offset,
                payload: r.payload.to_vec(),
            });
        });
        match progress.expect("read the spool") {
            Progress::More => {}
            other => return (records, other),
        }
    }
}

/// Looks until there is an answer, for what offers no event to wait for.
pub(crate) fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(answer) = look() {
            return answer;
        }
        assert!(Instant::now() < deadline, "waited {LIMIT:?} until {what}");
        #[expect(clippy::disallowed_methods, reason = "a bounded look at what the kernel offers no event for")]
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Says that a test could not be made here.
#[expect(clippy::print_stdout, reason = "the only way to tell who runs the tests")]
pub(crate) fn skipped(why: &str) {
    println!("skipped: {why}");
}

/// The tiers that can be had here, found out once. The third one always can.
pub(crate) fn tiers() -> &'static [Tier] {
    static TIERS: OnceLock<Vec<Tier>> = OnceLock::new();
    TIERS.get_or_init(|| {
        let available = |tier: &Tier| {
            let place = Place::new();
            let mut launch = place.launch("exit 0");
            launch.tiers = vec![*tier];
            match Run::try_launch(place, &launch) {
                Ok(_) => true,
                Err(SpawnError::Failed { kind: FailureKind::Tier, text }) => {
                    skipped(&text);
                    false
                }
                Err(other) => panic!("{other:?}"),
            }
        };
        let tiers: Vec<Tier> = ALL_TIERS.into_iter().filter(available).collect();
        assert!(tiers.contains(&Tier::Subreaper));
        tiers
    })
}
