//! What the cases have in common.

use super::Fixture;
use crate::driver::{
    Attached, ChunkEnd, Driver, KillRequest, OutputRecord, Owner, Provisioned, Session, Start, StartError,
};
use acri::{AgentId, AgentSpec, CommandId, Incarnation, Payload, RunId, id::Epoch, log::Stream};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use uuid::Uuid;

/// Bytes that a read asks for.
pub(super) const BATCH_BYTES: usize = 256 * 1024;

static COMMANDS: AtomicU64 = AtomicU64::new(1);

pub(super) fn command() -> CommandId {
    CommandId::from_uuid(Uuid::from_u64_pair(0x0193_6f5e_8a00_7000, COMMANDS.fetch_add(1, Ordering::Relaxed)))
}

pub(super) fn owner(epoch: u64) -> Owner {
    Owner { epoch: Epoch(epoch), incarnation: Incarnation::from_uuid(Uuid::from_u64_pair(7, epoch)) }
}

pub(super) fn kill(epoch: u64) -> KillRequest {
    KillRequest {
        command: command(),
        principal: "the suite".to_owned(),
        reason: "to see it end".to_owned(),
        owner: owner(epoch),
    }
}

/// An agent with one run, created and not started.
pub(super) struct Rig<'a> {
    pub(super) fixture: &'a dyn Fixture,
    pub(super) driver: Arc<dyn Driver>,
    pub(super) agent: AgentId,
    pub(super) run: RunId,
    pub(super) spec: AgentSpec,
    pub(super) provisioned: Provisioned,
}

impl<'a> Rig<'a> {
    pub(super) async fn new(fixture: &'a dyn Fixture, script: &[&str]) -> Self {
        let (driver, spec) = (fixture.driver(), fixture.spec(script));
        let agent = AgentId::derive(driver.harness(), command());
        let run = RunId::derive(agent, command());
        let provisioned = driver.create(agent, &spec).await.expect("the spec can be run");
        Self { fixture, driver, agent, run, spec, provisioned }
    }

    /// A node's restart: another driver over the same things.
    pub(super) fn restart(&mut self) {
        self.driver = self.fixture.driver();
    }

    pub(super) fn order(&self, epoch: u64) -> Start {
        Start {
            agent: self.agent,
            run: self.run,
            spec: self.spec.clone(),
            provisioned: self.provisioned.clone(),
            task: Payload::text("do it"),
            owner: owner(epoch),
        }
    }

    pub(super) async fn try_start(&self, epoch: u64) -> Result<Arc<dyn Session>, StartError> {
        self.driver.start(&self.order(epoch)).await
    }

    pub(super) async fn start(&self, epoch: u64) -> Arc<dyn Session> {
        self.try_start(epoch).await.expect("the run can be started")
    }

    pub(super) async fn attach(&self, epoch: u64) -> Arc<dyn Session> {
        match self.driver.attach(self.agent, self.run, owner(epoch)).await {
            Ok(Attached::Session(session)) => session,
            other => panic!("no session but {other:?}"),
        }
    }

    pub(super) async fn kill(&self, request: KillRequest) {
        self.driver.kill_switch(self.agent, self.run).kill(request).await.expect("the tree is proved gone");
    }

    pub(super) async fn let_go(&self, name: &str) {
        self.fixture.let_go(self.agent, self.run, name).await;
    }

    /// Leaves nothing alive.
    pub(super) async fn end(&self, epoch: u64) {
        self.kill(kill(epoch)).await;
    }
}

/// Output, put together.
#[derive(Debug, Default)]
pub(super) struct Read {
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: Vec<u8>,
    pub(super) records: Vec<OutputRecord>,
    pub(super) next: u64,
}

impl Read {
    pub(super) fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).expect("this script writes text")
    }

    /// Reads one chunk more, and checks that it follows what was read.
    pub(super) async fn more(&mut self, session: &dyn Session, bytes_max: usize) -> ChunkEnd {
        let chunk = session.output(self.next, bytes_max).await.expect("output can be read");
        for record in &chunk.records {
            assert!(record.spool_offset >= self.next, "{} is not behind {}", record.spool_offset, self.next);
            assert!(!record.bytes.is_empty());
            let stream = match record.stream {
                Stream::Stdout => &mut self.stdout,
                Stream::Stderr => &mut self.stderr,
            };
            assert_eq!(record.stream_offset, stream.len() as u64, "a hole or a double in {:?}", record.stream);
            stream.extend_from_slice(&record.bytes);
            self.next = record.spool_offset;
        }
        assert!(chunk.next >= self.next);
        if chunk.end == ChunkEnd::Open {
            assert!(!chunk.records.is_empty(), "an open chunk waits for something");
        }
        self.records.extend(chunk.records);
        self.next = chunk.next;
        chunk.end
    }

    /// Reads until standard output has at least so many bytes.
    pub(super) async fn until(&mut self, session: &dyn Session, bytes: usize) {
        while self.stdout.len() < bytes {
            let end = self.more(session, BATCH_BYTES).await;
            assert!(end == ChunkEnd::Open || self.stdout.len() >= bytes, "{end:?} after {:?}", self.stdout);
        }
    }

    /// Reads to the end, and says which.
    pub(super) async fn until_the_end(&mut self, session: &dyn Session, bytes_max: usize) -> ChunkEnd {
        loop {
            match self.more(session, bytes_max).await {
                ChunkEnd::Open => {}
                end => return end,
            }
        }
    }
}

/// All output from the beginning.
pub(super) async fn read_all(session: &dyn Session) -> (Read, ChunkEnd) {
    let mut read = Read::default();
    let end = read.until_the_end(session, BATCH_BYTES).await;
    (read, end)
}
