//! Text that a person types, as values.

use acri::{Timestamp, cursor::Cursor, id::StreamSeq};
use acri_client::{EventsSince, Since};
use std::time::{Duration, SystemTime};

/// `10s`, `5m`, `1h 30m`, or plain seconds.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    if let Ok(seconds) = text.parse::<u64>() {
        return Ok(Duration::from_secs(seconds));
    }
    humantime::parse_duration(text).map_err(|error| format!("{error}; write 10s, 5m or 1h"))
}

/// A moment: RFC 3339, or a time ago such as `10m`.
pub(crate) fn moment(text: &str) -> Result<Timestamp, String> {
    if let Ok(time) = text.parse::<Timestamp>() {
        return Ok(time);
    }
    let ago = humantime::parse_duration(text)
        .map_err(|_| "neither an RFC 3339 time such as 2026-11-30T12:00:00Z nor a time ago such as 10m".to_owned())?;
    let time = SystemTime::now().checked_sub(ago).ok_or("before the beginning of time")?;
    let elapsed = time.duration_since(SystemTime::UNIX_EPOCH).map_err(|_| "before 1970")?;
    Ok(Timestamp::from_micros(i64::try_from(elapsed.as_micros()).map_err(|_| "too far away")?))
}

/// `start`, `now`, a cursor, or a moment.
pub(crate) fn log_since(text: &str) -> Result<Since, String> {
    match text {
        "start" => Ok(Since::Start),
        "now" => Ok(Since::Now),
        _ => match text.parse::<Cursor>() {
            Ok(cursor) => Ok(Since::Cursor(cursor)),
            Err(_) => moment(text).map(Since::Time).map_err(|error| format!("no cursor; {error}")),
        },
    }
}

/// `start`, `now`, a stream sequence (go on after it), or a moment.
pub(crate) fn events_since(text: &str) -> Result<EventsSince, String> {
    match text {
        "start" => Ok(EventsSince::Start),
        "now" => Ok(EventsSince::Now),
        _ => match text.parse::<u64>() {
            Ok(sequence) => Ok(EventsSince::After(StreamSeq(sequence))),
            Err(_) => moment(text).map(EventsSince::Time),
        },
    }
}

/// Where `replay` ends: a sequence in the agent's history, or a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Until {
    Sequence(u64),
    Time(Timestamp),
}

pub(crate) fn until(text: &str) -> Result<Until, String> {
    match text.parse::<u64>() {
        Ok(sequence) => Ok(Until::Sequence(sequence)),
        Err(_) => moment(text).map(Until::Time),
    }
}

/// `NAME=VALUE`.
pub(crate) fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("write NAME=VALUE".to_owned()),
    }
}

/// `NAME=VALUE`, or `NAME` for the value that it has here.
pub(crate) fn variable(text: &str) -> Result<(String, Option<String>), String> {
    match text.split_once('=') {
        Some(("", _)) => Err("write NAME=VALUE, or NAME to copy it from here".to_owned()),
        Some((name, value)) => Ok((name.to_owned(), Some(value.to_owned()))),
        None if text.is_empty() => Err("the name is empty".to_owned()),
        None => Ok((text.to_owned(), None)),
    }
}

/// The lines of an `--env-file`: `NAME=VALUE`, `NAME`, blank, `# comment`.
pub(crate) fn env_file(text: &str) -> Result<Vec<(String, Option<String>)>, String> {
    text.lines()
        .enumerate()
        .map(|(index, line)| (index + 1, line.trim_start()))
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
        .map(|(number, line)| variable(line).map_err(|error| format!("line {number}: {error}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_written_with_a_unit_or_in_seconds() {
        assert_eq!(duration("10s"), Ok(Duration::from_secs(10)));
        assert_eq!(duration("90"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert!(duration("soon").is_err());
    }

    #[test]
    fn logs_begin_at_a_word_a_cursor_a_time_or_a_time_ago() {
        let cursor = Cursor { stream: 1, frame: StreamSeq(2), index: 3, sequence: acri::id::LogSeq(4), hash: [5; 8] };
        assert_eq!(log_since("start"), Ok(Since::Start));
        assert_eq!(log_since(&cursor.to_string()), Ok(Since::Cursor(cursor)));
        let time = "2026-11-30T12:00:00Z".parse().unwrap();
        assert_eq!(log_since("2026-11-30T12:00:00Z"), Ok(Since::Time(time)));
        assert!(matches!(log_since("10m"), Ok(Since::Time(_))));
        assert!(log_since("yesterday").unwrap_err().contains("10m"));
        assert_eq!(events_since("17"), Ok(EventsSince::After(StreamSeq(17))));
        assert_eq!(until("17"), Ok(Until::Sequence(17)));
    }

    #[test]
    fn a_variable_has_a_value_or_is_copied_and_a_file_may_have_comments() {
        assert_eq!(variable("A=b=c"), Ok(("A".to_owned(), Some("b=c".to_owned()))));
        assert_eq!(variable("A"), Ok(("A".to_owned(), None)));
        assert!(variable("=x").is_err() && variable("").is_err());
        let file = env_file("# secrets\nA=1\n\n  B\nC= two words \n").unwrap();
        let c = ("C".to_owned(), Some(" two words ".to_owned()));
        assert_eq!(file, [("A".to_owned(), Some("1".to_owned())), ("B".to_owned(), None), c]);
        assert!(env_file("A=1\n=2").unwrap_err().starts_with("line 2"));
    }
}
