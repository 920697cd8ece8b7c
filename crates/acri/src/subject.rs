//! Where each message goes: the only place in which a subject is spelled.
//!
//! Root `acri.v1`. A run's place is `_` where the fact or the log is the
//! agent's own.

use crate::id::{self, AgentId, HarnessType, NodeId, RunId};
use std::{fmt, str::FromStr};

/// First tokens of every subject.
pub const ROOT: &str = "acri.v1";
const NO_RUN: &str = "_";

macro_rules! verbs {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name { $($(#[$variant_doc])* $variant,)* }

        impl $name {
            /// Every verb.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// The token.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }

            fn of(token: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|verb| verb.as_str() == token)
            }
        }
    };
}

verbs! {
    /// What any node that offers a harness answers.
    HarnessVerb {
        /// Create an agent.
        Create = "create",
        /// Tell the capabilities.
        Capabilities = "capabilities",
    }
}
verbs! {
    /// What an agent's owner answers for the agent.
    AgentVerb {
        /// Start a run.
        Start = "start",
        /// Tell the status of the agent and its last run.
        Status = "status",
        /// Give the agent up.
        Remove = "remove",
    }
}
verbs! {
    /// What an agent's owner answers for a run.
    RunVerb {
        /// Tell its status.
        Status = "status",
        /// Halt it gracefully.
        Stop = "stop",
        /// End it.
        Kill = "kill",
    }
}

/// A concrete subject.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Subject {
    /// `acri.v1.cmd.harness.<harness>.<verb>`, a queue group.
    Harness(HarnessType, HarnessVerb),
    /// `acri.v1.cmd.agent.<agent>._.<verb>`
    Agent(AgentId, AgentVerb),
    /// `acri.v1.cmd.agent.<agent>.<run>.<verb>`
    Run(AgentId, RunId, RunVerb),
    /// `acri.v1.event.<shard>.<agent>.<run or _>.<type>`; the type has two
    /// tokens.
    Event(AgentId, Option<RunId>, String),
    /// `acri.v1.log.<shard>.<agent>.<run or _>`
    Log(AgentId, Option<RunId>),
    /// `acri.v1.node.<node>.heartbeat`
    Heartbeat(NodeId),
}

/// Text that is no subject of ours.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// No channel has this shape.
    #[error("{0:?} is no subject of this contract")]
    Unknown(String),
    /// A token is no id.
    #[error(transparent)]
    Id(#[from] id::Error),
    /// The channel is known, the verb is not.
    #[error("there is no verb {0:?} here")]
    Verb(String),
    /// The shard is not the agent's.
    #[error("agent {agent} is in shard {expected}, not {found:?}")]
    Shard {
        /// The agent.
        agent: AgentId,
        /// Its shard.
        expected: char,
        /// What the subject says.
        found: String,
    },
}

fn shown(text: &str) -> String {
    text.chars().take(200).collect()
}

struct Place(Option<RunId>);

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(run) => run.fmt(formatter),
            None => formatter.write_str(NO_RUN),
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Harness(harness, verb) => {
                write!(formatter, "{ROOT}.cmd.harness.{harness}.{}", verb.as_str())
            }
            Self::Agent(agent, verb) => {
                write!(formatter, "{ROOT}.cmd.agent.{agent}.{NO_RUN}.{}", verb.as_str())
            }
            Self::Run(agent, run, verb) => {
                write!(formatter, "{ROOT}.cmd.agent.{agent}.{run}.{}", verb.as_str())
            }
            Self::Event(agent, run, kind) => {
                write!(formatter, "{ROOT}.event.{}.{agent}.{}.{kind}", agent.shard(), Place(*run))
            }
            Self::Log(agent, run) => {
                write!(formatter, "{ROOT}.log.{}.{agent}.{}", agent.shard(), Place(*run))
            }
            Self::Heartbeat(node) => write!(formatter, "{ROOT}.node.{node}.heartbeat"),
        }
    }
}

fn in_shard(shard: &str, agent: &str) -> Result<AgentId, Error> {
    let agent: AgentId = agent.parse()?;
    if shard.len() == 1 && shard.starts_with(agent.shard()) {
        Ok(agent)
    } else {
        Err(Error::Shard { agent, expected: agent.shard(), found: shown(shard) })
    }
}

fn place(token: &str) -> Result<Option<RunId>, Error> {
    if token == NO_RUN { Ok(None) } else { Ok(Some(token.parse()?)) }
}

