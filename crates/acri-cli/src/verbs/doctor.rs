//! `doctor`: is everything as it must be?

use crate::{
    app::App,
    bus::{self, BusOptions},
    context::{self, ContextFile},
    failure::{NO, Silent},
    output::{Format, Out},
    verbs::show,
};
use acri::{
    Incarnation, StreamSeq, Timestamp,
    limits::{CLOCK_SKEW_MAX, EVENT_BODY_BYTES_MAX, LEASE_STOP_AFTER},
};
use acri_bus::{
    local::{self, Health},
    port::{Bus, Fault, LeaseEntry, Leased, Leases as _, StreamFacts},
};
use anyhow::Result;
use serde_json::json;
use std::{fs, path::Path, time::Duration};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri doctor
  acri doctor --nats nats://bus.example:4222 -o json

The server's version and its streams and buckets are compared with what this
version needs, the clocks with each other, and this machine with what a node
needs. A key is written to the bucket of leases and removed again; a server of
`acri up` is asked whether its streams take what is written. A stream that is
90 % full and a node that renews its lease no more are warnings. Exit status 1:
something fails.
")]
pub(crate) struct Args {}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Ok,
    Warning,
    Fails,
}

impl Verdict {
    fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Fails => "FAILS",
        }
    }
}

struct Finding {
    what: &'static str,
    verdict: Verdict,
    detail: String,
}

#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, what: &'static str, verdict: Verdict, detail: impl Into<String>) {
        self.0.push(Finding { what, verdict, detail: detail.into() });
    }
}

pub(crate) async fn perform(app: &mut App, _args: Args) -> Result<()> {
    let mut findings = Findings::default();
    match app.bus_options() {
        Ok(options) => {
            let place = app.global.nats.as_ref().map_or("the context file", |_| "--nats");
            findings.add("context", Verdict::Ok, format!("the bus is named by {place}"));
            examine_bus(&mut findings, &options).await;
            examine_server(&mut findings, app, &options).await;
        }
        Err(error) => findings.add("context", Verdict::Fails, format!("{error:#}")),
    }
    examine_machine(&mut findings);
    tell(&mut app.out, &findings.0)?;
    let fails = findings.0.iter().any(|finding| finding.verdict == Verdict::Fails);
    if fails { Err(Silent(NO).into()) } else { Ok(()) }
}

async fn examine_bus(findings: &mut Findings, options: &BusOptions) {
    // Connecting compares version, settings, streams and buckets.
    let bus = match bus::open(options, "acri doctor", bus::Role::Node).await {
        Ok(bus) => bus,
        Err(error) => return findings.add("bus", Verdict::Fails, format!("{error:#}")),
    };
    findings.add("bus", Verdict::Ok, format!("{} answers; streams and buckets are as needed", bus.server_name()));
    examine_streams(findings, &bus).await;
    let now = match bus.clock_offset_micros().await {
        Ok(offset) => {
            let skew = Duration::from_micros(offset.unsigned_abs());
            let verdict = if skew > CLOCK_SKEW_MAX { Verdict::Fails } else { Verdict::Ok };
            findings.add("clock", verdict, format!("{} ms from the bus's", offset / 1000));
            Timestamp::from_micros(show::now().as_micros().saturating_add(offset))
        }
        Err(fault) => {
            findings.add("clock", Verdict::Fails, fault.to_string());
            show::now()
        }
    };
    examine_store(findings, &bus).await;
    match bus.leases().await {
        Ok(leases) => examine_leases(findings, &leases, now),
        Err(fault) => findings.add("nodes", Verdict::Fails, fault.to_string()),
    }
}

/// Writes a key of the leases' bucket and takes it away again: a server may
/// answer everything and store nothing. What cannot be taken away again is
/// not tried, so of the other streams only the server itself knows.
async fn examine_store(findings: &mut Findings, bus: &impl Bus) {
    let nobody = Incarnation::from_uuid(uuid::Uuid::new_v4());
    let written = match bus.fence(nobody, StreamSeq(0)).await {
        Leased::Written(revision) => bus.collect_tombstone(nobody, revision).await,
        Leased::Unknown(fault) => Err(fault),
        Leased::Lost => {
            Err(Fault::Malformed { operation: "write", detail: "a key that nobody has is taken".to_owned() })
        }
    };
    match written {
        Ok(()) => findings.add("store", Verdict::Ok, "the bucket of leases takes what is written"),
        // An orchestrator need not be allowed to.
        Err(fault @ Fault::Refused { .. }) => findings.add("store", Verdict::Warning, fault.to_string()),
        Err(fault) => findings.add("store", Verdict::Fails, format!("the bucket of leases takes nothing: {fault}")),
    }
}

