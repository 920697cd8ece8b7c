//! What is owed to a run: the next event, effects, and when to look again.
//!
//! It follows from the folded run and from what this owner has seen
//! ([`Seen`], which dies with the process); nothing that is owed is stored.

use super::{Agent, Run, Stop, decide::Draft, verdict};
use crate::appender::{Effect, Report};
use acri::{
    CommandId, Epoch, Payload, Timestamp,
    command::OnExpiry,
    event::{ExitStatus, FailReason, RunFailed, RunLogsSealed, RunStarted, RunStopExpired},
    id::{LogSeq, Sha256Digest},
    limits::{ADOPTION_GRACE, KILL_PROOF_MAX, START_TIMEOUT},
};
use std::time::Duration;

/// After a harness is lost, its writer has this long to say how much of the
/// log there is, if it had begun.
pub const LOST_LOG_WAIT: Duration = Duration::from_secs(10);

/// A run whose node was lost stays open for this long after its end: its node
/// may come back, with its output.
pub const NODE_LOST_LOG_WAIT: Duration = Duration::from_secs(24 * 3600);

/// A Kill that the harness's holder recorded: command, principal, reason.
pub type KillRecord = (CommandId, String, String);

/// An exit as reported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exited {
    /// Its status.
    pub status: Option<ExitStatus>,
    /// The Kill that its holder recorded.
    pub killed: Option<KillRecord>,
    /// Whether its holder ended it for want of an owner.
    pub orphaned: bool,
}

/// Why a harness is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KillWhy {
    /// It did not begin in time.
    StartTimedOut,
    /// A Stop's grace expired.
    GraceExpired,
    /// A Kill is recorded.
    Requested,
    /// The history ended without it.
    Leftover,
}

/// Work that is wanted, without the words that go with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Want {
    /// See [`Effect::Attach`].
    Attach,
    /// See [`Effect::Kill`].
    Kill(KillWhy),
    /// See [`Effect::Spawn`].
    Spawn,
    /// See [`Effect::Stop`].
    Stop(CommandId),
    /// See [`Effect::Pump`].
    Pump,
}

/// What this owner has seen of a run's harness and asked of it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Seen {
    adopted: bool,
    history_lost: bool,
    attached_at: Option<Timestamp>,
    old_stop: Option<(CommandId, Timestamp)>,
    spawned_at: Option<Timestamp>,
    started: Option<RunStarted>,
    session: bool,
    not_started: Option<(FailReason, String)>,
    never_started: bool,
    exited: Option<Exited>,
    lost: Option<(FailReason, String, Timestamp)>,
    stop_sent: Option<CommandId>,
    stop_delivered: bool,
    kill_sent: Option<(KillWhy, Timestamp)>,
    start_timed_out: bool,
    grace_expired: bool,
    pumped: bool,
    logs: Option<RunLogsSealed>,
}

/// What is owed to a run.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Owed {
    /// The next event.
    pub event: Option<Draft>,
    /// Effects, in order.
    pub wants: Vec<Want>,
    /// When to look again, if nothing happens before.
    pub wake: Option<Timestamp>,
}

impl Seen {
    /// Of a run that an earlier owner may have begun. A Stop that he accepted
    /// may have been delivered, and its deadline waits for the grace.
    #[must_use]
    pub fn adopted(run: &Run, history_lost: bool, now: Timestamp) -> Self {
        Self {
            adopted: true,
            history_lost,
            old_stop: run.stop.as_ref().map(|stop| (stop.command, now.plus(ADOPTION_GRACE))),
            stop_delivered: run.stop.is_some(),
            ..Self::default()
        }
    }

    /// Takes in a report. Derived events are not for here.
    pub fn note(&mut self, report: Report, now: Timestamp) {
        match report {
            Report::Started(started) => {
                self.session = true;
                self.started = Some(started);
            }
            Report::NotStarted(reason, message) => self.not_started = Some((reason, message)),
            Report::NeverStarted => self.never_started = true,
            Report::Exited { status, killed, orphaned } => {
                self.session = true;
                self.exited.get_or_insert(Exited { status, killed, orphaned });
            }
            Report::Lost(reason, message) => {
                self.lost.get_or_insert((reason, message, now));
            }
            Report::StopDelivered => self.stop_delivered = true,
            Report::LogsDone { count, chain, gap } => self.logs = Some(RunLogsSealed { count, chain, gap }),
            Report::Derived(..) => {}
        }
    }

    /// Takes in that an effect was asked for.
    pub fn asked(&mut self, want: Want, now: Timestamp) {
        match want {
            Want::Attach => self.attached_at = Some(now),
            Want::Spawn => {
                self.spawned_at = Some(now);
                self.never_started = false;
            }
            Want::Stop(command) => self.stop_sent = Some(command),
            Want::Kill(why) => {
                self.kill_sent = Some((why, now));
                self.start_timed_out |= why == KillWhy::StartTimedOut;
                self.grace_expired |= why == KillWhy::GraceExpired;
            }
            Want::Pump => self.pumped = true,
        }
    }

