//! The machine, told step by step.

use super::world::World;
use crate::writer::{Input, LastFrame, Limits, LogEnd};
use acri::{
    codec,
    id::Epoch,
    log::{ResumeToken, Stream, decode},
};
use expect_test::{Expect, expect};

fn limits() -> Limits {
    Limits { line_bytes_max: 40, frame_bytes_max: 300, pending_bytes_wanted: 600, ..Limits::default() }
}

/// One command a line; `|` is LF. What the writer waits for is shown after each.
fn check(script: &str, expect: Expect) {
    let mut world = World::new(limits());
    let mut shown = String::new();
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        command(&mut world, word, &rest.replace('|', "\n"));
        shown += &format!("{line}\n{}", state(&world));
    }
    expect.assert_eq(&shown);
}

fn command(world: &mut World, word: &str, rest: &str) {
    match word {
        "out" | "err" => {
            world.write(if word == "out" { Stream::Stdout } else { Stream::Stderr }, rest.as_bytes());
            world.pump();
        }
        "pump" => while world.pump() {},
        "end" => {
            world.ended = true;
            world.pump();
        }
        "torn" => world.step(Input::EndOfOutput { at: world.spool_end, torn: true }),
        "last" => assert!(world.answer_read()),
        "last-of-epoch" => {
            let mut last = world.stream.pop().unwrap();
            last.epoch = Epoch(rest.parse().unwrap());
            world.stream.push(last);
            world.answer_read();
        }
        "ours" => assert!(world.answer_check()),
        "no-answer" => {
            let token = world.read.take().or_else(|| world.check.take()).unwrap();
            world.step(Input::ReadFailed(token));
        }
        "answer" => assert!(world.answer_publish()),
        "unheard" => {
            let sent = world.publish.take().unwrap();
            world.land(&sent).unwrap();
            world.step(Input::Unknown(sent.token));
        }
        "refuse" => {
            let sent = world.publish.take().unwrap();
            world.step(Input::Refused(sent.token));
        }
        "derived" => assert!(world.derive()),
        "release" => while world.release() {},
        "crash" => world.crash(),
        "stray" => world.stray(),
        "arrives" => {
            let sent = world.network.remove(0);
            world.land(&sent).unwrap();
        }
        "retention" => {
            world.retention = true;
            world.stream.clear();
        }
        other => panic!("no command {other:?}"),
    }
}

fn state(world: &World) -> String {
    let mut shown = String::new();
    if let Some(sent) = &world.publish {
        let frame = decode::frame(&sent.bytes).unwrap();
        let token: ResumeToken = codec::from_msgpack(&sent.resume).unwrap();
        let events: Vec<_> =
            frame.events.iter().map(|event| String::from_utf8_lossy(event.payload.as_bytes()).into_owned()).collect();
        shown += &format!("    publish {}: {events:?} after {}\n", frame.sequence, sent.expect);
        let streams: Vec<_> = token
            .streams
            .iter()
            .map(|(stream, position)| format!("{} {}", stream.as_str(), position.published))
            .collect();
        shown += &format!(
            "      resume: {}, spool {}, next {}\n",
            streams.join(", "),
            token.spool_offset,
            token.next_sequence
        );
    }
    if world.read.is_some() {
        shown += "    read the last frame\n";
    }
    if world.check.is_some() {
        shown += "    check the epoch\n";
    }
    for (source, event) in &world.derives {
        shown += &format!("    derive {} at {} {}\n", event.type_name(), source.stream.as_str(), source.offset);
    }
    if let Some(epoch) = world.fenced {
        shown += &format!("    step down for {epoch}\n");
    }
    if let Some((count, _, gap)) = world.done {
        shown += &format!("    done: {count} events, gap {gap}\n");
    }
    shown
}

