//! Create, Start, Stop, Kill, Status and remove over the bus; each repeated by
//! its id, and late.

use crate::site;
use acri::{
    AgentId, CommandId, ErrorCode, Event, Payload, RunId, RunState,
    command::OnExpiry,
    event::{KillCause, TYPE_NAMES},
    status::{Phase, Termination},
};
use acri_client::Error;
use acri_tests::{
    eventually,
    look::{ended, epochs, event, last_event, says, sealed, types, verified, written},
    process,
    site::begin,
};
use std::time::Duration;

const SECONDS: fn(u64) -> Duration = Duration::from_secs;

/// A command id of another time.
fn id_aged(hours: u64) -> CommandId {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let millis = u64::try_from(now.as_millis()).unwrap() - hours * 3_600_000;
    let random = *uuid::Uuid::new_v4().as_bytes();
    let uuid = uuid::Builder::from_unix_timestamp_millis(millis, random[..10].try_into().unwrap());
    CommandId::from_uuid(uuid.into_uuid())
}

fn code<T: std::fmt::Debug>(outcome: Result<T, Error>) -> ErrorCode {
    outcome.unwrap_err().code()
}

#[tokio::test]
async fn a_run_goes_from_create_to_removal_and_each_step_is_an_event() {
    let site = site().await;
    let _node = site.node("n1").await;
    let client = site.client().await;
    let agent = client.create(site.spec("echo \"to do: $ACRI_TASK\"; echo oops >&2")).await.unwrap();
    assert_eq!(agent.node.as_str(), "n1");
    assert!(client.status(agent.agent, None).await.unwrap().run.is_none());
    let run = client.start(agent.agent, Payload::text("write tests")).await.unwrap().run;
    let status = ended(&client, agent.agent, run).await;
    assert_eq!((status.state, status.termination), (RunState::Completed, Some(Termination::Completed)));
    let written = written(&client, agent.agent, run).await;
    assert_eq!((written.out(), written.err()), (vec!["to do: write tests".to_owned()], vec!["oops".to_owned()]));
    assert!(client.status(agent.agent, Some(run)).await.unwrap().run.unwrap().sealed);
    client.remove(agent.agent, "done").await.unwrap();
    assert!(client.status(agent.agent, None).await.unwrap().removed, "the events still tell");
    let expected =
        ["agent.created", "run.accepted", "run.started", "run.completed", "run.logs_sealed", "agent.removed"];
    assert_eq!(types(&client, agent.agent).await, expected);
    assert!(expected.iter().all(|name| TYPE_NAMES.contains(name)));
    verified(&client).await;
}

#[tokio::test]
async fn a_program_that_ends_within_its_grace_is_stopped() {
    let site = site().await;
    let _node = site.node("n1").await;
    let client = site.client().await;
    let script = "trap 'echo saved; exit 7' TERM; echo up; while :; do sleep 0.02; done";
    let (agent, run) = site.run(&client, script).await;
    says(&client, agent, run, "up").await;
    client.stop(agent, run, "enough", Some(SECONDS(30)), OnExpiry::Kill).await.unwrap();
    let status = ended(&client, agent, run).await;
    assert_eq!((status.state, status.exit.unwrap().code), (RunState::Stopped, Some(7)));
    assert_eq!(written(&client, agent, run).await.out(), ["up", "saved"]);
    let Event::RunStopped(stopped) = event(&client, agent, "run.stopped").await.envelope.event else {
        panic!("not stopped")
    };
    assert_eq!(stopped.reason, "enough");
    // It keeps its agent, and the next Start goes on with it.
    sealed(&client, agent, run).await;
    let again = client.start(agent, Payload::text("")).await.unwrap().run;
    client.kill(agent, again, "over").await.unwrap();
    verified(&client).await;
}

