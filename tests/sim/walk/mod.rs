//! Every order of everything, in a small world: breadth first over the real
//! machines and the real memory bus.
//!
//! Two incarnations of the owner; a harness with four outputs on two streams,
//! one of them a question; a Stop, which reaches the harness as an injection
//! would: once, by its id. A step is one of [`world::Action`]. Promises about
//! what is stored are checked in [`bus`], about a step in [`steps`], and from
//! every state a complete one must be reachable without a fault ([`search`]).
//!
//! Steps that nobody else can see are one: an answer to a read is taken when
//! it is given, and the spool grows when it is read. Whole scope at once is
//! too much for each build, so the faults are shared out between walks; the
//! ignored test takes them together.

mod bus;
mod carry;
mod machines;
mod plan;
mod search;
mod steps;
mod world;

use plan::{Left, Mutant, Plan};
use search::{Found, search};
use std::time::Instant;

const NONE: Left = Left { crashes: 0, lapses: 0, outages: 0, timeouts: 0, zombie_steps: 0 };

fn walk(plan: Plan) {
    let begun = Instant::now();
    let scope = plan.to_string();
    let Found { states, steps, depth, violation, covered, tables } = search(plan);
    println!(
        "walk ({scope}): {states} states, {steps} steps, depth {depth}, {covered}; {tables}; {:.1} s",
        begun.elapsed().as_secs_f32()
    );
    if let Some(violation) = violation {
        panic!("{violation}");
    }
}

#[test]
fn every_order_with_a_crash_and_a_stop_keeps_every_promise() {
    walk(Plan::new(Left { crashes: 1, ..NONE }, true));
}

#[test]
fn every_order_with_a_crash_and_lost_or_late_writes_keeps_every_promise() {
    walk(Plan::new(Left { crashes: 1, outages: 1, ..NONE }, false));
    let faults = Left { crashes: 1, timeouts: 1, ..NONE };
    walk(Plan::new(faults, false));
    walk(Plan { replicated: true, ..Plan::new(faults, true).of_one_line() });
}

#[test]
fn every_order_with_a_lapsed_lease_keeps_every_promise() {
    let lapse = |zombie_steps| Left { lapses: 1, zombie_steps, ..NONE };
    walk(Plan::new(lapse(1), false));
    walk(Plan::new(lapse(u8::MAX), false).of_one_line());
    walk(Plan::new(lapse(1), true).of_one_line());
}

#[test]
#[ignore = "takes minutes and some GiB: with --release"]
fn every_order_of_the_whole_scope_keeps_every_promise() {
    let crash = Left { crashes: 1, outages: 1, timeouts: 1, ..NONE };
    walk(Plan::new(crash, true));
    walk(Plan::new(Left { timeouts: 2, ..crash }, false));
    walk(Plan::new(Left { lapses: 1, zombie_steps: 6, ..NONE }, false));
    walk(Plan::new(Left { lapses: 1, zombie_steps: 1, ..NONE }, true));
    walk(Plan::new(Left { lapses: 1, zombie_steps: u8::MAX, ..NONE }, true).of_one_line());
    let whole = Left { crashes: 1, lapses: 1, outages: 1, timeouts: 1, zombie_steps: 2 };
    walk(Plan { states_max: 20_000_000, ..Plan::new(whole, true) });
}

/// The smallest world in which this fault of thought can show.
fn world_of(mutant: Mutant) -> Plan {
    let crash = Left { crashes: 1, ..NONE };
    let lapse = Left { lapses: 1, zombie_steps: 3, ..NONE };
    let timeout = Left { timeouts: 1, ..NONE };
    let plan = match mutant {
        Mutant::None | Mutant::EarlyEffect | Mutant::EarlyReply => Plan::new(NONE, true),
        Mutant::OneOffset | Mutant::DerivedAfterFrame | Mutant::ReaderByEpoch => Plan::new(crash, false),
        Mutant::NoIds => Plan::new(crash, true),
        Mutant::GrownRepeat => Plan::new(timeout, false).on_one_stream(),
        Mutant::NoFrameCheck => Plan::new(timeout, false),
        Mutant::LateClaim | Mutant::NoEpochs => Plan::new(lapse, true),
    };
    Plan { mutant, ..plan }
}

#[test]
fn the_walk_finds_each_fault_of_thought() {
    for mutant in Mutant::ALL {
        let Found { states, violation, .. } = search(world_of(mutant));
        let Some(wrong) = violation else {
            panic!("{mutant:?}: {states} states, and nothing is wrong");
        };
        println!("mutant {mutant:?}: {} steps to: {}", wrong.trace.len(), wrong.what);
        let fair = search(Plan { mutant: Mutant::None, states_max: states, ..world_of(mutant) });
        assert!(fair.violation.is_none(), "the same world without the mutant: {}", fair.states);
    }
}
