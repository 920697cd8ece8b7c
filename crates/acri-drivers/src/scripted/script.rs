//! The little language that a scripted harness speaks.

use acri::log::Stream;
use bytes::Bytes;

/// Steps of one script.
pub const STEPS_MAX: usize = 1_000;
/// Bytes of one line that `flood` writes.
pub const FLOOD_LINE_BYTES_MAX: usize = 1024 * 1024;

/// One step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    Write(Stream, Bytes),
    Wait(String),
    Flood { lines: u64, line_bytes: usize },
    Exit(i32),
    Signal(i32),
    OnStop(OnStop),
    Hang,
}

/// What a script does when it is asked to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum OnStop {
    /// Ends by SIGTERM, as a program that never heard of signals.
    #[default]
    Die,
    Ignore,
    Exit(i32),
}

/// Reads a script, one step each.
///
/// # Errors
/// The first step that is none, in words.
pub(crate) fn parse<'a>(steps: impl Iterator<Item = &'a str>) -> Result<Vec<Step>, String> {
    let mut script = Vec::new();
    for text in steps.map(str::trim_start).filter(|text| !text.is_empty()) {
        if script.len() == STEPS_MAX {
            return Err(format!("has more than {STEPS_MAX} steps"));
        }
        let step = step(text).ok_or_else(|| {
            let shown: String = text.chars().take(80).collect();
            format!("has a step that is none: {shown:?}")
        })?;
        script.push(step);
    }
    Ok(script)
}

fn step(text: &str) -> Option<Step> {
    let (verb, rest) = text.split_once(' ').unwrap_or((text, ""));
    let line = |text: String| Bytes::from(text + "\n");
    Some(match (verb, rest) {
        ("say", text) => Step::Write(Stream::Stdout, line(text.to_owned())),
        ("err", text) => Step::Write(Stream::Stderr, line(text.to_owned())),
        ("raw", hex) => Step::Write(Stream::Stdout, unhex(hex)?),
        ("ask", question) => {
            question.split_once(' ')?;
            Step::Write(Stream::Stdout, line(format!("!ask {question}")))
        }
        ("wait", name) if !name.is_empty() => Step::Wait(name.to_owned()),
        ("exit", code) => Step::Exit(code.parse().ok()?),
        ("signal", number) => Step::Signal(number.parse().ok()?),
        ("ignore", "stop") => Step::OnStop(OnStop::Ignore),
        ("on", rest) => Step::OnStop(OnStop::Exit(rest.strip_prefix("stop exit ")?.parse().ok()?)),
        ("hang" | "idle", "") => Step::Hang,
        ("flood", rest) => {
            let (lines, line_bytes) = rest.split_once(' ')?;
            let line_bytes = line_bytes.parse().ok().filter(|bytes| (2..=FLOOD_LINE_BYTES_MAX).contains(bytes))?;
            Step::Flood { lines: lines.parse().ok()?, line_bytes }
        }
        _ => return None,
    })
}

fn unhex(text: &str) -> Option<Bytes> {
    let digits: Vec<u8> = text.chars().map(|digit| digit.to_digit(16)?.try_into().ok()).collect::<Option<_>>()?;
    let whole = !digits.is_empty() && digits.len().is_multiple_of(2);
    whole.then(|| digits.chunks_exact(2).map(|pair| (pair[0] << 4) | pair[1]).collect())
}

/// Line `number` of a flood: the number, with zeros before it.
pub(crate) fn flood_line(number: u64, line_bytes: usize, into: &mut Vec<u8>) {
    let digits = number.to_string();
    let width = line_bytes - 1;
    let digits = &digits[digits.len().saturating_sub(width)..];
    into.resize(into.len() + width - digits.len(), b'0');
    into.extend_from_slice(digits.as_bytes());
    into.push(b'\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_verb_is_read_and_nothing_else() {
        let script = "say a  b\nerr\nraw 00fF\nask q1 why?\nwait go\nflood 2 8\non stop exit 3\nignore stop\nidle\nsignal 9\nexit 0";
        let steps = parse(script.lines()).unwrap();
        assert_eq!(steps.len(), 11);
        assert_eq!(steps[0], Step::Write(Stream::Stdout, Bytes::from_static(b"a  b\n")));
        assert_eq!(steps[2], Step::Write(Stream::Stdout, Bytes::from_static(&[0, 255])));
        assert_eq!(steps[3], Step::Write(Stream::Stdout, Bytes::from_static(b"!ask q1 why?\n")));
        for bad in [
            "sing",
            "raw 0",
            "raw",
            "raw zz",
            "exit x",
            "wait",
            "ask q1",
            "flood 1",
            "flood 1 1",
            "ignore me",
            "on stop",
        ] {
            assert!(parse([bad].into_iter()).is_err(), "{bad}");
        }
    }

    #[test]
    fn flood_lines_are_numbered_and_have_their_length() {
        let mut bytes = Vec::new();
        flood_line(7, 4, &mut bytes);
        flood_line(123_456, 4, &mut bytes);
        assert_eq!(bytes, b"007\n456\n");
    }
}
