//! Who listens to which command, in memory.

use crate::port::{Answer, Reply, Request, RequestStream};
use acri::{AgentId, HarnessType, Subject};
use async_trait::async_trait;
use futures_util::{StreamExt as _, stream};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};
use tokio::sync::{mpsc, oneshot};

/// Requests that wait at one listener; the next is lost, as on a slow
/// subscription.
const REQUESTS_WAITING_MAX: usize = 256;

/// Whose commands a listener takes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Door {
    Harness(HarnessType),
    Agent(AgentId),
}

impl Door {
    pub(super) fn of(subject: &Subject) -> Option<Self> {
        match subject {
            Subject::Harness(harness, _) => Some(Self::Harness(harness.clone())),
            Subject::Agent(agent, _) | Subject::Run(agent, ..) => Some(Self::Agent(*agent)),
            Subject::Event(..) | Subject::Log(..) | Subject::Heartbeat(_) => None,
        }
    }
}

struct Listener {
    key: u64,
    client: u64,
    sender: mpsc::Sender<Request>,
}

#[derive(Default)]
pub(super) struct Listeners {
    next: u64,
    turn: usize,
    doors: BTreeMap<Door, Vec<Listener>>,
}

/// A listener is there as long as this lives.
struct Listening {
    key: u64,
    door: Door,
    listeners: Weak<Mutex<Listeners>>,
}

impl Drop for Listening {
    fn drop(&mut self) {
        let Some(listeners) = self.listeners.upgrade() else { return };
        let mut listeners = listeners.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(list) = listeners.doors.get_mut(&self.door) {
            list.retain(|listener| listener.key != self.key);
            if list.is_empty() {
                listeners.doors.remove(&self.door);
            }
        }
    }
}

pub(super) fn listen(listeners: &Arc<Mutex<Listeners>>, client: u64, door: Door) -> RequestStream {
    let (sender, receiver) = mpsc::channel(REQUESTS_WAITING_MAX);
    let mut locked = listeners.lock().unwrap_or_else(PoisonError::into_inner);
    locked.next += 1;
    let key = locked.next;
    locked.doors.entry(door.clone()).or_default().push(Listener { key, client, sender });
    drop(locked);
    let listening = Listening { key, door, listeners: Arc::downgrade(listeners) };
    stream::unfold((receiver, listening), |(mut receiver, listening)| async move {
        let request = receiver.recv().await?;
        Some((request, (receiver, listening)))
    })
    .boxed()
}

impl Listeners {
    /// Those that a request goes to: all of an agent's, one of a harness's.
    pub(super) fn at(&mut self, door: &Door, away: impl Fn(u64) -> bool) -> Vec<mpsc::Sender<Request>> {
        self.turn = self.turn.wrapping_add(1);
        let Some(list) = self.doors.get(door) else { return Vec::new() };
        let here: Vec<_> =
            list.iter().filter(|listener| !away(listener.client)).map(|listener| listener.sender.clone()).collect();
        match door {
            Door::Agent(_) => here,
            Door::Harness(_) if here.is_empty() => here,
            Door::Harness(_) => vec![here[self.turn % here.len()].clone()],
        }
    }

    /// Ends all listeners of one client.
    pub(super) fn end(&mut self, client: u64) {
        for list in self.doors.values_mut() {
            list.retain(|listener| listener.client != client);
        }
        self.doors.retain(|_, list| !list.is_empty());
    }
}

/// Where the first answer goes; later ones are nobody's.
pub(super) type FirstAnswer = Arc<Mutex<Option<oneshot::Sender<Answer>>>>;

pub(super) struct MemoryReply(pub(super) FirstAnswer);

#[async_trait]
impl Reply for MemoryReply {
    async fn send(self: Box<Self>, answer: Answer) {
        let first = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(sender) = first {
            // Whoever asked may be gone.
            drop(sender.send(answer));
        }
    }
}
