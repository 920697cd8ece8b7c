//! For every effect: it fails, is repeated, loses its answer, and the machine
//! crashes before and after it.

use super::sim::Sim;
use crate::appender::Effect;

const EFFECTS: [&str; 5] = ["attach", "spawn", "stop", "kill", "pump"];
const MISHAPS: [&str; 7] =
    ["none", "fails", "is repeated", "loses its answer", "crash before", "crash after", "crash before, twice"];

fn is(effect: &Effect, name: &str) -> bool {
    match effect {
        Effect::Attach { .. } => name == "attach",
        Effect::Spawn { .. } => name == "spawn",
        Effect::Stop { .. } => name == "stop",
        Effect::Kill { .. } => name == "kill",
        Effect::Pump { .. } => name == "pump",
    }
}

/// Plays a run until the effect is asked for, and gives its place.
fn reach(name: &str) -> (Sim, usize) {
    let mut sim = Sim::new();
    sim.command("start", false);
    sim.bus("ack");
    for step in 0..8 {
        if let Some(at) = sim.effects.iter().position(|(_, _, effect)| is(effect, name)) {
            return (sim, at);
        }
        match (name, step) {
            ("attach", 2) => sim.adopt(),
            ("stop", 2) => sim.command("stop", false),
            ("kill", 2) => sim.command("kill", false),
            _ => {}
        }
        sim.bus("ack");
        if step < 2 && sim.effects.first().is_some_and(|(_, _, effect)| !is(effect, name)) {
            sim.perform(0, false);
        }
    }
    panic!("{name} is never asked for");
}

#[test]
fn every_effect_survives_every_mishap() {
    for name in EFFECTS {
        for mishap in MISHAPS {
            let (mut sim, at) = reach(name);
            let (token, run, effect) = sim.effects[at].clone();
            match mishap {
                "fails" => sim.perform(at, true),
                "is repeated" => {
                    if name != "attach" {
                        sim.effects.push((token, run, effect));
                    }
                    sim.perform(at, false);
                }
                "loses its answer" => {
                    sim.perform(at, false);
                    sim.pass(4_000);
                }
                "crash before" => sim.adopt(),
                "crash after" => {
                    sim.perform(at, false);
                    sim.adopt();
                }
                "crash before, twice" => {
                    sim.adopt();
                    sim.adopt();
                }
                _ => sim.perform(at, false),
            }
            sim.finish();
            let last = sim.world.envelopes().last().unwrap();
            assert_eq!(last.event.type_name(), "run.logs_sealed", "{name} {mishap}");
        }
    }
}

#[test]
fn a_crash_at_every_step_of_a_run_loses_nothing() {
    // Each number is a prefix of what happens in a run's life, then a crash.
    for steps in 0..12 {
        for late in [false, true] {
            let mut sim = Sim::new();
            let life: [&dyn Fn(&mut Sim); 12] = [
                &|sim| sim.command("start", false),
                &|sim| sim.bus("ack"),
                &|sim| sim.perform(0, false),
                &|sim| sim.bus("ack"),
                &|sim| sim.perform(0, false),
                &|sim| sim.derive(false, 0),
                &|sim| sim.bus("lose"),
                &|sim| sim.command("stop", false),
                &|sim| sim.bus("ack"),
                &|sim| sim.bus("ack"),
                &|sim| sim.exit(0),
                &|sim| sim.bus("ack"),
            ];
            for act in &life[..steps] {
                act(&mut sim);
            }
            sim.adopt();
            if late {
                sim.land();
            }
            sim.finish();
        }
    }
}
