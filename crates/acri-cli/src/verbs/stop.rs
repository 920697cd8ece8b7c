//! `stop`: ask a run to end gracefully.

use crate::{
    app::App,
    output::{self, Format},
    parse,
    resolve::{self, RunArgs},
};
use acri::command::OnExpiry;
use anyhow::Result;
use std::time::Duration;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri stop -L                          the newest run
  acri stop 3fa8 --grace 10s -m 'superseded'
  acri stop 3fa8 --keep                 go on if it does not end in time
")]
pub(crate) struct Args {
    #[command(flatten)]
    runs: RunArgs,
    /// How long it has to end [default: 30s]
    #[arg(long, short = 'g', value_name = "DURATION", value_parser = parse::duration)]
    grace: Option<Duration>,
    /// Let it go on if it has not ended by then, instead of killing it
    #[arg(long)]
    keep: bool,
    /// Why; recorded
    #[arg(long = "message", short = 'm', value_name = "REASON", default_value = "stopped by a person")]
    reason: String,
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let client = app.client().await?;
    let on_expiry = if args.keep { OnExpiry::Keep } else { OnExpiry::Kill };
    for (agent, run) in resolve::runs(&client, &args.runs).await? {
        let answer = client.stop(agent, run, args.reason.clone(), args.grace, on_expiry).await?;
        match app.out.format {
            Format::Table if app.out.quiet => app.out.line(run)?,
            Format::Table => app.out.line(format_args!("{run} stopping, until {}", answer.deadline))?,
            Format::Json | Format::Yaml => app.out.item(&output::json(&answer)?)?,
        }
    }
    Ok(())
}