#[tokio::test]
async fn a_stop_that_expires_kills_and_one_that_keeps_lets_the_run_go_on() {
    let site = site().await;
    let _node = site.node("n1").await;
    let client = site.client().await;
    let deaf = "trap '' TERM; echo up; while :; do sleep 0.02; done";
    let (killed, kept) = tokio::join!(site.run(&client, deaf), site.run(&client, deaf));
    says(&client, killed.0, killed.1, "up").await;
    says(&client, kept.0, kept.1, "up").await;
    let grace = Some(Duration::from_millis(300));
    client.stop(killed.0, killed.1, "enough", grace, OnExpiry::Kill).await.unwrap();
    client.stop(kept.0, kept.1, "please", grace, OnExpiry::Keep).await.unwrap();
    assert_eq!(ended(&client, killed.0, killed.1).await.termination, Some(Termination::Killed));
    let Event::RunKilled(event_killed) = event(&client, killed.0, "run.killed").await.envelope.event else {
        panic!("not killed")
    };
    assert_eq!((event_killed.cause, event_killed.reason.as_str()), (KillCause::GraceExpired, "enough"));
    event(&client, kept.0, "run.stop_expired").await;
    let status = client.status(kept.0, Some(kept.1)).await.unwrap().run.unwrap();
    assert_eq!((status.state, status.phase), (RunState::Running, None));
    assert!(client.kill(kept.0, kept.1, "now").await.unwrap().proved);
    verified(&client).await;
}

#[tokio::test]
async fn a_stop_is_seen_as_a_phase_and_a_kill_overtakes_it() {
    let site = site().await;
    let _node = site.node("n1").await;
    let client = site.client().await;
    let (agent, run) = site.run(&client, "trap '' TERM; echo up; while :; do sleep 0.02; done").await;
    says(&client, agent, run, "up").await;
    client.stop(agent, run, "slowly", Some(SECONDS(60)), OnExpiry::Kill).await.unwrap();
    let status = client.status(agent, Some(run)).await.unwrap().run.unwrap();
    assert_eq!(status.phase, Some(Phase::Stopping));
    assert!(client.kill(agent, run, "at once").await.unwrap().proved);
    assert!(site.processes().iter().all(|pid| !harness_of(*pid, run)));
    let Event::RunKilled(killed) = event(&client, agent, "run.killed").await.envelope.event else {
        panic!("not killed")
    };
    assert_eq!((killed.cause, killed.reason.as_str()), (KillCause::Requested, "at once"));
    verified(&client).await;
}

fn harness_of(pid: i32, run: RunId) -> bool {
    process::with_variable("ACRI_RUN", &run.to_string()).contains(&pid)
}

#[tokio::test]
async fn every_command_repeated_by_its_id_gets_the_same_answer_and_no_second_event() {
    let site = site().await;
    let mut first = site.node("n1").await;
    let second = site.node("n2").await;
    let client = site.client().await;
    let ids: Vec<CommandId> = futures_util::future::join_all((0..5).map(|_| client.mint_id())).await;
    let spec = site.spec("trap 'exit 3' TERM; echo up; while :; do sleep 0.02; done");
    let handle = client.create_with_id(ids[0], spec.clone()).await.unwrap();
    let agent = handle.agent;
    // Either node takes a repeat of Create, and looks the agent up.
    for _ in 0..40 {
        assert_eq!(client.create_with_id(ids[0], spec.clone()).await.unwrap(), handle);
    }
    let task = Payload::text("a task");
    let run = client.start_with_id(ids[1], agent, task.clone()).await.unwrap();
    says(&client, agent, run.run, "up").await;
    assert_eq!(client.start_with_id(ids[1], agent, task.clone()).await.unwrap(), run);
    let stop = || client.stop_with_id(ids[2], agent, run.run, "enough", Some(SECONDS(40)), OnExpiry::Kill);
    let stopping = stop().await.unwrap();
    assert_eq!(stop().await.unwrap(), stopping);
    ended(&client, agent, run.run).await;
    assert_eq!(stop().await.unwrap(), stopping, "after the run's end too");
    let kill = || client.kill_with_id(ids[3], agent, run.run, "late");
    let killed = kill().await.unwrap();
    assert_eq!(kill().await.unwrap(), killed);
    sealed(&client, agent, run.run).await;

    // The owner's next life answers as the first one did.
    let owner = handle.node.as_str().to_owned();
    let mut nodes = [Some(std::mem::replace(&mut first, second)), None];
    nodes[1] = Some(first);
    let index = usize::from(owner == "n2");
    nodes[index].as_mut().unwrap().kill9().await;
    let mut reborn = site.node(&owner).await;
    assert_eq!(client.start_with_id(ids[1], agent, task.clone()).await.unwrap(), run);
    assert_eq!(stop().await.unwrap(), stopping);
    assert_eq!(kill().await.unwrap(), killed);
    let again = client.create_with_id(ids[0], spec.clone()).await.unwrap();
    assert_eq!((again.agent, again.created), (handle.agent, handle.created));

    let removed = client.remove_with_id(ids[4], agent, "done").await.unwrap();
    assert_eq!(client.remove_with_id(ids[4], agent, "done").await.unwrap(), removed);

    let expected = [
        "agent.created",
        "run.accepted",
        "run.started",
        "run.stop_requested",
        "run.stopped",
        "run.logs_sealed",
        "agent.assigned",
        "agent.removed",
    ];
    assert_eq!(types(&client, agent).await, expected);
    assert_eq!(epochs(&client, agent).await, [1, 2]);
    // With its owner gone a repeat of Create is answered by the other node.
    reborn.kill9().await;
    let other = client.create_with_id(ids[0], spec).await.unwrap();
    assert_eq!((other.agent, other.created), (handle.agent, handle.created));
    assert_eq!(types(&client, agent).await, expected);
    verified(&client).await;
}

