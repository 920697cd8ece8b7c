//! Scripts in, expectations out: see [`script`] for the language.

mod checking;
mod commands;
mod effects;
mod ownership;
mod random;
mod runs;
mod script;
mod sim;
mod slots;
mod words;
mod world;

use expect_test::Expect;

/// Runs a script against a fresh agent and compares what happened.
fn check(script: &str, expected: Expect) {
    expected.assert_eq(&script::play(script));
}
