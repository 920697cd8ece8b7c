//! `inspect`: everything about an agent and its runs.

use crate::{
    app::App,
    output,
    resolve::{self, AgentArg},
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
    app.out.document(&object(&folded, &lease)?)
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
