//! `rm`: give agents up.

use crate::{
    app::App,
    failure::{Failure, UNAVAILABLE},
    output::{self, Format},
    resolve,
};
use acri::{AgentId, Event, RunId};
use acri_client::{Client, Error, EventItem};
use anyhow::Result;
use futures_util::{Stream, StreamExt as _};
use std::time::Duration;

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

/// How long the seal of a run that has ended is waited for. Its owner seals it
/// within seconds; one that died meanwhile does it at its next start.
const SEAL_WAIT_MAX: Duration = Duration::from_secs(60);

/// Waits until nothing more follows for a run: until then its agent cannot be
/// removed.
pub(crate) async fn seal(client: &Client, agent: AgentId, run: RunId) -> Result<()> {
    sealed_within(SEAL_WAIT_MAX, client.run_events(agent, run, true), agent, run).await
}

async fn sealed_within(
    at_most: Duration,
    mut events: impl Stream<Item = Result<EventItem, Error>> + Unpin,
    agent: AgentId,
    run: RunId,
) -> Result<()> {
    let seal = async {
        while let Some(item) = events.next().await {
            if let EventItem::Event(event) = item?
                && matches!(event.envelope.event, Event::RunLogsSealed(_))
            {
                break;
            }
        }
        Ok(())
    };
    match tokio::time::timeout(at_most, seal).await {
        Ok(sealed) => sealed,
        Err(_) => {
            let text = format!(
                "failed to remove agent {agent}: the log of run {run} was not complete within {} s",
                at_most.as_secs()
            );
            let hint = format!(
                "its node may be gone: see `acri nodes`, start it again, and repeat `acri rm {agent}`; \
                 nothing but the agent's removal is missing"
            );
            Err(Failure::new(UNAVAILABLE, text).hint(hint).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use acri::CommandId;

    #[tokio::test]
    async fn a_seal_that_does_not_come_is_given_up_and_what_to_do_is_said() {
        let agent = AgentId::derive(&"process".parse().unwrap(), CommandId::from_uuid(uuid::Uuid::from_u128(1)));
        let run = RunId::derive(agent, CommandId::from_uuid(uuid::Uuid::from_u128(2)));
        let silent = futures_util::stream::pending();
        let waited = sealed_within(Duration::from_millis(1), silent, agent, run);
        let error = tokio::time::timeout(Duration::from_secs(30), waited).await.expect("a limit").unwrap_err();
        let failure = error.downcast_ref::<Failure>().unwrap();
        assert_eq!(failure.status, UNAVAILABLE);
        assert!(error.to_string().contains(&format!("log of run {run} was not complete")), "{error}");
        let hint = failure.hint.as_deref().unwrap_or_default();
        assert!(hint.contains("acri nodes") && hint.contains(&format!("acri rm {agent}")), "{hint}");
    }
}
