//! Events, effects and answers in few words.

use crate::appender::{Answer, Effect, Halt};
use acri::{
    Event, EventEnvelope, Timestamp,
    event::{ExitStatus, KillCause},
};

pub(super) fn exit(exit: Option<ExitStatus>) -> String {
    match exit {
        None => "no exit".to_owned(),
        Some(ExitStatus { code: Some(code), .. }) => format!("code {code}"),
        Some(ExitStatus { signal: Some(signal), .. }) => format!("signal {signal}"),
        Some(_) => "exit unknown".to_owned(),
    }
}

pub(super) fn event(envelope: &EventEnvelope, start: Timestamp) -> String {
    let name = envelope.event.type_name();
    let at = |time: Timestamp| format!("{}ms", time.since(start).as_millis());
    let data = match &envelope.event {
        Event::RunAccepted(data) => format!("{:?}", String::from_utf8_lossy(data.task.as_bytes())),
        Event::RunWaiting(data) => data.reason.as_str().to_owned(),
        Event::RunStopRequested(data) => {
            format!("{}, {:?} at {}", data.reason, data.on_expiry, at(data.deadline))
        }
        Event::RunKillRequested(data) => {
            format!("{} by {}", data.reason, envelope.principal.as_deref().unwrap_or("nobody"))
        }
        Event::RunCompleted(data) => exit(data.exit),
        Event::RunStopped(data) => format!("{}, {}", data.reason, exit(data.exit)),
        Event::RunFailed(data) => {
            format!("{}, {}, {}", data.reason.as_str(), data.message, exit(data.exit))
        }
        Event::RunKilled(data) => {
            let cause = match data.cause {
                KillCause::Requested => "requested",
                KillCause::GraceExpired => "grace_expired",
            };
            format!("{cause}, {}, {}", data.reason, exit(data.exit))
        }
        Event::RunLogsSealed(data) => {
            format!("{}{}", data.count, if data.gap { ", gap" } else { "" })
        }
        Event::EscalationRaised(data) => data.question.chars().take(40).collect(),
        Event::AgentAssigned(_) => format!("epoch {}", envelope.epoch),
        Event::AgentRemoved(data) => data.reason.clone(),
        Event::AgentCreated(_) | Event::RunStarted(_) | Event::RunResumed(_) | Event::RunStopExpired(_) => {
            String::new()
        }
        Event::Unknown { .. } => "?".to_owned(),
    };
    if data.is_empty() { name.to_owned() } else { format!("{name}({data})") }
}

pub(super) fn answer(answer: &Answer, start: Timestamp) -> String {
    match answer {
        Answer::Created(handle) => format!("created on {}", handle.node),
        Answer::Started(_) => "started".to_owned(),
        Answer::Stopping(ack) => {
            format!("stopping until {}ms", ack.deadline.since(start).as_millis())
        }
        Answer::Killed(ack) => {
            format!("killed, {}", if ack.proved { "proved" } else { "not proved" })
        }
        Answer::Status(status) => match &status.run {
            None => format!("no run, epoch {}", status.epoch),
            Some(run) => format!(
                "{:?}{}{}{}",
                run.state,
                run.phase.map_or_else(String::new, |phase| format!(" {phase:?}")),
                run.reason.as_ref().map_or_else(String::new, |reason| format!(" ({reason})")),
                if run.sealed { " sealed" } else { "" },
            )
            .to_lowercase(),
        },
        Answer::Removed(_) => "removed".to_owned(),
        Answer::Refused(error) => {
            format!("{}{}", error, if error.retryable { " (retry)" } else { "" })
        }
    }
}

pub(super) fn effect(effect: &Effect) -> String {
    match effect {
        Effect::Attach { epoch } => format!("ATTACH as {epoch}"),
        Effect::Spawn { .. } => "SPAWN".to_owned(),
        Effect::Stop { .. } => "STOP".to_owned(),
        Effect::Kill { reason, principal, .. } => format!("KILL ({reason}, by {principal})"),
        Effect::Pump { .. } => "PUMP".to_owned(),
    }
}

pub(super) fn halt(halt: &Halt) -> String {
    match halt {
        Halt::Fenced { by } => format!("HALT fenced by {by}"),
        Halt::NotOurs => "HALT not ours".to_owned(),
        Halt::HistoryLost => "HALT history lost".to_owned(),
        Halt::Bug(what) => format!("HALT bug: {what}"),
    }
}
