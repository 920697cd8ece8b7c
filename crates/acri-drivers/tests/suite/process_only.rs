//! What only real processes have: environments, directories, trees, shims that
//! hang, and a machine that was restarted.

use super::process::{Processes, best_tier, signal_shim, spec_of};
use acri::limits::PROCESS_TASK_BYTES_MAX;
use acri::{
    AgentId, AgentSpec, CommandId, ErrorCode, Incarnation, Payload, RunId, event::FailReason, id::Epoch, log::Stream,
};
use acri_drivers::{
    driver::{Attached, ChunkEnd, Driver, Fault, KillRequest, Owner, Provisioned, Session, Start, StartError},
    process::{Config, ProcessDriver},
};
use acri_shim::{Meta, Phase, Process};
use rustix::process::Signal;
use std::{os::unix::fs::PermissionsExt as _, path::Path, sync::Arc, time::Duration};
use uuid::Uuid;

const BATCH_BYTES: usize = 1024 * 1024;

pub(crate) fn agent(number: u64) -> AgentId {
    AgentId::from_uuid(Uuid::from_u64_pair(3, number))
}

pub(crate) fn run(number: u64) -> RunId {
    RunId::from_uuid(Uuid::from_u64_pair(4, number))
}

pub(crate) fn owner(epoch: u64) -> Owner {
    Owner { epoch: Epoch(epoch), incarnation: Incarnation::from_uuid(Uuid::from_u64_pair(5, epoch)) }
}

pub(crate) fn kill(epoch: u64) -> KillRequest {
    KillRequest {
        command: CommandId::from_uuid(Uuid::from_u64_pair(6, epoch)),
        principal: "a test".to_owned(),
        reason: "because".to_owned(),
        owner: owner(epoch),
    }
}

pub(crate) fn driver(fixture: &Processes) -> ProcessDriver {
    ProcessDriver::new(fixture.config()).unwrap()
}

fn order(number: u64, spec: &AgentSpec) -> Start {
    Start {
        agent: agent(number),
        run: run(number),
        spec: spec.clone(),
        provisioned: Provisioned::default(),
        task: Payload::text("the task's\ntext"),
        owner: owner(1),
    }
}

pub(crate) async fn start(driver: &ProcessDriver, number: u64, spec: &AgentSpec) -> Arc<dyn Session> {
    driver.create(agent(number), spec).await.unwrap();
    driver.start(&order(number, spec)).await.unwrap()
}

pub(crate) async fn until(session: &dyn Session, done: impl Fn(&str) -> bool) -> String {
    let (mut text, mut next) = (String::new(), 0);
    while !done(&text) {
        let chunk = session.output(next, BATCH_BYTES).await.unwrap();
        for record in chunk.records.iter().filter(|record| record.stream == Stream::Stdout) {
            text.push_str(std::str::from_utf8(&record.bytes).unwrap());
        }
        next = chunk.next;
        if chunk.end != ChunkEnd::Open {
            break;
        }
    }
    text
}

pub(crate) async fn all(session: &dyn Session) -> String {
    until(session, |_| false).await
}

/// Whether a process is there and no zombie, which only its new parent can remove.
fn lives(process: Process) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.pid)).unwrap_or_default();
    process.exists() && !stat.rsplit(") ").next().is_some_and(|fields| fields.starts_with(['Z', 'X']))
}

/// Waits until a look says yes; what it looks at has no event.
pub(crate) async fn eventually(mut look: impl FnMut() -> bool) {
    let looking = async {
        while !look() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), looking).await.expect("it becomes so within ten seconds");
}

#[tokio::test]
async fn the_environment_is_the_specs_and_nothing_of_the_nodes() {
    let fixture = best_tier();
    let mut spec = spec_of(&["env"]);
    spec.environment.insert("GREETING".to_owned(), "a b".to_owned());
    let text = all(&*start(&driver(&fixture), 1, &spec).await).await;
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    let (agent, run) = (format!("ACRI_AGENT={}", agent(1)), format!("ACRI_RUN={}", run(1)));
    let expected = [&agent, &run, "ACRI_TASK=the task's", "GREETING=a b", "PATH=/usr/local/bin:/usr/bin:/bin", "text"];
    assert_eq!(lines, expected);
}

