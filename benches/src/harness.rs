//! Programs that the benches run as harnesses: this binary under other names.

use std::{
    ffi::OsString,
    io::{self, Write as _},
    process::ExitCode,
    time::Duration,
};

/// Writes so many lines of so many bytes as fast as it can.
pub(crate) const FLOOD: &str = "harness-flood";
/// Writes a hundred lines a second until it is killed.
pub(crate) const CHATTER: &str = "harness-chatter";

/// Bytes handed to the pipe at once.
const WRITE_BYTES: usize = 64 * 1024;
const CHATTER_EVERY: Duration = Duration::from_millis(10);

fn number(arguments: &[OsString], at: usize) -> Option<usize> {
    arguments.get(at)?.to_str()?.parse().ok()
}

/// Arguments: lines, bytes of each with its LF.
pub(crate) fn flood(arguments: &[OsString]) -> ExitCode {
    let (Some(lines), Some(bytes)) = (number(arguments, 0), number(arguments, 1)) else {
        return ExitCode::from(64);
    };
    let mut line: Vec<u8> = b"abcdefghijklmnopqrstuvwxyz ".repeat(bytes.div_ceil(27));
    line.truncate(bytes.max(1) - 1);
    line.push(b'\n');
    let at_once = (WRITE_BYTES / line.len()).max(1);
    let block = line.repeat(at_once);
    let mut out = io::stdout().lock();
    let mut left = lines;
    while left > 0 {
        let now = left.min(at_once);
        if out.write_all(&block[..now * line.len()]).is_err() {
            return ExitCode::FAILURE;
        }
        left -= now;
    }
    if out.flush().is_err() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// A line every ten milliseconds.
#[expect(clippy::disallowed_methods, reason = "a harness is a plain program and may sleep")]
pub(crate) fn chatter() -> ExitCode {
    let line = [b'x'; 100];
    loop {
        let mut out = io::stdout().lock();
        if out.write_all(&line).and_then(|()| out.write_all(b"\n")).is_err() {
            return ExitCode::FAILURE;
        }
        std::thread::sleep(CHATTER_EVERY);
    }
}
