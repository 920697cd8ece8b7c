//! The driver suite: one list of cases that every driver passes.
//!
//! A driver's tests implement [`Fixture`] and run each of [`CASES`]. A case
//! knows a driver only through its trait; its harness is a script in the
//! language of [`crate::scripted`], which a fixture for another harness type
//! translates.
#![expect(clippy::unwrap_used, reason = "the suite is a test, which a broken rule ends")]

mod ends;
mod output;
mod owners;
mod refusals;
mod rig;
mod starts;

use crate::driver::Driver;
use acri::{AgentId, AgentSpec, ErrorCode, RunId};
use async_trait::async_trait;
use futures_util::future::BoxFuture;
use std::{sync::Arc, time::Duration};

/// What a driver's tests must be able to do beside the driver.
#[async_trait]
pub trait Fixture: Send + Sync {
    /// A driver over what is there: a second one is that of a restarted node.
    fn driver(&self) -> Arc<dyn Driver>;
    /// A spec whose harness follows the script.
    fn spec(&self, script: &[&str]) -> AgentSpec;
    /// Lets the script's `wait NAME` go on, now or when it comes there.
    async fn let_go(&self, agent: AgentId, run: RunId, name: &str);
    /// Ends the run's holder without a word, if it has one.
    async fn crash(&self, agent: AgentId, run: RunId);
    /// The same, and what it kept cannot be read.
    async fn lose(&self, agent: AgentId, run: RunId);
    /// Specs that Create refuses.
    fn refused(&self) -> Vec<Refused>;
}

/// A spec that Create refuses.
#[derive(Debug, Clone)]
pub struct Refused {
    /// Why, in words.
    pub why: &'static str,
    /// The spec.
    pub spec: AgentSpec,
    /// The code of the refusal.
    pub code: ErrorCode,
    /// The field that it names.
    pub field: &'static str,
}

/// One case.
#[derive(Clone, Copy)]
pub struct Case {
    /// A sentence about behaviour, as a test's name.
    pub name: &'static str,
    run: for<'a> fn(&'a dyn Fixture) -> BoxFuture<'a, ()>,
}

impl std::fmt::Debug for Case {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name)
    }
}

/// How long one case may take.
const CASE_WAIT: Duration = Duration::from_secs(60);

impl Case {
    /// Runs it, and panics if the driver breaks a rule.
    pub async fn run(&self, fixture: &dyn Fixture) {
        assert!(
            tokio::time::timeout(CASE_WAIT, (self.run)(fixture)).await.is_ok(),
            "{} does not end within {CASE_WAIT:?}",
            self.name
        );
    }

    /// The case with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        CASES.iter().find(|case| case.name == name)
    }
}

macro_rules! cases {
    ($($module:ident: $($name:ident)*;)*) => {
        /// Every case.
        pub const CASES: &[Case] = &[$($(
            Case { name: stringify!($name), run: |fixture| Box::pin($module::$name(fixture)) },
        )*)*];

        /// Makes a test of each case: `driver_suite!(module, fixture)`, where
        /// `fixture` is a function that makes a new fixture.
        #[macro_export]
        macro_rules! driver_suite {
            ($tests:ident, $fixture:path) => {
                mod $tests {
                    #[test]
                    fn every_case_is_a_test() {
                        let tests = [$($(stringify!($name),)*)*];
                        assert!($crate::suite::CASES.iter().map(|case| case.name).eq(tests));
                    }
                    $($(
                        #[test]
                        fn $name() {
                            $crate::suite::run(stringify!($name), || $fixture());
                        }
                    )*)*
                }
            };
        }
    };
}

cases! {
    starts:
        a_repeated_start_finds_the_harness_started
        a_start_after_a_node_crash_finds_the_harness_started
        starts_at_the_same_time_start_one_harness
        a_start_that_nobody_waits_for_is_found_by_the_next
        a_run_that_was_never_started_is_told_as_such
        a_scan_finds_a_run_whose_kill_switch_works
        what_is_forgotten_was_never_started;
    owners:
        attach_claims_and_an_older_owner_is_refused
        an_older_owner_is_refused_after_the_end_too
        a_kill_by_an_older_owner_is_refused
        the_resume_token_outlives_the_node;
    output:
        output_is_exact_in_each_stream
        output_is_read_again_from_any_offset_not_released
        output_goes_on_after_a_release
        a_reader_that_has_caught_up_is_woken
        the_end_is_told_when_all_output_can_be_read
        a_harness_that_wrote_nothing_ends_without_output
        a_flood_larger_than_a_batch_comes_whole;
    ends:
        exit_codes_and_signals_are_told
        a_kill_before_the_start_is_found_by_the_start
        a_kill_ends_a_running_harness
        a_kill_at_any_moment_of_the_start_is_found
        a_kill_repeated_answers_again
        a_kill_after_the_end_changes_nothing
        a_kill_works_while_the_runtime_is_blocked
        a_kill_that_nobody_waits_for_still_kills
        a_stop_ends_a_harness_that_listens
        a_stop_ends_a_harness_that_knows_nothing_of_it
        a_stop_that_is_ignored_leaves_the_kill
        a_holder_that_died_leaves_what_it_spooled_and_no_end
        a_run_of_which_nothing_is_left_is_lost;
    refusals:
        specs_that_cannot_be_run_are_refused_with_their_field
        a_create_repeated_finds_what_the_first_made
        tasks_that_are_too_large_or_no_text_are_refused;
}

/// Runs one case on a runtime of its own, as [`driver_suite`] does.
///
/// # Panics
/// If there is no such case, or the driver breaks a rule.
pub fn run<F: Fixture>(name: &str, fixture: impl FnOnce() -> F) {
    let case = Case::named(name).expect("the names come from the list");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be made");
    runtime.block_on(async { case.run(&fixture()).await });
}
