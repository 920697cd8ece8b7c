//! `status`: of a run, or of an agent's last run.

use crate::{
    app::App,
    output::{self, Format},
    resolve::{self, RunArg},
    verbs::show,
};
use anyhow::Result;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri status -L               of the newest run
  acri status 3fa8 -o json
")]
pub(crate) struct Args {
    #[command(flatten)]
    run: RunArg,
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let client = app.client().await?;
    let target = resolve::target(&client, args.run.run.as_deref()).await?;
    let status = client.status(target.agent, target.run).await?;
    match app.out.format {
        Format::Table if app.out.quiet => {
            let state = status.run.as_ref().map_or_else(|| "none".to_owned(), |run| show::name(&run.state));
            app.out.line(state)
        }
        Format::Table => {
            let lines: Vec<_> = show::status(&status)
                .into_iter()
                .map(|(name, value)| format!("{name:<8} {}", output::plain(&value)))
                .collect();
            app.out.line(lines.join("\n"))
        }
        Format::Json | Format::Yaml => app.out.document(&output::json(&status)?),
    }
}
