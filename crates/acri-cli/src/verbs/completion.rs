//! `completion`: a script for the shell.

use crate::{app::App, args::Cli};
use anyhow::Result;
use clap::CommandFactory as _;
use clap_complete::Shell;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri completion bash > ~/.local/share/bash-completion/completions/acri
  acri completion zsh > ~/.zfunc/_acri
")]
pub(crate) struct Args {
    /// Which shell
    #[arg(value_enum, value_name = "SHELL")]
    shell: Shell,
}

pub(crate) fn perform(app: &mut App, args: &Args) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "acri", &mut script);
    app.out.bytes(&script)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_knows_every_verb() {
        let mut script = Vec::new();
        clap_complete::generate(Shell::Bash, &mut Cli::command(), "acri", &mut script);
        let script = String::from_utf8(script).unwrap();
        for verb in Cli::command().get_subcommands() {
            assert!(script.contains(verb.get_name()), "{}", verb.get_name());
        }
    }
}
