//! Taking in what happens.

use super::{Answer, Appender, Asker, Command, Ctx, DERIVED_WAITING_MAX, Input, Life, Order, Output, Report};
use crate::agent::decide::{self, Decided};
use acri::{ErrorBody, ErrorCode, RunId, Timestamp, limits::COMMANDS_WAITING_MAX};

impl Appender {
    /// Takes in what happened and tells what is to be done, in order.
    ///
    /// After [`Output::Halt`] nothing is done any more: the actor calls
    /// [`Appender::abandon`]; a later command is answered `unavailable`.
    pub fn step(&mut self, input: Input, ctx: Ctx<'_>) -> Vec<Output> {
        let mut out = Vec::new();
        if self.life == Life::Halted {
            if let Input::Command(asker, _) = input {
                out.push(Output::Reply(asker, Answer::Refused(halted())));
            } else {
                self.stale += u64::from(input != Input::Tick);
            }
            return out;
        }
        let now = ctx.now;
        match input {
            Input::Command(asker, command) => self.command(asker, command, now, &mut out),
            Input::Report(run, report) => self.report(run, report, now),
            Input::Appended(token, seq) => self.appended(token, seq, now, &mut out),
            Input::Duplicate(token, _) | Input::Conflict(token) => self.look(token, &mut out),
            Input::Unknown(token) => self.unknown(token, &mut out),
            Input::Refused(token, error) => self.refused(token, error, now, &mut out),
            Input::Caught(token, stored, last) => self.caught(token, &stored, last, now, &mut out),
            Input::ReadFailed(token) => self.read_failed(token, &mut out),
            Input::EffectDone(token) => {
                let before = self.effects.len();
                self.effects.retain(|_, held| *held != token);
                self.stale += u64::from(self.effects.len() == before);
            }
            // A timer by another clock may be early: wish again.
            Input::Tick => self.wish = None,
        }
        if self.life != Life::Halted {
            self.advance(ctx, &mut out);
        }
        out
    }

    /// Answers a question as [`Appender::step`] would, beside whoever steps:
    /// nothing is decided by it. `None`: it is an order, or this machine has
    /// halted.
    ///
    /// What an acknowledged command did is in the answer: its event is folded
    /// before it is acknowledged.
    #[must_use]
    pub fn ask(&self, command: &Command, now: Timestamp) -> Option<Answer> {
        if self.life == Life::Halted || !matches!(command.order, Order::Status(_)) {
            return None;
        }
        Some(match decide::decide(&self.agent, command, now) {
            Ok(Decided::Known(answer)) => answer,
            Ok(_) => Answer::Refused(ErrorBody::new(ErrorCode::Internal, "a question was taken for an order")),
            Err(error) => Answer::Refused(error),
        })
    }

    /// Whether a command is certain to be refused because its id was used for
    /// another one. A Kill that takes effect before it is decided asks first.
    #[must_use]
    pub fn refuses_id(&self, command: &Command) -> bool {
        matches!(decide::known(&self.agent, command), Some(Err(_)))
    }

    /// A question is answered at once; an order waits for its turn.
    fn command(&mut self, asker: Asker, command: Command, now: Timestamp, out: &mut Vec<Output>) {
        if let Some(answer) = self.ask(&command, now) {
            return out.push(Output::Reply(asker, answer));
        }
        let queue = if matches!(command.order, Order::Kill(..)) { &mut self.kills } else { &mut self.commands };
        if queue.len() >= COMMANDS_WAITING_MAX {
            let text = format!("{COMMANDS_WAITING_MAX} commands wait for this agent already");
            out.push(Output::Reply(asker, Answer::Refused(ErrorBody::new(ErrorCode::ResourceExhausted, text))));
        } else {
            queue.push_back((asker, command));
        }
    }

    fn report(&mut self, run: RunId, report: Report, now: Timestamp) {
        if let Report::Derived(source, event) = report {
            if self.derived.len() < DERIVED_WAITING_MAX {
                self.derived.push_back((run, source, event));
            } else {
                self.stale += 1;
            }
        } else if let Some(seen) = self.seen.get_mut(&run) {
            seen.note(report, now);
        } else {
            self.stale += 1;
        }
    }
}

fn halted() -> ErrorBody {
    ErrorBody::new(ErrorCode::Unavailable, "this owner has stopped acting for the agent")
}
