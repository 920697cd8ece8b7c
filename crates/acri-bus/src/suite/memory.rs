//! The bus in memory, seen from outside.

use super::BusFactory;
use crate::{memory::MemoryBus, port::SharedBus};
use acri::{AgentId, RunId, StreamSeq};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use std::sync::{Arc, Mutex, PoisonError};

/// Clients of one bus in memory.
#[derive(Debug, Default)]
pub struct MemoryFactory {
    bus: MemoryBus,
    clients: Mutex<Vec<MemoryBus>>,
}

impl MemoryFactory {
    /// Clients of that bus.
    #[must_use]
    pub fn of(bus: MemoryBus) -> Self {
        Self { bus, clients: Mutex::default() }
    }

    pub(super) fn another(&self) -> MemoryBus {
        let client = self.bus.another();
        self.clients.lock().unwrap_or_else(PoisonError::into_inner).push(client.clone());
        client
    }

    pub(super) async fn raw(
        &self,
        subject: &str,
        answered: bool,
        content_type: &str,
        handled: BoxFuture<'_, ()>,
    ) -> bool {
        let mut answer = self.bus.raw_request_to(subject, answered, Some(content_type), Bytes::from_static(b"{}"));
        handled.await;
        answer.try_recv().is_ok()
    }

    fn set_away(&self, away: bool) {
        for client in self.clients.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            client.set_away(away);
        }
    }
}

#[async_trait]
impl BusFactory for MemoryFactory {
    async fn client(&self) -> SharedBus {
        Arc::new(self.another())
    }

    async fn raw_request(&self, subject: &str, reply: &str, content_type: &str, handled: BoxFuture<'_, ()>) -> bool {
        let mut answer = self.bus.raw_request(subject, Some(reply), Some(content_type), Bytes::from_static(b"{}"));
        handled.await;
        answer.try_recv().is_ok()
    }

    async fn drop_frames(&self, agent: AgentId, run: Option<RunId>) {
        self.bus.with(|state| {
            if let Some(last) = state.last_frame(agent, run).map(|frame| frame.seq) {
                // Retention knows no run: it takes what is older.
                state.drop_frames_before(StreamSeq(last.0 + 1));
            }
        });
    }

    async fn crash(&self) {
        self.set_away(true);
    }

    async fn restore(&self) {
        self.set_away(false);
    }
}
