//! The binary `acri`; everything is in the library beside it, so that tests and
//! benches can be the same program.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    acri_cli::main()
}