#[tokio::test]
async fn a_command_that_comes_a_day_late_is_refused_and_never_carried_out() {
    let site = site().await;
    let _node = site.node("n1").await;
    let client = site.client().await;
    let (agent, run) = site.run(&client, "echo up; exec sleep 600").await;
    says(&client, agent, run, "up").await;
    let before = last_event(&client).await;
    let late = id_aged(25);
    let expired = ErrorCode::Expired;
    assert_eq!(code(client.create_with_id(late, site.spec("true")).await), expired);
    assert_eq!(code(client.start_with_id(late, agent, Payload::text("")).await), expired);
    let stop = client.stop_with_id(late, agent, run, "", None, OnExpiry::Kill).await;
    assert_eq!(code(stop), expired);
    assert_eq!(code(client.kill_with_id(late, agent, run, "").await), expired);
    assert_eq!(code(client.remove_with_id(late, agent, "").await), expired);
    assert_eq!(last_event(&client).await, before, "no state change");
    assert_eq!(client.status(agent, Some(run)).await.unwrap().run.unwrap().state, RunState::Running);
    assert!(!process::with_variable("ACRI_RUN", &run.to_string()).is_empty(), "the harness lives");
    // An hour late is early enough, and an hour early is not.
    client.kill_with_id(id_aged(1), agent, run, "").await.unwrap();
    let ahead =
        uuid::Builder::from_unix_timestamp_millis(client.mint_id().await.millis().unwrap() + 3_600_000, &[7; 10]);
    let ahead = CommandId::from_uuid(ahead.into_uuid());
    assert_eq!(code(client.create_with_id(ahead, site.spec("true")).await), expired);
}

#[tokio::test]
async fn an_id_that_was_used_for_another_command_is_refused() {
    let site = site().await;
    let _node = site.node("n1").await;
    let client = site.client().await;
    let (create, start) = (client.mint_id().await, client.mint_id().await);
    let agent = client.create_with_id(create, site.spec("exec sleep 600")).await.unwrap().agent;
    let run = client.start_with_id(start, agent, Payload::text("one")).await.unwrap().run;
    let before = types(&client, agent).await.len();
    let reused = ErrorCode::IdReused;
    assert_eq!(code(client.create_with_id(create, site.spec("true")).await), reused);
    assert_eq!(code(client.start_with_id(start, agent, Payload::text("two")).await), reused);
    assert_eq!(code(client.kill_with_id(start, agent, run, "").await), reused);
    let stop = client.stop_with_id(create, agent, run, "", None, OnExpiry::Kill).await;
    assert_eq!(code(stop), reused);
    assert_eq!(code(client.remove_with_id(start, agent, "").await), reused);
    event(&client, agent, "run.started").await;
    assert!(types(&client, agent).await.len() <= before + 1, "run.started at the most");
    let state = client.status(agent, Some(run)).await.unwrap().run.unwrap().state;
    assert_eq!(state, RunState::Running, "a Kill under a used id kills nothing");
}

#[tokio::test]
async fn what_does_not_exist_is_not_found_with_and_without_a_node() {
    let site = site().await;
    let mut node = site.node("n1").await;
    let client = site.client().await;
    let known = client.create(site.spec("true")).await.unwrap().agent;
    let nobody = AgentId::from_uuid(uuid::Uuid::new_v4());
    let nothing = RunId::from_uuid(uuid::Uuid::new_v4());
    let missing = ErrorCode::NotFound;
    for _ in 0..2 {
        assert_eq!(code(client.status(nobody, None).await), missing);
        assert_eq!(code(client.status(known, Some(nothing)).await), missing);
        assert_eq!(code(client.start(nobody, Payload::text("")).await), missing);
        assert_eq!(code(client.stop(nobody, nothing, "", None, OnExpiry::Kill).await), missing);
        assert_eq!(code(client.kill(nobody, nothing, "").await), missing);
        assert_eq!(code(client.kill(known, nothing, "").await), missing);
        assert_eq!(code(client.remove(nobody, "").await), missing);
        // The second time nobody is there to answer.
        node.drain_if_alive().await;
    }
}

