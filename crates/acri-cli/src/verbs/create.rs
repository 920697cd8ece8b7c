//! `create`: provision an agent.

use crate::{
    app::App,
    failure::{Failure, NOT_FOUND, USAGE},
    output::{self, Format},
    verbs::spec::SpecArgs,
};
use acri::{AgentSpec, CommandId};
use anyhow::{Context as _, Result};
use std::{fs, io::Read as _, path::PathBuf};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri create --name fixer -C . -- python3 fix.py    an agent that runs a program here
  acri create -f agent.yaml                          from a spec, `-` reads it from stdin

Without -C, and without `working_directory` in the spec, the program runs in an
empty directory of the agent's own.
")]
pub(crate) struct Args {
    /// A spec in JSON or YAML; options change it
    #[arg(long, short = 'f', value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    spec: SpecArgs,
    /// Command id of an earlier attempt: a repeat gives the same agent
    #[arg(long, value_name = "ID")]
    id: Option<CommandId>,
    /// Program and arguments
    #[arg(last = true, value_name = "COMMAND", required_unless_present = "file")]
    command: Vec<String>,
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let spec = match &args.file {
        None => args.spec.spec(args.command)?,
        Some(path) => {
            let mut spec = read(path)?;
            args.spec.change(&mut spec)?;
            if !args.command.is_empty() {
                spec.command = args.command;
            }
            spec
        }
    };
    let client = app.client().await?;
    let id = match args.id {
        Some(id) => id,
        None => client.mint_id().await,
    };
    let handle = client.create_with_id(id, spec).await?;
    match app.out.format {
        Format::Table => app.out.line(handle.agent),
        Format::Json | Format::Yaml => app.out.document(&output::json(&handle)?),
    }
}

fn read(path: &PathBuf) -> Result<AgentSpec> {
    let shown = path.display();
    let text = if path.as_os_str() == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("failed to read the spec from stdin")?;
        text
    } else {
        fs::read_to_string(path).map_err(|error| Failure::new(NOT_FOUND, format!("failed to read {shown}: {error}")))?
    };
    // JSON is YAML too.
    serde_saphyr::from_str(&text)
        .map_err(|error| Failure::new(USAGE, format!("{shown} is no agent spec: {error}")).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_is_read_from_json_and_from_yaml_and_an_unknown_field_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("spec");
        fs::write(&path, r#"{"harness": "process", "command": ["echo", "1"], "labels": {"a": "b"}}"#).unwrap();
        let json = read(&path).unwrap();
        fs::write(&path, "harness: process\ncommand: [echo, \"1\"]\nlabels:\n  a: b\n").unwrap();
        assert_eq!(read(&path).unwrap(), json);
        fs::write(&path, "harness: process\nsandbox: strict\n").unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("sandbox"));
    }
}