/// A server of `acri up` on this machine is asked how it is: it alone knows
/// that one of its streams takes nothing more.
async fn examine_server(findings: &mut Findings, app: &App, options: &BusOptions) {
    let context = context::path(app.global.context.as_deref()).and_then(|path| context::read(&path));
    let Ok(Some(ContextFile { store: Some(store), nats, .. })) = context else { return };
    if nats != options.nats {
        return;
    }
    match local::health_of(&store).await {
        None => findings.add("server", Verdict::Fails, format!("none runs on {}", store.display())),
        Some(Health::Well) => findings.add("server", Verdict::Ok, "all its streams take what is written"),
        Some(Health::Fails(detail) | Health::Silent(detail)) => findings.add("server", Verdict::Fails, detail),
    }
}

/// An entry that nobody renews outlives its owner where the bus was away or
/// put back: its age tells, not that it is there.
fn examine_leases(findings: &mut Findings, leases: &[(Incarnation, LeaseEntry)], now: Timestamp) {
    let (mut live, mut silent) = (0_usize, Vec::new());
    for (_, entry) in leases {
        if let LeaseEntry::Live { node, renewed, .. } = entry {
            let age = now.since(*renewed);
            if age <= LEASE_STOP_AFTER {
                live += 1;
            } else {
                silent.push(format!("{node} renewed its lease {} ago", show::duration(age)));
            }
        }
    }
    let rest = leases.len() - live - silent.len();
    let verdict = if live == 0 || !silent.is_empty() { Verdict::Warning } else { Verdict::Ok };
    let mut detail = vec![format!("{live} live, {rest} expired or fenced")];
    detail.append(&mut silent);
    findings.add("nodes", verdict, detail.join("; "));
}

async fn examine_streams(findings: &mut Findings, bus: &impl Bus) {
    for (what, facts) in [("events", bus.event_facts().await), ("logs", bus.log_facts().await)] {
        match facts {
            Ok(facts) => examine_room(findings, what, &facts),
            Err(fault) => findings.add(what, Verdict::Fails, fault.to_string()),
        }
    }
}

