//! `inspect`: everything about an agent and its runs.

use crate::{
    app::App,
    output::{self, Format, Out},
    resolve::{self, AgentArg},
    verbs::show,
};
use acri_bus::port::LeaseEntry;
use acri_client::{Agent, Run};
use anyhow::Result;
use serde_json::json;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri inspect fixer
  acri inspect -L -o yaml      everything, with the values of its environment
")]
pub(crate) struct Args {
    #[command(flatten)]
    agent: AgentArg,
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let client = app.client().await?;
    let agent = resolve::agent(&client, args.agent.agent.as_deref()).await?;
    let folded = client.agent(agent).await?;
    let lease = client.bus().lease(folded.owner().incarnation).await?;
    match app.out.format {
        Format::Table => table(&mut app.out, &folded, &lease),
        Format::Json | Format::Yaml => app.out.document(&object(&folded, &lease)?),
    }
}

fn table(out: &mut Out, agent: &Agent, held: &LeaseEntry) -> Result<()> {
    for (name, value) in lines(agent, held) {
        out.line(format_args!("{name:<12} {}", output::plain(&value)))?;
    }
    if agent.runs().is_empty() {
        return Ok(());
    }
    out.line("")?;
    let rows: Vec<_> = runs(agent)
        .into_iter()
        .map(|run| {
            let status = run.status();
            let log = if status.sealed { "complete" } else { "open" };
            let took = status.since.since(run.accepted_at);
            let took = if status.state.is_terminal() { show::duration(took) } else { "-".to_owned() };
            let accepted = run.accepted_at.to_string();
            let detail = show::detail(&status);
            vec![run.id.to_string(), show::state(&status), accepted, took, log.to_owned(), detail]
        })
        .collect();
    out.table(&["RUN", "STATE", "ACCEPTED", "TOOK", "LOG", "REASON"], &rows)
}

fn lines(agent: &Agent, held: &LeaseEntry) -> Vec<(&'static str, String)> {
    let (spec, owner) = (agent.spec(), agent.owner());
    let pairs = |(name, value): (&String, &String)| format!("{name}={value}");
    let mut lines = vec![
        ("agent", agent.id().to_string()),
        ("harness", spec.harness.to_string()),
        ("command", spec.command.join(" ")),
        ("directory", agent.working_directory().unwrap_or("-").to_owned()),
        // Their values may be secrets, and a terminal has onlookers.
        ("environment", spec.environment.keys().cloned().collect::<Vec<_>>().join(" ")),
        ("labels", spec.labels.iter().map(pairs).collect::<Vec<_>>().join(" ")),
        ("created", format!("{} ({})", agent.created(), show::ago(agent.created()))),
        ("owner", format!("{} (epoch {}, lease {})", owner.node, owner.epoch, lease(held))),
        ("orphan after", show::duration(spec.orphan_after())),
        ("lost after", show::duration(spec.node_lost_after())),
        ("events", format!("{}, the last {}", agent.last().sequence, show::ago(agent.last().time))),
    ];
    if agent.removed() {
        lines.push(("removed", "yes".to_owned()));
    }
    lines.retain(|(_, value)| !value.is_empty());
    lines
}

fn runs(agent: &Agent) -> Vec<&Run> {
    let mut runs: Vec<_> = agent.runs().values().map(AsRef::as_ref).collect();
    runs.sort_by_key(|run: &&Run| run.accepted_at);
    runs
}

pub(crate) fn lease(lease: &LeaseEntry) -> &'static str {
    match lease {
        LeaseEntry::Live { .. } => "live",
        LeaseEntry::Expired(_) => "expired",
        LeaseEntry::Fenced(_) => "fenced",
        LeaseEntry::Absent => "absent",
    }
}

fn object(agent: &Agent, held: &LeaseEntry) -> Result<serde_json::Value> {
    let runs = runs(agent)
        .into_iter()
        .map(|run| {
            let mut value = output::json(&run.status())?;
            value["accepted"] = run.accepted_at.to_string().into();
            value["command_id"] = json!(run.command);
            value["principal"] = json!(run.principal);
            Ok(value)
        })
        .collect::<Result<Vec<_>>>()?;
    let owner = agent.owner();
    Ok(json!({
        "agent": agent.id(),
        "spec": agent.spec(),
        "capabilities": agent.capabilities(),
        "working_directory": agent.working_directory(),
        "created": agent.created(),
        "created_by": agent.created_by(),
        "owner": {
            "node": owner.node,
            "incarnation": owner.incarnation,
            "epoch": owner.epoch,
            "lease": lease(held),
        },
        "removed": agent.removed(),
        "events": agent.last().sequence,
        "last_event": {
            "stream_sequence": agent.last().seq,
            "sha256": agent.last().digest,
            "time": agent.last().time,
        },
        "runs": runs,
    }))
}
