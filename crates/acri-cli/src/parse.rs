//! Text that a person types, as values.

use acri::{Timestamp, cursor::Cursor, id::StreamSeq};
use acri_client::{EventsSince, Since};
use std::{
    ops::RangeInclusive,
    time::{Duration, SystemTime},
};

/// The longest time that any option takes; many have a smaller limit of their
/// own.
const DURATION_MAX: Duration = Duration::from_secs(366 * 24 * 3600);
/// Lifetimes of a lease that a node can keep, and others can wait for.
const LEASE_TTL: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(600);
/// Between two heartbeats.
const HEARTBEAT_EVERY: RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_secs(600);

/// `10s`, `5m`, `1h 30m`, or plain seconds.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let duration = match text.parse::<u64>() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => humantime::parse_duration(text).map_err(|error| format!("{error}; write 10s, 5m or 1h"))?,
    };
    within(duration, Duration::ZERO..=DURATION_MAX)
}

/// A lease's lifetime.
pub(crate) fn lease_ttl(text: &str) -> Result<Duration, String> {
    within(duration(text)?, LEASE_TTL)
}

/// The time between two heartbeats.
pub(crate) fn heartbeat_every(text: &str) -> Result<Duration, String> {
    within(duration(text)?, HEARTBEAT_EVERY)
}

fn within(duration: Duration, limits: RangeInclusive<Duration>) -> Result<Duration, String> {
    if limits.contains(&duration) {
        return Ok(duration);
    }
    let shown = |limit: &Duration| match limit.as_secs() / (24 * 3600) {
        0 => humantime::format_duration(*limit).to_string(),
        days => format!("{days} days"),
    };
    if duration < *limits.start() {
        Err(format!("is below {}", shown(limits.start())))
    } else {
        Err(format!("is above {}", shown(limits.end())))
    }
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
        // Added to a moment, it must be one.
        assert_eq!(duration("18446744073709551615"), Err("is above 366 days".to_owned()));
        assert!(duration("500000 years").is_err() && duration("1000d").is_err());
        assert!(lease_ttl("0s").is_err() && lease_ttl("1h").is_err() && lease_ttl("2s").is_ok());
        assert!(heartbeat_every("0s").is_err() && heartbeat_every("250ms").is_ok());
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