#[tokio::test]
async fn the_largest_task_reaches_the_program() {
    let fixture = best_tier();
    let driver = driver(&fixture);
    let spec = spec_of(&["sh", "-c", "printf %s \"$ACRI_TASK\" | wc -c"]);
    driver.create(agent(1), &spec).await.unwrap();
    let task = Payload::text("x".repeat(PROCESS_TASK_BYTES_MAX));
    let session = driver.start(&Start { task, ..order(1, &spec) }).await.unwrap();
    assert_eq!(all(&*session).await, format!("{PROCESS_TASK_BYTES_MAX}\n"));
}

#[tokio::test]
async fn directories_are_private_and_a_fresh_one_is_where_the_program_runs() {
    let fixture = best_tier();
    let driver = driver(&fixture);
    let spec = spec_of(&["sh", "-c", "pwd"]);
    let provisioned = driver.create(agent(1), &spec).await.unwrap();
    let work = provisioned.working_directory.clone().unwrap();
    let session = driver.start(&Start { provisioned, ..order(1, &spec) }).await.unwrap();
    assert_eq!(all(&*session).await, format!("{work}\n"));
    for directory in [Path::new(&work), &fixture.run_dir(agent(1), run(1)), &fixture.state.path().join("runs")] {
        let mode = std::fs::metadata(directory).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700, "{}", directory.display());
    }
    session.exit().await.unwrap();
    driver.remove(agent(1)).await;
    assert!(!Path::new(&work).exists() && !fixture.run_dir(agent(1), run(1)).exists());
}

#[tokio::test]
async fn a_kill_ends_descendants_that_tried_to_get_away() {
    let fixture = best_tier();
    let driver = driver(&fixture);
    let script = "setsid sh -c 'sleep infinity & echo $!; trap \"\" TERM HUP; sleep infinity' & wait";
    // Numbers from within a pid namespace would mean nothing here.
    let session = start(&driver, 1, &spec_of(&["sh", "-c", script])).await;
    let text = until(&*session, |text| text.ends_with('\n')).await;
    let in_namespace = session.info().tree_control.as_deref() == Some("pidns");
    let child = (!in_namespace).then(|| Process::of(text.trim().parse().unwrap()).unwrap());
    driver.kill_switch(agent(1), run(1)).kill(kill(1)).await.unwrap();
    assert!(child.is_none_or(|child| !child.exists()));
    assert!(session.exit().await.unwrap().killed.is_some());
}

#[tokio::test]
async fn a_kill_does_without_a_shim_that_hangs() {
    let fixture = best_tier();
    let driver = driver(&fixture);
    let session = start(&driver, 1, &spec_of(&["sh", "-c", "echo $$; sleep infinity"])).await;
    until(&*session, |text| text.ends_with('\n')).await;
    let dir = driver.run_dir(agent(1), run(1));
    let main = acri_shim::scan(&dir).unwrap().meta.unwrap().harness.unwrap();
    signal_shim(&dir, Signal::STOP);
    driver.kill_switch(agent(1), run(1)).kill(kill(1)).await.unwrap();
    assert!(!lives(main));
    // Why it ended is known, how is not.
    let exit = session.exit().await.unwrap();
    assert_eq!((exit.status, exit.killed.map(|kill| kill.command)), (None, Some(kill(1).command)));
}

#[tokio::test]
async fn requests_to_a_shim_that_hangs_fail_within_their_limit() {
    let fixture = best_tier();
    let driver = driver(&fixture);
    let session = start(&driver, 1, &spec_of(&["sleep", "infinity"])).await;
    session.contact(owner(1)).await.unwrap();
    let dir = driver.run_dir(agent(1), run(1));
    signal_shim(&dir, Signal::STOP);
    let contact = session.contact(owner(1)).await;
    assert!(matches!(contact, Err(Fault::Unreachable { operation: "contact", .. })), "{contact:?}");
    signal_shim(&dir, Signal::CONT);
    session.contact(owner(1)).await.unwrap();
    driver.kill_switch(agent(1), run(1)).kill(kill(1)).await.unwrap();
}