#[tokio::test]
async fn what_cannot_run_fails_create_or_start_with_the_reason() {
    let site = site().await;
    let _node = site.node("n1").await;
    let client = site.client().await;
    let field = |outcome: Result<acri::command::AgentHandle, Error>| {
        let body = outcome.unwrap_err().body();
        (body.field.unwrap_or_default(), body.message)
    };
    let (which, text) = field(client.create(site.command_spec(&["no-such-program"])).await);
    assert_eq!(which, "command");
    assert!(text.contains("no-such-program"), "{text}");

    let mut spec = site.spec("true");
    spec.working_directory = Some("/no/such/directory".to_owned());
    let (which, text) = field(client.create(spec).await);
    assert_eq!(which, "working_directory");
    assert!(text.contains("/no/such/directory"), "{text}");

    let plain = site.directory().join("plain.txt");
    std::fs::write(&plain, "no program\n").unwrap();
    let (which, text) = field(client.create(site.command_spec(&[plain.to_str().unwrap()])).await);
    assert_eq!(which, "command");
    assert!(text.contains("executed"), "{text}");

    // What is there at Create and gone at Start fails the run, at once.
    let program = site.directory().join("program");
    std::fs::write(&program, "#!/bin/sh\ntrue\n").unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&program, executable).unwrap();
    let agent = client.create(site.command_spec(&[program.to_str().unwrap()])).await.unwrap().agent;
    std::fs::remove_file(&program).unwrap();
    match client.start(agent, Payload::text("")).await {
        Err(error) => assert_eq!(error.body().field.as_deref(), Some("command")),
        Ok(handle) => {
            let status = ended(&client, agent, handle.run).await;
            assert_eq!(status.state, RunState::Failed);
            let reason = status.reason.unwrap_or_default();
            assert!(reason.contains("spawn_failed") || reason.contains("program"), "{reason}");
            sealed(&client, agent, handle.run).await;
        }
    }
    verified(&client).await;
}

#[tokio::test]
async fn an_open_run_bars_another_start_and_the_removal() {
    let site = site().await;
    let _node = site.node("n1").await;
    let client = site.client().await;
    let (agent, run) = begin(&client, site.spec("exec sleep 600")).await;
    let barred = ErrorCode::FailedPrecondition;
    assert_eq!(code(client.start(agent, Payload::text("")).await), barred);
    assert_eq!(code(client.remove(agent, "").await), barred);
    client.kill(agent, run, "").await.unwrap();
    // Refusals are not remembered.
    sealed(&client, agent, run).await;
    client.remove(agent, "").await.unwrap();
    assert_eq!(code(client.start(agent, Payload::text("")).await), barred);
}

#[tokio::test]
async fn a_drained_node_leaves_its_runs_alive_and_its_next_start_takes_them_on() {
    let site = site().await;
    let mut node = site.node("n1").await;
    let client = site.client().await;
    let script = "echo up; while [ ! -e go ]; do sleep 0.02; done; echo went";
    let (agent, run) = site.run(&client, script).await;
    says(&client, agent, run, "up").await;
    assert!(node.drain().await.success());
    assert!(!process::with_variable("ACRI_RUN", &run.to_string()).is_empty());
    eventually("the lease to be given up or to lapse", || async {
        let status = client.status(agent, Some(run)).await.unwrap().run.unwrap();
        (status.state == RunState::Running).then_some(())
    })
    .await;
    let _node = site.node("n1").await;
    let work = site.state_dir("n1").join(format!("node/processes/agents/{agent}/work/go"));
    std::fs::write(work, "").unwrap();
    assert_eq!(ended(&client, agent, run).await.state, RunState::Completed);
    assert_eq!(written(&client, agent, run).await.out(), ["up", "went"]);
    assert_eq!(epochs(&client, agent).await, [1, 2]);
    verified(&client).await;
}
