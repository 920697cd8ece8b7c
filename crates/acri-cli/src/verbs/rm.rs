//! `rm`: give agents up.

use crate::{
    app::App,
    output::{self, Format},
    resolve,
};
use anyhow::Result;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri rm fixer 3fa8
  acri rm -L -m 'done with it'

An agent with an open run is refused: stop or kill the run first, or use -f.
What happened stays in the event stream.
")]
pub(crate) struct Args {
    /// AGENT, or a RUN of it; unique prefixes and names will do
    #[arg(value_name = "AGENT", required_unless_present = "last")]
    agents: Vec<String>,
    /// The newest agent
    #[arg(long, short = 'L', conflicts_with = "agents")]
    last: bool,
    /// Kill an open run first
    #[arg(long, short = 'f')]
    force: bool,
    /// Why; recorded
    #[arg(long = "message", short = 'm', value_name = "REASON", default_value = "removed by a person")]
    reason: String,
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let client = app.client().await?;
    let named: Vec<Option<&str>> =
        if args.last { vec![None] } else { args.agents.iter().map(|agent| Some(agent.as_str())).collect() };
    for name in named {
        let agent = resolve::agent(&client, name).await?;
        if args.force
            && let Some(run) = client.agent(agent).await?.open_run().map(|run| run.id)
        {
            client.kill(agent, run, args.reason.clone()).await?;
            seal(&client, agent, run).await?;
        }
        let answer = client.remove(agent, args.reason.clone()).await?;
        match app.out.format {
            Format::Table => app.out.line(agent)?,
            Format::Json | Format::Yaml => app.out.item(&output::json(&answer)?)?,
        }
    }
    Ok(())
}

/// Waits until nothing more follows for a run: until then its agent cannot be
/// removed.
pub(crate) async fn seal(client: &acri_client::Client, agent: acri::AgentId, run: acri::RunId) -> Result<()> {
    use futures_util::StreamExt as _;
    let mut events = client.run_events(agent, run, true);
    while let Some(item) = events.next().await {
        if let acri_client::EventItem::Event(event) = item?
            && matches!(event.envelope.event, acri::Event::RunLogsSealed(_))
        {
            break;
        }
    }
    Ok(())
}
