//! Adoption, fencing, and what an adopter owes.

use super::check;
use expect_test::expect;

#[test]
fn an_adoption_claims_then_attaches_then_goes_on() {
    check(
        "agent\nstart r1\nr1 started\ncrash\nhold\nadopt\nstop s1 r1 5ms\nack\nr1 started\nack",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        crash -> 
        hold -> 
        adopt -> agent.assigned(epoch 2)
        stop s1 r1 5ms -> 
        ack -> ATTACH as 2; wake 3000ms
        r1 started -> PUMP; run.stop_requested(s1!, Kill at 5ms)
        ack -> [3] stopping until 5ms; STOP; wake 5ms
    "#]],
    );
}

#[test]
fn a_pending_run_that_was_never_started_is_spawned() {
    check(
        "agent\nstart r1\ncrash\nadopt\nr1 neverstarted\nr1 started",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        crash -> 
        adopt -> agent.assigned(epoch 2); ATTACH as 2; wake 3000ms
        r1 neverstarted -> SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
    "#]],
    );
    check(
        "agent\nstart r1\ncrash\nadopt\nr1 started\nr1 exit 0",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        crash -> 
        adopt -> agent.assigned(epoch 2); ATTACH as 2; wake 3000ms
        r1 started -> run.started; PUMP
        r1 exit 0 -> run.completed(code 0)
    "#]],
    );
    check(
        "agent\nstart r1\ncrash\nadopt\nr1 exit 0",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        crash -> 
        adopt -> agent.assigned(epoch 2); ATTACH as 2; wake 3000ms
        r1 exit 0 -> run.completed(code 0); PUMP
    "#]],
    );
}

#[test]
fn what_was_asked_before_a_crash_ends_a_run_that_never_started() {
    check(
        "agent\nstart r1\nkill k1 r1\ncrash\nadopt\nr1 neverstarted",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        kill k1 r1 -> run.kill_requested(k1! by ann); KILL (k1!, by ann); wake 3000ms
        crash -> 
        adopt -> agent.assigned(epoch 2); ATTACH as 2; wake 3000ms
        r1 neverstarted -> run.killed(requested, k1!, no exit); run.logs_sealed(0); sealed
    "#]],
    );
    check(
        "agent\nstart r1\nstop s1 r1 5ms\ncrash\nadopt\nr1 neverstarted",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        stop s1 r1 5ms -> run.stop_requested(s1!, Kill at 5ms); [3] stopping until 5ms; wake 5ms
        crash -> 
        adopt -> agent.assigned(epoch 2); ATTACH as 2; wake 3000ms
        r1 neverstarted -> run.stopped(s1!, no exit); wake 30000ms; run.logs_sealed(0); sealed
    "#]],
    );
}

