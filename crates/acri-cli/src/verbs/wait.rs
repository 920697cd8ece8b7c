//! `wait`: until a run has ended.

use crate::{
    app::App,
    failure::{Failure, NO, Silent, UNAVAILABLE},
    output::{self, Format},
    resolve::{self, RunArg},
    verbs::show,
};
use acri::RunState;
use anyhow::Result;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri wait -L && echo it worked
  acri wait 3fa8 --timeout 10m

It returns when the run has ended; `sealed` in its output tells whether the log
is complete by then, which `acri logs -f` waits for.

Exit status: 0 completed, 1 stopped or failed, 5 not ended within --timeout.
")]
pub(crate) struct Args {
    #[command(flatten)]
    run: RunArg,
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let client = app.client().await?;
    let (agent, run) = resolve::run(&client, args.run.run.as_deref()).await?;
    let status = match app.global.timeout {
        None => client.wait(agent, run).await?,
        Some(timeout) => tokio::time::timeout(timeout, client.wait(agent, run)).await.map_err(|_| {
            Failure::new(UNAVAILABLE, format!("run {run} has not ended within {}", show::duration(timeout)))
        })??,
    };
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
