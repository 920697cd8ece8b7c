//! The life of a run.

use super::check;
use expect_test::expect;

#[test]
fn a_run_that_exits_with_status_zero_is_completed_and_sealed() {
    check(
        "create\nstart r1 do it\nr1 started\nstatus r1\nr1 exit 0\nr1 logs 3\nstatus r1",
        expect![[r#"
            create -> agent.created; [1] created on node-1
            start r1 do it -> run.accepted("do it"); [2] started; SPAWN; wake 60000ms
            r1 started -> run.started; PUMP
            status r1 -> [3] running
            r1 exit 0 -> run.completed(code 0)
            r1 logs 3 -> run.logs_sealed(3); sealed
            status r1 -> [4] completed sealed
        "#]],
    );
}

#[test]
fn a_status_other_than_zero_or_a_signal_fails_the_run() {
    check(
        "agent\nstart r1\nr1 started\nr1 exit 3\nr1 logs 0\nstart r2\nr2 started\nr2 exit sig 11",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        r1 exit 3 -> run.failed(exit, status 3, code 3)
        r1 logs 0 -> run.logs_sealed(0); sealed
        start r2 -> run.accepted(""); [3] started; SPAWN; wake 60000ms
        r2 started -> run.started; PUMP
        r2 exit sig 11 -> run.failed(exit, signal 11, signal 11)
    "#]],
    );
    check(
        "agent\nstart r1\nr1 started\nr1 exit ?",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        r1 exit ? -> run.failed(exit, status unknown, no exit)
    "#]],
    );
}

#[test]
fn a_harness_that_certainly_did_not_begin_is_a_failed_run_without_a_log() {
    check(
        "agent\nstart r1\nr1 notstarted\nstatus",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 notstarted -> run.failed(spawn_failed, no such program, no exit); run.logs_sealed(0); sealed
        status -> [3] failed (spawn_failed: no such program) sealed
    "#]],
    );
}

#[test]
fn a_start_that_never_becomes_ready_times_out_once() {
    check(
        "agent\nstart r1\n+59999ms\n+1ms\n+1ms\n+3000ms\nr1 exit sig 9 killed r1\nr1 logs 0\n+90000ms",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        +59999ms -> wake 60000ms
        +1ms -> KILL (it did not begin in time, by ann); wake 63000ms
        +1ms -> wake 63000ms
        +3000ms -> KILL (it did not begin in time, by ann); wake 66001ms
        r1 exit sig 9 killed r1 -> run.failed(start_timed_out, the harness did not begin in time, signal 9); PUMP
        r1 logs 0 -> run.logs_sealed(0); sealed
        +90000ms -> 
    "#]],
    );
    check(
        "agent\nstart r1\n+60000ms\nr1 started\nr1 notstarted",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        +60000ms -> KILL (it did not begin in time, by ann); wake 63000ms
        r1 started -> 
        r1 notstarted -> run.failed(start_timed_out, the harness did not begin in time, no exit); PUMP; run.logs_sealed(0); sealed
    "#]],
    );
}

#[test]
fn a_stop_in_grace_stops_the_run() {
    check(
        "agent\nstart r1\nr1 started\nstop s1 r1 5000ms\nr1 stopdelivered\nstatus\n+1000ms\nr1 exit 0",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        stop s1 r1 5000ms -> run.stop_requested(s1!, Kill at 5000ms); [3] stopping until 5000ms; STOP; wake 5000ms
        r1 stopdelivered -> 
        status -> [4] running stopping (s1!)
        +1000ms -> wake 5000ms
        r1 exit 0 -> run.stopped(s1!, code 0)
    "#]],
    );
    check(
        "agent\nstart r1\nr1 started\nstop s1 r1 5000ms\nr1 exit 7",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        stop s1 r1 5000ms -> run.stop_requested(s1!, Kill at 5000ms); [3] stopping until 5000ms; STOP; wake 5000ms
        r1 exit 7 -> run.stopped(s1!, code 7)
    "#]],
    );
}

#[test]
fn success_before_the_stop_was_delivered_is_success() {
    check(
        "agent\nstart r1\nr1 started\nstop s1 r1 5000ms\nr1 exit 0",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        stop s1 r1 5000ms -> run.stop_requested(s1!, Kill at 5000ms); [3] stopping until 5000ms; STOP; wake 5000ms
        r1 exit 0 -> run.completed(code 0)
    "#]],
    );
}

#[test]
fn an_expired_stop_kills() {
    check(
        "agent\nstart r1\nr1 started\nstop s1 r1 5000ms\nr1 stopdelivered\n+5000ms\n+3000ms\nr1 exit sig 9 killed s1",
        expect![[r#"
            start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
            r1 started -> run.started; PUMP
            stop s1 r1 5000ms -> run.stop_requested(s1!, Kill at 5000ms); [3] stopping until 5000ms; STOP; wake 5000ms
            r1 stopdelivered -> 
            +5000ms -> KILL (s1!, by ann); wake 8000ms
            +3000ms -> KILL (s1!, by ann); wake 11000ms
            r1 exit sig 9 killed s1 -> run.killed(grace_expired, s1!, signal 9)
        "#]],
    );
}

#[test]
fn a_stop_that_keeps_on_expiry_is_forgotten_when_it_expires() {
    check(
        "agent\nstart r1\nr1 started\nstop s1 r1 5000ms keep\nr1 stopdelivered\n+5000ms\nstatus\nr1 exit 3",
        expect![[r#"
            start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
            r1 started -> run.started; PUMP
            stop s1 r1 5000ms keep -> run.stop_requested(s1!, Keep at 5000ms); [3] stopping until 5000ms; STOP; wake 5000ms
            r1 stopdelivered -> 
            +5000ms -> run.stop_expired
            status -> [4] running
            r1 exit 3 -> run.failed(exit, status 3, code 3)
        "#]],
    );
}

#[test]
fn a_second_stop_can_only_shorten_the_grace() {
    check(
        "agent\nstart r1\nr1 started\nstop s1 r1 5000ms\nstop s2 r1 9000ms\nstop s3 r1 1000ms\n+1000ms\nstop s4 r1 9000ms keep\nr1 exit sig 9 killed s3",
        expect![[r#"
            start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
            r1 started -> run.started; PUMP
            stop s1 r1 5000ms -> run.stop_requested(s1!, Kill at 5000ms); [3] stopping until 5000ms; STOP; wake 5000ms
            stop s2 r1 9000ms -> run.stop_requested(s2!, Kill at 5000ms); [4] stopping until 5000ms; STOP
            stop s3 r1 1000ms -> run.stop_requested(s3!, Kill at 1000ms); [5] stopping until 1000ms; STOP; wake 1000ms
            +1000ms -> KILL (s3!, by ann); wake 4000ms
            stop s4 r1 9000ms keep -> run.stop_requested(s4!, Keep at 1000ms); [6] stopping until 1000ms; STOP
            r1 exit sig 9 killed s3 -> run.killed(grace_expired, s3!, signal 9)
        "#]],
    );
}

#[test]
fn a_stop_before_the_harness_begins_waits_for_it() {
    check(
        "agent\nstart r1\nstop s1 r1 5000ms\nr1 started\nr1 stopdelivered\nr1 exit sig 15",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        stop s1 r1 5000ms -> run.stop_requested(s1!, Kill at 5000ms); [3] stopping until 5000ms; wake 5000ms
        r1 started -> STOP; run.started; PUMP
        r1 stopdelivered -> 
        r1 exit sig 15 -> run.stopped(s1!, signal 15)
    "#]],
    );
    check(
        "agent\nstart r1\nstop s1 r1 5000ms\nr1 notstarted",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        stop s1 r1 5000ms -> run.stop_requested(s1!, Kill at 5000ms); [3] stopping until 5000ms; wake 5000ms
        r1 notstarted -> run.stopped(s1!, no exit); run.logs_sealed(0); sealed
    "#]],
    );
}

#[test]
fn a_kill_is_answered_when_its_end_is_recorded() {
    check(
        "agent\nstart r1\nr1 started\nkill k1 r1\nstatus\nkill k2 r1\n+1ms\nr1 exit sig 9 killed k1",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        kill k1 r1 -> run.kill_requested(k1! by ann); KILL (k1!, by ann); wake 3000ms
        status -> [4] running killing (k1!)
        kill k2 r1 -> 
        +1ms -> wake 3000ms
        r1 exit sig 9 killed k1 -> run.killed(requested, k1!, signal 9); [3] killed, proved; [5] killed, proved
    "#]],
    );
}

#[test]
fn an_unproved_kill_says_so_and_is_repeated() {
    check(
        "agent\nstart r1\nr1 started\nkill k1 r1\n+3000ms\n+2999ms\n+1ms\nkill k1 r1\nr1 exit sig 9 killed k1\nkill k1 r1\nkill k9 r1",
        expect![[r#"
            start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
            r1 started -> run.started; PUMP
            kill k1 r1 -> run.kill_requested(k1! by ann); KILL (k1!, by ann); wake 3000ms
            +3000ms -> KILL (k1!, by ann); [3] killed, not proved; wake 6000ms
            +2999ms -> wake 6000ms
            +1ms -> KILL (k1!, by ann); wake 9000ms
            kill k1 r1 -> 
            r1 exit sig 9 killed k1 -> run.killed(requested, k1!, signal 9); [4] killed, proved
            kill k1 r1 -> [5] killed, proved
            kill k9 r1 -> [6] killed, proved
        "#]],
    );
}

#[test]
fn a_kill_while_stopping_wins() {
    check(
        "agent\nstart r1\nr1 started\nstop s1 r1 5000ms\nkill k1 r1\nstop s2 r1 1ms\nr1 exit 0",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        stop s1 r1 5000ms -> run.stop_requested(s1!, Kill at 5000ms); [3] stopping until 5000ms; STOP; wake 5000ms
        kill k1 r1 -> run.kill_requested(k1! by ann); KILL (k1!, by ann); wake 3000ms
        stop s2 r1 1ms -> [5] ACRI-0005 failed_precondition: run 8b71d1ad-8021-8be3-a51b-7f2efd3efe0b is being killed
        r1 exit 0 -> run.killed(requested, k1!, code 0); [4] killed, proved
    "#]],
    );
}

#[test]
fn a_kill_before_the_harness_begins_ends_the_run_as_killed() {
    check(
        "agent\nstart r1\nkill k1 r1\nr1 notstarted",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        kill k1 r1 -> run.kill_requested(k1! by ann); KILL (k1!, by ann); wake 3000ms
        r1 notstarted -> run.killed(requested, k1!, no exit); [3] killed, proved; run.logs_sealed(0); sealed
    "#]],
    );
}

#[test]
fn an_exit_before_any_kill_keeps_its_outcome() {
    check(
        "agent\nstart r1\nr1 started\nhold\nr1 wait out 1\nr1 exit 0\nkill k1 r1\ngo",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        hold -> 
        r1 wait out 1 -> run.waiting(tool_call)
        r1 exit 0 -> 
        kill k1 r1 -> 
        go -> derived 1; run.completed(code 0); [3] killed, proved
    "#]],
    );
}

#[test]
fn a_kill_that_only_the_holder_knows_is_recorded_before_the_end() {
    check(
        "agent\nstart r1\nr1 started\nr1 exit sig 9 killed k7\nkill k7 r1",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        r1 exit sig 9 killed k7 -> run.kill_requested(k7! by ann); run.killed(requested, k7!, signal 9)
        kill k7 r1 -> [3] killed, proved
    "#]],
    );
}

#[test]
fn an_orphaned_or_lost_harness_fails_its_run() {
    check(
        "agent\nstart r1\nr1 started\nr1 exit orphaned",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        r1 exit orphaned -> run.failed(orphaned, no owner spoke to its holder, no exit)
    "#]],
    );
    check(
        "agent\nstart r1\nr1 started\nr1 lost\n+9999ms\n+1ms",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        r1 lost -> run.failed(harness_lost, its holder is gone, no exit); wake 10000ms
        +9999ms -> wake 10000ms
        +1ms -> run.logs_sealed(0, gap); sealed
    "#]],
    );
    check(
        "agent\nstart r1\nr1 started\nr1 lost\nr1 logs 2 gap",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        r1 lost -> run.failed(harness_lost, its holder is gone, no exit); wake 10000ms
        r1 logs 2 gap -> run.logs_sealed(2, gap); sealed
    "#]],
    );
    check(
        "agent\nstart r1\nr1 lost",
        expect![[r#"
            start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
            r1 lost -> run.failed(harness_lost, its holder is gone, no exit); wake 10000ms
        "#]],
    );
}

#[test]
fn a_harness_that_is_lost_after_its_kill_was_recorded_was_killed() {
    check(
        "agent\nstart r1\nr1 started\nkill k1 r1\nr1 lost\nr1 logs 2 gap",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        kill k1 r1 -> run.kill_requested(k1! by ann); KILL (k1!, by ann); wake 3000ms
        r1 lost -> run.killed(requested, k1!, no exit); [3] killed, proved; wake 10000ms
        r1 logs 2 gap -> run.logs_sealed(2, gap); sealed
    "#]],
    );
    // Of a node that is silent nothing is proved.
    check(
        "agent\nstart r1\nr1 started\nkill k1 r1\nr1 lost node\nr1 logs 2 gap",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        kill k1 r1 -> run.kill_requested(k1! by ann); KILL (k1!, by ann); wake 3000ms
        r1 lost node -> run.failed(node_lost, it was silent, no exit); [3] killed, not proved; wake 10000ms
        r1 logs 2 gap -> run.logs_sealed(2, gap); sealed
    "#]],
    );
    check(
        "agent\nstart r1\nr1 started\nkill k1 r1\ncrash\nadopt\nr1 neverstarted",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        kill k1 r1 -> run.kill_requested(k1! by ann); KILL (k1!, by ann); wake 3000ms
        crash -> 
        adopt -> agent.assigned(epoch 2); ATTACH as 2; wake 3000ms
        r1 neverstarted -> run.killed(requested, k1!, no exit); wake 10000ms
    "#]],
    );
}

#[test]
fn logs_done_before_the_end_are_remembered() {
    check(
        "agent\nstart r1\nr1 started\nr1 logs 4\nr1 exit 0",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        r1 logs 4 -> 
        r1 exit 0 -> run.completed(code 0); run.logs_sealed(4); sealed
    "#]],
    );
}

#[test]
fn derived_events_are_stored_once_and_answered_always() {
    check(
        "agent\nstart r1\nr1 started\nr1 ask out 5\nr1 wait out 6\nr1 wait out 7\nr1 wait err 1\nr1 ask out 5\nr1 resume out 9\nr1 resume out 10\nr1 exit 0\nr1 ask out 11\nr1 logs 2\nr1 ask out 12",
        expect![[r#"
            start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
            r1 started -> run.started; PUMP
            r1 ask out 5 -> escalation.raised(why?); derived 5
            r1 wait out 6 -> run.waiting(tool_call); derived 6
            r1 wait out 7 -> derived 7
            r1 wait err 1 -> derived 1
            r1 ask out 5 -> derived 5
            r1 resume out 9 -> run.resumed; derived 9
            r1 resume out 10 -> derived 10
            r1 exit 0 -> run.completed(code 0)
            r1 ask out 11 -> escalation.raised(why?); derived 11
            r1 logs 2 -> run.logs_sealed(2); sealed
            r1 ask out 12 -> derived 12
        "#]],
    );
}

#[test]
fn a_report_of_a_sealed_run_is_stale() {
    check(
        "agent\nstart r1\nr1 notstarted\nr1 exit 0\nstale\ndone",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 notstarted -> run.failed(spawn_failed, no such program, no exit); run.logs_sealed(0); sealed
        r1 exit 0 -> 
        stale -> stale +1
        done -> 
    "#]],
    );
}

#[test]
fn the_same_source_twice_is_one_event() {
    check(
        "agent\nstart r1\nr1 started\nr1 ask out 5\nr1 ask out 5\nr1 ask err 5",
        expect![[r#"
        start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
        r1 started -> run.started; PUMP
        r1 ask out 5 -> escalation.raised(why?); derived 5
        r1 ask out 5 -> derived 5
        r1 ask err 5 -> escalation.raised(why?); derived 5
    "#]],
    );
}

#[test]
fn what_was_found_in_the_output_is_stored_before_the_seal() {
    check(
        "agent\nstart r1\nr1 started\nr1 exit 0\nhold\nr1 ask out 1\nr1 ask out 2\nr1 logs 2\ngo",
        expect![[r#"
            start r1 -> run.accepted(""); [2] started; SPAWN; wake 60000ms
            r1 started -> run.started; PUMP
            r1 exit 0 -> run.completed(code 0)
            hold -> 
            r1 ask out 1 -> escalation.raised(why?)
            r1 ask out 2 -> 
            r1 logs 2 -> 
            go -> derived 1; escalation.raised(why?); derived 2; run.logs_sealed(2); sealed
        "#]],
    );
}
