//! Random orders of everything that can happen, with faults.

use super::sim::Sim;
use crate::appender::{Input, Token};
use proptest::prelude::*;

fn act(sim: &mut Sim, what: u8, how: u8) {
    let again = how.is_multiple_of(4);
    match what {
        0 | 1 => sim.command("start", again),
        2 => sim.command("stop", again),
        3 => sim.command("keep", again),
        4 => sim.command("kill", again),
        5 => sim.command(if how < 16 { "remove" } else { "status" }, again),
        6..=9 => sim.bus("ack"),
        10 => sim.bus(["lose", "drop", "dup", "conflict", "hidden", "refuse"][usize::from(how) % 6]),
        11..=14 => sim.perform(usize::from(how), false),
        15 => sim.perform(usize::from(how), true),
        16 => sim.exit(i32::from(how % 2)),
        17 => sim.derive(again, how),
        18 => sim.logs(),
        19 => sim.pass([1, 500, 3000, 30_000][usize::from(how) % 4]),
        20 => sim.adopt(),
        21 => sim.land(),
        22 => sim.perish(again),
        _ => {
            for token in 0..u64::from(how) {
                let token = Token(token);
                if sim.world.machine.as_ref().is_some_and(|machine| !machine.awaits(token)) {
                    let last = sim.world.last();
                    sim.give(Input::Appended(token, last));
                    sim.give(Input::Conflict(token));
                    sim.give(Input::Caught(token, Vec::new(), last));
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_in_whatever_order_a_run_ends_once_and_nothing_is_lost(
        running in any::<bool>(),
        acts in prop::collection::vec((0_u8..24, any::<u8>()), 0..80),
    ) {
        let mut sim = if running { Sim::running() } else { Sim::new() };
        for (what, how) in acts {
            if sim.world.machine.is_none() {
                sim.adopt();
            }
            act(&mut sim, what, how);
        }
        sim.finish();
    }

    #[test]
    fn the_same_inputs_give_the_same_machine(acts in prop::collection::vec((0_u8..20, any::<u8>()), 0..40)) {
        let play = || {
            let mut sim = Sim::new();
            acts.iter().for_each(|(what, how)| act(&mut sim, *what, *how));
            sim
        };
        let (one, other) = (play(), play());
        prop_assert_eq!(&one.world.machine, &other.world.machine);
        if let (Some(one), Some(other)) = (one.world.machine, other.world.machine) {
            prop_assert_eq!(one.fingerprint(), other.fingerprint());
        }
    }
}