impl FromStr for Subject {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let unknown = || Error::Unknown(shown(text));
        let rest = text.strip_prefix(ROOT).and_then(|rest| rest.strip_prefix('.')).ok_or_else(unknown)?;
        let tokens: Vec<&str> = rest.split('.').take(8).collect();
        match tokens.as_slice() {
            ["cmd", "harness", harness, verb] => {
                let verb = HarnessVerb::of(verb).ok_or_else(|| Error::Verb(shown(verb)))?;
                Ok(Self::Harness(harness.parse()?, verb))
            }
            ["cmd", "agent", agent, NO_RUN, verb] => {
                let verb = AgentVerb::of(verb).ok_or_else(|| Error::Verb(shown(verb)))?;
                Ok(Self::Agent(agent.parse()?, verb))
            }
            ["cmd", "agent", agent, run, verb] => {
                let verb = RunVerb::of(verb).ok_or_else(|| Error::Verb(shown(verb)))?;
                Ok(Self::Run(agent.parse()?, run.parse()?, verb))
            }
            ["event", shard, agent, run, family, name] if event_type_is_plain(family, name) => {
                Ok(Self::Event(in_shard(shard, agent)?, place(run)?, format!("{family}.{name}")))
            }
            ["log", shard, agent, run] => Ok(Self::Log(in_shard(shard, agent)?, place(run)?)),
            ["node", node, "heartbeat"] => Ok(Self::Heartbeat(node.parse()?)),
            _ => Err(unknown()),
        }
    }
}

fn event_type_is_plain(family: &str, name: &str) -> bool {
    let plain = |token: &str| {
        !token.is_empty()
            && token.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
    };
    plain(family) && plain(name)
}

/// Subjects with wildcards, for subscriptions and for the compare-and-set over
/// an agent.
pub mod filter {
    use super::{AgentId, HarnessType, ROOT, RunId};

    /// Everything of one agent's event sequence.
    #[must_use]
    pub fn agent_events(agent: AgentId) -> String {
        format!("{ROOT}.event.{}.{agent}.>", agent.shard())
    }

    /// The events of one run.
    #[must_use]
    pub fn run_events(agent: AgentId, run: RunId) -> String {
        format!("{ROOT}.event.{}.{agent}.{run}.>", agent.shard())
    }

    /// Every event.
    #[must_use]
    pub fn all_events() -> String {
        format!("{ROOT}.event.>")
    }

    /// Every log frame.
    #[must_use]
    pub fn all_logs() -> String {
        format!("{ROOT}.log.>")
    }

    /// Every command to one agent and its runs.
    #[must_use]
    pub fn agent_commands(agent: AgentId) -> String {
        format!("{ROOT}.cmd.agent.{agent}.*.*")
    }

    /// Every command to a harness type.
    #[must_use]
    pub fn harness_commands(harness: &HarnessType) -> String {
        format!("{ROOT}.cmd.harness.{harness}.*")
    }

    /// Every node's heartbeat.
    #[must_use]
    pub fn heartbeats() -> String {
        format!("{ROOT}.node.*.heartbeat")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_subject() -> impl Strategy<Value = Subject> {
        (any::<u128>(), any::<u128>(), 0_usize..12).prop_map(|(agent, run, which)| {
            let agent = AgentId::from_uuid(uuid::Uuid::from_u128(agent));
            let run = RunId::from_uuid(uuid::Uuid::from_u128(run));
            match which {
                0 => Subject::Harness("acp:gemini".parse().unwrap(), HarnessVerb::Create),
                1 => Subject::Harness("process".parse().unwrap(), HarnessVerb::Capabilities),
                2..=4 => Subject::Agent(agent, AgentVerb::ALL[which - 2]),
                5..=7 => Subject::Run(agent, run, RunVerb::ALL[which - 5]),
                8 => Subject::Event(agent, Some(run), "run.failed".into()),
                9 => Subject::Event(agent, None, "agent.assigned".into()),
                10 => Subject::Log(agent, Some(run)),
                _ => Subject::Heartbeat("node-1".parse().unwrap()),
            }
        })
    }

    proptest! {
        #[test]
        fn a_rendered_subject_parses_to_itself(subject in any_subject()) {
            prop_assert_eq!(subject.to_string().parse::<Subject>().unwrap(), subject);
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in "(acri\\.v1\\.)?[ -~]{0,80}") {
            if let Ok(subject) = text.parse::<Subject>() {
                prop_assert_eq!(subject.to_string(), text);
            }
        }
    }

    #[test]
    fn an_event_in_a_foreign_shard_is_refused() {
        let agent = AgentId::from_uuid(uuid::Uuid::from_u128(0xa));
        let text = format!("acri.v1.event.b.{agent}._.agent.created");
        assert!(matches!(text.parse::<Subject>(), Err(Error::Shard { expected: 'a', .. })));
    }

    #[test]
    fn an_unknown_verb_is_told_apart_from_an_unknown_subject() {
        let agent = AgentId::from_uuid(uuid::Uuid::from_u128(0xa));
        assert!(matches!(format!("acri.v1.cmd.agent.{agent}._.dance").parse::<Subject>(), Err(Error::Verb(_))));
        assert!(matches!("acri.v2.cmd".parse::<Subject>(), Err(Error::Unknown(_))));
    }
}
