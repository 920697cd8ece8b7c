//! What is wrong with a history is found, by the fold and by the check.

use super::script::Player;
use crate::{
    agent::Agent,
    appender::Stored,
    check::{Verifier, verify},
};
use acri::{
    Epoch, Event, RunId, StreamSeq, Subject,
    event::{
        AgentAssigned, AgentRemoved, FailReason, RunAccepted, RunFailed, RunKillRequested, RunLogsSealed, RunResumed,
        RunStarted, RunStopExpired,
    },
    id::{LogSeq, Sha256Digest},
};
use expect_test::expect;
use proptest::prelude::*;

fn played(lines: &[&str]) -> Player {
    let mut player = Player::new();
    for line in lines {
        player.line(line);
    }
    player
}

fn whole() -> Vec<(Subject, Stored)> {
    played(&[
        "create",
        "start r1",
        "r1 started",
        "r1 ask out 3",
        "stop s1 r1 5ms",
        "r1 exit 1",
        "r1 logs 2",
        "remove x",
    ])
    .world
    .store
}

fn found(history: &[(Subject, Stored)]) -> Vec<String> {
    verify(history).problems.into_iter().map(|problem| problem.what).collect()
}

#[test]
fn a_whole_history_has_no_problem() {
    let report = verify(&whole());
    assert_eq!((report.agents, report.runs, report.events), (1, 1, 8));
    assert_eq!(report.problems, []);
}

#[test]
fn agents_may_be_interleaved() {
    let (one, mut verifier) = (whole(), Verifier::default());
    let other = {
        let mut player = Player::new();
        player.world.command_id("something before");
        ["create", "start r1"].into_iter().for_each(|line| drop(player.line(line)));
        // Its ids are minted apart.
        player.world.store
    };
    assert_ne!(one[0].0, other[0].0);
    verifier.push(&one[0].0, &one[0].1);
    let mut between = other[0].1.clone();
    between.seq = StreamSeq(11);
    verifier.push(&other[0].0, &between);
    verifier.push(&one[1].0, &one[1].1);
    let report = verifier.finish();
    assert_eq!((report.agents, report.runs, report.problem_count), (2, 1, 1), "{:?}", report.problems);
    assert!(report.problems[0].what.contains("a second time"), "both worlds mint the same ids");
}

#[test]
fn loss_change_and_disorder_are_found_by_both() {
    let whole = whole();
    for at in 0..whole.len() - 1 {
        let mut lost = whole.clone();
        lost.remove(at);
        assert!(!found(&lost).is_empty(), "without event {at}");
        assert!(Agent::fold(lost.iter().map(|(_, stored)| stored)).is_err(), "without event {at}");

        let mut swapped = whole.clone();
        swapped.swap(at, at + 1);
        assert!(!found(&swapped).is_empty(), "event {at} after its next");

        let mut doubled = whole.clone();
        doubled.insert(at, whole[at].clone());
        assert!(!found(&doubled).is_empty(), "event {at} twice");

        let mut changed = whole.clone();
        let mut bytes = changed[at].1.bytes.to_vec();
        if let Some(byte) = bytes.iter_mut().rev().find(|byte| byte.is_ascii_lowercase()) {
            *byte = b'z';
        }
        changed[at].1.bytes = bytes.into();
        assert!(!found(&changed).is_empty(), "event {at} changed");
        assert!(Agent::fold(changed.iter().map(|(_, stored)| stored)).is_err(), "event {at} changed");
    }
}

#[test]
fn a_subject_that_says_something_else_is_found() {
    let mut whole = whole();
    whole[2].0 = whole[3].0.clone();
    assert!(found(&whole)[0].starts_with("stored under"));
}

/// Adds one event that is well chained and must not be; what is said of it.
fn misfit(lines: &[&str], run: Option<&str>, epoch: u64, event: impl Into<Event>) -> String {
    let mut player = played(lines);
    let run: Option<RunId> = run.map(|run| player.world.run(run));
    player.world.foreign(run, Epoch(epoch), event.into());
    let history = &player.world.store;
    let folded = Agent::fold(history.iter().map(|(_, stored)| stored)).map(|_| ());
    let folded = folded.map_or_else(|error| error.to_string(), |()| "fine".to_owned());
    let id = run.map_or_else(String::new, |run| run.to_string());
    format!("check: {} | fold: {folded}\n", found(history).join(", "))
        .replace(&id, if id.is_empty() { "" } else { "RUN" })
}

