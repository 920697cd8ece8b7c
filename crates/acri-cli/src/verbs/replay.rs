//! `replay`: step through a history.

use crate::{
    app::App,
    export,
    failure::{Failure, NO, NOT_FOUND, USAGE},
    output::{self, Format, Out},
    parse::{self, Until},
    resolve,
    verbs::{events, show},
};
use acri::{AgentId, codec};
use acri_client::{Agent, StoredEvent};
use acri_core::appender::Stored;
use anyhow::Result;
use serde_json::json;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri replay fixer                          every event, and the state after it
  acri replay 3fa8 --until 12                up to the agent's twelfth event
  acri replay 3fa8 --until 2026-11-30T12:00:00Z -o json
  acri replay --file copy.jsonl 3fa8         from a copy that `acri verify --save` made

The state is folded from the events alone, as a node does it when it takes an
agent over.
")]
pub(crate) struct Args {
    /// AGENT, or a RUN of it; with --file a prefix of the agent's id, not
    /// needed if the copy holds only one
    #[arg(value_name = "AGENT", required_unless_present_any = ["last", "file"])]
    agent: Option<String>,
    /// The newest agent
    #[arg(long, short = 'L', conflicts_with_all = ["agent", "file"])]
    last: bool,
    /// Last event to show: its number in the agent's history, or a time
    #[arg(long, value_name = "WHERE", value_parser = parse::until)]
    until: Option<Until>,
    /// A copy that `acri verify --save` made, instead of the bus
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let history = match &args.file {
        Some(path) => of_copy(&export::read(path)?, args.agent.as_deref())?,
        None => {
            let client = app.client().await?;
            let agent = resolve::agent(&client, args.agent.as_deref()).await?;
            client.history(agent).await?.into_iter().map(|event| stored(&event)).collect()
        }
    };
    replay(&mut app.out, &history, args.until)
}

fn stored(event: &StoredEvent) -> Stored {
    Stored { seq: event.seq, time: event.time, bytes: event.bytes.to_vec() }
}

/// The history of one agent in a copy.
fn of_copy(copy: &export::Copy, prefix: Option<&str>) -> Result<Vec<Stored>> {
    let prefix = prefix.unwrap_or_default();
    let mut agents: Vec<AgentId> = copy
        .events
        .iter()
        .filter_map(|(subject, _)| match subject {
            acri::Subject::Event(agent, ..) if agent.to_string().starts_with(prefix) => {
                Some(*agent)
            }
            _ => None,
        })
        .collect();
    agents.sort_unstable();
    agents.dedup();
    let agent = match agents.as_slice() {
        [agent] => *agent,
        [] => {
            return Err(Failure::new(
                NOT_FOUND,
                format!("the copy has no agent that begins with {prefix:?}"),
            )
            .into());
        }
        several => {
            let listed: Vec<_> = several.iter().map(ToString::to_string).collect();
            return Err(Failure::new(
                USAGE,
                format!("which agent? the copy has {}", listed.join(", ")),
            )
            .into());
        }
    };
    let is_its =
        |subject: &acri::Subject| matches!(subject, acri::Subject::Event(of, ..) if *of == agent);
    Ok(copy
        .events
        .iter()
        .filter(|(subject, _)| is_its(subject))
        .map(|(_, stored)| stored.clone())
        .collect())
}

fn replay(out: &mut Out, history: &[Stored], until: Option<Until>) -> Result<()> {
    let mut agent: Option<Agent> = None;
    for stored in history {
        let event = StoredEvent {
            seq: stored.seq,
            time: stored.time,
            envelope: codec::from_msgpack(&stored.bytes)
                .map_err(|error| Failure::new(NO, format!("event at {}: {error}", stored.seq)))?,
            bytes: stored.bytes.clone().into(),
        };
        let beyond = match until {
            None => false,
            Some(Until::Sequence(last)) => event.envelope.sequence.0 > last,
            Some(Until::Time(last)) => event.envelope.time > last,
        };
        if beyond {
            break;
        }
        let folded = match &mut agent {
            Some(agent) => agent.evolve(stored),
            None => Agent::fold([stored]).map(|first| agent = first),
        };
        print(out, &event, agent.as_ref())?;
        // The event is shown before it is said that it does not fit.
        folded
            .map_err(|error| Failure::new(NO, format!("the history cannot be folded: {error}")))?;
    }
    Ok(())
}

fn print(out: &mut Out, event: &StoredEvent, agent: Option<&Agent>) -> Result<()> {
    let status = agent.and_then(|agent| agent.status(event.envelope.run));
    if out.format != Format::Table {
        return out
            .item(&json!({"event": events::object(event)?, "state": output::json(&status)?}));
    }
    out.line(format_args!("{:>4}  {}", event.envelope.sequence, events::line(event)))?;
    let Some(status) = status else { return Ok(()) };
    let run = match &status.run {
        Some(run) => {
            let detail = show::detail(run);
            let detail =
                if detail.is_empty() { detail } else { format!(", {}", output::plain(&detail)) };
            let sealed = if run.sealed { ", log complete" } else { "" };
            format!("run {} {}{detail}{sealed}", output::short(run.run), show::state(run))
        }
        None => "no run".to_owned(),
    };
    let removed = if status.removed { ", removed" } else { "" };
    out.line(format_args!("      = owner {} epoch {}{removed}; {run}", status.node, status.epoch))
}
