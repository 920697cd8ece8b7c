//! `acri`: the command line, and the root at which everything is put together.
//!
//! Begin with [`args`], then [`verbs`]: one module a verb. [`output`] is the
//! one way to the terminal, [`failure`] the one way out with an error.
//!
//! It must never decide about agents or runs: what it knows of them comes from
//! `acri-client`.
#![forbid(unsafe_code)]

mod app;
mod args;
mod bus;
mod context;
mod demo;
mod export;
mod failure;
mod keep;
mod node;
mod output;
mod parse;
mod resolve;
mod signals;
mod verbs;

use clap::Parser as _;
use std::{ffi::OsString, io::IsTerminal as _, process::ExitCode};
use tracing_subscriber::EnvFilter;

/// Threads for what blocks: a burst of a thousand starts would otherwise take
/// tokio's 512.
const BLOCKING_THREADS_MAX: usize = 64;

/// The whole program: parses the arguments, performs the verb, and returns its
/// exit status.
#[must_use]
pub fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    // Before anything starts a thread: the holder of a harness is this binary.
    if let Some(code) = acri_shim::dispatch(&arguments) {
        return code;
    }
    let cli = match args::Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            // Help is an answer, everything else is wrong usage.
            let status = if error.use_stderr() { failure::USAGE } else { failure::OK };
            // A closed terminal is no reason to say more.
            let _ = error.print();
            return ExitCode::from(status);
        }
    };
    let filter = EnvFilter::try_from_env("ACRI_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    let mut app = app::App::new(cli.global);
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .max_blocking_threads(BLOCKING_THREADS_MAX)
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            return failure::end(&anyhow::Error::from(error).context("failed to start"), &mut app.out);
        }
    };
    let outcome = runtime.block_on(verbs::perform(&mut app, cli.verb)).and_then(|()| app.out.flush());
    // Whatever still waits (a signal, a reader) is not waited for.
    runtime.shutdown_background();
    match outcome {
        Ok(()) => ExitCode::from(failure::OK),
        Err(error) => {
            // What was written before the error comes before it.
            let _ = app.out.flush();
            failure::end(&error, &mut app.out)
        }
    }
}
