//! Going on: effects that are owed, the next event, answers, and when to wake.

use super::{Answer, Appender, Ctx, EffectKind, Life, Output, slot::Purpose};
use crate::agent::{
    cut,
    decide::{self, Decided, Draft},
    due::{self, Want},
};
use acri::{
    Event, RunId, RunState, Timestamp,
    event::{EscalationRaised, Source},
    limits::EVENT_BODY_BYTES_MAX,
};

impl Appender {
    /// Does all that can be done now.
    pub(super) fn advance(&mut self, ctx: Ctx<'_>, out: &mut Vec<Output>) {
        let now = ctx.now;
        if self.retry_at.is_some_and(|at| now >= at) {
            self.retry_at = None;
        }
        if self.life == Life::Owner {
            self.effects(now, out);
        }
        self.answer_killers(now, out);
        if self.slot.is_none() {
            self.fill(ctx, out);
        }
        self.answer_known_derived(out);
        self.wake(now, out);
    }

    fn effects(&mut self, now: Timestamp, out: &mut Vec<Output>) {
        let runs: Vec<RunId> = self.seen.keys().copied().collect();
        for id in runs {
            let (Some(run), Some(seen)) = (self.agent.run(id), self.seen.get_mut(&id)) else {
                continue;
            };
            for want in due::due(&self.agent, run, seen, now).wants {
                seen.asked(want, now);
                self.tokens += 1;
                let token = super::Token(self.tokens);
                self.effects.insert((id, kind(want)), token);
                out.push(Output::Effect { token, run: id, effect: want.effect(run, self.epoch) });
            }
        }
    }

    /// Who waits for a kill hears of its proof, or that there is none yet.
    fn answer_killers(&mut self, now: Timestamp, out: &mut Vec<Output>) {
        for killer in std::mem::take(&mut self.killers) {
            let ended = self.agent.run(killer.run).is_none_or(|run| run.end.is_some());
            if ended || now >= killer.until {
                out.push(Output::Reply(killer.asker, Answer::Killed(self.kill_ack(killer.run))));
            } else {
                self.killers.push(killer);
            }
        }
    }

    /// Puts the next event into the free slot.
    fn fill(&mut self, ctx: Ctx<'_>, out: &mut Vec<Output>) {
        let Ctx { now, events_percent, mint } = ctx;
        // The time that the event will bear: a deadline counts from it.
        let time = now.max(self.agent.last().time);
        while self.slot.is_none() {
            let Some((purpose, draft)) = self.next(time, events_percent, out) else { return };
            let asker = match &purpose {
                Purpose::Command(asker, _) => Some(*asker),
                Purpose::Claim | Purpose::Derived(..) | Purpose::Owed => None,
            };
            let of_output = match &purpose {
                Purpose::Derived(run, source, _) => Some((*run, *source)),
                Purpose::Claim | Purpose::Command(..) | Purpose::Owed => None,
            };
            let Err(error) = self.send(draft, purpose, Ctx { now, events_percent, mint: &mut *mint }, out) else {
                return;
            };
            match (asker, of_output) {
                (Some(asker), _) => out.push(Output::Reply(asker, Answer::Refused(error))),
                (None, Some((run, source))) => {
                    // Its text is in the log in full; it cannot be an event.
                    self.stale += 1;
                    out.push(Output::Derived(run, source));
                }
                (None, None) => return self.halt(super::Halt::Bug(error.to_string()), out),
            }
        }
    }

    fn next(&mut self, now: Timestamp, events_percent: u64, out: &mut Vec<Output>) -> Option<(Purpose, Draft)> {
        match self.life {
            Life::Creating | Life::Halted => return None,
            Life::Claiming { .. } if self.agent.removed() => {
                self.life = Life::Retired;
                out.push(Output::Retired);
            }
            Life::Claiming { .. } if self.retry_at.is_some() => return None,
            Life::Claiming { .. } => return Some((Purpose::Claim, self.claim())),
            Life::Owner | Life::Retired => {}
        }
        let owed = self.owed(now);
        // A harness that had ended by itself was not killed: its end goes first.
        if let Some((draft, true)) = &owed {
            return Some((Purpose::Owed, draft.clone()));
        }
        if let Some(next) = self.next_command(true, now, events_percent, out) {
            return Some(next);
        }
        if let Some((draft, _)) = owed {
            return Some((Purpose::Owed, draft));
        }
        if self.claiming_until().is_some_and(|until| now < until) {
            return None;
        }
        self.command_next = !self.command_next;
        if self.command_next {
            self.next_command(false, now, events_percent, out).or_else(|| self.next_derived(out))
        } else {
            self.next_derived(out).or_else(|| self.next_command(false, now, events_percent, out))
        }
    }

