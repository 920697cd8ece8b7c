//! How a run ended, by what its history and its harness's holder say.

use super::{
    Agent, Run,
    decide::Draft,
    due::{Exited, KillRecord, Seen},
};
use acri::{
    CommandId, Event,
    event::{
        Checkpoint, ExitStatus, FailReason, KillCause, RunCompleted, RunFailed, RunKillRequested, RunKilled, RunStopped,
    },
    limits::{PRINCIPAL_BYTES_MAX, REASON_BYTES_MAX},
    spec::Completion,
};

/// The event that ends the run, or the Kill's record that must stand before
/// it; `None` while the harness may live.
pub(super) fn verdict(agent: &Agent, run: &Run, seen: &Seen) -> Option<Draft> {
    if let Some(exited) = seen.exited() {
        return Some(of_exit(agent, run, seen, exited));
    }
    if let Some((reason, message)) = seen.lost() {
        return Some(of_loss(run, reason, message));
    }
    if seen.never_started() && run.started {
        let message = "it had started, and its holder knows nothing of it";
        return Some(of_loss(run, FailReason::HarnessLost, message));
    }
    let never = seen.never_started() && (run.kill.is_some() || run.stop.is_some() || seen.start_timed_out());
    if seen.not_started().is_none() && !never {
        return None;
    }
    let event = match (&run.kill, &run.stop, seen.not_started()) {
        (Some(kill), ..) => killed(KillCause::Requested, &kill.reason, None),
        (None, ..) if seen.start_timed_out() => start_timed_out(None),
        (None, Some(stop), _) => stopped(&stop.reason, None),
        (None, None, Some((reason, message))) => failed(reason, message, None),
        (None, None, None) => return None,
    };
    Some(Draft::of_run(run.id, event))
}

/// A harness is called lost only when nothing of it lives: where a Kill was
/// recorded before, that is its proof. What another reason says proves nothing
/// of a Kill.
fn of_loss(run: &Run, reason: FailReason, message: &str) -> Draft {
    let event = match &run.kill {
        Some(kill) if reason == FailReason::HarnessLost => killed(KillCause::Requested, &kill.reason, None),
        _ => failed(reason, message, None),
    };
    Draft::of_run(run.id, event)
}

/// What a recorded Kill was for.
enum Record<'a> {
    None,
    StartTimedOut,
    Grace(&'a str),
    Kill(&'a KillRecord),
}

fn record<'a>(run: &'a Run, exited: &'a Exited) -> Record<'a> {
    match &exited.killed {
        None => Record::None,
        Some((command, ..)) if run.command == Some(*command) => Record::StartTimedOut,
        Some(record) => run.stops.get(&record.0).map_or(Record::Kill(record), |reason| Record::Grace(reason)),
    }
}

fn of_exit(agent: &Agent, run: &Run, seen: &Seen, exited: &Exited) -> Draft {
    let exit = exited.status;
    if let Some(kill) = &run.kill {
        return Draft::of_run(run.id, killed(KillCause::Requested, &kill.reason, exit));
    }
    let record = record(run, exited);
    if let Record::Kill((command, principal, reason)) = record {
        return kill_requested(run, *command, principal, reason);
    }
    let event = if exited.orphaned {
        failed(FailReason::Orphaned, "no owner spoke to its holder", exit)
    } else if seen.start_timed_out() || matches!(record, Record::StartTimedOut) {
        start_timed_out(exit)
    } else if let Record::Grace(reason) = record {
        killed(KillCause::GraceExpired, reason, exit)
    } else if let (Some(stop), true) = (&run.stop, seen.grace_expired()) {
        killed(KillCause::GraceExpired, &stop.reason, exit)
    } else {
        by_itself(agent, run, seen, exit)
    };
    Draft::of_run(run.id, event)
}

fn by_itself(agent: &Agent, run: &Run, seen: &Seen, exit: Option<ExitStatus>) -> Event {
    let code = exit.and_then(|status| status.code);
    let success = code == Some(0) && agent.spec().completion == Completion::Exit;
    match &run.stop {
        Some(_) if success && !seen.stop_delivered() => RunCompleted { exit }.into(),
        Some(stop) => stopped(&stop.reason, exit),
        None if success => RunCompleted { exit }.into(),
        None => {
            let message = match exit {
                Some(ExitStatus { code: Some(0), .. }) => "status 0, and no record said that it completed".to_owned(),
                Some(ExitStatus { code: Some(code), .. }) => format!("status {code}"),
                Some(ExitStatus { signal: Some(signal), .. }) => format!("signal {signal}"),
                Some(ExitStatus { code: None, signal: None }) | None => "status unknown".to_owned(),
            };
            failed(FailReason::Exit, &message, exit)
        }
    }
}

fn kill_requested(run: &Run, command: CommandId, principal: &str, reason: &str) -> Draft {
    Draft {
        cause: Some(command),
        principal: Some(cut(principal, PRINCIPAL_BYTES_MAX)),
        ..Draft::of_run(run.id, RunKillRequested { reason: cut(reason, REASON_BYTES_MAX) })
    }
}

fn start_timed_out(exit: Option<ExitStatus>) -> Event {
    failed(FailReason::StartTimedOut, "the harness did not begin in time", exit)
}

fn failed(reason: FailReason, message: &str, exit: Option<ExitStatus>) -> Event {
    RunFailed { reason, message: cut(message, REASON_BYTES_MAX), exit }.into()
}

fn killed(cause: KillCause, reason: &str, exit: Option<ExitStatus>) -> Event {
    RunKilled { cause, reason: reason.to_owned(), exit }.into()
}

fn stopped(reason: &str, exit: Option<ExitStatus>) -> Event {
    RunStopped { reason: reason.to_owned(), checkpoint: Checkpoint::None, exit }.into()
}

/// Cuts text to its limit, and says so in the text.
pub(crate) fn cut(text: &str, bytes_max: usize) -> String {
    if text.len() <= bytes_max {
        return text.to_owned();
    }
    let mark = format!(" … (cut, {} bytes)", text.len());
    let end = text.floor_char_boundary(bytes_max.saturating_sub(mark.len()));
    format!("{}{mark}", &text[..end])
}
