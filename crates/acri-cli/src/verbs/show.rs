//! How statuses, times and events look in tables.

use acri::{
    AgentStatus, Event, EventEnvelope, Timestamp,
    event::ExitStatus,
    status::{Phase, RunStatus, Termination},
};
use std::time::{Duration, SystemTime};

pub(crate) fn now() -> Timestamp {
    let elapsed = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_micros(i64::try_from(elapsed.as_micros()).unwrap_or(i64::MAX))
}

/// The largest two units of a duration: `3m 12s`.
pub(crate) fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m {}s", seconds % 60),
        (0, _, _) => format!("{hours}h {minutes}m"),
        _ => format!("{days}d {hours}h"),
    }
}

pub(crate) fn ago(time: Timestamp) -> String {
    format!("{} ago", duration(now().since(time)))
}

pub(crate) fn exit(exit: Option<ExitStatus>) -> String {
    match exit {
        Some(ExitStatus { code: Some(code), .. }) => format!("status {code}"),
        Some(ExitStatus { signal: Some(signal), .. }) => format!("signal {signal}"),
        _ => String::new(),
    }
}

/// A contract enum as its name on the wire.
pub(crate) fn name<T: serde::Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => name,
        Ok(other) => other.to_string(),
        Err(_) => "?".to_owned(),
    }
}

/// `running`, `running (stopping)`, `failed (killed)`.
pub(crate) fn state(run: &RunStatus) -> String {
    let state = name(&run.state);
    match (run.phase, run.termination) {
        (Some(phase), _) => format!("{state} ({})", name(&phase)),
        (None, Some(Termination::Killed)) => format!("{state} (killed)"),
        _ => state,
    }
}

/// How a run came to where it is: exit and reason.
pub(crate) fn detail(run: &RunStatus) -> String {
    let exit = exit(run.exit);
    match (&run.reason, exit.is_empty()) {
        (Some(reason), true) => reason.clone(),
        (Some(reason), false) if reason.contains(&exit) => reason.clone(),
        (Some(reason), false) => format!("{exit}: {reason}"),
        (None, _) => exit,
    }
}

/// The lines of `status`.
pub(crate) fn status(status: &AgentStatus) -> Vec<(&'static str, String)> {
    let mut lines = vec![("agent", status.agent.to_string())];
    if let Some(run) = &status.run {
        lines.push(("run", run.run.to_string()));
        lines.push(("state", state(run)));
        let detail = detail(run);
        if !detail.is_empty() {
            lines.push(("reason", detail));
        }
        lines.push(("since", format!("{} ({})", run.since, ago(run.since))));
        lines.push(("log", if run.sealed { "complete" } else { "open" }.to_owned()));
    } else {
        lines.push(("run", "none yet".to_owned()));
    }
    let gone = status.run.as_ref().is_some_and(|run| run.phase == Some(Phase::Unreachable));
    let reach = if gone { ", unreachable" } else { "" };
    lines.push(("owner", format!("{} (epoch {}{reach})", status.node, status.epoch)));
    if status.removed {
        lines.push(("removed", "yes".to_owned()));
    }
    lines
}

/// What an event says beside its type, in a few words.
pub(crate) fn event(envelope: &EventEnvelope) -> String {
    let with_exit = |status: Option<ExitStatus>, rest: &str| {
        let exit = exit(status);
        let parts: Vec<_> = [exit.as_str(), rest].into_iter().filter(|part| !part.is_empty()).collect();
        parts.join(", ")
    };
    match &envelope.event {
        Event::AgentCreated(data) => {
            let command = data.spec.command.join(" ");
            format!("{} {command}", data.spec.harness).trim_end().to_owned()
        }
        Event::AgentAssigned(_) => format!("to {} (epoch {})", envelope.node, envelope.epoch),
        Event::AgentRemoved(data) => data.reason.clone(),
        Event::RunStarted(data) => {
            let pid = data.pid.map(|pid| format!("pid {pid}"));
            let tree = data.tree_control.as_ref().map(|tier| format!("tree held by {tier}"));
            [pid, tree].into_iter().flatten().collect::<Vec<_>>().join(", ")
        }
        Event::RunWaiting(data) => data.reason.as_str().to_owned(),
        Event::RunStopRequested(data) => format!("until {}: {}", data.deadline, data.reason),
        Event::RunKillRequested(data) => data.reason.clone(),
        Event::RunCompleted(data) => with_exit(data.exit, ""),
        Event::RunStopped(data) => with_exit(data.exit, &data.reason),
        Event::RunFailed(data) => {
            let message = if data.message.is_empty() { data.reason.as_str() } else { &data.message };
            with_exit(data.exit, message)
        }
        Event::RunKilled(data) => with_exit(data.exit, &format!("{}: {}", name(&data.cause), data.reason)),
        Event::RunLogsSealed(data) => {
            format!("{} log events{}", data.count, if data.gap { ", some output is missing" } else { "" })
        }
        Event::EscalationRaised(data) => format!("{}: {}", data.escalation, data.question),
        Event::RunAccepted(_) | Event::RunResumed(_) | Event::RunStopExpired(_) | Event::Unknown { .. } => {
            String::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use acri::RunState;

    #[test]
    fn a_duration_shows_its_two_largest_units() {
        let shown = |seconds| duration(Duration::from_secs(seconds));
        assert_eq!([shown(5), shown(65), shown(3_700), shown(90_000)], ["5s", "1m 5s", "1h 1m", "1d 1h"]);
    }

    #[test]
    fn a_killed_run_is_failed_and_says_so() {
        let run = RunStatus {
            run: "bbbb1111-0000-8000-8000-000000000011".parse().unwrap(),
            state: RunState::Failed,
            phase: None,
            reason: Some("enough".into()),
            since: Timestamp::from_micros(0),
            termination: Some(Termination::Killed),
            exit: Some(ExitStatus { code: None, signal: Some(9) }),
            sealed: true,
        };
        assert_eq!(state(&run), "failed (killed)");
        assert_eq!(detail(&run), "signal 9: enough");
    }
}
