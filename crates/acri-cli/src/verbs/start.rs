//! `start`: begin a run on an agent.

use crate::{
    app::App,
    output::{self, Format},
    resolve::{self, AgentArg},
};
use acri::{CommandId, Payload};
use anyhow::Result;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri start fixer --task 'make the tests pass'
  acri logs -f $(acri start 3fa8)
")]
pub(crate) struct Args {
    #[command(flatten)]
    agent: AgentArg,
    /// What the agent is to do
    #[arg(long, value_name = "TEXT", default_value = "")]
    task: String,
    /// Command id of an earlier attempt: a repeat gives the same run
    #[arg(long, value_name = "ID")]
    id: Option<CommandId>,
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let client = app.client().await?;
    let agent = resolve::agent(&client, args.agent.agent.as_deref()).await?;
    let id = match args.id {
        Some(id) => id,
        None => client.mint_id().await,
    };
    let handle = client.start_with_id(id, agent, Payload::text(args.task)).await?;
    match app.out.format {
        Format::Table => app.out.line(format_args!("{}/{}", handle.agent, handle.run)),
        Format::Json | Format::Yaml => app.out.document(&output::json(&handle)?),
    }
}