#[test]
fn an_old_stop_is_asked_again_and_expires_only_after_the_grace_of_adoption() {
    check(
        "agent\nstart r1\nr1 started\nstop s1 r1 1000ms\ncrash\n+2000ms\nadopt\nr1 started\n+29999ms\n+1ms\nr1 exit sig 9 killed s1",
        expect![[r#"
            start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
            r1 started -> run.started; PUMP
            stop s1 r1 1000ms -> run.stop_requested(s1!, Kill at 1000ms); [3] stopping until 1000ms; STOP; wake 1000ms
            crash -> 
            +2000ms -> 
            adopt -> agent.assigned(epoch 2); ATTACH as 2; wake 5000ms
            r1 started -> STOP; PUMP; wake 32000ms
            +29999ms -> wake 32000ms
            +1ms -> KILL (s1!, by ann); wake 35000ms
            r1 exit sig 9 killed s1 -> run.killed(grace_expired, s1!, signal 9)
        "#]],
    );
    check(
        "agent\nstart r1\nr1 started\nstop s1 r1 1000ms\ncrash\nadopt\nr1 started\nr1 exit 0",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        stop s1 r1 1000ms -> run.stop_requested(s1!, Kill at 1000ms); [3] stopping until 1000ms; STOP; wake 1000ms
        crash -> 
        adopt -> agent.assigned(epoch 2); ATTACH as 2; wake 3000ms
        r1 started -> STOP; PUMP; wake 30000ms
        r1 exit 0 -> run.stopped(s1!, code 0)
    "#]],
    );
}

#[test]
fn a_new_stop_after_an_adoption_has_its_own_deadline() {
    check(
        "agent\nstart r1\nr1 started\ncrash\nadopt\nr1 started\nstop s1 r1 1000ms\n+1000ms",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        crash -> 
        adopt -> agent.assigned(epoch 2); ATTACH as 2; wake 3000ms
        r1 started -> PUMP
        stop s1 r1 1000ms -> run.stop_requested(s1!, Kill at 1000ms); [3] stopping until 1000ms; STOP; wake 1000ms
        +1000ms -> KILL (s1!, by ann); wake 4000ms
    "#]],
    );
}

#[test]
fn a_recorded_kill_is_carried_out_after_the_claim() {
    check(
        "agent\nstart r1\nr1 started\nkill k1 r1\ncrash\nadopt\nr1 started\nr1 exit sig 9 killed k1",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        kill k1 r1 -> run.kill_requested(k1! by ann); KILL (k1!, by ann); wake 3000ms
        crash -> 
        adopt -> agent.assigned(epoch 2); ATTACH as 2; wake 3000ms
        r1 started -> KILL (k1!, by ann); PUMP
        r1 exit sig 9 killed k1 -> run.killed(requested, k1!, signal 9)
    "#]],
    );
    check(
        "agent\nstart r1\nr1 started\nkill k1 r1\ncrash\nadopt\n+3000ms\n+3000ms",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        kill k1 r1 -> run.kill_requested(k1! by ann); KILL (k1!, by ann); wake 3000ms
        crash -> 
        adopt -> agent.assigned(epoch 2); ATTACH as 2; wake 3000ms
        +3000ms -> KILL (k1!, by ann); wake 6000ms
        +3000ms -> KILL (k1!, by ann); wake 9000ms
    "#]],
    );
}

#[test]
fn an_ended_run_is_attached_for_its_log_only() {
    check(
        "agent\nstart r1\nr1 started\nr1 exit 0\ncrash\nadopt\nr1 started\nr1 exit 0\nr1 logs 2",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        r1 exit 0 -> run.completed(code 0)
        crash -> 
        adopt -> agent.assigned(epoch 2); ATTACH as 2; wake 3000ms
        r1 started -> PUMP
        r1 exit 0 -> 
        r1 logs 2 -> run.logs_sealed(2); sealed
    "#]],
    );
    check(
        "agent\nstart r1\nr1 started\nr1 exit 0\ncrash\nadopt\nr1 lost",
        expect![[r#"
            start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
            r1 started -> run.started; PUMP
            r1 exit 0 -> run.completed(code 0)
            crash -> 
            adopt -> agent.assigned(epoch 2); ATTACH as 2; wake 3000ms
            r1 lost -> wake 10000ms
        "#]],
    );
}

#[test]
fn a_lost_history_fails_the_open_run_and_kills_what_is_left_of_it() {
    check(
        "agent\nstart r1\nr1 started\ncrash\nadopt lost\nkill k1 r1\nr1 started\n+3000ms\nr1 exit sig 9 killed r1\nr1 logs 1\nkill k1 r1",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        crash -> 
        adopt lost -> agent.assigned(epoch 2); ATTACH as 2; run.failed(history_lost, the event stream lost acknowledged events, no exit); wake 3000ms
        kill k1 r1 -> [3] killed, not proved
        r1 started -> KILL (its run has ended without it, by ann); PUMP
        +3000ms -> KILL (its run has ended without it, by ann); wake 6000ms
        r1 exit sig 9 killed r1 -> 
        r1 logs 1 -> run.logs_sealed(1); sealed
        kill k1 r1 -> [4] killed, proved
    "#]],
    );
    check(
        "agent\nstart r1\ncrash\nadopt lost\nr1 neverstarted",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        crash -> 
        adopt lost -> agent.assigned(epoch 2); ATTACH as 2; run.failed(history_lost, the event stream lost acknowledged events, no exit); wake 3000ms
        r1 neverstarted -> run.logs_sealed(0); sealed
    "#]],
    );
}

#[test]
fn a_started_run_of_which_its_holder_knows_nothing_is_lost() {
    check(
        "agent\nstart r1\nr1 started\ncrash\nadopt\nr1 neverstarted",
        expect![[r#"
            start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
            r1 started -> run.started; PUMP
            crash -> 
            adopt -> agent.assigned(epoch 2); ATTACH as 2; wake 3000ms
            r1 neverstarted -> run.failed(harness_lost, it had started, and its holder knows nothing of it, no exit); wake 10000ms
        "#]],
    );
}

#[test]
fn decisions_wait_for_the_claim_but_not_for_long_and_a_kill_does_not_wait() {
    check(
        "agent\nstart r1\nr1 started\ncrash\nadopt\nstop s1 r1 5000ms\nr1 started\ncrash\nadopt\nstop s2 r1 1ms\nstatus\n+3000ms",
        expect![[r#"
            start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
            r1 started -> run.started; PUMP
            crash -> 
            adopt -> agent.assigned(epoch 2); ATTACH as 2; wake 3000ms
            stop s1 r1 5000ms -> 
            r1 started -> PUMP; run.stop_requested(s1!, Kill at 5000ms); [3] stopping until 5000ms; STOP; wake 5000ms
            crash -> 
            adopt -> agent.assigned(epoch 3); ATTACH as 3; wake 3000ms
            stop s2 r1 1ms -> 
            status -> [5] running stopping (s1!)
            +3000ms -> run.stop_requested(s2!, Kill at 3001ms); wake 30000ms; [4] stopping until 3001ms; wake 3001ms
        "#]],
    );
    check(
        "agent\nstart r1\nr1 started\ncrash\nadopt\nstop s1 r1 5000ms\nkill k1 r1",
        expect![[r#"
            start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
            r1 started -> run.started; PUMP
            crash -> 
            adopt -> agent.assigned(epoch 2); ATTACH as 2; wake 3000ms
            stop s1 r1 5000ms -> 
            kill k1 r1 -> run.kill_requested(k1! by ann)
        "#]],
    );
}

#[test]
fn a_run_of_a_lost_node_stays_open_for_a_day_for_its_node_to_come_back() {
    check(
        "agent\nstart r1\nr1 started\ncrash\nadopt\nr1 lost node\nkill k1 r1\n+86399999ms\n+1ms\nkill k2 r1",
        expect![[r#"
            start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
            r1 started -> run.started; PUMP
            crash -> 
            adopt -> agent.assigned(epoch 2); ATTACH as 2; wake 3000ms
            r1 lost node -> run.failed(node_lost, it was silent, no exit); wake 10000ms; wake 86400000ms
            kill k1 r1 -> [3] killed, not proved
            +86399999ms -> wake 86400000ms
            +1ms -> run.logs_sealed(0, gap); sealed
            kill k2 r1 -> [4] killed, not proved
        "#]],
    );
    check(
        "agent\nstart r1\nr1 started\ncrash\nadopt\nr1 lost node\ncrash\nadopt\nr1 started\nr1 exit orphaned\nr1 logs 2\nkill k1 r1",
        expect![[r#"
            start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
            r1 started -> run.started; PUMP
            crash -> 
            adopt -> agent.assigned(epoch 2); ATTACH as 2; wake 3000ms
            r1 lost node -> run.failed(node_lost, it was silent, no exit); wake 10000ms; wake 86400000ms
            crash -> 
            adopt -> agent.assigned(epoch 3); ATTACH as 3; wake 3000ms
            r1 started -> KILL (its run has ended without it, by ann); PUMP
            r1 exit orphaned -> 
            r1 logs 2 -> run.logs_sealed(2); sealed
            kill k1 r1 -> [3] killed, proved
        "#]],
    );
    check(
        "agent\nstart r1\ncrash\nadopt\nr1 lost node\ncrash\nadopt\nr1 started\nr1 lost\n+10000ms",
        expect![[r#"
            start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
            crash -> 
            adopt -> agent.assigned(epoch 2); ATTACH as 2; wake 3000ms
            r1 lost node -> run.failed(node_lost, it was silent, no exit); wake 10000ms; wake 86400000ms
            crash -> 
            adopt -> agent.assigned(epoch 3); ATTACH as 3; wake 3000ms
            r1 started -> KILL (its run has ended without it, by ann); PUMP
            r1 lost -> wake 10000ms
            +10000ms -> run.logs_sealed(0, gap); sealed
        "#]],
    );
    check(
        "agent\nstart r1\ncrash\nadopt\nr1 lost node\ncrash\nadopt\nr1 neverstarted",
        expect![[r#"
            start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
            crash -> 
            adopt -> agent.assigned(epoch 2); ATTACH as 2; wake 3000ms
            r1 lost node -> run.failed(node_lost, it was silent, no exit); wake 10000ms; wake 86400000ms
            crash -> 
            adopt -> agent.assigned(epoch 3); ATTACH as 3; wake 3000ms
            r1 neverstarted -> run.logs_sealed(0); sealed
        "#]],
    );
}

#[test]
fn a_removed_agent_is_not_claimed() {
    check(
        "agent\nremove x\ncrash\nadopt\nremove x\nstart r1\nstatus",
        expect![[r#"
        remove x -> agent.removed(done); [2] removed; retired
        crash -> 
        adopt -> retired
        remove x -> [3] removed
        start r1 -> [4] ACRI-0005 failed_precondition: the agent was removed
        status -> [5] no run, epoch 1
    "#]],
    );
}

#[test]
fn a_newer_owner_fences_the_older_one() {
    check(
        "agent\nhold\nstart r1\nclaimed\nack\nread\nstart r2",
        expect![[r#"
        hold -> 
        start r1 -> run.accepted("")
        claimed -> 
        ack -> reread after 10
        read -> HALT fenced by 2
        start r2 -> [3] ACRI-0008 unavailable: this owner has stopped acting for the agent (retry)
    "#]],
    );
}

#[test]
fn of_two_adopters_one_wins() {
    check(
        "agent\ncrash\nhold\nadopt\nclaimed\nack\nread",
        expect![[r#"
        crash -> 
        hold -> 
        adopt -> agent.assigned(epoch 2)
        claimed -> 
        ack -> reread after 10
        read -> HALT fenced by 2
    "#]],
    );
}

#[test]
fn a_predecessors_event_that_lands_late_kills_the_slot_and_the_claim_is_made_anew() {
    check(
        "agent\nstart r1\ncrash\nhold\nadopt\nlate r1\nack\nread\nack",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        crash -> 
        hold -> 
        adopt -> agent.assigned(epoch 2)
        late r1 -> 
        ack -> reread after 13
        read -> agent.assigned(epoch 2)
        ack -> ATTACH as 2; wake 3000ms
    "#]],
    );
}

#[test]
fn a_predecessors_removal_that_lands_late_leaves_nothing_to_claim() {
    let mut player = super::script::Player::new();
    for line in ["create", "crash", "hold", "adopt"] {
        player.line(line);
    }
    let epoch = player.world.envelopes()[0].epoch;
    player.world.foreign(None, epoch, acri::event::AgentRemoved { reason: String::new() }.into());
    player.line("ack");
    assert_eq!(player.line("read"), ["retired"]);
}

#[test]
fn our_epoch_under_a_foreign_event_is_a_bug() {
    check(
        "agent\nstart r1\nhold\nr1 started\nlate r1\nack\nread",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        hold -> 
        r1 started -> run.started
        late r1 -> 
        ack -> reread after 13
        read -> HALT bug: event 00000000-0000-0000-0000-000000000004 bears epoch 1 and is not ours
    "#]],
    );
}

#[test]
fn a_stream_that_lost_what_was_acknowledged_is_noticed() {
    check(
        "agent\nstart r1\nhold\nr1 started\nrollback\nack\nread\nadopt lost",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        hold -> 
        r1 started -> run.started
        rollback -> 
        ack -> reread after 13
        read -> HALT history lost
        adopt lost -> agent.assigned(epoch 2)
    "#]],
    );
}

#[test]
fn a_repeated_create_elsewhere_gets_the_first_handle() {
    check(
        "create\ncreate again",
        expect![[r#"
        create -> agent.created; [1] created on node-1
        create again -> agent.created; reread after 0; [2] created on node-1; HALT not ours
    "#]],
    );
    check(
        "hold\ncreate\nlose\nack\nclaimed\nread",
        expect![[r#"
        hold -> 
        create -> agent.created
        lose -> again #1 agent.created
        ack -> reread after 0
        claimed -> 
        read -> HALT fenced by 2
    "#]],
    );
}

#[test]
fn a_history_that_cannot_be_folded_stops_the_agent_loudly() {
    let mut player = super::script::Player::new();
    for line in ["create", "start r1", "crash"] {
        player.line(line);
    }
    let (run, epoch) = (player.world.run("r9"), player.world.envelopes()[0].epoch);
    player.world.foreign(Some(run), epoch, acri::event::RunResumed {}.into());
    let said = player.line("adopt").join("; ");
    assert!(said.starts_with("HALT bug") && said.contains("was never accepted"), "{said}");
}

#[test]
fn an_unknown_event_is_skipped_and_counted() {
    let mut player = super::script::Player::new();
    for line in ["create", "start r1", "crash"] {
        player.line(line);
    }
    let (run, epoch) = (player.world.run("r1"), player.world.envelopes()[0].epoch);
    let event = acri::Event::Unknown { type_name: "run.danced".to_owned(), data: acri::value::Value::Nil };
    player.world.foreign(Some(run), epoch, event);
    let event = acri::Event::Unknown { type_name: "agent.danced".to_owned(), data: acri::value::Value::Nil };
    player.world.foreign(None, epoch, event);
    player.line("adopt");
    player.line("r1 started");
    assert_eq!(crate::check::verify(&player.world.store).problems, []);
    assert_eq!(player.world.envelopes().last().unwrap().event.type_name(), "run.started");
}
