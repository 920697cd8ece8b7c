//! The typed client that an orchestrator links: every operation, with
//! repeats that are safe, and streams that resume.
//!
//! Begin with [`Client`]. Commands go to whoever owns the agent; logs, events
//! and, where no owner lives, the status come straight from the streams, so
//! history is there when no node is.
//!
//! ```no_run
//! # async fn example(bus: acri_client::SharedBus) -> Result<(), acri_client::Error> {
//! use acri::{AgentSpec, Payload};
//! use acri_client::{Client, LogItem, Since};
//! use futures_util::StreamExt as _;
//!
//! let client = Client::new(bus, "orchestrator".into());
//! let harness = "process".parse().expect("a plain name");
//! let agent = client.create(AgentSpec::new(harness, vec!["make".into(), "test".into()])).await?;
//! let run = client.start(agent.agent, Payload::text("")).await?;
//! let mut logs = client.logs(run.agent, run.run, Since::Start, true);
//! while let Some(item) = logs.next().await {
//!     if let LogItem::Event(event, cursor) = item? {
//!         // Keep `cursor`: Since::Cursor goes on exactly after this event.
//!         let _ = (event.payload.as_bytes(), cursor);
//!     }
//! }
//! let status = client.wait(run.agent, run.run).await?;
//! # let _ = status; Ok(()) }
//! ```
//!
//! It must never carry out a rule of its own: what a history means is told by
//! `acri-core`, which it links for that and nothing else. It must never let a
//! command be carried out twice: an id is minted once per command, and only
//! that id is sent again.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod error;
mod events;
mod fold;
mod history;
mod limits;
mod logs;
mod operations;
mod outage;
#[cfg(test)]
mod tests;
mod time;

pub use acri_bus::port::{EventSelection, SharedBus};
pub use acri_core::agent::{Agent, Run};
pub use error::Error;
pub use events::{EventItem, EventTypes, EventsSince, StoredEvent};
pub use history::Overview;
pub use limits::Limits;
pub use logs::{LogItem, Since};
pub use operations::{Client, NodeView, StatusTold};
