//! The shim as a program of its own, for the tests; and a harness that listens
//! to SIGTERM, which a shell cannot do without a moment in which it is deaf.

use std::{io::Write as _, process::ExitCode};
use tokio::signal::unix::{SignalKind, signal};

fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().collect();
    if let Some(code) = acri_shim::dispatch(&args) {
        return code;
    }
    let words: Vec<&str> = args.iter().filter_map(|word| word.to_str()).collect();
    match words[..] {
        [_, "listen", code, text] => listen(code, text).unwrap_or(ExitCode::FAILURE),
        _ => ExitCode::from(64),
    }
}

/// Says the text, and ends with the code when it is asked to stop.
fn listen(code: &str, text: &str) -> std::io::Result<ExitCode> {
    let code: u8 = code.parse().map_err(std::io::Error::other)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut stops = signal(SignalKind::terminate())?;
        writeln!(std::io::stdout(), "{text}")?;
        stops.recv().await;
        Ok(ExitCode::from(code))
    })
}
