//! The command line as types. Each verb's options stand beside the verb.

use crate::{failure::EXIT_HELP, output::Format, parse, verbs};
use clap::{Args, Parser, Subcommand};
use std::{path::PathBuf, time::Duration};

const EXAMPLES: &str = "\
Examples:
  acri demo                              watch a real program run as an agent
  acri up                                a bus and a node, for this machine
  acri run -- python3 -c 'print(1 + 1)'  run a program as an agent's run
  acri ps -a                             agents and their last runs
  acri logs -f -L                        follow the newest run
";

/// Runs AI agent harnesses, and any other program, as event-sourced agents on
/// NATS JetStream: started, watched, stopped and killed through one interface.
#[derive(Debug, Parser)]
#[command(name = "acri", version, after_help = format!("{EXAMPLES}\n{EXIT_HELP}"), propagate_version = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

/// Options of every verb.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// The bus: URLs of a NATS server or cluster, separated by commas.
    /// Default: what the context file says
    #[arg(long, global = true, env = "ACRI_NATS", value_name = "URL", hide_env_values = true)]
    pub(crate) nats: Option<String>,
    /// Credentials file (JWT and key) for the bus
    #[arg(long, global = true, env = "ACRI_CREDS", value_name = "FILE", hide_env_values = true)]
    pub(crate) creds: Option<PathBuf>,
    /// File with an nkey seed for the bus
    #[arg(long, global = true, env = "ACRI_NKEY", value_name = "FILE", hide_env_values = true)]
    pub(crate) nkey: Option<PathBuf>,
    /// Certificate authority that the bus must show
    #[arg(long, global = true, env = "ACRI_TLS_CA", value_name = "FILE")]
    pub(crate) tls_ca: Option<PathBuf>,
    /// Our certificate for the bus
    #[arg(long, global = true, env = "ACRI_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// The key of our certificate
    #[arg(long, global = true, env = "ACRI_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Where answers come, if the bus's permissions want another place than
    /// `_INBOX`: `_INBOX_<user>`
    #[arg(long, global = true, env = "ACRI_INBOX_PREFIX", value_name = "PREFIX")]
    pub(crate) inbox_prefix: Option<String>,
    /// Context file that `acri up` leaves [default:
    /// $XDG_STATE_HOME/acri/context.json]
    #[arg(long, global = true, env = "ACRI_CONTEXT", value_name = "FILE")]
    pub(crate) context: Option<PathBuf>,
    /// How answers are written; streams have one JSON object a line
    #[arg(long, short, global = true, value_enum, value_name = "FORMAT", default_value_t)]
    pub(crate) output: Format,
    /// Say only what was asked for: ids in lists, nothing on success
    #[arg(long, short, global = true)]
    pub(crate) quiet: bool,
    /// How long a command may wait for its answer
    #[arg(long, global = true, value_parser = parse::duration, value_name = "DURATION")]
    pub(crate) timeout: Option<Duration>,
    /// Who asks; recorded with every command [default: user@host]
    #[arg(long, global = true, env = "ACRI_PRINCIPAL", value_name = "NAME")]
    pub(crate) principal: Option<String>,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Start a bus and a node on this machine, until Ctrl-C
    Up(verbs::up::Args),
    /// Watch a real program run as an agent, killed and verified
    Demo(crate::demo::Args),
    /// Start a node on an existing bus, until Ctrl-C
    Node(verbs::node::Args),
    /// Run a program as an agent: create, start, follow, end with its status
    Run(verbs::run::Args),
    /// Create an agent
    Create(verbs::create::Args),
    /// Start a run on an agent
    Start(verbs::start::Args),
    /// Tell the status of a run, or of an agent's last run
    Status(verbs::status::Args),
    /// List agents with their last run
    Ps(verbs::ps::Args),
    /// Tell everything about an agent and its runs
    Inspect(verbs::inspect::Args),
    /// Wait until a run has ended
    Wait(verbs::wait::Args),
    /// Show what a run wrote
    Logs(verbs::logs::Args),
    /// Show what happened to agents and runs
    Events(verbs::events::Args),
    /// Ask a run to end gracefully
    Stop(verbs::stop::Args),
    /// End a run and its whole process tree at once
    Kill(verbs::kill::Args),
    /// Remove agents that have no open run
    Rm(verbs::rm::Args),
    /// Tell what a harness can do
    Caps(verbs::caps::Args),
    /// List nodes
    Nodes(verbs::nodes::Args),
    /// Check a history against change, loss and reordering
    Verify(verbs::verify::Args),
    /// Step through a history, printing the state after each event
    Replay(verbs::replay::Args),
    /// Check the bus, the nodes and this machine
    Doctor(verbs::doctor::Args),
    /// Print a completion script for a shell
    Completion(verbs::completion::Args),
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_tree_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_help_has_an_example_that_names_its_verb() {
        for verb in Cli::command().get_subcommands() {
            let help = verb.get_after_help().map(ToString::to_string).unwrap_or_default();
            let call = format!("  acri {}", verb.get_name());
            assert!(help.starts_with("Example") && help.contains(&call), "{}: {help:?}", verb.get_name());
        }
        assert!(Cli::command().get_after_help().is_some());
    }

    #[test]
    fn every_example_parses() {
        let command = Cli::command();
        let helps =
            command.get_subcommands().chain([&command]).filter_map(|verb| Some(verb.get_after_help()?.to_string()));
        let mut seen = 0;
        for line in helps.flat_map(|help| help.lines().map(str::to_owned).collect::<Vec<_>>()) {
            let Some(example) = line.strip_prefix("  acri ") else { continue };
            // The explanation stands behind two blanks; pipes end the example.
            let example = example.split("  ").next().unwrap_or(example).split(" | ").next().unwrap_or(example);
            let example = example.split(" > ").next().unwrap_or(example).split(" && ").next().unwrap_or(example);
            let inner = example.split_once("$(").map(|(before, _)| format!("{before}3fa8"));
            let words = words(inner.as_deref().unwrap_or(example));
            if let Err(error) = Cli::try_parse_from(std::iter::once("acri".to_owned()).chain(words)) {
                panic!("acri {example}\n{error}");
            }
            seen += 1;
        }
        assert!(seen > 20, "{seen}");
    }

    /// Splits at blanks, single quotes kept together.
    fn words(text: &str) -> Vec<String> {
        let mut words = vec![String::new()];
        let mut quoted = false;
        for character in text.chars() {
            match character {
                '\'' => quoted = !quoted,
                ' ' if !quoted => words.push(String::new()),
                _ => words.last_mut().unwrap().push(character),
            }
        }
        words.into_iter().filter(|word| !word.is_empty()).collect()
    }

    #[test]
    fn what_follows_two_dashes_is_the_programs_own() {
        let cli = Cli::try_parse_from(["acri", "run", "--rm", "--", "ls", "-l", "--output", "x"]).unwrap();
        let Verb::Run(run) = cli.verb else { panic!("{:?}", cli.verb) };
        assert_eq!(run.command, ["ls", "-l", "--output", "x"]);
        assert_eq!(cli.global.output, Format::Table);
    }
}