#[tokio::test]
async fn after_a_restart_of_the_machine_the_spool_is_read_and_the_run_is_lost() {
    let fixture = best_tier();
    let first = driver(&fixture);
    let session = start(&first, 1, &spec_of(&["sh", "-c", "echo before; sleep infinity"])).await;
    until(&*session, |text| text == "before\n").await;
    let dir = first.run_dir(agent(1), run(1));
    signal_shim(&dir, Signal::KILL);
    session.exit().await.unwrap_err();
    let meta = acri_shim::scan(&dir).unwrap().meta.unwrap();
    write_meta(&dir, &Meta { boot_id: "another one".to_owned(), ..meta });
    let second = driver(&fixture);
    let attached = second.attach(agent(1), run(1), owner(2)).await.unwrap();
    let Attached::Session(session) = attached else { panic!("{attached:?}") };
    assert_eq!(session.lost_reason(), FailReason::MachineRestarted);
    assert_eq!(all(&*session).await, "before\n");
    assert!(matches!(session.exit().await, Err(Fault::Broken { .. })));
    second.kill_switch(agent(1), run(1)).kill(kill(2)).await.unwrap();
}

fn write_meta(dir: &Path, meta: &Meta) {
    std::fs::write(dir.join("meta"), acri::codec::to_msgpack(meta).unwrap()).unwrap();
}

#[tokio::test]
async fn a_start_that_was_cut_off_is_never_repeated() {
    let fixture = best_tier();
    let driver = driver(&fixture);
    let spec = spec_of(&["sh", "-c", "echo never"]);
    driver.create(agent(1), &spec).await.unwrap();
    let dir = driver.run_dir(agent(1), run(1));
    std::fs::create_dir_all(&dir).unwrap();
    let boot_id = acri_shim::boot_id().unwrap();
    write_meta(&dir, &Meta { boot_id, phase: Phase::Spawning, ..Meta::default() });
    for _ in 0..2 {
        let started = driver.start(&order(1, &spec)).await.map(drop);
        assert!(matches!(started, Err(StartError::Fault(Fault::Broken { .. }))), "{started:?}");
    }
    let attached = driver.attach(agent(1), run(1), owner(1)).await.unwrap();
    assert!(matches!(attached, Attached::Lost { reason: FailReason::HarnessLost, .. }), "{attached:?}");
}

#[tokio::test]
async fn a_kill_latched_by_an_earlier_node_is_found_by_the_start() {
    let fixture = best_tier();
    let spec = spec_of(&["sh", "-c", "echo never"]);
    let first = driver(&fixture);
    std::fs::create_dir_all(first.run_dir(agent(1), run(1))).unwrap();
    first.kill_switch(agent(1), run(1)).kill(kill(1)).await.unwrap();
    let second = driver(&fixture);
    assert_eq!(second.scan().await.len(), 1);
    let session = start(&second, 1, &spec).await;
    assert_eq!(all(&*session).await, "");
    assert_eq!(session.exit().await.unwrap().killed.unwrap().command, kill(1).command);
}

#[tokio::test]
async fn a_start_that_is_refused_leaves_nothing_and_can_be_repeated() {
    let fixture = best_tier();
    let driver = driver(&fixture);
    let spec = spec_of(&["sh", "-c", "echo made it"]);
    let provisioned = Provisioned { working_directory: Some("/no/such/directory".to_owned()) };
    let started = driver.start(&Start { provisioned, ..order(1, &spec) }).await.map(drop);
    let Err(StartError::Refused(refusal)) = started else { panic!("{started:?}") };
    assert_eq!(refusal.0.field.as_deref(), Some("working_directory"));
    assert!(!driver.run_dir(agent(1), run(1)).exists());
    assert_eq!(all(&*start(&driver, 1, &spec).await).await, "made it\n");
}

