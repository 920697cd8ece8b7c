//! The shim as a program of its own, for the tests.

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().collect();
    acri_shim::dispatch(&args).unwrap_or(ExitCode::from(64))
}
