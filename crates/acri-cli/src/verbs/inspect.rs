//! `inspect`: everything about an agent and its runs.

use crate::{
    app::App,
    output::{self, Format, Out},
    resolve::{self, AgentArg},
    verbs::show,
};
use acri_bus::port::LeaseEntry;
use acri_client::Agent;
use anyhow::Result;
use serde_json::json;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri inspect fixer
  acri inspect -L -o yaml
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
        Format::Table => tell(&mut app.out, &folded, &lease),
        Format::Json | Format::Yaml => app.out.document(&object(&folded, &lease)?),
    }
}

/// For people: what matters, one line each, then its runs.
fn tell(out: &mut Out, agent: &Agent, held: &LeaseEntry) -> Result<()> {
    let owner = agent.owner();
    let mut facts = vec![
        ("agent", agent.id().to_string()),
        ("harness", agent.spec().harness.to_string()),
        ("command", agent.spec().command.join(" ")),
        ("directory", agent.working_directory().unwrap_or_default().to_owned()),
        ("created", format!("{} ({})", agent.created(), show::ago(agent.created()))),
        ("owner", format!("{}, epoch {}, lease {}", owner.node, owner.epoch, lease(held))),
        ("events", format!("{}, the last one {}", agent.last().sequence, agent.last().time)),
    ];
    if agent.removed() {
        facts.push(("removed", "yes".to_owned()));
    }
    for (name, value) in facts {
        out.line(format_args!("{name:<10} {}", output::plain(&value)))?;
    }
    let mut runs: Vec<_> = agent.runs().values().collect();
    runs.sort_by_key(|run| run.accepted_at);
    let rows: Vec<_> = runs
        .into_iter()
        .map(|run| {
            let status = run.status();
            let detail = output::plain(&show::detail(&status));
            vec![run.id.to_string(), show::state(&status), show::ago(run.accepted_at), detail]
        })
        .collect();
    if rows.is_empty() { Ok(()) } else { out.table(&["RUN", "STATE", "ACCEPTED", "DETAIL"], &rows) }
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
    let mut runs: Vec<_> = agent.runs().values().collect();
    runs.sort_by_key(|run| run.accepted_at);
    let runs = runs
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
