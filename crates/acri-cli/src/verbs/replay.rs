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
use acri::{AgentId, EventEnvelope, Subject, codec};
use acri_client::{Agent, StoredEvent};
use acri_core::appender::Stored;
use anyhow::Result;
use serde_json::json;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

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
    /// AGENT, or a RUN of it; with --file a prefix of the agent's id, all if it
    /// is missing
    #[arg(value_name = "AGENT", required_unless_present_any = ["last", "file"])]
    agent: Option<String>,
    /// The newest agent
    #[arg(long, short = 'L', conflicts_with_all = ["agent", "file"])]
    last: bool,
    /// Last event to show: its number in the agent's history, or a time
    #[arg(long, value_name = "WHERE", value_parser = parse::until)]
    until: Option<Until>,
    /// A copy that `acri verify --save` made, or the history that a failing
    /// simulation left, instead of the bus
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let steps = match &args.file {
        Some(path) => of_copy(export::read(path)?, args.agent.as_deref())?,
        None => {
            let client = app.client().await?;
            let agent = resolve::agent(&client, args.agent.as_deref()).await?;
            let history = client.history(agent).await?;
            history.iter().map(|event| Step::Event(agent, stored(event))).collect()
        }
    };
    replay(&mut app.out, steps, args.until)
}

fn stored(event: &StoredEvent) -> Stored {
    Stored { seq: event.seq, time: event.time, bytes: event.bytes.clone() }
}

/// One step of a replay.
enum Step {
    Event(AgentId, Stored),
    /// What a simulation did in between.
    Note(String),
}

/// The steps of a copy, of one agent if a prefix names it.
fn of_copy(copy: export::Copy, prefix: Option<&str>) -> Result<Vec<Step>> {
    let mut steps = Vec::new();
    let mut notes = copy.notes.into_iter().peekable();
    let mut agents = BTreeSet::new();
    for (index, (subject, stored)) in copy.events.into_iter().enumerate() {
        while let Some((_, note)) = notes.next_if(|(before, _)| *before <= index) {
            steps.push(Step::Note(note));
        }
        if let Subject::Event(agent, ..) = subject
            && prefix.is_none_or(|prefix| agent.to_string().starts_with(prefix))
        {
            agents.insert(agent);
            steps.push(Step::Event(agent, stored));
        }
    }
    steps.extend(notes.map(|(_, note)| Step::Note(note)));
    match (prefix, agents.len()) {
        (Some(prefix), 0) => {
            let message = format!("the copy has no agent that begins with {prefix:?}");
            Err(Failure::new(NOT_FOUND, message).into())
        }
        (Some(prefix), 2..) => {
            let listed: Vec<_> = agents.iter().map(ToString::to_string).collect();
            let message = format!("{prefix:?} may be any of {}", listed.join(", "));
            Err(Failure::new(USAGE, message).into())
        }
        _ => Ok(steps),
    }
}

fn replay(out: &mut Out, steps: Vec<Step>, until: Option<Until>) -> Result<()> {
    let mut agents: BTreeMap<AgentId, Option<Agent>> = BTreeMap::new();
    let mut broken = BTreeMap::new();
    for step in steps {
        match step {
            Step::Note(note) if out.format == Format::Table => {
                out.line(format_args!("      * {}", output::plain(&note)))?
            }
            Step::Note(note) => out.item(&json!({"note": note}))?,
            // What follows an event that does not fit cannot be folded either.
            Step::Event(id, _) if broken.contains_key(&id) => {}
            Step::Event(id, stored) => {
                let agent = agents.entry(id).or_default();
                if let Err(problem) = step_on(out, agent, &stored, until)? {
                    out.line_or_item(format_args!("      ! {problem}"), || json!({"broken": id, "problem": problem}))?;
                    broken.insert(id, problem);
                }
            }
        }
    }
    match broken.first_key_value() {
        None => Ok(()),
        Some((id, problem)) => {
            let message = format!("the history of agent {id} cannot be folded: {problem}");
            Err(Failure::new(NO, message).into())
        }
    }
}

/// Folds and shows one event; tells why it does not fit.
fn step_on(
    out: &mut Out,
    agent: &mut Option<Agent>,
    stored: &Stored,
    until: Option<Until>,
) -> Result<Result<(), String>> {
    let envelope: EventEnvelope = match codec::from_msgpack(&stored.bytes) {
        Ok(envelope) => envelope,
        Err(error) => return Ok(Err(format!("event at {}: {error}", stored.seq))),
    };
    let beyond = match until {
        None => false,
        Some(Until::Sequence(last)) => envelope.sequence.0 > last,
        Some(Until::Time(last)) => envelope.time > last,
    };
    if beyond {
        return Ok(Ok(()));
    }
    let bytes = stored.bytes.clone();
    let event = StoredEvent { seq: stored.seq, time: stored.time, envelope, bytes };
    let folded = match agent {
        Some(agent) => agent.evolve(stored),
        None => Agent::fold([stored]).map(|first| *agent = first),
    };
    // The event is shown before it is said that it does not fit.
    print(out, &event, agent.as_ref())?;
    Ok(folded.map_err(|error| error.to_string()))
}

fn print(out: &mut Out, event: &StoredEvent, agent: Option<&Agent>) -> Result<()> {
    let status = agent.and_then(|agent| agent.status(event.envelope.run));
    if out.format != Format::Table {
        return out.item(&json!({"event": events::object(event)?, "state": output::json(&status)?}));
    }
    out.line(format_args!("{:>4}  {}", event.envelope.sequence, events::line(event)))?;
    let Some(status) = status else { return Ok(()) };
    let run = match &status.run {
        Some(run) => {
            let detail = show::detail(run);
            let detail = if detail.is_empty() { detail } else { format!(", {}", output::plain(&detail)) };
            let sealed = if run.sealed { ", log complete" } else { "" };
            format!("run {} {}{detail}{sealed}", output::short(run.run), show::state(run))
        }
        None => "no run".to_owned(),
    };
    let removed = if status.removed { ", removed" } else { "" };
    out.line(format_args!("      = owner {} epoch {}{removed}; {run}", status.node, status.epoch))
}
