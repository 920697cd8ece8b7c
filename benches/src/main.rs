//! Measures what the product promises, each row against the raw engine on the
//! same server in the same run, and prints the table of `docs/performance.md`.
//!
//! ```text
//!   main  arguments ─ table  rows as text
//!   bed   a server of one's own, nodes on it, clients
//!   rows  one file each, or two that share a set-up
//! ```
//! It asserts nothing: only ratios of neighbours count, since the machine is
//! shared. Begin with [`rows`].
#![forbid(unsafe_code)]

mod bed;
mod harness;
mod load;
mod rows;
mod table;

use anyhow::{Result, bail};
use rows::{NAMES, Scale};
use std::{ffi::OsString, process::ExitCode};

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    match arguments.get(1).and_then(|first| first.to_str()) {
        Some("shim" | "node") => return acri_cli::main(),
        Some(harness::FLOOD) => return harness::flood(&arguments[2..]),
        Some(harness::CHATTER) => return harness::chatter(),
        Some(rows::IDLE_NODE) => return rows::idle_node(&arguments[2..]),
        _ => {}
    }
    match measure(&arguments[1..]) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            table::say(&format!("acri-benches: failed: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn measure(arguments: &[OsString]) -> Result<()> {
    let mut scale = Scale::full();
    let mut wanted: Vec<&str> = Vec::new();
    for argument in arguments {
        match argument.to_str() {
            Some("--smoke") => scale = Scale::smoke(),
            Some(name) if NAMES.contains(&name) => wanted.push(name),
            _ => bail!("usage: acri-benches [--smoke] [NAME...]; names are {}", NAMES.join(", ")),
        }
    }
    if wanted.is_empty() {
        wanted.extend(NAMES);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(rows::measure(&scale, &wanted));
    runtime.shutdown_background();
    outcome
}
