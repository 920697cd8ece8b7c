//! `ps`: agents with their last run.

use crate::{
    app::App,
    output::{self, Format},
    parse,
    resolve::NAME_LABEL,
    verbs::show,
};
use acri::{AgentStatus, RunState};
use acri_client::Agent;
use anyhow::Result;
use serde_json::json;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri ps                        agents at work, or ready to be started
  acri ps -a                     and those whose last run has ended
  acri ps -a --state failed -l team=infra
  acri rm $(acri ps -a -q --state completed)
")]
pub(crate) struct Args {
    /// Also agents whose last run has ended, and removed ones
    #[arg(long, short = 'a')]
    all: bool,
    /// Only with a last run in this state
    #[arg(long, short = 's', value_name = "STATE", value_parser = state)]
    state: Option<RunState>,
    /// Only with this label
    #[arg(long = "label", short = 'l', value_name = "NAME=VALUE", value_parser = parse::label)]
    labels: Vec<(String, String)>,
    /// Only of this harness
    #[arg(long, value_name = "TYPE")]
    harness: Option<String>,
    /// Only owned by this node
    #[arg(long, value_name = "NODE")]
    node: Option<String>,
    /// Only the newest N
    #[arg(long, short = 'n', value_name = "N")]
    last: Option<usize>,
}

fn state(text: &str) -> Result<RunState, String> {
    serde_json::from_value(text.into())
        .map_err(|_| "the states are pending, running, waiting, completed, stopped and failed".to_owned())
}

impl Args {
    fn wants(&self, agent: &Agent, status: &AgentStatus) -> bool {
        let state = status.run.as_ref().map(|run| run.state);
        let asked_for_ended = self.all || self.state.is_some_and(RunState::is_terminal);
        let shown = asked_for_ended || (!agent.removed() && !state.is_some_and(RunState::is_terminal));
        shown
            && self.state.is_none_or(|wanted| state == Some(wanted))
            && self.harness.as_ref().is_none_or(|harness| agent.spec().harness.as_str() == harness)
            && self.node.as_ref().is_none_or(|node| status.node.as_str() == node)
            && self.labels.iter().all(|(name, value)| agent.spec().labels.get(name) == Some(value))
    }
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let client = app.client().await?;
    let overview = client.agents().await?;
    let statuses = client.statuses(&overview.agents).await?;
    let mut listed: Vec<_> =
        overview.agents.iter().zip(&statuses).filter(|(agent, status)| args.wants(agent, status)).collect();
    // The newest first, as crictl has it.
    listed.sort_by_key(|(agent, _)| std::cmp::Reverse(agent.last_run().map_or(agent.created(), |run| run.accepted_at)));
    listed.truncate(args.last.unwrap_or(usize::MAX));
    match app.out.format {
        _ if app.out.quiet => listed.iter().try_for_each(|(agent, _)| app.out.line(agent.id()))?,
        Format::Table => {
            let rows: Vec<_> = listed.iter().map(|(agent, status)| row(agent, status)).collect();
            app.out.table(&["AGENT", "RUN", "STATE", "SINCE", "NAME", "NODE", "COMMAND"], &rows)?;
        }
        Format::Json | Format::Yaml => {
            let agents = listed.iter().map(|(agent, status)| object(agent, status)).collect::<Result<Vec<_>>>()?;
            app.out.document(&json!({"agents": agents}))?;
        }
    }
    for (agent, detail) in &overview.broken {
        app.out.warn(format_args!("acri: the history of agent {agent} cannot be folded: {detail}"))?;
    }
    Ok(())
}

/// Characters of a command that a table shows.
const COMMAND_SHOWN: usize = 40;

fn row(agent: &Agent, status: &AgentStatus) -> Vec<String> {
    let mut command = agent.spec().command.join(" ");
    if command.is_empty() {
        command = agent.spec().harness.to_string();
    }
    if command.chars().count() > COMMAND_SHOWN {
        command = command.chars().take(COMMAND_SHOWN - 1).chain(['…']).collect();
    }
    let name = agent.spec().labels.get(NAME_LABEL).cloned().unwrap_or_default();
    let (run, state, since) = match &status.run {
        Some(run) => (output::short(run.run), show::state(run), run.since),
        None => ("-".to_owned(), "created".to_owned(), agent.created()),
    };
    let state = if agent.removed() { format!("{state} (removed)") } else { state };
    vec![output::short(agent.id()), run, state, show::ago(since), name, status.node.to_string(), command]
}

fn object(agent: &Agent, status: &AgentStatus) -> Result<serde_json::Value> {
    let mut value = output::json(status)?;
    value["harness"] = agent.spec().harness.as_str().into();
    value["command"] = json!(agent.spec().command);
    value["labels"] = json!(agent.spec().labels);
    value["created"] = agent.created().to_string().into();
    Ok(value)
}