    /// Whether an adoption's attach has told anything.
    fn reached(&self) -> bool {
        !self.adopted || self.session || self.spawned_at.is_some() || self.gone()
    }

    /// Whether no harness is there (any more).
    fn gone(&self) -> bool {
        self.exited.is_some() || self.lost.is_some() || self.not_started.is_some() || self.never_started
    }

    /// Until when decisions wait for the claim of what an earlier owner left:
    /// until it is told what that is, but no longer than a kill's proof.
    #[must_use]
    pub fn claiming_until(&self) -> Option<Timestamp> {
        self.attached_at.filter(|_| !self.reached()).map(|at| at.plus(KILL_PROOF_MAX))
    }

    /// The exit that was reported.
    #[must_use]
    pub fn exited(&self) -> Option<&Exited> {
        self.exited.as_ref()
    }

    /// Why the harness was lost.
    pub(super) fn lost(&self) -> Option<(FailReason, &str)> {
        self.lost.as_ref().map(|(reason, message, _)| (*reason, message.as_str()))
    }

    /// Why it certainly did not begin.
    pub(super) fn not_started(&self) -> Option<(FailReason, &str)> {
        self.not_started.as_ref().map(|(reason, message)| (*reason, message.as_str()))
    }

    pub(super) fn never_started(&self) -> bool {
        self.never_started
    }

    pub(super) fn start_timed_out(&self) -> bool {
        self.start_timed_out
    }

    pub(super) fn grace_expired(&self) -> bool {
        self.grace_expired
    }

    pub(super) fn stop_delivered(&self) -> bool {
        self.stop_delivered
    }

    fn deadline(&self, stop: &Stop) -> Timestamp {
        match self.old_stop {
            Some((command, not_before)) if command == stop.command => stop.deadline.max(not_before),
            _ => stop.deadline,
        }
    }

    fn start_deadline(&self, run: &Run) -> Option<Timestamp> {
        if run.started || self.session || self.gone() || run.end.is_some() {
            return None;
        }
        Some(self.spawned_at.or(self.attached_at)?.plus(START_TIMEOUT))
    }
}

/// What is owed to an unsealed run.
#[must_use]
pub fn due(agent: &Agent, run: &Run, seen: &Seen, now: Timestamp) -> Owed {
    if run.sealed {
        return Owed::default();
    }
    Owed { event: event(agent, run, seen, now), wants: wants(run, seen, now), wake: wake(run, seen, now) }
}

fn event(agent: &Agent, run: &Run, seen: &Seen, now: Timestamp) -> Option<Draft> {
    if run.end.is_some() {
        return seal(run, seen, now).map(|seal| Draft::of_run(run.id, seal));
    }
    if seen.history_lost {
        let message = "the event stream lost acknowledged events".to_owned();
        return Some(Draft::of_run(run.id, RunFailed { reason: FailReason::HistoryLost, message, exit: None }));
    }
    if let Some(started) = &seen.started
        && !run.started
        && !seen.start_timed_out
    {
        return Some(Draft::of_run(run.id, started.clone()));
    }
    if let Some(verdict) = verdict::verdict(agent, run, seen) {
        return Some(verdict);
    }
    if run.kill.is_some() || seen.grace_expired {
        return None;
    }
    let stop = run.stop.as_ref().filter(|stop| stop.on_expiry == OnExpiry::Keep)?;
    (now >= seen.deadline(stop)).then(|| Draft::of_run(run.id, RunStopExpired {}))
}

/// A run whose harness never began has no log. One whose harness was lost, or
/// had begun and its holder knows nothing of it, is sealed with what is known
/// of its stored log; if nobody says that in time, as if there were none.
fn seal(run: &Run, seen: &Seen, now: Timestamp) -> Option<RunLogsSealed> {
    let empty = |gap| RunLogsSealed { count: LogSeq(0), chain: Sha256Digest::default(), gap };
    if let Some(until) = node_lost_until(run, seen) {
        return (seen.gone() && now >= until).then(|| seen.logs.clone().unwrap_or_else(|| empty(true)));
    }
    if let Some(logs) = &seen.logs {
        return Some(logs.clone());
    }
    if seen.not_started.is_some() || (seen.never_started && !run.started) {
        return Some(empty(false));
    }
    (now >= lost_log_until(run, seen)?).then(|| empty(true))
}

/// Until when it is waited for what is known of a lost run's log.
fn lost_log_until(run: &Run, seen: &Seen) -> Option<Timestamp> {
    let lost_at = seen.lost.as_ref().map(|(.., at)| *at);
    let end = run.end.as_ref().filter(|_| seen.never_started && run.started);
    Some(lost_at.or(end.map(|end| end.at))?.plus(LOST_LOG_WAIT))
}

