//! `kill`: end a run and its whole process tree.

use crate::{
    app::App,
    failure::{Silent, UNAVAILABLE},
    output::{self, Format},
    resolve::{self, RunArgs},
};
use anyhow::Result;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri kill -L -m 'deletes the wrong files'
  acri kill 3fa8 77c0

It answers when the whole process tree is proved gone. Exit status 5: the kill
is recorded and repeated, but not yet proved.
")]
pub(crate) struct Args {
    #[command(flatten)]
    runs: RunArgs,
    /// Why; recorded
    #[arg(long = "message", short = 'm', value_name = "REASON", default_value = "killed by a person")]
    reason: String,
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let client = app.client().await?;
    let mut all_proved = true;
    for (agent, run) in resolve::runs(&client, &args.runs).await? {
        let answer = client.kill(agent, run, args.reason.clone()).await?;
        all_proved &= answer.proved;
        match app.out.format {
            Format::Table if app.out.quiet => app.out.line(run)?,
            Format::Table if answer.proved => {
                app.out.line(format_args!("{run} has ended, its process tree is gone"))?
            }
            Format::Table => app.out.line(format_args!("{run} killing, not yet proved gone"))?,
            Format::Json | Format::Yaml => app.out.item(&output::json(&answer)?)?,
        }
    }
    if all_proved { Ok(()) } else { Err(Silent(UNAVAILABLE).into()) }
}
