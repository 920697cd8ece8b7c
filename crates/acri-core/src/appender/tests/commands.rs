//! What is answered, and what is refused.

use super::{check, script::Player};
use crate::appender::{Answer, Input, Order, Output};
use acri::{
    CommandId, ErrorCode, Payload,
    command::{CreateAgent, StartRun},
    event::{EscalationRaised, Source},
    limits::{COMMANDS_WAITING_MAX, EVENT_BODY_BYTES_MAX, RUNS_PER_AGENT_MAX},
    log::Stream,
};
use expect_test::expect;

#[test]
fn a_repeat_gets_the_first_answer() {
    check(
        "create\ncreate create\nstart r1 t\nstart r1 t\nr1 started\nstop s1 r1 500ms\n+100ms\nstop s1 r1 500ms\nr1 exit 1\nstop s1 r1 500ms\nr1 logs 0\nstart r1 t\nremove x\nremove x",
        expect![[r#"
            create -> agent.created; [1] created on node-1
            create create -> [2] created on node-1
            start r1 t -> run.accepted("t"); [3] started; SPAWN; wake 60000ms
            start r1 t -> [4] started
            r1 started -> run.started; PUMP
            stop s1 r1 500ms -> run.stop_requested(s1!, Kill at 500ms); [5] stopping until 500ms; STOP; wake 500ms
            +100ms -> wake 500ms
            stop s1 r1 500ms -> [6] stopping until 500ms
            r1 exit 1 -> run.stopped(s1!, code 1)
            stop s1 r1 500ms -> [7] stopping until 500ms
            r1 logs 0 -> run.logs_sealed(0); sealed
            start r1 t -> [8] started
            remove x -> agent.removed(done); [9] removed; retired
            remove x -> [10] removed
        "#]],
    );
}

#[test]
fn an_id_used_for_something_else_is_refused() {
    for last in ["start r1 other", "stop r1 r1 5ms", "start create", "kill s1 r1", "stop s1 r1 500ms keep", "remove r1"]
    {
        let mut player = Player::new();
        for line in ["create", "start r1 t", "stop s1 r1 500ms"] {
            player.line(line);
        }
        let said = player.line(last).join("; ");
        assert!(said.contains("ACRI-0012"), "{last} -> {said}");
    }
}

#[test]
fn what_the_state_does_not_allow_is_refused() {
    let mut player = Player::new();
    let mut told = String::new();
    for line in [
        "create",
        "stop s0 r1 5ms",
        "kill k0 r1",
        "status r1",
        "start r1",
        "start r2",
        "remove x",
        "r1 started",
        "r1 exit 0",
        "start r3",
        "stop s1 r1 5ms",
        "kill k1 r1",
        "remove y",
        "r1 logs 1",
        "remove z",
        "start r4",
        "remove w",
    ] {
        let said = player.line(line).join("; ");
        told.push_str(&format!("{line} -> {said}\n"));
    }
    let run = player.world.run("r1").to_string();
    expect![[r#"
        create -> agent.created; [1] created on node-1
        stop s0 r1 5ms -> [2] ACRI-0004 not_found: there is no run R1 of this agent
        kill k0 r1 -> [3] ACRI-0004 not_found: there is no run R1 of this agent
        status r1 -> [4] ACRI-0004 not_found: there is no run R1 of this agent
        start r1 -> run.accepted(""); [5] started; SPAWN; wake 60000ms
        start r2 -> [6] ACRI-0005 failed_precondition: run R1 is open: pending
        remove x -> [7] ACRI-0005 failed_precondition: run R1 is open: pending
        r1 started -> run.started; PUMP
        r1 exit 0 -> run.completed(code 0)
        start r3 -> [8] ACRI-0005 failed_precondition: run R1 is completed but still open: its log is not yet sealed (retry)
        stop s1 r1 5ms -> [9] ACRI-0005 failed_precondition: run R1 has ended
        kill k1 r1 -> [10] killed, proved
        remove y -> [11] ACRI-0005 failed_precondition: run R1 is completed but still open: its log is not yet sealed (retry)
        r1 logs 1 -> run.logs_sealed(1); sealed
        remove z -> agent.removed(done); [12] removed; retired
        start r4 -> [13] ACRI-0005 failed_precondition: the agent was removed
        remove w -> [14] ACRI-0005 failed_precondition: the agent was removed
    "#]].assert_eq(&told.replace(&run, "R1"));
}

#[test]
fn only_one_run_is_open_and_the_refusal_names_it() {
    check(
        "agent\nstart r1\nr1 started\nr1 exit 0\nr1 logs 1\nstart r2\nr2 started\nstatus r1\nstatus",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        r1 exit 0 -> run.completed(code 0)
        r1 logs 1 -> run.logs_sealed(1); sealed
        start r2 -> run.accepted(""); [3] started; SPAWN; wake 60000ms
        r2 started -> run.started; PUMP
        status r1 -> [4] completed sealed
        status -> [5] running
    "#]],
    );
}

/// Plays lines, then gives one command with its own id and expiry.
fn give(lines: &[&str], id: impl FnOnce(&mut Player) -> CommandId, expires_ms: Option<i64>, order: Order) -> Answer {
    let mut player = Player::new();
    for line in lines {
        player.line(line);
    }
    let id = id(&mut player);
    player.world.set_command_id("given", id);
    let mut command = player.world.command("given", order);
    command.expires = expires_ms.map(|ms| acri::Timestamp::from_micros(player.world.now.as_micros() + ms * 1000));
    let asker = player.world.asker();
    let mut out = player.world.step(Input::Command(asker, command));
    if player.world.append.is_some() {
        out.extend(player.bus("ack"));
    }
    let mut answers =
        out.into_iter().filter_map(|output| if let Output::Reply(_, answer) = output { Some(answer) } else { None });
    answers.next_back().expect("an answer")
}

fn start() -> Order {
    Order::Start(StartRun { task: Payload::text("") })
}

fn code(answer: &Answer) -> Option<ErrorCode> {
    if let Answer::Refused(error) = answer { Some(error.code) } else { None }
}

#[test]
fn a_command_that_is_too_old_or_from_the_future_is_refused() {
    let day = "+86400000ms";
    let fresh = |player: &mut Player| player.world.command_id("fresh");
    assert_eq!(code(&give(&["create"], fresh, Some(-1), start())), Some(ErrorCode::Expired), "by its own word");
    assert_eq!(code(&give(&["create"], fresh, Some(0), start())), None, "at the last moment");
    let old = |player: &mut Player| player.world.command_id("create");
    assert_eq!(code(&give(&["create", day], old, None, start())), Some(ErrorCode::IdReused));
    assert_eq!(code(&give(&["create", day, "+1ms"], old, None, start())), Some(ErrorCode::Expired));
    let ahead = |ms: u128| {
        move |player: &mut Player| {
            let now = player.world.command_id("now").as_uuid().as_u128();
            CommandId::from_uuid(uuid::Uuid::from_u128(now + (ms << 80)))
        }
    };
    assert_eq!(code(&give(&["create"], ahead(60_000), None, start())), None);
    assert_eq!(code(&give(&["create"], ahead(60_001), None, start())), Some(ErrorCode::Expired));
    let nil = |_: &mut Player| CommandId::from_uuid(uuid::Uuid::nil());
    assert_eq!(code(&give(&["create"], nil, None, start())), Some(ErrorCode::InvalidArgument));
}

#[test]
fn an_accepted_command_that_expired_by_its_own_word_still_gets_its_answer() {
    let again = |player: &mut Player| player.world.command_id("r1");
    assert!(matches!(give(&["create", "start r1"], again, Some(-5), start()), Answer::Started(_)));
}

#[test]
fn a_task_that_makes_the_event_too_large_is_refused_by_name() {
    let fresh = |player: &mut Player| player.world.command_id("fresh");
    let task = Payload::text("x".repeat(EVENT_BODY_BYTES_MAX));
    let Answer::Refused(error) = give(&["create"], fresh, None, Order::Start(StartRun { task })) else { panic!() };
    assert_eq!((error.code, error.field.as_deref()), (ErrorCode::TooLarge, Some("task")));
}

#[test]
fn a_create_that_is_too_large_or_expired_leaves_no_agent() {
    let mut player = Player::new();
    player.world.spec.labels.insert("x".to_owned(), "x".repeat(EVENT_BODY_BYTES_MAX));
    let said = player.line("create").join("; ");
    assert!(said.contains("ACRI-0010") && said.contains("`spec`") && said.ends_with("HALT not ours"), "{said}");
    let mut player = Player::new();
    player.world.command_id("create");
    player.world.pass(std::time::Duration::from_secs(24 * 3600 + 1));
    let said = player.line("create").join("; ");
    assert!(said.contains("ACRI-0006"), "{said}");
}

#[test]
fn more_commands_than_may_wait_are_refused_but_a_kill_is_not() {
    let mut player = Player::new();
    for line in ["create", "start r1", "r1 started", "hold", "stop s r1 5ms"] {
        player.line(line);
    }
    for number in 0..COMMANDS_WAITING_MAX {
        assert!(player.line(&format!("start c{number}")).is_empty());
    }
    let said = player.line("start more").join("; ");
    assert!(said.contains("ACRI-0007") && said.contains("(retry)"), "{said}");
    assert!(player.line("kill k r1").is_empty());
    assert!(!player.line("status").is_empty(), "a question is answered at once");
    assert_eq!(player.world.machine.as_mut().unwrap().abandon().len(), COMMANDS_WAITING_MAX + 2);
}

#[test]
fn an_agent_has_only_so_many_runs() {
    let mut player = Player::new();
    player.line("create");
    for number in 0..RUNS_PER_AGENT_MAX {
        player.line(&format!("start r{number}"));
        player.line(&format!("r{number} notstarted"));
    }
    let said = player.line("start more").join("; ");
    assert!(said.contains("ACRI-0007"), "{said}");
}

#[test]
fn a_kill_is_recorded_before_other_waiting_commands() {
    check(
        "agent\nstart r1\nr1 started\nhold\nr1 wait out 1\nstop s1 r1 5ms\nkill k1 r1\nack\ngo",
        expect![[r#"
            start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
            r1 started -> run.started; PUMP
            hold -> 
            r1 wait out 1 -> run.waiting(tool_call)
            stop s1 r1 5ms -> 
            kill k1 r1 -> 
            ack -> derived 1; run.kill_requested(k1! by ann)
            go -> KILL (k1!, by ann); [3] ACRI-0005 failed_precondition: run 8b71d1ad-8021-8be3-a51b-7f2efd3efe0b is being killed; wake 3000ms
        "#]],
    );
}

#[test]
fn a_question_too_long_for_an_event_is_cut_and_says_so() {
    let mut player = Player::new();
    for line in ["create", "start r1", "r1 started"] {
        player.line(line);
    }
    let run = player.world.run("r1");
    let question = "ä".repeat(EVENT_BODY_BYTES_MAX);
    let event = EscalationRaised { escalation: "e".to_owned(), question }.into();
    let source = Source { stream: Stream::Stdout, offset: 1, index: 0 };
    player.world.step(Input::Report(run, crate::appender::Report::Derived(source, event)));
    player.bus("ack");
    let acri::Event::EscalationRaised(stored) = &player.world.envelopes().last().unwrap().event else { panic!() };
    assert!(stored.question.ends_with("(cut, 524288 bytes)"));
}

#[test]
fn another_spec_under_the_same_create_is_refused() {
    let mut player = Player::new();
    player.line("create");
    let mut spec = player.world.spec.clone();
    spec.command.push("x".to_owned());
    let command = player.world.command("create", Order::Create(CreateAgent { spec }));
    let asker = player.world.asker();
    let out = player.world.step(Input::Command(asker, command));
    assert!(matches!(&out[0], Output::Reply(_, Answer::Refused(error)) if error.code == ErrorCode::IdReused));
}

#[test]
fn from_ninety_percent_on_nothing_new_begins_and_what_runs_can_end() {
    check(
        "create\nfull 89\nstart r1 t\nfull 90\nstart r1 t\nr1 started\nstart r2 t\nstop s1 r1 500ms\nkill k1 r1\nr1 exit sig 9 killed k1\nr1 logs 0\nstart r2 t\nfull 89\nstart r2 t\nfull 100\nr2 started\nr2 exit 0\nr2 logs 0\nremove x",
        expect![[r#"
            create -> agent.created; [1] created on node-1
            full 89 -> 
            start r1 t -> run.accepted("t"); [2] started; SPAWN; wake 60000ms
            full 90 -> 
            start r1 t -> [3] started
            r1 started -> run.started; PUMP
            start r2 t -> [4] ACRI-0005 failed_precondition: run 8b71d1ad-8021-8be3-a51b-7f2efd3efe0b is open: running
            stop s1 r1 500ms -> run.stop_requested(s1!, Kill at 500ms); [5] stopping until 500ms; STOP; wake 500ms
            kill k1 r1 -> run.kill_requested(k1! by ann); KILL (k1!, by ann)
            r1 exit sig 9 killed k1 -> run.killed(requested, k1!, signal 9); [6] killed, proved
            r1 logs 0 -> run.logs_sealed(0); sealed
            start r2 t -> [7] ACRI-0007 resource_exhausted: the event stream ACRI_EVENTS is 90 % full, and from 90 % on nothing new begins, so that what runs can end: give the stream more room (retry)
            full 89 -> 
            start r2 t -> run.accepted("t"); [8] started; SPAWN; wake 60000ms
            full 100 -> 
            r2 started -> run.started; PUMP
            r2 exit 0 -> run.completed(code 0)
            r2 logs 0 -> run.logs_sealed(0); sealed
            remove x -> agent.removed(done); [9] removed; retired
        "#]],
    );
}

#[test]
fn a_create_that_is_no_repeat_is_refused_from_ninety_percent_on() {
    let mut player = Player::new();
    let spec = player.world.spec.clone();
    let create = player.world.command("create", Order::Create(CreateAgent { spec }));
    assert_eq!(create.check_room(89), Ok(()));
    let refused = create.check_room(90).unwrap_err();
    assert_eq!((refused.code, refused.retryable), (ErrorCode::ResourceExhausted, true));
    assert!(refused.message.contains("ACRI_EVENTS is 90 % full"), "{}", refused.message);
}
