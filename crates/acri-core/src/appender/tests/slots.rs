//! One event under way: every way in which the bus can answer.

use super::{check, script::Player};
use crate::appender::{Input, Output};
use acri::{StreamSeq, Timestamp};
use expect_test::expect;

#[test]
fn an_unknown_outcome_is_repeated_until_a_read_finds_it_stored() {
    check(
        "agent\nhold\nstart r1\nlose\nack\nread",
        expect![[r#"
        hold -> 
        start r1 -> run.accepted("")
        lose -> again #1 run.accepted("")
        ack -> reread after 10
        read -> [2] started; SPAWN; wake 60000ms
    "#]],
    );
}

#[test]
fn an_attempt_that_was_not_stored_is_repeated_with_the_same_body() {
    check(
        "agent\nhold\nstart r1\ndrop\ndrop\nack",
        expect![[r#"
        hold -> 
        start r1 -> run.accepted("")
        drop -> again #1 run.accepted("")
        drop -> again #2 run.accepted("")
        ack -> [2] started; SPAWN; wake 60000ms
    "#]],
    );
}

#[test]
fn a_duplicate_counts_only_if_a_read_finds_our_bytes() {
    check(
        "agent\nhold\nstart r1\ndup\nreadfail\nread",
        expect![[r#"
        hold -> 
        start r1 -> run.accepted("")
        dup -> reread after 10
        readfail -> reread after 10
        read -> [2] started; SPAWN; wake 60000ms
    "#]],
    );
}

#[test]
fn a_conflict_without_anything_new_is_repeated() {
    check(
        "agent\nhold\nstart r1\nconflict\nread\nack",
        expect![[r#"
        hold -> 
        start r1 -> run.accepted("")
        conflict -> reread after 10
        read -> again #1 run.accepted("")
        ack -> [2] started; SPAWN; wake 60000ms
    "#]],
    );
}

#[test]
fn a_refused_command_is_answered_and_forgotten() {
    check(
        "agent\nhold\nstart r1\nrefuse\ngo\nstart r1",
        expect![[r#"
        hold -> 
        start r1 -> run.accepted("")
        refuse -> [2] ACRI-0007 resource_exhausted: the stream is full (retry)
        go -> 
        start r1 -> run.accepted(""); [3] started; SPAWN; wake 60000ms
    "#]],
    );
}

#[test]
fn a_refusal_after_an_unknown_outcome_proves_nothing() {
    check(
        "agent\nhold\nstart r1\nlose\nrefuse\nack\nread",
        expect![[r#"
        hold -> 
        start r1 -> run.accepted("")
        lose -> again #1 run.accepted("")
        refuse -> again #2 run.accepted("")
        ack -> reread after 10
        read -> [2] started; SPAWN; wake 60000ms
    "#]],
    );
}

#[test]
fn an_owed_event_that_is_refused_is_tried_again_later() {
    check(
        "agent\nstart r1\nhold\nr1 started\nrefuse\nr1 ask out 1\n+4999ms\n+1ms\ngo",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        hold -> 
        r1 started -> run.started
        refuse -> wake 5000ms
        r1 ask out 1 -> 
        +4999ms -> wake 5000ms
        +1ms -> run.started
        go -> PUMP; escalation.raised(why?); derived 1
    "#]],
    );
    check(
        "agent\nstart r1\nr1 started\nhold\nr1 ask out 1\nrefuse\n+5000ms\nack",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        hold -> 
        r1 ask out 1 -> escalation.raised(why?)
        refuse -> wake 5000ms
        +5000ms -> escalation.raised(why?)
        ack -> derived 1
    "#]],
    );
}

#[test]
fn a_stale_result_is_counted_and_dropped() {
    check(
        "agent\nhold\nstart r1\ndrop\nstale\nack\nstale",
        expect![[r#"
        hold -> 
        start r1 -> run.accepted("")
        drop -> again #1 run.accepted("")
        stale -> stale +1
        ack -> [2] started; SPAWN; wake 60000ms
        stale -> stale +1
    "#]],
    );
}

#[test]
fn status_is_answered_while_an_event_is_under_way() {
    check(
        "agent\nhold\nstart r1\nstatus\nack\nstatus",
        expect![[r#"
        hold -> 
        start r1 -> run.accepted("")
        status -> [3] no run, epoch 1
        ack -> [2] started; SPAWN; wake 60000ms
        status -> [4] pending
    "#]],
    );
}

#[test]
fn a_refused_create_leaves_no_agent() {
    check(
        "hold\ncreate\nrefuse\nstatus\n+1ms",
        expect![[r#"
        hold -> 
        create -> agent.created
        refuse -> [1] ACRI-0007 resource_exhausted: the stream is full (retry); HALT not ours
        status -> [2] ACRI-0008 unavailable: this owner has stopped acting for the agent (retry)
        +1ms -> 
    "#]],
    );
}

#[test]
fn a_create_whose_answer_was_lost_is_found() {
    check(
        "hold\ncreate\nlose\nack\nread\nstart r1",
        expect![[r#"
        hold -> 
        create -> agent.created
        lose -> again #1 agent.created
        ack -> reread after 0
        read -> [1] created on node-1
        start r1 -> run.accepted("")
    "#]],
    );
}

#[test]
fn a_read_that_is_not_the_whole_is_made_again() {
    let mut player = Player::new();
    for line in ["create", "hold", "start r1", "lose", "ack"] {
        player.line(line);
    }
    let (token, after) = player.world.read.take().unwrap();
    let beyond = StreamSeq(player.world.last().0 + 1);
    let seen = player.world.store.iter().map(|(_, stored)| stored.clone());
    let seen = seen.filter(|stored| stored.seq > after).collect();
    let out = player.world.step(Input::Caught(token, seen, beyond));
    assert!(matches!(out[..], [Output::Reread { .. }]), "{out:?}");
}

#[test]
fn a_result_of_another_kind_than_the_one_awaited_is_stale() {
    let mut player = Player::new();
    for line in ["create", "hold", "start r1", "conflict"] {
        player.line(line);
    }
    let (token, _) = player.world.read.unwrap();
    assert_eq!(player.world.step(Input::Appended(token, StreamSeq(99))), []);
    assert_eq!(player.world.machine.as_ref().unwrap().stale_count(), 1);
    assert!(player.world.machine.as_ref().unwrap().awaits(token));
}

#[test]
fn a_clock_that_goes_back_does_not_take_the_history_with_it() {
    let mut player = Player::new();
    for line in ["create", "start r1"] {
        player.line(line);
    }
    let before = player.world.now;
    player.world.now = Timestamp::from_micros(before.as_micros() - 1_000_000);
    player.line("r1 started");
    assert_eq!(player.world.envelopes().last().unwrap().time, before);
}