/// Until when a lost node is waited for; `None` if it was not, or is back.
fn node_lost_until(run: &Run, seen: &Seen) -> Option<Timestamp> {
    // Only the node where the harness lived can tell any of that.
    let told = matches!(seen.lost, Some((reason, ..)) if reason != FailReason::NodeLost);
    if seen.session || seen.never_started || told {
        return None;
    }
    let end = run.end.as_ref()?;
    // One that had ended before its node was lost is owed its log all the same.
    let given_up = matches!(seen.lost, Some((FailReason::NodeLost, ..)));
    (given_up || end.failure == Some(FailReason::NodeLost)).then(|| end.at.plus(NODE_LOST_LOG_WAIT))
}

fn wants(run: &Run, seen: &Seen, now: Timestamp) -> Vec<Want> {
    if seen.adopted && seen.attached_at.is_none() {
        return vec![Want::Attach];
    }
    let mut wants = Vec::new();
    if let Some(why) = kill_why(run, seen, now)
        && kill_due(why, seen).is_none_or(|at| now >= at)
    {
        wants.push(Want::Kill(why));
    }
    if !seen.reached() {
        return wants;
    }
    let alive = run.end.is_none() && run.kill.is_none();
    let unspawned = seen.never_started || (!seen.adopted && seen.spawned_at.is_none());
    if alive && unspawned && !run.started && run.stop.is_none() && !seen.start_timed_out && !seen.history_lost {
        wants.push(Want::Spawn);
    }
    if let Some(stop) = &run.stop
        && alive
        && seen.session
        && !seen.gone()
        && seen.stop_sent != Some(stop.command)
    {
        wants.push(Want::Stop(stop.command));
    }
    if seen.session && seen.lost.is_none() && !seen.pumped && (run.started || run.end.is_some()) {
        wants.push(Want::Pump);
    }
    wants
}

fn kill_why(run: &Run, seen: &Seen, now: Timestamp) -> Option<KillWhy> {
    if seen.gone() {
        return None;
    }
    if run.end.is_some() {
        return (run.end_is_unproved() && seen.session).then_some(KillWhy::Leftover);
    }
    if run.kill.is_some() {
        return Some(KillWhy::Requested);
    }
    let expired = |stop: &Stop| stop.on_expiry == OnExpiry::Kill && now >= seen.deadline(stop);
    if run.stop.as_ref().is_some_and(|stop| seen.grace_expired || expired(stop)) {
        // Once begun it is not taken back: a later Stop cannot lengthen the grace.
        return Some(KillWhy::GraceExpired);
    }
    let late = seen.start_deadline(run).is_some_and(|deadline| now >= deadline);
    (late || seen.start_timed_out).then_some(KillWhy::StartTimedOut)
}

/// When this kill is due; `None`: at once. An adoption claims the harness
/// first, but no kill waits for that longer than for its proof.
fn kill_due(why: KillWhy, seen: &Seen) -> Option<Timestamp> {
    match seen.kill_sent {
        Some((sent_for, at)) if sent_for == why => Some(at.plus(KILL_PROOF_MAX)),
        _ if !seen.reached() => seen.attached_at.map(|at| at.plus(KILL_PROOF_MAX)),
        _ => None,
    }
}

fn wake(run: &Run, seen: &Seen, now: Timestamp) -> Option<Timestamp> {
    let mut times = vec![seen.start_deadline(run)];
    if let Some(stop) = run.stop.as_ref().filter(|_| run.end.is_none()) {
        times.push(Some(seen.deadline(stop)));
    }
    if let Some(why) = kill_why(run, seen, now) {
        times.push(kill_due(why, seen));
    }
    times.push(node_lost_until(run, seen).or_else(|| lost_log_until(run, seen)));
    times.into_iter().flatten().filter(|time| *time > now).min()
}

impl Want {
    /// The effect, with its words.
    #[must_use]
    pub fn effect(self, run: &Run, epoch: Epoch) -> Effect {
        match self {
            Self::Attach => Effect::Attach { epoch },
            Self::Spawn => {
                Effect::Spawn { task: run.task.clone().unwrap_or_else(|| Payload::text(String::new())), epoch }
            }
            Self::Stop(command) => Effect::Stop { command, epoch },
            Self::Pump => Effect::Pump { epoch },
            Self::Kill(why) => kill_effect(why, run, epoch),
        }
    }
}

/// A kill that no Kill asked for goes under the command that it follows from:
/// by that the holder's record is told from a Kill's.
fn kill_effect(why: KillWhy, run: &Run, epoch: Epoch) -> Effect {
    let start = run.command.unwrap_or_else(|| CommandId::from_uuid(*run.id.as_uuid()));
    let principal = run.principal.clone().unwrap_or_default();
    let (command, principal, reason) = match (why, &run.kill, &run.stop) {
        (KillWhy::Requested, Some(kill), _) => (kill.command, kill.principal.clone(), kill.reason.clone()),
        (KillWhy::GraceExpired, _, Some(stop)) => (stop.command, stop.principal.clone(), stop.reason.clone()),
        (KillWhy::StartTimedOut, ..) => (start, principal, "it did not begin in time".to_owned()),
        _ => (start, principal, "its run has ended without it".to_owned()),
    };
    Effect::Kill { command, principal, reason, epoch }
}
