//! `caps`: what a harness can do.

use crate::{
    app::App,
    failure::{Failure, USAGE},
    output::{self, Format},
    verbs::show,
};
use anyhow::Result;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri caps               what the harness `process` can do
  acri caps process -o json
")]
pub(crate) struct Args {
    /// Kind of harness
    #[arg(value_name = "HARNESS", default_value = "process")]
    harness: String,
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let harness = args.harness.parse().map_err(|error| Failure::new(USAGE, format!("{error}")))?;
    let client = app.client().await?;
    let set = client.capabilities(&harness).await?;
    if app.out.format != Format::Table {
        return app.out.document(&output::json(&set)?);
    }
    let mut rows = vec![
        ("structured_logs", show::name(&set.structured_logs)),
        ("async_injection", show::name(&set.async_injection)),
        ("context_state", show::name(&set.context_state)),
        ("graceful_stop", show::name(&set.graceful_stop)),
        ("subagent_spawn", show::name(&set.subagent_spawn)),
        ("headless", show::name(&set.headless)),
        ("streaming_context", show::name(&set.streaming_context)),
        ("multimodal_input", show::name(&set.multimodal_input)),
        ("multimodal_output", show::name(&set.multimodal_output)),
        ("artifact_inline_max_bytes", set.artifact_inline_max_bytes.to_string()),
    ];
    rows.extend(set.tree_control.map(|tier| ("tree_control", tier)));
    rows.extend(set.isolation.map(|isolation| ("isolation", isolation)));
    let rows: Vec<_> = rows.into_iter().map(|(name, value)| vec![name.to_owned(), value]).collect();
    app.out.table(&["CAPABILITY", "FIDELITY"], &rows)
}
