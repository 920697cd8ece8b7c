//! `wait`: until a run has ended.

use crate::{
    app::App,
    failure::{Failure, NO, Silent, UNAVAILABLE},
    output::{self, Format},
    resolve::{self, RunArg},
    verbs::{rm, show},
};
use acri::{RunState, status::RunStatus};
use acri_client::Client;
use anyhow::Result;
use std::time::Duration;

/// How long an ended run's log is waited for. A node that lives seals it at
/// once; one that died may take a day, or come back never.
const SEAL_WAIT: Duration = Duration::from_secs(5);

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri wait -L && echo it worked
  acri wait 3fa8 --timeout 10m

What it tells is final: the run has ended, and its log is complete (`sealed`),
so that the agent can be started again or removed. Where the log is not complete
within 5 s after the end, because the run's node is gone, `sealed` is false.

Exit status: 0 completed, 1 stopped or failed, 5 not ended within --timeout.
")]
pub(crate) struct Args {
    #[command(flatten)]
    run: RunArg,
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let client = app.client().await?;
    let (agent, run) = resolve::run(&client, args.run.run.as_deref()).await?;
    let ended = match app.global.timeout {
        None => client.wait(agent, run).await?,
        Some(timeout) => tokio::time::timeout(timeout, client.wait(agent, run)).await.map_err(|_| {
            Failure::new(UNAVAILABLE, format!("run {run} has not ended within {}", show::duration(timeout)))
        })??,
    };
    let status = sealed(&client, agent, ended).await?;
    match app.out.format {
        Format::Table => {
            let detail = output::plain(&show::detail(&status));
            let state = show::state(&status);
            app.out.line(if detail.is_empty() { state } else { format!("{state}: {detail}") })?;
        }
        Format::Json | Format::Yaml => app.out.document(&output::json(&status)?)?,
    }
    if status.state == RunState::Completed { Ok(()) } else { Err(Silent(NO).into()) }
}

/// The same status once its log is complete, or as it is after [`SEAL_WAIT`].
async fn sealed(client: &Client, agent: acri::AgentId, ended: RunStatus) -> Result<RunStatus> {
    match tokio::time::timeout(SEAL_WAIT, rm::seal(client, agent, ended.run)).await {
        Ok(sealed) => sealed.map(|()| RunStatus { sealed: true, ..ended }),
        Err(_) => Ok(ended),
    }
}
