//! Deciding: a command becomes one event, an answer that is known already, or
//! a refusal. One file per family of commands.

mod create;
mod kill;
mod remove;
mod start;
mod stop;

pub(crate) use create::already_there;

use super::{Accepted, AcceptedOrder, Agent, Run};
use crate::appender::{Answer, Command, Order};
use acri::{
    CommandId, ErrorBody, ErrorCode, Event, RunId, Timestamp,
    event::Source,
    limits::{COMMAND_AGE_MAX, COMMAND_AHEAD_MAX, EVENTS_PERCENT_MAX},
};

/// An event to be appended, without what the sequencer adds.
#[derive(Debug, Clone, PartialEq)]
pub struct Draft {
    /// Of which run; `None` for the agent's own.
    pub run: Option<RunId>,
    /// The command that causes it.
    pub cause: Option<CommandId>,
    /// Who gave that command.
    pub principal: Option<String>,
    /// Where in the harness's output it was found.
    pub source: Option<Source>,
    /// What happens.
    pub event: Event,
}

impl Draft {
    /// An event of a run that no command causes.
    #[must_use]
    pub fn of_run(run: RunId, event: impl Into<Event>) -> Self {
        Self { run: Some(run), cause: None, principal: None, source: None, event: event.into() }
    }

    fn caused(command: &Command, run: Option<RunId>, event: impl Into<Event>) -> Self {
        Self {
            run,
            cause: Some(command.id),
            principal: Some(command.principal.clone()),
            source: None,
            event: event.into(),
        }
    }
}

/// What a command comes to, if it is not refused.
#[derive(Debug, Clone, PartialEq)]
pub enum Decided {
    /// This event; the answer follows from the state with it.
    Append(Draft),
    /// Nothing new: the first answer again, or a mere question.
    Known(Answer),
    /// Nothing new: a Kill of this run is recorded, its end answers.
    Awaits(RunId),
}

/// Decides a command at a moment of the bus's time.
///
/// A repeat within 24 h of its id's time gets the first answer, even after it
/// expired by its own word. Refusals are not remembered.
///
/// # Errors
/// What stands in the way.
pub fn decide(agent: &Agent, command: &Command, now: Timestamp) -> Result<Decided, ErrorBody> {
    if let Order::Status(run) = command.order {
        return match agent.status(run) {
            Some(status) => Ok(Decided::Known(Answer::Status(status))),
            None => Err(no_such_run(run.unwrap_or_else(|| RunId::derive(agent.id, command.id)))),
        };
    }
    check_age(command.id, now)?;
    if let Some(answer) = known(agent, command) {
        return answer;
    }
    check_expiry(command.expires, now)?;
    match &command.order {
        Order::Create(_) => Err(already_there(agent)),
        Order::Start(data) => start::decide(agent, command, data),
        Order::Stop(run, data) => stop::decide(agent, command, *run, data, now),
        Order::Kill(run, data) => kill::decide(agent, command, *run, data),
        Order::Remove(data) => remove::decide(agent, command, data),
        Order::Status(_) => Err(ErrorBody::new(ErrorCode::Internal, "a question was taken for an order")),
    }
}

/// The answer to a command that this agent has accepted already, or the
/// complaint that its id was used for another one.
pub(crate) fn known(agent: &Agent, command: &Command) -> Option<Result<Decided, ErrorBody>> {
    if agent.created_by == Some(command.id) {
        let same = matches!(&command.order, Order::Create(data) if data.spec == agent.spec);
        let answer = same.then(|| Decided::Known(Answer::Created(agent.handle())));
        return Some(answer.ok_or_else(|| reused(command.id)));
    }
    let Accepted { order, .. } = agent.accepted.get(&command.id)?;
    let answer = match (order, &command.order) {
        (AcceptedOrder::Start { run, task }, Order::Start(data)) => start::repeat(agent, *run, *task, data),
        (AcceptedOrder::Stop { .. }, Order::Stop(run, data)) => stop::repeat(order, *run, data),
        (AcceptedOrder::Kill { run, reason }, Order::Kill(asked, data)) => {
            kill::repeat(agent, *run, reason, *asked, data)
        }
        (AcceptedOrder::Remove { reason }, Order::Remove(data)) => remove::repeat(agent, reason, data),
        _ => None,
    };
    Some(answer.ok_or_else(|| reused(command.id)))
}

