//! The demo: a placeholder until the real one stands here.

use crate::app::App;
use anyhow::{Result, bail};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  acri demo            watch it
  acri demo -o json    only the summary
")]
pub(crate) struct Args {}

pub(crate) async fn perform(_app: &mut App, _args: Args) -> Result<()> {
    bail!("the demo is not built yet")
}
