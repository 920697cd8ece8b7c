//! Options that make an agent's spec, shared by `create` and `run`.

use crate::{failure::Failure, failure::NOT_FOUND, failure::USAGE, parse, resolve::NAME_LABEL};
use acri::AgentSpec;
use anyhow::{Context as _, Result};
use std::{collections::BTreeMap, env, fs, path::PathBuf, time::Duration};

/// What the agent is.
#[derive(Debug, clap::Args)]
pub(crate) struct SpecArgs {
    /// Kind of harness that runs it
    #[arg(long, value_name = "TYPE", default_value = "process")]
    pub(crate) harness: String,
    /// A name for people; kept as the label `name`
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// A label, for selection and display; may be repeated
    #[arg(long = "label", short = 'l', value_name = "NAME=VALUE", value_parser = parse::label)]
    pub(crate) labels: Vec<(String, String)>,
    /// A variable of the program's environment; NAME alone copies it from
    /// here. Of what is set here only PATH is passed on by itself
    #[arg(long = "env", short = 'e', value_name = "NAME[=VALUE]", value_parser = parse::variable)]
    pub(crate) environment: Vec<(String, Option<String>)>,
    /// A file of such variables, one a line
    #[arg(long, value_name = "FILE")]
    pub(crate) env_file: Option<PathBuf>,
    /// Its working directory, on the node
    #[arg(long, short = 'C', value_name = "DIR")]
    pub(crate) cwd: Option<PathBuf>,
    /// Kill the program when no owner spoke to it for this long [default:
    /// 15m; at most 30 days]
    #[arg(long, value_name = "DURATION", value_parser = parse::duration)]
    pub(crate) orphan_after: Option<Duration>,
    /// Give a run up when its node is silent for this long [default: 20m; at
    /// most 60 days]
    #[arg(long, value_name = "DURATION", value_parser = parse::duration)]
    pub(crate) node_lost_after: Option<Duration>,
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl SpecArgs {
    /// The spec of a command.
    pub(crate) fn spec(&self, command: Vec<String>) -> Result<AgentSpec> {
        let harness = self.harness.parse().map_err(|error| Failure::new(USAGE, format!("--harness: {error}")))?;
        let mut spec = AgentSpec::new(harness, command);
        if let Some(path) = env::var("PATH").ok().filter(|path| !path.is_empty()) {
            spec.environment.insert("PATH".to_owned(), path);
        }
        self.change(&mut spec)?;
        Ok(spec)
    }

    /// Sets in a spec what the options say.
    pub(crate) fn change(&self, spec: &mut AgentSpec) -> Result<()> {
        spec.labels.extend(self.labels.iter().cloned());
        spec.labels.extend(self.name.iter().map(|name| (NAME_LABEL.to_owned(), name.clone())));
        spec.environment.extend(self.environment()?);
        if let Some(directory) = &self.cwd {
            spec.working_directory = Some(absolute(directory)?);
        }
        spec.orphan_after_ms = self.orphan_after.map(millis).or(spec.orphan_after_ms);
        spec.node_lost_after_ms = self.node_lost_after.map(millis).or(spec.node_lost_after_ms);
        Ok(())
    }

    fn environment(&self) -> Result<BTreeMap<String, String>> {
        let mut variables = Vec::new();
        if let Some(path) = &self.env_file {
            let text = fs::read_to_string(path)
                .map_err(|error| Failure::new(NOT_FOUND, format!("failed to read {}: {error}", path.display())))?;
            let lines =
                parse::env_file(&text).map_err(|error| Failure::new(USAGE, format!("{}: {error}", path.display())))?;
            variables.extend(lines);
        }
        variables.extend(self.environment.iter().cloned());
        let mut environment = BTreeMap::new();
        for (name, value) in variables {
            let value = match value {
                Some(value) => value,
                None => match env::var(&name) {
                    Ok(value) => value,
                    Err(env::VarError::NotPresent) => continue,
                    Err(env::VarError::NotUnicode(_)) => {
                        return Err(Failure::new(USAGE, format!("the value of {name} is not UTF-8")).into());
                    }
                },
            };
            environment.insert(name, value);
        }
        Ok(environment)
    }
}

/// A path as the node will take it: absolute, and text.
pub(crate) fn absolute(path: &std::path::Path) -> Result<String> {
    let absolute = std::path::absolute(path).with_context(|| format!("failed to find {}", path.display()))?;
    absolute
        .into_os_string()
        .into_string()
        .map_err(|path| Failure::new(USAGE, format!("the path {} is not UTF-8", path.display())).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        spec: SpecArgs,
    }

    #[test]
    fn only_path_is_passed_on_and_a_bare_name_copies_its_value() {
        let line = Line::parse_from(["x", "-e", "A=1", "-e", "HOME", "-e", "ACRI_SURELY_NOT_SET", "--name", "fixer"]);
        let spec = line.spec.spec(vec!["true".into()]).unwrap();
        let names: Vec<_> = spec.environment.keys().map(String::as_str).collect();
        let expected: &[&str] = if env::var("HOME").is_ok() { &["A", "HOME", "PATH"] } else { &["A", "PATH"] };
        assert_eq!(names, expected);
        assert_eq!(spec.labels.get("name").map(String::as_str), Some("fixer"));
        assert_eq!(spec.check(), Ok(()));
    }

    #[test]
    fn a_relative_directory_becomes_absolute_here() {
        let line = Line::parse_from(["x", "-C", "sub", "--orphan-after", "2m", "--node-lost-after", "5m"]);
        let spec = line.spec.spec(vec!["true".into()]).unwrap();
        let expected = env::current_dir().unwrap().join("sub").into_os_string().into_string().unwrap();
        assert_eq!(spec.working_directory, Some(expected));
        assert_eq!((spec.orphan_after_ms, spec.node_lost_after_ms), (Some(120_000), Some(300_000)));
    }
}