    /// The next event that is owed to a run, and whether its exit is known.
    fn owed(&self, now: Timestamp) -> Option<(Draft, bool)> {
        if self.life != Life::Owner || self.retry_at.is_some() {
            return None;
        }
        self.seen.iter().find_map(|(id, seen)| {
            let draft = due::due(&self.agent, self.agent.run(*id)?, seen, now).event?;
            let seals = matches!(draft.event, Event::RunLogsSealed(_));
            let early = seals && self.derived.iter().any(|(run, ..)| run == id);
            (!early).then_some((draft, seen.exited().is_some()))
        })
    }

    /// An adopter claims what he finds before he decides anything but a Kill.
    fn claiming_until(&self) -> Option<Timestamp> {
        self.seen.values().filter_map(|seen| seen.claiming_until()).max()
    }

    fn next_command(
        &mut self,
        kill: bool,
        now: Timestamp,
        events_percent: u64,
        out: &mut Vec<Output>,
    ) -> Option<(Purpose, Draft)> {
        loop {
            let queue = if kill { &mut self.kills } else { &mut self.commands };
            let (asker, command) = queue.pop_front()?;
            let decided = decide::decide(&self.agent, &command, now);
            match decided.and_then(|decided| decide::check_room(&command, decided, events_percent)) {
                Ok(Decided::Append(draft)) => {
                    return Some((Purpose::Command(asker, command), draft));
                }
                Ok(Decided::Known(answer)) => out.push(Output::Reply(asker, answer)),
                Ok(Decided::Awaits(run)) => self.wait_for_end(asker, run, now, out),
                Err(error) => out.push(Output::Reply(asker, Answer::Refused(error))),
            }
        }
    }

    fn next_derived(&mut self, out: &mut Vec<Output>) -> Option<(Purpose, Draft)> {
        if self.retry_at.is_some() {
            return None;
        }
        loop {
            let (run, source, event) = self.derived.pop_front()?;
            match self.derive(run, source, &event) {
                Some(draft) => return Some((Purpose::Derived(run, source, event), draft)),
                None => out.push(Output::Derived(run, source)),
            }
        }
    }

    /// A repeat is answered even while another event is under way.
    fn answer_known_derived(&mut self, out: &mut Vec<Output>) {
        while let Some((run, source)) = self.derived.front().map(|(run, source, _)| (*run, *source)) {
            if !self.is_known(run, source) {
                return;
            }
            self.derived.pop_front();
            out.push(Output::Derived(run, source));
        }
    }

    fn is_known(&self, run: RunId, source: Source) -> bool {
        let run = self.agent.run(run);
        run.is_none_or(|run| run.sealed || run.sources.get(&source.stream).is_some_and(|known| source <= *known))
    }

    /// Only what a harness's output can tell becomes an event, once, and only
    /// where it changes something. `None`: what covers it may be published.
    fn derive(&self, id: RunId, source: Source, event: &Event) -> Option<Draft> {
        let run = self.agent.run(id).filter(|_| !self.is_known(id, source))?;
        let running = matches!(run.state, RunState::Running | RunState::Waiting);
        let news = match event {
            Event::EscalationRaised(_) | Event::Unknown { .. } => true,
            Event::RunWaiting(data) => running && run.waiting != Some(data.reason),
            Event::RunResumed(_) => run.state == RunState::Waiting,
            Event::AgentCreated(_)
            | Event::AgentAssigned(_)
            | Event::AgentRemoved(_)
            | Event::RunAccepted(_)
            | Event::RunStarted(_)
            | Event::RunStopRequested(_)
            | Event::RunStopExpired(_)
            | Event::RunKillRequested(_)
            | Event::RunCompleted(_)
            | Event::RunStopped(_)
            | Event::RunFailed(_)
            | Event::RunKilled(_)
            | Event::RunLogsSealed(_) => false,
        };
        news.then(|| Draft { source: Some(source), ..Draft::of_run(id, fitted(event)) })
    }

    fn wake(&mut self, now: Timestamp, out: &mut Vec<Output>) {
        if self.life == Life::Halted {
            return;
        }
        let runs =
            self.seen.iter().filter_map(|(id, seen)| due::due(&self.agent, self.agent.run(*id)?, seen, now).wake);
        let killers = self.killers.iter().map(|killer| killer.until);
        let wish =
            runs.chain(killers).chain(self.retry_at).chain(self.claiming_until()).filter(|time| *time > now).min();
        if wish != self.wish {
            self.wish = wish;
            out.extend(wish.map(Output::WakeAt));
        }
    }
}

/// A question longer than an event may be is cut, and says so: in the log it
/// stands in full.
fn fitted(event: &Event) -> Event {
    let Event::EscalationRaised(data) = event else { return event.clone() };
    let escalation = cut(&data.escalation, EVENT_BODY_BYTES_MAX / 64);
    EscalationRaised { escalation, question: cut(&data.question, EVENT_BODY_BYTES_MAX / 2) }.into()
}

fn kind(want: Want) -> EffectKind {
    match want {
        Want::Attach => EffectKind::Attach,
        Want::Spawn => EffectKind::Spawn,
        Want::Stop(_) => EffectKind::Stop,
        Want::Kill(_) => EffectKind::Kill,
        Want::Pump => EffectKind::Pump,
    }
}
