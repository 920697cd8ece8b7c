//! `status`: of a run, or of an agent's last run.

use crate::{
    app::App,
    output::{self, Format},
    resolve::{self, RunArg},
    verbs::show,
};
use acri_client::StatusTold;
use anyhow::Result;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri status -L               of the newest run
  acri status 3fa8 -o json

The node that owns the agent answers. Where none lives, or it says nothing for
3 s, the history answers, and a word on stderr says so.
")]
pub(crate) struct Args {
    #[command(flatten)]
    run: RunArg,
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let client = app.client().await?;
    let target = resolve::target(&client, args.run.run.as_deref()).await?;
    let StatusTold { status, owner_silent } = client.status_told(target.agent, target.run).await?;
    let open = status.run.as_ref().is_some_and(|run| !run.state.is_terminal());
    if let Some(why) = owner_silent.filter(|_| open) {
        let why = output::plain(&why.message);
        app.out.note(format_args!("acri: node {} does not answer, so the history does: {why}", status.node))?;
    }
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