fn examine_room(findings: &mut Findings, what: &'static str, facts: &StreamFacts) {
    let full = facts.percent_full();
    let room = facts.bytes_max.map_or_else(String::new, |max| format!(" of {} ({full} %)", mib(max)));
    let held = format!("holds {} to {}, {}{room}", facts.first, facts.last, mib(facts.bytes));
    let verdict = if full >= STREAM_FULL_PERCENT { Verdict::Warning } else { Verdict::Ok };
    findings.add(what, verdict, format!("stream of {}, {held}", facts.created));
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

/// From this share of what a stream may hold on, it is about to be full.
const STREAM_FULL_PERCENT: u64 = acri::limits::EVENTS_PERCENT_MAX;
/// Below this share of free space a spool may soon be full.
const DISK_FREE_PERCENT_MIN: u64 = 5;

fn examine_machine(findings: &mut Findings) {
    match tree_control(&fs::read_to_string("/proc/self/mountinfo").unwrap_or_default()) {
        Some(place) => findings.add("cgroup", Verdict::Ok, format!("cgroup v2 at {place}")),
        None => findings.add(
            "cgroup",
            Verdict::Warning,
            "no cgroup v2 hierarchy: process trees are held by a pid namespace, or by a walk",
        ),
    }
    match context::state_dir() {
        Ok(directory) => examine_disk(findings, &directory),
        Err(error) => findings.add("disk", Verdict::Fails, format!("{error:#}")),
    }
}

/// Where the v2 hierarchy is mounted; on hybrid hosts it stands apart.
fn tree_control(mounts: &str) -> Option<&str> {
    mounts
        .lines()
        .filter(|line| line.split(" - ").nth(1).is_some_and(|rest| rest.starts_with("cgroup2 ")))
        .find_map(|line| line.split(' ').nth(4))
}

fn examine_disk(findings: &mut Findings, directory: &Path) {
    let existing = directory.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    match rustix::fs::statvfs(existing) {
        Ok(space) => {
            let free = space.f_bavail.saturating_mul(space.f_frsize);
            let percent = space.f_bavail.saturating_mul(100) / space.f_blocks.max(1);
            let verdict = if percent < DISK_FREE_PERCENT_MIN { Verdict::Warning } else { Verdict::Ok };
            let detail = format!("{} MiB free ({percent} %) for {}", free / (1 << 20), directory.display());
            findings.add("disk", verdict, detail);
        }
        Err(error) => findings.add("disk", Verdict::Warning, format!("{}: {error}", existing.display())),
    }
}

fn tell(out: &mut Out, findings: &[Finding]) -> Result<()> {
    if out.format == Format::Table {
        let rows: Vec<_> = findings
            .iter()
            .map(|finding| vec![finding.what.to_owned(), finding.verdict.as_str().to_owned(), finding.detail.clone()])
            .collect();
        return out.table(&["WHAT", "VERDICT", "DETAIL"], &rows);
    }
    let listed: Vec<_> = findings
        .iter()
        .map(|finding| {
            json!({
                "what": finding.what,
                "verdict": finding.verdict.as_str().to_ascii_lowercase(),
                "detail": finding.detail,
            })
        })
        .collect();
    out.document(&json!({"findings": listed, "checked": show::now(), "event_body_bytes_max": EVENT_BODY_BYTES_MAX}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn only(findings: Findings) -> (Verdict, String) {
        let [finding] = <[Finding; 1]>::try_from(findings.0).unwrap_or_else(|_| panic!("one finding"));
        (finding.verdict, finding.detail)
    }

    #[test]
    fn a_node_is_judged_by_the_age_of_its_lease_and_not_by_its_being_there() {
        let now = Timestamp::from_micros(1_000_000_000);
        let lease = |name: &str, age: Duration| {
            let renewed = Timestamp::from_micros(now.as_micros() - i64::try_from(age.as_micros()).unwrap());
            let entry = LeaseEntry::Live { node: name.parse().unwrap(), revision: StreamSeq(1), renewed };
            (Incarnation::from_uuid(uuid::Uuid::new_v4()), entry)
        };
        let gone = (Incarnation::from_uuid(uuid::Uuid::new_v4()), LeaseEntry::Fenced(StreamSeq(2)));
        let told = |leases: &[(Incarnation, LeaseEntry)]| {
            let mut findings = Findings::default();
            examine_leases(&mut findings, leases, now);
            only(findings)
        };
        let fresh = lease("n1", LEASE_STOP_AFTER);
        assert_eq!(told(&[fresh.clone(), gone]), (Verdict::Ok, "1 live, 1 expired or fenced".to_owned()));
        let (verdict, detail) = told(&[fresh, lease("n2", LEASE_STOP_AFTER + Duration::from_secs(1))]);
        assert_eq!(verdict, Verdict::Warning);
        assert!(detail.starts_with("1 live") && detail.contains("n2 renewed its lease 12s ago"), "{detail}");
        assert_eq!(told(&[]).0, Verdict::Warning, "no node at all");
    }

    #[test]
    fn a_stream_that_is_nearly_full_is_a_warning() {
        let told = |bytes: u64, bytes_max: Option<u64>| {
            let (created, first, last) = (Timestamp::from_micros(0), StreamSeq(1), StreamSeq(9));
            let mut findings = Findings::default();
            examine_room(&mut findings, "events", &StreamFacts { created, first, last, bytes, bytes_max });
            only(findings)
        };
        let (verdict, detail) = told(89 << 20, Some(100 << 20));
        assert_eq!(verdict, Verdict::Ok);
        assert!(detail.ends_with("89 MiB of 100 MiB (89 %)"), "{detail}");
        assert_eq!(told(90 << 20, Some(100 << 20)).0, Verdict::Warning);
        assert_eq!(told(u64::MAX, None).0, Verdict::Ok);
    }

    #[test]
    fn the_v2_hierarchy_is_found_where_it_is_mounted() {
        let hybrid = "\
35 24 0:30 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
36 35 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
37 35 0:32 / /sys/fs/cgroup/unified rw,nosuid - cgroup2 cgroup2 rw\n";
        assert_eq!(tree_control(hybrid), Some("/sys/fs/cgroup/unified"));
        assert_eq!(tree_control("36 35 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw\n"), None);
    }
}
