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
/// Different blocks: more than a frame holds, so that none repeats itself.
const BLOCKS: usize = 32;
const NAMES: [&str; 16] = [
    "agent", "cache", "client", "config", "driver", "events", "frames", "ledger", "parser", "queue", "reader",
    "router", "session", "shard", "tokens", "writer",
];
const PHRASES: [&str; 16] = [
    "let me see what the test expects of it,",
    "the second argument is the limit in bytes,",
    "and nothing else calls this function.",
    "That fails where the queue is empty,",
    "so the order has to be kept:",
    "first the record, then its index;",
    "return Err(Error::NotFound { key });",
    "if self.entries.len() > LIMIT { return None; }",
    "for (index, entry) in entries.iter().enumerate() {",
    "assert_eq!(found, expected);",
    "thread 'main' panicked at src/lib.rs:",
    "warning: unused variable",
    "error[E0308]: mismatched types",
    "I run the tests again now",
    "and will look at the log after that.",
    "let mut out = Vec::with_capacity(lines);",
];
const CHATTER_EVERY: Duration = Duration::from_millis(10);

fn number(arguments: &[OsString], at: usize) -> Option<usize> {
    arguments.get(at)?.to_str()?.parse().ok()
}

/// Lines of a length, like the events that agents write: the same few shapes
/// about ever other names, numbers and sentences. LZ4 makes an eighth of them; of
/// recorded transcripts of agents it makes a fifth, of the output of builds a
/// tenth.
fn transcript(lines: usize, bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut below = |limit: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state % u64::try_from(limit).unwrap_or(1)).unwrap_or(0)
    };
    let mut out = Vec::with_capacity(lines * bytes);
    for at in 0..lines {
        let (name, number) = (NAMES[below(NAMES.len())], below(4_000));
        let mut line = match below(3) {
            0 => format!(
                "{{\"type\":\"tool_result\",\"session\":\"ses_6a1f09e4cffe\",\"part\":{{\"tool\":\"bash\",\"state\":{{\"status\":\"completed\",\"output\":\"test {name}::case_{number} ... ok",
            ),
            1 => format!(
                "{{\"type\":\"message\",\"session\":\"ses_6a1f09e4cffe\",\"message\":{{\"role\":\"assistant\",\"number\":{at},\"content\":[{{\"type\":\"text\",\"text\":\"I look at src/{name}.rs",
            ),
            _ => format!(
                "{{\"type\":\"tool_call\",\"session\":\"ses_6a1f09e4cffe\",\"part\":{{\"tool\":\"edit\",\"input\":{{\"filePath\":\"/workspace/src/{name}/part_{number}.rs\",\"newString\":\"",
            ),
        };
        while line.len() < bytes {
            line.push(' ');
            line.push_str(PHRASES[below(PHRASES.len())]);
        }
        line.truncate(bytes - 1);
        out.extend_from_slice(line.as_bytes());
        out.push(b'\n');
    }
    out
}

/// Arguments: lines, bytes of each with its LF.
pub(crate) fn flood(arguments: &[OsString]) -> ExitCode {
    let (Some(lines), Some(bytes)) = (number(arguments, 0), number(arguments, 1)) else {
        return ExitCode::from(64);
    };
    let bytes = bytes.max(1);
    let at_once = (WRITE_BYTES / bytes).max(1);
    let block = transcript(at_once * BLOCKS, bytes);
    let mut blocks = block.chunks(at_once * bytes).cycle();
    let mut out = io::stdout().lock();
    let mut left = lines;
    while left > 0 {
        let now = left.min(at_once);
        let block = blocks.next().unwrap_or_default();
        if out.write_all(&block[..now * bytes]).is_err() {
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
