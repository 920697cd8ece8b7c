//! Reading a spool, the hot path: a batch is read from its segment into a shared
//! buffer, and copied once, into memory that its records then share.

use super::{blocking_or, limits::READS_AT_ONCE_MAX};
use crate::driver::{Fault, OutputRecord};
use acri::{Timestamp, log::Stream};
use acri_shim::spool::{self, Progress, Reader, Scratch};
use bytes::{Bytes, BytesMut};
use std::{
    io,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};
use tokio::sync::Semaphore;

/// Bytes that a batch is given room for at first when its size is not known.
const ROOM_BYTES: usize = 16 * 1024;

/// Bounds the reads of a node that go on at once, and their memory.
#[derive(Debug)]
pub(super) struct Reads {
    permits: Arc<Semaphore>,
    scratch: Arc<Mutex<Vec<Scratch>>>,
}

impl Reads {
    pub(super) fn new() -> Self {
        Self { permits: Arc::new(Semaphore::new(READS_AT_ONCE_MAX)), scratch: Arc::default() }
    }

    /// Reads from `reader` on another thread and gives it back.
    pub(super) async fn read(
        &self,
        mut reader: Reader,
        bytes_max: usize,
        room: Option<usize>,
    ) -> Result<(Reader, Batch), Fault> {
        let broken = |detail: String| Fault::Broken { operation: "read output", detail };
        let permit = Arc::clone(&self.permits).acquire_owned().await.map_err(|error| broken(error.to_string()))?;
        let scratches = Arc::clone(&self.scratch);
        blocking_or("read output", move || {
            let mut scratch = pop(&scratches);
            let batch = batch(&mut reader, &mut scratch, bytes_max, room);
            push(&scratches, scratch);
            drop(permit);
            batch.map(|batch| (reader, batch))
        })
        .await
    }
}

fn pop(scratches: &Mutex<Vec<Scratch>>) -> Scratch {
    scratches.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
}

fn push(scratches: &Mutex<Vec<Scratch>>, scratch: Scratch) {
    scratches.lock().unwrap_or_else(PoisonError::into_inner).push(scratch);
}

/// What one read gave.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) records: Vec<OutputRecord>,
    pub(super) next: u64,
    pub(super) progress: Progress,
}

fn batch(reader: &mut Reader, scratch: &mut Scratch, bytes_max: usize, room: Option<usize>) -> io::Result<Batch> {
    let mut bytes = BytesMut::with_capacity(room.unwrap_or(ROOM_BYTES));
    let mut records: Vec<(OutputRecord, usize)> = Vec::new();
    let progress = reader.read_batch(scratch, bytes_max, |record| {
        bytes.extend_from_slice(record.payload);
        let stream = match record.stream {
            spool::Stream::Stdout => Stream::Stdout,
            spool::Stream::Stderr => Stream::Stderr,
        };
        let record = OutputRecord {
            spool_offset: record.offset,
            stream,
            stream_offset: record.stream_offset,
            time: timestamp(record.wall_ns),
            bytes: Bytes::new(),
        };
        records.push((record, bytes.len()));
    })?;
    let bytes = bytes.freeze();
    let mut from = 0;
    let slice = |(mut record, to): (OutputRecord, usize)| {
        record.bytes = bytes.slice(from..to);
        from = to;
        record
    };
    let records = records.into_iter().map(slice).collect();
    Ok(Batch { records, next: reader.offset(), progress })
}

fn timestamp(wall_ns: u64) -> Timestamp {
    Timestamp::from_micros(i64::try_from(wall_ns / 1_000).unwrap_or(i64::MAX))
}

/// Whether anything of a spool can be read. Blocks.
pub(super) fn is_readable(dir: &Path) -> io::Result<bool> {
    let mut any = false;
    let progress = Reader::open(dir, 0).read_batch(&mut Scratch::default(), 1, |_| any = true)?;
    // Where something was released, something was readable.
    Ok(any || matches!(progress, Progress::Gone { .. }))
}