#[test]
fn an_idle_runs_line_leaves_at_once_and_what_waits_makes_the_next_frame_larger() {
    check(
        "last\nout one|\nout two|\nerr three|\nanswer\nanswer\nend",
        expect![[r#"
            last
            out one|
                publish 1: ["one"] after 0
                  resume: stdout 4, spool 44, next 2
            out two|
                publish 1: ["one"] after 0
                  resume: stdout 4, spool 44, next 2
            err three|
                publish 1: ["one"] after 0
                  resume: stdout 4, spool 44, next 2
            answer
                publish 2: ["two", "three"] after 1
                  resume: stdout 8, stderr 6, spool 134, next 4
            answer
            end
                done: 3 events, gap false
        "#]],
    );
}

#[test]
fn a_half_line_is_not_lost_when_a_crash_follows_the_other_streams_line() {
    check(
        "last\nout hel\nerr x|\nanswer\nrelease\nout lo|\ncrash\nlast\npump\nanswer\nend",
        expect![[r#"
            last
            out hel
            err x|
                publish 1: ["x"] after 0
                  resume: stderr 2, spool 0, next 2
            answer
            release
            out lo|
                publish 2: ["hello"] after 1
                  resume: stdout 6, stderr 2, spool 128, next 3
            crash
                read the last frame
            last
            pump
                publish 2: ["hello"] after 1
                  resume: stdout 6, stderr 2, spool 128, next 3
            answer
            end
                done: 2 events, gap false
        "#]],
    );
}

#[test]
fn a_frame_whose_acknowledgement_is_lost_is_repeated_and_found_to_be_ours() {
    check(
        "last\nout one|\nunheard\nout two|\nanswer\nours\nlast\nanswer",
        expect![[r#"
        last
        out one|
            publish 1: ["one"] after 0
              resume: stdout 4, spool 44, next 2
        unheard
            publish 1: ["one"] after 0
              resume: stdout 4, spool 44, next 2
        out two|
            publish 1: ["one"] after 0
              resume: stdout 4, spool 44, next 2
        answer
            check the epoch
        ours
            read the last frame
        last
            publish 2: ["two"] after 1
              resume: stdout 8, spool 88, next 3
        answer
    "#]],
    );
}

#[test]
fn a_former_owners_late_frame_is_the_ground_to_go_on_from() {
    check(
        "last\nout one|\nout two|\nerr thr\nout four|\nanswer\ncrash\n\
         last\npump\narrives\nanswer\nours\nlast\npump\nerr ee|\nanswer\nend",
        expect![[r#"
            last
            out one|
                publish 1: ["one"] after 0
                  resume: stdout 4, spool 44, next 2
            out two|
                publish 1: ["one"] after 0
                  resume: stdout 4, spool 44, next 2
            err thr
                publish 1: ["one"] after 0
                  resume: stdout 4, spool 44, next 2
            out four|
                publish 1: ["one"] after 0
                  resume: stdout 4, spool 44, next 2
            answer
                publish 2: ["two", "four"] after 1
                  resume: stdout 13, spool 88, next 4
            crash
                read the last frame
            last
            pump
                publish 2: ["two"] after 1
                  resume: stdout 8, spool 88, next 3
            arrives
                publish 2: ["two"] after 1
                  resume: stdout 8, spool 88, next 3
            answer
                check the epoch
            ours
                read the last frame
            last
            pump
            err ee|
                publish 4: ["three"] after 2
                  resume: stdout 13, stderr 6, spool 219, next 5
            answer
            end
                done: 4 events, gap false
        "#]],
    );
}

#[test]
fn a_frame_of_a_newer_epoch_ends_the_writer() {
    check(
        "last\nout one|\nunheard\nanswer\nours\nlast-of-epoch 9\nout two|",
        expect![[r#"
        last
        out one|
            publish 1: ["one"] after 0
              resume: stdout 4, spool 44, next 2
        unheard
            publish 1: ["one"] after 0
              resume: stdout 4, spool 44, next 2
        answer
            check the epoch
        ours
            read the last frame
        last-of-epoch 9
            step down for 9
        out two|
            step down for 9
    "#]],
    );
    check(
        "last\nout one|\nanswer\ncrash\nlast-of-epoch 3",
        expect![[r#"
        last
        out one|
            publish 1: ["one"] after 0
              resume: stdout 4, spool 44, next 2
        answer
        crash
            read the last frame
        last-of-epoch 3
            step down for 3
    "#]],
    );
}

#[test]
fn retention_that_takes_the_last_frame_costs_nothing() {
    check(
        "last\nout one|\nanswer\nretention\nout two|\nanswer\nours\nlast\nanswer\nend",
        expect![[r#"
        last
        out one|
            publish 1: ["one"] after 0
              resume: stdout 4, spool 44, next 2
        answer
        retention
        out two|
            publish 2: ["two"] after 1
              resume: stdout 8, spool 88, next 3
        answer
            check the epoch
        ours
            read the last frame
        last
            publish 2: ["two"] after 0
              resume: stdout 8, spool 88, next 3
        answer
        end
            done: 2 events, gap false
    "#]],
    );
    check(
        "last\nout one|\nanswer\nrelease\nretention\ncrash\nlast\nout two|\nanswer\nend",
        expect![[r#"
        last
        out one|
            publish 1: ["one"] after 0
              resume: stdout 4, spool 44, next 2
        answer
        release
        retention
        crash
            read the last frame
        last
        out two|
            publish 2: ["two"] after 0
              resume: stdout 8, spool 88, next 3
        answer
        end
            done: 2 events, gap false
    "#]],
    );
}

#[test]
fn a_message_that_no_owner_wrote_is_passed_by_without_a_gap() {
    check(
        "last\nout one|\nanswer\nstray\nout two|\nanswer\nours\nlast\nanswer\nstray\ncrash\nlast\nout three|\nanswer\nend",
        expect![[r#"
            last
            out one|
                publish 1: ["one"] after 0
                  resume: stdout 4, spool 44, next 2
            answer
            stray
            out two|
                publish 2: ["two"] after 1
                  resume: stdout 8, spool 88, next 3
            answer
                check the epoch
            ours
                read the last frame
            last
                publish 2: ["two"] after 2
                  resume: stdout 8, spool 88, next 3
            answer
            stray
            crash
                read the last frame
            last
            out three|
                publish 3: ["three"] after 4
                  resume: stdout 14, spool 134, next 4
            answer
            end
                done: 3 events, gap false
        "#]],
    );
    check(
        "stray\nlast\nout one|\nanswer\nend",
        expect![[r#"
            stray
                read the last frame
            last
            out one|
                publish 1: ["one"] after 1
                  resume: stdout 4, spool 44, next 2
            answer
            end
                done: 1 events, gap false
        "#]],
    );
    // Nothing else is left, and something else follows.
    check(
        "last\nout one|\nanswer\nstray\nretention\nout two|\nanswer\nours\nlast\nanswer\nend",
        expect![[r#"
            last
            out one|
                publish 1: ["one"] after 0
                  resume: stdout 4, spool 44, next 2
            answer
            stray
            retention
            out two|
                publish 2: ["two"] after 1
                  resume: stdout 8, spool 88, next 3
            answer
                check the epoch
            ours
                read the last frame
            last
                publish 2: ["two"] after 2
                  resume: stdout 8, spool 88, next 3
            answer
            end
                done: 2 events, gap false
        "#]],
    );
}

#[test]
fn a_question_is_stored_before_its_line_is_published() {
    check(
        "last\nout a|!ask b|c|\nanswer\nderived\nanswer\nend",
        expect![[r#"
        last
        out a|!ask b|c|
            publish 1: ["a"] after 0
              resume: stdout 2, spool 0, next 2
            derive escalation.raised at stdout 2
        answer
            derive escalation.raised at stdout 2
        derived
            publish 2: ["!ask b", "c"] after 1
              resume: stdout 11, spool 51, next 4
        answer
        end
            done: 3 events, gap false
    "#]],
    );
}

#[test]
fn a_question_under_way_is_not_sent_again_when_a_late_frame_is_found() {
    check(
        "last\nout one|\nout two|\nout three|\nanswer\ncrash\n\
         last\npump\nout !ask a|\npump\narrives\nanswer\nours\nlast\npump\nderived\nanswer",
        expect![[r#"
            last
            out one|
                publish 1: ["one"] after 0
                  resume: stdout 4, spool 44, next 2
            out two|
                publish 1: ["one"] after 0
                  resume: stdout 4, spool 44, next 2
            out three|
                publish 1: ["one"] after 0
                  resume: stdout 4, spool 44, next 2
            answer
                publish 2: ["two", "three"] after 1
                  resume: stdout 14, spool 134, next 4
            crash
                read the last frame
            last
            pump
                publish 2: ["two"] after 1
                  resume: stdout 8, spool 88, next 3
            out !ask a|
                publish 2: ["two"] after 1
                  resume: stdout 8, spool 88, next 3
                derive escalation.raised at stdout 14
            pump
                publish 2: ["two"] after 1
                  resume: stdout 8, spool 88, next 3
                derive escalation.raised at stdout 14
            arrives
                publish 2: ["two"] after 1
                  resume: stdout 8, spool 88, next 3
                derive escalation.raised at stdout 14
            answer
                check the epoch
                derive escalation.raised at stdout 14
            ours
                read the last frame
                derive escalation.raised at stdout 14
            last
                derive escalation.raised at stdout 14
            pump
                derive escalation.raised at stdout 14
            derived
                publish 4: ["!ask a"] after 2
                  resume: stdout 21, spool 181, next 5
            answer
        "#]],
    );
}

#[test]
fn a_question_that_was_asked_before_the_crash_is_not_asked_twice() {
    check(
        "last\nout !ask b&c|\nderived\nderived\nanswer\ncrash\nlast\nout d|\npump",
        expect![[r#"
        last
        out !ask b&c|
            derive escalation.raised at stdout 0
            derive escalation.raised at stdout 0
        derived
            derive escalation.raised at stdout 0
        derived
            publish 1: ["!ask b&c"] after 0
              resume: stdout 9, spool 49, next 2
        answer
        crash
            read the last frame
        last
        out d|
            publish 2: ["d"] after 1
              resume: stdout 11, spool 91, next 3
        pump
            publish 2: ["d"] after 1
              resume: stdout 11, spool 91, next 3
    "#]],
    );
}

#[test]
fn a_refused_frame_is_repeated_after_a_look_at_the_epoch() {
    check(
        "last\nout one|\nrefuse\nno-answer\nours\nno-answer\nlast\nanswer",
        expect![[r#"
        last
        out one|
            publish 1: ["one"] after 0
              resume: stdout 4, spool 44, next 2
        refuse
            check the epoch
        no-answer
            check the epoch
        ours
            read the last frame
        no-answer
            read the last frame
        last
            publish 1: ["one"] after 0
              resume: stdout 4, spool 44, next 2
        answer
    "#]],
    );
}

#[test]
fn the_last_line_needs_no_line_feed_and_a_torn_end_is_a_gap() {
    check(
        "last\nerr b\nout a\ntorn\nanswer",
        expect![[r#"
        last
        err b
        out a
        torn
            publish 1: ["b", "a"] after 0
              resume: stdout 1, stderr 1, spool 82, next 3
        answer
            done: 2 events, gap true
    "#]],
    );
}

#[test]
fn one_last_line_that_is_published_does_not_lose_the_other() {
    check(
        "last\nerr b\nout !ask a\nend\nanswer\nrelease\ncrash\nlast\npump\nderived\nanswer",
        expect![[r#"
        last
        err b
        out !ask a
        end
            publish 1: ["b"] after 0
              resume: stderr 1, spool 41, next 2
            derive escalation.raised at stdout 0
        answer
            derive escalation.raised at stdout 0
        release
            derive escalation.raised at stdout 0
        crash
            read the last frame
        last
        pump
            derive escalation.raised at stdout 0
        derived
            publish 2: ["!ask a"] after 1
              resume: stdout 6, stderr 1, spool 87, next 3
        answer
            done: 2 events, gap false
    "#]],
    );
}

#[test]
fn a_run_without_output_is_done_at_once() {
    check(
        "last\nend",
        expect![[r#"
        last
        end
            done: 0 events, gap false
    "#]],
    );
}

#[test]
fn a_stream_that_was_put_back_leaves_a_gap_and_repeats_nothing() {
    let mut world = World::new(limits());
    for word in ["last", "out one|", "answer", "release", "out two|", "answer", "release"] {
        let (word, rest) = word.split_once(' ').unwrap_or((word, ""));
        command(&mut world, word, &rest.replace('|', "\n"));
    }
    let first = &world.stream[0];
    let last = LogEnd { seq: first.seq, frame: LastFrame::of(first.epoch, &first.resume) };
    let after_two = world.spool_end;
    world.crash();
    let read = world.read.take().unwrap();
    world.step(Input::Last(read, last));
    assert_eq!(world.writer.wants_output(), Some(after_two));
    world.step(Input::EndOfOutput { at: after_two, torn: false });
    let (count, _, gap) = world.done.unwrap();
    assert_eq!((count.0, gap), (2, true));
}

#[test]
fn no_more_output_is_wanted_than_can_be_published() {
    let mut world = World::new(limits());
    assert_eq!(world.writer.wants_output(), None, "before it is known where to begin");
    world.answer_read();
    for _ in 0..100 {
        world.write(Stream::Stdout, b"0123456789\n");
        world.pump();
    }
    assert_eq!(world.writer.wants_output(), None);
    assert!(world.spool.len() * 80 > 600);
    world.finish();
    assert_eq!(world.seen.len(), 100);
}

#[test]
fn a_part_of_a_line_of_the_largest_size_leaves_in_a_frame_of_its_own() {
    let mut world = World::new(Limits::default());
    world.answer_read();
    for byte in [b'x', 0xff] {
        for _ in 0..20 {
            world.write(Stream::Stdout, &[byte; 64 * 1024]);
            while world.pump() {}
        }
    }
    world.finish();
    let parts: Vec<_> = world.seen.iter().map(|event| (event.part, event.payload.as_bytes().len())).collect();
    assert_eq!(parts, [(Some(0), 1 << 20), (Some(1), 1 << 20), (Some(2), 1 << 19)]);
    assert_eq!(world.stream.len(), 3);
}

#[test]
fn a_record_that_is_not_the_next_is_ignored_and_asked_for_again() {
    let mut world = World::new(limits());
    world.answer_read();
    world.write(Stream::Stdout, b"one\n");
    let wanted = world.writer.wants_output();
    let record = crate::writer::SpoolRecord {
        spool_offset: 44,
        spool_end: 90,
        stream: Stream::Stdout,
        stream_offset: 4,
        time: acri::Timestamp::default(),
        bytes: b"two\n",
    };
    world.step(Input::Output(record));
    world.step(Input::EndOfOutput { at: 90, torn: false });
    assert_eq!(world.writer.wants_output(), wanted);
    assert_eq!(world.writer.ignored(), 2);
    world.step(Input::OutputGone { first: 44 });
    world.step(Input::Output(record));
    assert_eq!(world.writer.wants_output(), Some(90));
    world.answer_publish();
    world.step(Input::EndOfOutput { at: 90, torn: false });
    assert_eq!(world.done.unwrap().0.0, 1);
    assert!(world.done.unwrap().2, "a gap");
}