#[tokio::test]
async fn no_more_processes_than_the_node_may_hold_are_started() {
    let fixture = best_tier();
    let driver = ProcessDriver::new(Config { processes_max: 1, ..fixture.config() }).unwrap();
    let spec = spec_of(&["sleep", "infinity"]);
    let session = start(&driver, 1, &spec).await;
    let refused = driver.start(&order(2, &spec)).await.map(drop);
    let Err(StartError::Refused(refusal)) = refused else { panic!("{refused:?}") };
    assert_eq!((refusal.0.code, refusal.0.retryable), (ErrorCode::ResourceExhausted, true));
    driver.kill_switch(agent(1), run(1)).kill(kill(1)).await.unwrap();
    session.exit().await.unwrap();
    // Its place is free once its shim is gone.
    driver.create(agent(2), &spec).await.unwrap();
    let second = tokio::time::timeout(Duration::from_secs(10), async {
        loop {
            match driver.start(&order(2, &spec)).await {
                Ok(session) => return session,
                Err(StartError::Refused(_)) => tokio::task::yield_now().await,
                Err(StartError::Fault(fault)) => panic!("{fault}"),
            }
        }
    });
    drop(second.await.unwrap());
    driver.kill_switch(agent(2), run(2)).kill(kill(1)).await.unwrap();
}

#[tokio::test]
async fn shims_that_have_ended_are_reaped() {
    let fixture = best_tier();
    let driver = driver(&fixture);
    let session = start(&driver, 1, &spec_of(&["sleep", "infinity"])).await;
    let shim = acri_shim::scan(&driver.run_dir(agent(1), run(1))).unwrap().meta.unwrap().shim;
    assert!(shim.exists());
    // Nobody looks at the session any more.
    drop(session);
    driver.kill_switch(agent(1), run(1)).kill(kill(1)).await.unwrap();
    eventually(|| !shim.exists()).await;
}

#[tokio::test]
async fn a_harness_whose_owner_says_nothing_is_ended_as_orphaned() {
    let fixture = best_tier();
    let spec = AgentSpec { orphan_after_ms: Some(1000), ..spec_of(&["sleep", "infinity"]) };
    let exit = start(&driver(&fixture), 1, &spec).await.exit().await.unwrap();
    assert_eq!((exit.orphaned, exit.killed), (true, None));
}

#[tokio::test]
async fn a_harness_that_writes_more_than_its_spool_holds_waits_for_releases() {
    const LINES: usize = 100_000;
    let fixture = best_tier();
    let mut config = fixture.config();
    config.limits.spool_bytes_max = 1024 * 1024;
    config.limits.segment_bytes = 256 * 1024;
    let driver = ProcessDriver::new(config).unwrap();
    let spec = spec_of(&["sh", "-c", &format!("seq -f '%099.0f' 1 {LINES}")]);
    let session = start(&driver, 1, &spec).await;
    let (mut next, mut bytes) = (0, 0);
    loop {
        let chunk = session.output(next, 64 * 1024).await.unwrap();
        bytes += chunk.records.iter().map(|record| record.bytes.len()).sum::<usize>();
        next = chunk.next;
        if chunk.end != ChunkEnd::Open {
            assert_eq!(chunk.end, ChunkEnd::Ended);
            break;
        }
        session.release(owner(1), next, "token".into()).await.unwrap();
    }
    assert_eq!(bytes, LINES * 100);
    // What is gone is said, with where the rest begins.
    let early = session.output(0, 1).await.unwrap();
    assert!(matches!(early.end, ChunkEnd::Gone { first } if first > 0), "{early:?}");
}

