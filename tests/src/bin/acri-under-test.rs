//! `acri` itself, built beside the tests that run it.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    acri_cli::main()
}
