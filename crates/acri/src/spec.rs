//! What an orchestrator asks for when it creates an agent (spec, section 1).

use crate::{
    id::HarnessType,
    limits::{
        COMMAND_ARGUMENTS_MAX, COMMAND_BYTES_MAX, LABEL_BYTES_MAX, LABELS_MAX, LOST_MARGIN_MIN, NODE_LOST_AFTER,
        NODE_LOST_AFTER_MAX, ORPHAN_AFTER, ORPHAN_AFTER_MAX,
    },
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, time::Duration};

/// The declaration of an agent.
///
/// A field that this version does not know is refused, not skipped: a sandbox
/// constraint that nobody enforces must not look accepted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentSpec {
    /// The harness type that runs it.
    pub harness: HarnessType,
    /// Program and arguments, for harnesses that are a command. The program is
    /// looked up on the `PATH` of `environment` unless it contains a slash.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// Absolute path of the working directory on the node. Missing: a fresh
    /// directory of the agent's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_directory: Option<String>,
    /// The environment, which is built from nothing plus these. Missing
    /// `PATH`: `/usr/local/bin:/usr/bin:/bin`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// What counts as success of a plain process.
    #[serde(default)]
    pub completion: Completion,
    /// What the program finds on its standard input.
    #[serde(default)]
    pub stdin: Stdin,
    /// Free labels, for selection and display.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// A local harness whose node is silent for this long is killed by its
    /// holder. A second to 30 days; missing: 15 minutes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub orphan_after_ms: Option<u64>,
    /// A run whose node is silent for this long is given up. Missing: 20
    /// minutes. Exceeds `orphan_after_ms` by at least 30 s; at most 60 days.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_lost_after_ms: Option<u64>,
}

/// What counts as success of a plain process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Completion {
    /// It ends with status 0.
    #[default]
    Exit,
    /// It says so in a record.
    Record,
}

/// What the program finds on its standard input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stdin {
    /// Nothing: end of file at once.
    #[default]
    None,
    /// Injections as records.
    Records,
}

/// A field of a request that cannot be accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("field `{field}` {problem}")]
pub struct Invalid {
    /// The field's name on the wire.
    pub field: &'static str,
    /// What is wrong, with the limit where there is one.
    pub problem: String,
}

impl Invalid {
    /// A field and its problem.
    #[must_use]
    pub fn new(field: &'static str, problem: impl Into<String>) -> Self {
        Self { field, problem: problem.into() }
    }
}

impl AgentSpec {
    /// A spec with nothing but a harness and a command.
    #[must_use]
    pub fn new(harness: HarnessType, command: Vec<String>) -> Self {
        Self {
            harness,
            command,
            working_directory: None,
            environment: BTreeMap::new(),
            completion: Completion::default(),
            stdin: Stdin::default(),
            labels: BTreeMap::new(),
            orphan_after_ms: None,
            node_lost_after_ms: None,
        }
    }

    /// How long a local harness may live without an owner.
    #[must_use]
    pub fn orphan_after(&self) -> Duration {
        self.orphan_after_ms.map_or(ORPHAN_AFTER, Duration::from_millis)
    }

    /// After how long a silent node's run is given up.
    #[must_use]
    pub fn node_lost_after(&self) -> Duration {
        self.node_lost_after_ms.map_or(NODE_LOST_AFTER, Duration::from_millis)
    }

    /// Checks every limit that does not depend on the node.
    ///
    /// # Errors
    /// The first field that breaks its limit.
    pub fn check(&self) -> Result<(), Invalid> {
        if self.command.len() > COMMAND_ARGUMENTS_MAX {
            return Err(Invalid::new("command", format!("has more than {COMMAND_ARGUMENTS_MAX} arguments")));
        }
        let environment: usize = self.environment.iter().map(|(name, value)| name.len() + value.len() + 2).sum();
        let bytes = environment + self.command.iter().map(|argument| argument.len() + 1).sum::<usize>();
        if bytes > COMMAND_BYTES_MAX {
            return Err(Invalid::new(
                "command",
                format!("and `environment` have {bytes} bytes together, more than {COMMAND_BYTES_MAX}"),
            ));
        }
        if self.command.iter().any(|argument| argument.contains('\0')) {
            return Err(Invalid::new("command", "contains a zero byte"));
        }
        for (name, value) in &self.environment {
            if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
                let name: String = name.chars().take(80).collect();
                return Err(Invalid::new("environment", format!("has a name or value that cannot be set: {name:?}")));
            }
        }
        if let Some(directory) = &self.working_directory
            && (!directory.starts_with('/') || directory.contains('\0') || directory.len() > 4096)
        {
            return Err(Invalid::new("working_directory", "must be an absolute path of at most 4096 bytes"));
        }
        if self.labels.len() > LABELS_MAX {
            return Err(Invalid::new("labels", format!("has more than {LABELS_MAX} entries")));
        }
        if self
            .labels
            .iter()
            .any(|(name, value)| name.is_empty() || name.len() > LABEL_BYTES_MAX || value.len() > LABEL_BYTES_MAX)
        {
            return Err(Invalid::new(
                "labels",
                format!("has an empty name, or a name or value above {LABEL_BYTES_MAX} bytes"),
            ));
        }
        if self.orphan_after() < Duration::from_secs(1) {
            return Err(Invalid::new("orphan_after_ms", "is below 1000"));
        }
        for (field, asked, max) in [
            ("orphan_after_ms", self.orphan_after(), ORPHAN_AFTER_MAX),
            ("node_lost_after_ms", self.node_lost_after(), NODE_LOST_AFTER_MAX),
        ] {
            if asked > max {
                return Err(Invalid::new(field, format!("is above {}", max.as_millis())));
            }
        }
        if self.node_lost_after() < self.orphan_after().saturating_add(LOST_MARGIN_MIN) {
            return Err(Invalid::new(
                "node_lost_after_ms",
                format!("must exceed `orphan_after_ms` by at least {} ms", LOST_MARGIN_MIN.as_millis()),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(orphan: Option<u64>, lost: Option<u64>) -> Option<&'static str> {
        let harness = "process".parse().unwrap();
        let spec = AgentSpec {
            orphan_after_ms: orphan,
            node_lost_after_ms: lost,
            ..AgentSpec::new(harness, vec!["true".to_owned()])
        };
        spec.check().err().map(|invalid| invalid.field)
    }

    #[test]
    fn what_is_absurdly_long_or_short_is_refused_by_its_field() {
        let (orphan, lost) = (Some("orphan_after_ms"), Some("node_lost_after_ms"));
        let millis = |limit: Duration| u64::try_from(limit.as_millis()).unwrap();
        let (orphan_max, lost_max) = (millis(ORPHAN_AFTER_MAX), millis(NODE_LOST_AFTER_MAX));
        let cases = [
            (None, None, None),
            (Some(1_000), Some(31_000), None),
            (Some(999), None, orphan),
            (Some(1_000), Some(30_999), lost),
            (Some(orphan_max), Some(lost_max), None),
            (Some(orphan_max + 1), Some(lost_max), orphan),
            (Some(1_000), Some(lost_max + 1), lost),
            (Some(u64::MAX), Some(u64::MAX), orphan),
            (None, Some(u64::MAX), lost),
        ];
        for (orphan_after, lost_after, expected) in cases {
            assert_eq!(refused(orphan_after, lost_after), expected, "{orphan_after:?}, {lost_after:?}");
        }
    }
}
