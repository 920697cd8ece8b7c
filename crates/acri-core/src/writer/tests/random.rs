//! Any output, any schedule, any crash: the same log.

use super::world::{World, expected};
use crate::writer::{Input, Limits};
use acri::log::Stream;
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Move {
    Write(Stream, Vec<u8>),
    Pump(u8),
    Derive,
    /// The agent took the event, and nobody heard.
    DeriveUnheard,
    Release,
    AnswerRead,
    AnswerCheck,
    FailRead,
    Stored,
    /// Stored, and the acknowledgement is lost.
    StoredUnheard,
    /// Not stored, or not yet.
    Delayed,
    Dropped,
    Refused,
    /// An earlier attempt arrives after all.
    Arrives(prop::sample::Index),
    /// Retention removes the oldest frames.
    Retain(u8),
    Crash,
    /// A message that no owner wrote.
    Stray,
    /// The harness ends; what it would have written after it is not.
    End,
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        4 => "[a-c]{1,6}".prop_map(String::into_bytes),
        4 => Just(b"\n".to_vec()),
        2 => Just("é☃𝄞".as_bytes().to_vec()),
        1 => Just(b"!ask x\n".to_vec()),
        1 => Just(b"!ask y&z\n".to_vec()),
        1 => Just(b"!as".to_vec()),
        1 => Just(b"k q\n".to_vec()),
        1 => proptest::collection::vec(any::<u8>(), 1..5),
        1 => Just(b"a long line without an end, ".to_vec()),
    ];
    proptest::collection::vec(piece, 1..5).prop_map(|pieces| pieces.concat())
}

fn stream() -> impl Strategy<Value = Stream> {
    prop_oneof![2 => Just(Stream::Stdout), 1 => Just(Stream::Stderr)]
}

fn moves(retention: bool) -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        6 => (stream(), bytes()).prop_map(|(stream, bytes)| Move::Write(stream, bytes)),
        1 => (stream(), bytes(), 1..3_usize).prop_map(|(stream, mut bytes, length)| {
            bytes.truncate(length);
            Move::Write(stream, bytes)
        }),
        6 => (1..6_u8).prop_map(Move::Pump),
        4 => Just(Move::Derive),
        1 => Just(Move::DeriveUnheard),
        3 => Just(Move::Release),
        4 => Just(Move::AnswerRead),
        2 => Just(Move::AnswerCheck),
        1 => Just(Move::FailRead),
        6 => Just(Move::Stored),
        1 => Just(Move::StoredUnheard),
        1 => Just(Move::Delayed),
        1 => Just(Move::Dropped),
        1 => Just(Move::Refused),
        2 => any::<prop::sample::Index>().prop_map(Move::Arrives),
        1 => (1..4_u8).prop_map(move |frames| Move::Retain(if retention { frames } else { 0 })),
        1 => Just(Move::Crash),
        1 => Just(Move::Stray),
    ];
    let moves = proptest::collection::vec(one, 0..160);
    (moves, any::<prop::sample::Index>()).prop_map(|(mut moves, at)| {
        let half = moves.len() / 2;
        moves.insert(half + at.index(half + 1), Move::End);
        moves
    })
}

fn limits() -> Limits {
    Limits {
        line_bytes_max: 10,
        frame_bytes_max: 300,
        pending_bytes_wanted: 400,
        pending_bytes_max: 700,
        derived_in_flight_max: 2,
    }
}

fn carry_out(world: &mut World, one: Move) {
    match one {
        Move::Write(..) if world.ended => {}
        Move::Write(stream, bytes) => world.write(stream, &bytes),
        Move::End => world.ended = true,
        Move::Pump(records) => {
            for _ in 0..records {
                world.pump();
            }
        }
        Move::Derive => drop(world.derive()),
        Move::DeriveUnheard => {
            if let Some((source, event)) = world.derives.front().cloned() {
                world.append_derived(source, event);
            }
        }
        Move::Release => drop(world.release()),
        Move::AnswerRead => drop(world.answer_read()),
        Move::AnswerCheck => drop(world.answer_check()),
        Move::FailRead => {
            if let Some(token) = world.read.take().or_else(|| world.check.take()) {
                world.step(Input::ReadFailed(token));
            }
        }
        Move::Stored => drop(world.answer_publish()),
        Move::StoredUnheard | Move::Delayed | Move::Dropped => {
            if let Some(sent) = world.publish.take() {
                if matches!(one, Move::StoredUnheard) {
                    world.land(&sent);
                } else if matches!(one, Move::Delayed) {
                    world.network.push(sent.clone());
                }
                world.step(Input::Unknown(sent.token));
            }
        }
        Move::Refused => {
            if let Some(sent) = world.publish.take() {
                world.step(Input::Refused(sent.token));
            }
        }
        Move::Arrives(index) => {
            if !world.network.is_empty() {
                let at = index.index(world.network.len());
                let sent = world.network.swap_remove(at);
                world.land(&sent);
            }
        }
        Move::Retain(0) => {}
        Move::Retain(frames) => {
            world.retention = true;
            let frames = usize::from(frames).min(world.stream.len());
            world.stream.drain(..frames);
        }
        Move::Crash => world.crash(),
        Move::Stray => world.stray(),
    }
}

fn same_log(moves: Vec<Move>) {
    let mut world = World::new(limits());
    for one in moves {
        carry_out(&mut world, one);
    }
    world.finish();
    let (events, derived) = expected(&world.spool, world.limits.line_bytes_max);
    assert_eq!(world.seen, events, "what a live reader saw");
    assert_eq!(world.resumed, events, "what a reader with a cursor saw");
    for stream in [Stream::Stdout, Stream::Stderr] {
        let of = |all: &[(acri::event::Source, acri::Event)]| -> Vec<_> {
            all.iter().filter(|(source, _)| source.stream == stream).cloned().collect()
        };
        assert_eq!(of(&world.history), of(&derived), "derived, once each");
    }
    let (count, chain, gap) = world.done.unwrap();
    assert_eq!(count.0, events.len() as u64);
    if !world.retention {
        assert!(!gap);
        let whole =
            world.stream.iter().fold(acri::id::Sha256Digest::default(), |chain, kept| chain.chained(&kept.bytes));
        assert_eq!(chain, whole);
    }
}

proptest! {
    #[test]
    fn any_crash_and_any_lost_answer_gives_the_same_log(moves in moves(false)) {
        same_log(moves);
    }

    #[test]
    fn retention_behind_the_readers_changes_nothing(moves in moves(true)) {
        same_log(moves);
    }
}