#[test]
fn events_that_do_not_fit_are_found() {
    let running = &["create", "start r1", "r1 started"][..];
    let ended = &["create", "start r1", "r1 notstarted"][..];
    let open = &["create", "start r1", "r1 started", "r1 exit 0"][..];
    let failed = || RunFailed { reason: FailReason::Exit, message: String::new(), exit: None };
    let sealed = || RunLogsSealed { count: LogSeq(0), chain: Sha256Digest::default(), gap: false };
    let started = || RunStarted { tree_control: None, isolation: None, pid: None };
    let task = || RunAccepted { task: acri::Payload::text("") };
    let claim = || AgentAssigned { orphan_after_ms: 1, node_lost_after_ms: 2 };
    let told = [
        misfit(open, Some("r1"), 1, failed()),
        misfit(ended, Some("r1"), 1, failed()),
        misfit(running, Some("r1"), 1, sealed()),
        misfit(running, Some("r1"), 1, started()),
        misfit(running, Some("r2"), 1, started()),
        misfit(running, Some("r2"), 1, task()),
        misfit(ended, Some("r1"), 1, task()),
        misfit(running, Some("r1"), 1, RunResumed {}),
        misfit(running, Some("r1"), 1, RunStopExpired {}),
        misfit(running, Some("r1"), 1, RunKillRequested { reason: String::new() }),
        misfit(running, None, 1, started()),
        misfit(running, Some("r1"), 2, claim()),
        misfit(running, None, 1, claim()),
        misfit(running, Some("r1"), 2, failed()),
        misfit(running, Some("r1"), 0, failed()),
        misfit(running, None, 1, AgentRemoved { reason: String::new() }),
        misfit(&["create", "remove x"], None, 2, claim()),
    ]
    .concat();
    expect![[r#"
        check: second end of the run | fold: event at stream sequence 22 (run.failed): follows the end of its run
        check: event after the run's seal, second end of the run | fold: event at stream sequence 22 (run.failed): follows the seal of run RUN
        check: seal before the run's end | fold: event at stream sequence 19 (run.logs_sealed): seals a run that has not ended
        check:  | fold: event at stream sequence 19 (run.started): starts the run again
        check: run that was never accepted | fold: event at stream sequence 19 (run.started): is of run RUN, which was never accepted
        check: run.accepted without the command that caused it, second open run | fold: event at stream sequence 19 (run.accepted): begins run RUN while run 8b71d1ad-8021-8be3-a51b-7f2efd3efe0b is open
        check: run.accepted without the command that caused it, run accepted a second time, event after the run's seal | fold: event at stream sequence 22 (run.accepted): begins run RUN again
        check:  | fold: event at stream sequence 19 (run.resumed): resumes a run that does not wait
        check:  | fold: event at stream sequence 19 (run.stop_expired): ends the grace of a Stop that is not in force
        check: run.kill_requested without the command that caused it | fold: event at stream sequence 19 (run.kill_requested): is a Kill without its command
        check: run.started without a run | fold: event at stream sequence 19 (run.started): is a run's and names none
        check: agent.assigned of a run | fold: event at stream sequence 19 (agent.assigned): is the agent's own and names a run
        check: epoch 1 after 1 | fold: event at stream sequence 19 (agent.assigned): claims epoch 1 after 1
        check: epoch 2 that nobody claimed | fold: event at stream sequence 19 (run.failed): bears epoch 2, the owner's is 1
        check: epoch 0 after 1 | fold: event at stream sequence 19 (run.failed): bears epoch 0, the owner's is 1
        check: agent.removed without the command that caused it, agent.removed while a run is open | fold: event at stream sequence 19 (agent.removed): removes the agent while run 8b71d1ad-8021-8be3-a51b-7f2efd3efe0b is open
        check: event after agent.removed | fold: event at stream sequence 16 (agent.assigned): follows agent.removed
    "#]].assert_eq(&told);
}

proptest! {
    #[test]
    fn no_bytes_make_the_fold_or_the_check_panic(at in 0_usize..8, cut in 0_usize..400, byte in any::<u8>()) {
        let mut history = whole();
        let mut bytes = history[at].1.bytes.to_vec();
        let place = cut % bytes.len();
        if byte == 0 { bytes.truncate(place) } else { bytes[place] ^= byte }
        history[at].1.bytes = bytes.into();
        prop_assert!(!found(&history).is_empty() || at == history.len() - 1);
        let _ = Agent::fold(history.iter().map(|(_, stored)| stored));
    }
}
