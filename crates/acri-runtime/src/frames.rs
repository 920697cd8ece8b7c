//! What is stored of a run's log, for whoever goes on from there.

use acri::{AgentId, RunId, StreamSeq};
use acri_bus::port::{Fault, RecordedFrame, SharedBus, Until};
use acri_core::writer::{LastFrame, LogEnd};
use futures_util::TryStreamExt as _;

/// What is last on the run's subject, from the leader.
///
/// Where that is no frame of an owner, the whole log is read for the last one
/// that is: such a message is rare, and what lies behind it is not to be
/// written a second time.
///
/// # Errors
/// [`Fault`] if nobody could say.
pub(crate) async fn last(bus: &SharedBus, agent: AgentId, run: RunId) -> Result<LogEnd, Fault> {
    let Some(newest) = bus.last_frame(agent, Some(run)).await? else { return Ok(LogEnd::default()) };
    let seq = newest.seq;
    if let Some(frame) = owned(&newest) {
        return Ok(LogEnd { seq, frame: Some(frame) });
    }
    tracing::warn!(%run, %seq, "a message that no owner wrote is on the run's log subject");
    let mut messages = bus.read_frames(agent, Some(run), StreamSeq(1), Until::Now).await?;
    let mut frame = None;
    while let Some(message) = messages.try_next().await? {
        if message.seq >= seq {
            return Ok(LogEnd { seq, frame });
        }
        frame = owned(&message).or(frame);
    }
    // Retention took it, or the reader is behind the leader: ask again.
    let detail = format!("the read ended before sequence {seq}");
    Err(Fault::Unavailable { operation: "find a run's last log frame", detail })
}

fn owned(message: &RecordedFrame) -> Option<LastFrame> {
    let mark = message.mark.as_ref()?;
    LastFrame::of(mark.epoch, &mark.resume)
}
