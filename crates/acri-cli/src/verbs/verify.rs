//! `verify`: is this history what was written?

use crate::{
    app::App,
    export,
    failure::{NO, Silent},
    output::{Format, Out},
    resolve,
};
use acri::{AgentId, StreamSeq, Subject};
use acri_bus::port::{EventSelection, Recorded, Until};
use acri_client::Client;
use acri_core::{
    appender::Stored,
    check::{Report, Verifier},
};
use anyhow::Result;
use futures_util::StreamExt as _;
use serde_json::json;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri verify                        everything on the bus
  acri verify fixer --save copy.jsonl
  acri verify --file copy.jsonl      a copy, without any bus

Each event bears the SHA-256 of the one before it, so a changed, missing or
reordered event is found and named. What nobody can find: that the end was cut
off, or that all was written anew with a node's credentials. A copy has a sum
over itself, which finds a changed end too. Exit status 1: damage was found.
")]
pub(crate) struct Args {
    /// Only this agent
    #[arg(value_name = "AGENT", conflicts_with = "all")]
    agent: Option<String>,
    /// All agents, which is the default
    #[arg(long)]
    all: bool,
    /// A copy that `--save` made, instead of the bus
    #[arg(long, value_name = "FILE", conflicts_with_all = ["agent", "all"])]
    file: Option<PathBuf>,
    /// Save what is verified: one JSON object a line, with the stored bytes
    #[arg(long, value_name = "FILE", conflicts_with = "file")]
    save: Option<PathBuf>,
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let mut damage = Vec::new();
    let report = match &args.file {
        Some(path) => {
            let copy = export::read(path)?;
            damage = copy.damage;
            let mut verifier = Verifier::default();
            copy.events.iter().for_each(|(subject, stored)| verifier.push(subject, stored));
            verifier.finish()
        }
        None => {
            let client = app.client().await?;
            let agent = match &args.agent {
                Some(name) => Some(resolve::agent(&client, Some(name)).await?),
                None => None,
            };
            over_the_stream(&client, agent, args.save.as_deref()).await?
        }
    };
    tell(&mut app.out, &report, &damage)?;
    if report.problem_count == 0 && damage.is_empty() { Ok(()) } else { Err(Silent(NO).into()) }
}

/// Verifies what the bus holds, and saves it as it goes.
pub(crate) async fn over_the_stream(
    client: &Client,
    agent: Option<AgentId>,
    save: Option<&std::path::Path>,
) -> Result<Report> {
    let selection = agent.map_or(EventSelection::All, EventSelection::Agent);
    let mut copy = save.map(export::Writer::create).transpose()?;
    let mut verifier = Verifier::default();
    let mut events = client.bus().read(selection, StreamSeq(1), Until::Now).await?;
    while let Some(recorded) = events.next().await {
        let (subject, stored) = pair(recorded?);
        verifier.push(&subject, &stored);
        if let Some(copy) = &mut copy {
            copy.event(&subject, &stored)?;
        }
    }
    if let Some(copy) = copy {
        copy.finish()?;
    }
    Ok(verifier.finish())
}

fn pair(recorded: Recorded) -> (Subject, Stored) {
    let stored = Stored { seq: recorded.seq, time: recorded.time, bytes: recorded.bytes.to_vec() };
    (recorded.subject, stored)
}

fn tell(out: &mut Out, report: &Report, damage: &[String]) -> Result<()> {
    let intact = report.problem_count == 0 && damage.is_empty();
    if out.format != Format::Table {
        let problems: Vec<_> = report
            .problems
            .iter()
            .map(|problem| {
                json!({
                    "stream_sequence": problem.seq,
                    "agent": problem.agent,
                    "run": problem.run,
                    "problem": problem.what,
                })
            })
            .collect();
        return out.document(&json!({
            "intact": intact,
            "agents": report.agents,
            "runs": report.runs,
            "events": report.events,
            "problem_count": report.problem_count,
            "problems": problems,
            "copy_problems": damage,
        }));
    }
    for line in damage {
        out.line(format_args!("DAMAGED  the copy: {line}"))?;
    }
    for problem in &report.problems {
        let whose = match (problem.agent, problem.run) {
            (Some(agent), Some(run)) => format!(" (agent {agent}, run {run})"),
            (Some(agent), None) => format!(" (agent {agent})"),
            (None, _) => String::new(),
        };
        out.line(format_args!("DAMAGED  event at {}{whose}: {}", problem.seq, problem.what))?;
    }
    if report.problem_count > report.problems.len() {
        out.line(format_args!(
            "DAMAGED  and {} more",
            report.problem_count - report.problems.len()
        ))?;
    }
    if out.quiet {
        return Ok(());
    }
    let verdict = if intact { "intact" } else { "not intact" };
    out.line(format_args!(
        "{} events of {} agents and {} runs: {verdict}",
        report.events, report.agents, report.runs
    ))
}