#[tokio::test]
async fn many_runs_at_once_keep_their_output_apart() {
    let fixture = best_tier();
    let driver = driver(&fixture);
    let spec = spec_of(&["sh", "-c", "seq 1 2000; echo $ACRI_RUN"]);
    let mut sessions = Vec::new();
    for number in 0..20 {
        sessions.push(start(&driver, number, &spec).await);
    }
    let numbers: String = (1..=2000).map(|number| format!("{number}\n")).collect();
    for (session, number) in sessions.iter().zip(0..) {
        assert_eq!(all(&**session).await, format!("{numbers}{}\n", run(number)));
        assert_eq!(session.exit().await.unwrap().status.unwrap().code, Some(0));
    }
}

#[tokio::test]
async fn capabilities_say_what_is_in_force() {
    let fixture = best_tier();
    let driver = driver(&fixture);
    let capabilities = driver.capabilities();
    let session = start(&driver, 1, &spec_of(&["true"])).await;
    assert_eq!(session.info().tree_control, capabilities.tree_control);
    assert_eq!(capabilities.isolation.as_deref(), Some("none"));
    assert!(session.info().pid.is_some());
    session.exit().await.unwrap();
}

/// Not a test of behaviour: `cargo test --release -p acri-drivers --test suite throughput -- --ignored --nocapture`.
#[tokio::test]
#[ignore = "measures"]
async fn throughput_of_output() {
    const BYTES: usize = 200 * 1024 * 1024;
    let fixture = best_tier();
    let driver = driver(&fixture);
    for program in [format!("head -c {BYTES} /dev/zero"), "seq -f '%0255.0f' 0 799999".to_owned()] {
        let number = u64::try_from(program.len()).unwrap();
        let session = start(&driver, number, &spec_of(&["sh", "-c", &program])).await;
        session.exit().await.unwrap();
        for batch in [256 * 1024, 1024 * 1024] {
            let (mut next, mut bytes, mut records, begun) = (0, 0, 0, std::time::Instant::now());
            loop {
                let chunk = session.output(next, batch).await.unwrap();
                records += chunk.records.len();
                bytes += chunk.records.iter().map(|record| record.bytes.len()).sum::<usize>();
                next = chunk.next;
                if chunk.end != ChunkEnd::Open {
                    break;
                }
            }
            let seconds = begun.elapsed().as_secs_f64();
            #[expect(clippy::cast_precision_loss, reason = "shown to people")]
            let rate = bytes as f64 / seconds / 1e6;
            println!("{program}: {batch} bytes a batch: {bytes} bytes, {records} records, {rate:.0} MB/s");
        }
    }
}

/// Not a test of behaviour, see above: `RUNS` idle processes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures"]
async fn scale_of_idle_processes() {
    let runs: u64 = std::env::var("RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(200);
    let fixture = best_tier();
    let driver = driver(&fixture);
    let spec = spec_of(&["sleep", "infinity"]);
    let rss = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        status.lines().find(|line| line.starts_with("VmRSS")).unwrap().to_owned()
    };
    let (before, begun) = (rss(), std::time::Instant::now());
    let mut starting = tokio::task::JoinSet::new();
    for number in 0..runs {
        let (driver, spec) = (driver.clone(), spec.clone());
        starting.spawn(async move { start(&driver, number, &spec).await });
    }
    let sessions = starting.join_all().await;
    println!("{runs} started in {:?}; {before} before, {} after", begun.elapsed(), rss());
    println!("{} descriptors, {} threads", count("/proc/self/fd"), count("/proc/self/task"));
    let begun = std::time::Instant::now();
    let mut killing = tokio::task::JoinSet::new();
    for number in 0..runs {
        let switch = driver.kill_switch(agent(number), run(number));
        killing.spawn(async move { switch.kill(kill(1)).await });
    }
    assert!(killing.join_all().await.into_iter().all(|killed| killed.is_ok()));
    println!("killed in {:?}", begun.elapsed());
    for session in sessions {
        assert!(session.exit().await.unwrap().killed.is_some());
    }
}

fn count(directory: &str) -> usize {
    std::fs::read_dir(directory).unwrap().count()
}
