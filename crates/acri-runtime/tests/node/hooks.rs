//! The scripted driver with mishaps: what it is asked for panics, waits, or
//! comes too late.

use crate::PATIENCE;
use acri::{AgentId, AgentSpec, CapabilitySet, HarnessType, Payload, RunId, id::Epoch};
use acri_bus::{
    memory::MemoryBus,
    port::{Appended, FrameAppend, Logs as _},
};
use acri_core::writer::{self, SpoolRecord, Writer};
use acri_drivers::{
    driver::{
        Attached, Chunk, Driver, Exit, Fault, Held, Info, KillSwitch, OutputRecord, Owner, Provisioned, Refusal,
        Session, Start, StartError,
    },
    scripted::ScriptedDriver,
};
use async_trait::async_trait;
use bytes::Bytes;
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU32, Ordering},
};

/// What is to go wrong next, how often.
#[derive(Debug, Default)]
pub(crate) struct Mishaps {
    pub(crate) check_task_panics: AtomicU32,
    /// Where a check of a task waits for the test, before it panics or not.
    pub(crate) check_task_gate: Mutex<Option<std::sync::mpsc::Receiver<()>>>,
    pub(crate) output_panics: AtomicU32,
    pub(crate) attach_panics: AtomicU32,
    pub(crate) start_panics: AtomicU32,
    pub(crate) exit_panics: AtomicU32,
    pub(crate) attaches: AtomicU32,
    /// Where a former owner's frame of a run's first two lines gets in before ours.
    pub(crate) late_frame: Mutex<Option<MemoryBus>>,
}

pub(crate) fn strike(left: &AtomicU32, what: &str) {
    let due = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |count| count.checked_sub(1)).is_ok();
    assert!(!due, "{what} panics, as the test wants it");
}

/// The scripted driver, with mishaps.
pub(crate) struct Hooked {
    pub(crate) inner: ScriptedDriver,
    pub(crate) local: bool,
    pub(crate) mishaps: Arc<Mishaps>,
}

pub(crate) struct HookedSession {
    pub(crate) inner: Arc<dyn Session>,
    pub(crate) run: (AgentId, RunId),
    pub(crate) mishaps: Arc<Mishaps>,
}

impl Hooked {
    fn session(&self, inner: Arc<dyn Session>, run: (AgentId, RunId)) -> Arc<dyn Session> {
        Arc::new(HookedSession { inner, run, mishaps: Arc::clone(&self.mishaps) })
    }
}

#[async_trait]
impl Driver for Hooked {
    fn harness(&self) -> &HarnessType {
        self.inner.harness()
    }
    fn capabilities(&self) -> CapabilitySet {
        self.inner.capabilities()
    }
    fn is_local(&self) -> bool {
        self.local
    }
    async fn create(&self, agent: AgentId, spec: &AgentSpec) -> Result<Provisioned, Refusal> {
        self.inner.create(agent, spec).await
    }
    fn check_task(&self, spec: &AgentSpec, task: &Payload) -> Result<(), Refusal> {
        let gate = self.mishaps.check_task_gate.lock().unwrap().take();
        if let Some(gate) = gate {
            let _ = gate.recv_timeout(PATIENCE);
        }
        strike(&self.mishaps.check_task_panics, "check_task");
        self.inner.check_task(spec, task)
    }
    async fn start(&self, start: &Start) -> Result<Arc<dyn Session>, StartError> {
        strike(&self.mishaps.start_panics, "start");
        Ok(self.session(self.inner.start(start).await?, (start.agent, start.run)))
    }
    async fn attach(&self, agent: AgentId, run: RunId, owner: Owner) -> Result<Attached, Fault> {
        self.mishaps.attaches.fetch_add(1, Ordering::SeqCst);
        strike(&self.mishaps.attach_panics, "attach");
        match self.inner.attach(agent, run, owner).await? {
            Attached::Session(session) => Ok(Attached::Session(self.session(session, (agent, run)))),
            other => Ok(other),
        }
    }
    async fn give_up(&self, agent: AgentId, run: RunId, owner: Owner) -> Result<(), Fault> {
        self.inner.give_up(agent, run, owner).await
    }
    async fn scan(&self) -> Vec<Held> {
        self.inner.scan().await
    }
    fn kill_switch(&self, agent: AgentId, run: RunId) -> Arc<dyn KillSwitch> {
        self.inner.kill_switch(agent, run)
    }
    async fn forget(&self, agent: AgentId, run: RunId) {
        self.inner.forget(agent, run).await;
    }
    async fn remove(&self, agent: AgentId) {
        self.inner.remove(agent).await;
    }
}

#[async_trait]
impl Session for HookedSession {
    fn info(&self) -> Info {
        self.inner.info()
    }
    async fn stop(&self, owner: Owner, command: acri::CommandId) -> Result<(), Fault> {
        self.inner.stop(owner, command).await
    }
    async fn contact(&self, owner: Owner) -> Result<(), Fault> {
        self.inner.contact(owner).await
    }
    async fn output(&self, offset: u64, bytes_max: usize) -> Result<Chunk, Fault> {
        strike(&self.mishaps.output_panics, "output");
        let late = self.mishaps.late_frame.lock().unwrap().take();
        let mut chunk = self.inner.output(offset, bytes_max).await?;
        if let Some(bus) = late {
            while chunk.records.len() < 3 {
                tokio::task::yield_now().await;
                chunk = self.inner.output(offset, bytes_max).await?;
            }
            let frame = frame_of(self.run, &chunk.records[..2], chunk.records[2].spool_offset);
            assert!(matches!(bus.append_frame(&frame).await, Appended::Stored(_)));
        }
        Ok(chunk)
    }
    async fn exit(&self) -> Result<Exit, Fault> {
        strike(&self.mishaps.exit_panics, "exit");
        self.inner.exit().await
    }
    async fn release(&self, owner: Owner, offset: u64, token: Bytes) -> Result<(), Fault> {
        self.inner.release(owner, offset, token).await
    }
    async fn resume_token(&self) -> Result<Option<Bytes>, Fault> {
        self.inner.resume_token().await
    }
}

/// The frame that an owner published who had read these records as one.
pub(crate) fn frame_of((agent, run): (AgentId, RunId), records: &[OutputRecord], spool_end: u64) -> FrameAppend {
    let (first, bytes) = (&records[0], records.iter().flat_map(|record| record.bytes.to_vec()).collect::<Vec<_>>());
    let (mut writer, begun) = Writer::new(agent, run, Epoch(1), None);
    let [writer::Output::ReadLast { token, .. }] = begun[..] else { panic!("{begun:?}") };
    writer.step(writer::Input::Last(token, writer::LogEnd::default()));
    let outputs = writer.step(writer::Input::Output(SpoolRecord {
        spool_offset: first.spool_offset,
        spool_end,
        stream: first.stream,
        stream_offset: first.stream_offset,
        time: first.time,
        bytes: &bytes,
    }));
    let Some(writer::Output::Publish { expect, bytes, resume, .. }) = outputs.into_iter().next() else {
        panic!("a whole line is published at once")
    };
    FrameAppend { agent, run: Some(run), expect, epoch: Epoch(1), resume, bytes }
}
