//! The machine of an agent behind a lock. Its actor steps it. The control thread
//! answers from it, and steps it where nothing can be in the way; it never waits
//! for the lock, and leaves every effect to the actor.

use crate::{node::Shared, request::Back};
use acri::{ErrorBody, Timestamp};
use acri_core::appender::{Answer, Appender, Asker, Command, Ctx, Input, Order, Output};
use acri_drivers::driver::Driver;
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio::sync::OwnedSemaphorePermit;

pub(crate) type Askers = BTreeMap<Asker, (Back, Option<OwnedSemaphorePermit>)>;

/// The machine of an agent, and who waits for its answers. Its actor steps it;
/// the control thread asks it what needs no step, and steps it for a Start that
/// nothing stands before, so that the answer waits for no other thread.
pub(crate) struct Core {
    inner: Mutex<Inner>,
    shared: Arc<Shared>,
    driver: Arc<dyn Driver>,
}

#[derive(Default)]
pub(crate) struct Inner {
    /// None before its birth, and as soon as its actor stops acting.
    pub(crate) appender: Option<Appender>,
    pub(crate) askers: Askers,
    next_asker: u64,
    /// What a step on the control thread said and left to the actor, who does it
    /// before anything that a later step says.
    pub(crate) undone: Vec<Output>,
}

/// A command, its envelope checked, and who waits for it. The permit is given
/// back when it is answered or dropped; dropped, it is answered by its way back.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) command: Command,
    pub(crate) back: Back,
    pub(crate) permit: OwnedSemaphorePermit,
}

/// What the control thread has to do after a step.
#[derive(Debug, Default)]
pub(crate) struct Here {
    pub(crate) replies: Vec<(Back, Answer)>,
    pub(crate) append: Option<Output>,
    /// Something is left to the actor.
    pub(crate) left: bool,
}

/// What became of a step on the control thread.
#[expect(clippy::large_enum_variant, reason = "it lives for a moment and is moved once")]
pub(crate) enum Stepped<T> {
    /// It is done.
    Here(Here),
    /// It is the actor's: somebody steps just now, and that thread waits for
    /// nobody, or it is nothing for that thread.
    NotHere(T),
    /// A panic, which would end a subscription with nobody to tell.
    Panicked,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Core").finish_non_exhaustive()
    }
}

impl Inner {
    pub(crate) fn ask(&mut self, back: Back, permit: Option<OwnedSemaphorePermit>) -> Asker {
        let asker = Asker(self.next_asker);
        self.next_asker += 1;
        self.askers.insert(asker, (back, permit));
        asker
    }

    /// Steps, and keeps what is not the control thread's for the actor.
    fn step_here(&mut self, shared: &Shared, input: Input) -> Here {
        let mut here = Here::default();
        let Some(appender) = self.appender.as_mut() else { return here };
        for output in with_ctx(shared, |ctx| appender.step(input, ctx)) {
            match output {
                Output::Reply(asker, answer) => {
                    here.replies.extend(self.askers.remove(&asker).map(|(back, _permit)| (back, answer)));
                }
                // A repeat is the actor's, who does it over another connection.
                Output::Append { attempt: 0, .. } if here.append.is_none() => here.append = Some(output),
                output => self.undone.push(output),
            }
        }
        here.left = !self.undone.is_empty();
        here
    }
}

impl Core {
    pub(crate) fn new(shared: Arc<Shared>, driver: Arc<dyn Driver>) -> Self {
        Self { inner: Mutex::default(), shared, driver }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        // What a panic leaves dies with its actor.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn with<T>(&self, act: impl FnOnce(&Appender) -> T) -> Option<T> {
        self.lock().appender.as_ref().map(act)
    }

    /// Whether the command bears another one's id. `false` where somebody steps
    /// just now: a Kill waits for nobody.
    pub(crate) fn refuses_id(&self, command: &Command) -> bool {
        let Ok(inner) = self.inner.try_lock() else { return false };
        inner.appender.as_ref().is_some_and(|core| core.refuses_id(command))
    }

    /// The answer to a question; `None`: it is none, or somebody steps just
    /// now, and the actor answers it.
    pub(crate) fn answer_to(&self, command: &Command, now: Timestamp) -> Option<Answer> {
        self.inner.try_lock().ok()?.appender.as_ref()?.ask(command, now)
    }

    /// A step by the actor: what it says, after what was left to the actor.
    pub(crate) fn step(&self, input: Input) -> Vec<Output> {
        let mut inner = self.lock();
        let mut outputs = std::mem::take(&mut inner.undone);
        if let Some(appender) = inner.appender.as_mut() {
            outputs.extend(with_ctx(&self.shared, |ctx| appender.step(input, ctx)));
        }
        outputs
    }

    /// A command's step on the control thread.
    pub(crate) fn begin_here(&self, waiting: Waiting) -> Stepped<Waiting> {
        let Ok(mut inner) = self.inner.try_lock() else { return Stepped::NotHere(waiting) };
        // While a run is open there is something to kill, and a Start to refuse.
        if inner.appender.as_ref().is_none_or(|core| core.open_run().is_some()) {
            return Stepped::NotHere(waiting);
        }
        unpanicked(|| {
            let Waiting { command, back, permit } = waiting;
            if let Some(error) = self.refusal(&inner, &command) {
                return Here { replies: vec![(back, Answer::Refused(error))], ..Here::default() };
            }
            let asker = inner.ask(back, Some(permit));
            inner.step_here(&self.shared, Input::Command(asker, command))
        })
    }

    /// The step that follows from an append there.
    pub(crate) fn settle_here(&self, input: Input) -> Stepped<Input> {
        let Ok(mut inner) = self.inner.try_lock() else { return Stepped::NotHere(input) };
        if !matches!(input, Input::Appended(..)) {
            return Stepped::NotHere(input);
        }
        unpanicked(|| {
            let mut here = inner.step_here(&self.shared, input);
            // The next command's append, and that came through the actor.
            inner.undone.extend(here.append.take());
            here.left = !inner.undone.is_empty();
            here
        })
    }

    /// What only the driver can know of a task.
    pub(crate) fn refusal(&self, inner: &Inner, command: &Command) -> Option<ErrorBody> {
        let (Order::Start(start), Some(appender)) = (&command.order, inner.appender.as_ref()) else { return None };
        self.driver.check_task(appender.state().spec(), &start.task).err().map(|refusal| refusal.0)
    }

    /// Stops acting: whoever waits is told so by his way back.
    pub(crate) fn end(&self) -> Askers {
        let mut inner = self.lock();
        inner.appender = None;
        inner.undone.clear();
        std::mem::take(&mut inner.askers)
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

fn unpanicked<T>(act: impl FnOnce() -> Here) -> Stepped<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)).map_or(Stepped::Panicked, Stepped::Here)
}

pub(crate) fn with_ctx<T>(shared: &Shared, act: impl FnOnce(Ctx<'_>) -> T) -> T {
    let mut mint = || shared.mint_event_id();
    act(Ctx { now: shared.clock.now(), events_percent: shared.room.percent(), mint: &mut mint })
}