/// Refuses a command that expired: by its id's time, or by its own word. For
/// what acts before it decides: a kill switch.
///
/// # Errors
/// `deadline_exceeded`; `invalid_argument` if the id is no UUIDv7.
pub fn check_time(id: CommandId, expires: Option<Timestamp>, now: Timestamp) -> Result<(), ErrorBody> {
    check_age(id, now).and_then(|()| check_expiry(expires, now))
}

/// Refuses what would begin something where the event stream is nearly full:
/// the rest is for the ends of what runs, Kills and seals. What is known
/// already needs no room.
pub(crate) fn check_room(command: &Command, decided: Decided, events_percent: u64) -> Result<Decided, ErrorBody> {
    match (&decided, &command.order) {
        (Decided::Append(_), Order::Start(_)) => room(events_percent).map(|()| decided),
        _ => Ok(decided),
    }
}

/// # Errors
/// `resource_exhausted` where the event stream is too full to begin anything.
pub(crate) fn room(events_percent: u64) -> Result<(), ErrorBody> {
    if events_percent < EVENTS_PERCENT_MAX {
        return Ok(());
    }
    let text = format!(
        "the event stream ACRI_EVENTS is {events_percent} % full, and from {EVENTS_PERCENT_MAX} % on nothing new \
         begins, so that what runs can end: give the stream more room"
    );
    Err(ErrorBody::new(ErrorCode::ResourceExhausted, text))
}

/// Refuses an id that is too old, or from the future.
fn check_age(id: CommandId, now: Timestamp) -> Result<(), ErrorBody> {
    let Some(minted) = id.millis().and_then(|ms| i64::try_from(ms).ok()).and_then(|ms| ms.checked_mul(1000)) else {
        return Err(refused(ErrorCode::InvalidArgument, "id", format!("command id {id} is no UUIDv7")));
    };
    let minted = Timestamp::from_micros(minted);
    if now > minted.plus(COMMAND_AGE_MAX) {
        let text = format!("command id {id} is of {minted}, more than {} s ago", COMMAND_AGE_MAX.as_secs());
        return Err(refused(ErrorCode::Expired, "id", text));
    }
    if minted > now.plus(COMMAND_AHEAD_MAX) {
        let ahead = COMMAND_AHEAD_MAX.as_secs();
        return Err(refused(
            ErrorCode::Expired,
            "id",
            format!("command id {id} is of {minted}, more than {ahead} s ahead"),
        ));
    }
    Ok(())
}

fn check_expiry(expires: Option<Timestamp>, now: Timestamp) -> Result<(), ErrorBody> {
    match expires {
        Some(expires) if now > expires => {
            Err(refused(ErrorCode::Expired, "expires", format!("the command expired at {expires}")))
        }
        _ => Ok(()),
    }
}

fn refused(code: ErrorCode, field: &str, message: String) -> ErrorBody {
    ErrorBody { field: Some(field.to_owned()), ..ErrorBody::new(code, message) }
}

pub(crate) fn reused(id: CommandId) -> ErrorBody {
    refused(ErrorCode::IdReused, "id", format!("command id {id} was used for another command"))
}

fn no_such_run(run: RunId) -> ErrorBody {
    ErrorBody::new(ErrorCode::NotFound, format!("there is no run {run} of this agent"))
}

/// Says which run is open. One that has ended is sealed soon: try again.
fn open_run(run: &Run) -> ErrorBody {
    let state = format!("{:?}", run.state).to_lowercase();
    if run.end.is_some() {
        let message = format!("run {} is {state} but still open: its log is not yet sealed", run.id);
        ErrorBody { retryable: true, ..ErrorBody::new(ErrorCode::FailedPrecondition, message) }
    } else {
        ErrorBody::new(ErrorCode::FailedPrecondition, format!("run {} is open: {state}", run.id))
    }
}

fn is_removed() -> ErrorBody {
    ErrorBody::new(ErrorCode::FailedPrecondition, "the agent was removed")
}
