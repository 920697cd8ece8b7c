//! The demo: real programs as agents, before the viewer's eyes, and every
//! claim checked by the demo itself.
//!
//! [`stage`] holds the private bus, the node and its death; [`claims`] what is
//! claimed and how it is checked.

mod claims;
mod stage;

use crate::{app::App, failure::Silent, output::Format};
use anyhow::{Context as _, Result};
use claims::Claims;
use stage::Stage;
use std::time::Instant;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri demo            watch it, under a minute
  acri demo -o json    ends with a summary, one claim an entry

It starts a bus and a node of its own, in a temporary directory, and removes
them. Status 0 if every claim holds, else 1.
")]
pub(crate) struct Args {
    /// Leave the directory, with what the agents made, and say where it is
    #[arg(long)]
    keep: bool,
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let began = Instant::now();
    let mut claims = Claims::default();
    let mut stage = Stage::set(app).await.context("failed to set the stage")?;
    let played = play(app, &mut stage, &mut claims).await;
    let kept = stage.strike(args.keep).await;
    played?;
    if let Some(directory) = kept {
        app.out.note(format_args!("kept: {}", directory.display()))?;
    }
    let took = began.elapsed();
    if app.out.format == Format::Table {
        let verdict = if claims.all_hold() { "every claim holds" } else { "NOT every claim holds" };
        app.out.line(format_args!(
            "\n{verdict}: {} of {}, {:.1} s",
            claims.held(),
            claims.len(),
            took.as_secs_f64()
        ))?;
    } else {
        app.out.document(&claims.summary(took))?;
    }
    if claims.all_hold() { Ok(()) } else { Err(Silent(1).into()) }
}

async fn play(app: &mut App, stage: &mut Stage, claims: &mut Claims) -> Result<()> {
    claims::work_survives_the_nodes_death(app, stage, claims).await?;
    claims::a_runaway_is_gone(app, stage, claims).await?;
    claims::history_is_tamper_evident(app, stage, claims).await
}
