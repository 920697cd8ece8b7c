//! Which agent or run a person means: ids by any unique prefix, the name
//! label, `AGENT/RUN`, or the newest.

use crate::failure::{Failure, USAGE};
use acri::{AgentId, ErrorBody, ErrorCode, RunId, Timestamp};
use acri_client::{Agent, Client};
use anyhow::Result;
use std::{collections::BTreeSet, fmt::Write as _};

/// The label that names an agent.
pub(crate) const NAME_LABEL: &str = "name";

/// A run: AGENT/RUN, RUN or AGENT, by prefixes; AGENT alone means its last.
#[derive(Debug, clap::Args)]
pub(crate) struct RunArg {
    /// RUN, AGENT (its last run) or AGENT/RUN; unique prefixes and names will
    /// do
    #[arg(value_name = "RUN", required_unless_present = "last")]
    pub(crate) run: Option<String>,
    /// The newest run
    #[arg(long, short = 'L', conflicts_with = "run")]
    pub(crate) last: bool,
}

/// Several runs.
#[derive(Debug, clap::Args)]
pub(crate) struct RunArgs {
    /// RUN, AGENT (its last run) or AGENT/RUN; unique prefixes and names will
    /// do
    #[arg(value_name = "RUN", required_unless_present = "last")]
    pub(crate) runs: Vec<String>,
    /// The newest run
    #[arg(long, short = 'L', conflicts_with = "runs")]
    pub(crate) last: bool,
}

/// An agent.
#[derive(Debug, clap::Args)]
pub(crate) struct AgentArg {
    /// AGENT, or a RUN of it; unique prefixes and names will do
    #[arg(value_name = "AGENT", required_unless_present = "last")]
    pub(crate) agent: Option<String>,
    /// The newest agent
    #[arg(long, short = 'L', conflicts_with = "agent")]
    pub(crate) last: bool,
}

/// An agent with, where one was named, a run of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Target {
    pub(crate) agent: AgentId,
    pub(crate) run: Option<RunId>,
}

/// What the search knows of an agent.
#[derive(Debug, Clone)]
struct Candidate {
    agent: AgentId,
    name: Option<String>,
    removed: bool,
    created: Timestamp,
    runs: Vec<(RunId, Timestamp)>,
}

impl Candidate {
    fn of(agent: &Agent) -> Self {
        let mut runs: Vec<_> = agent.runs().values().map(|run| (run.id, run.accepted_at)).collect();
        // The last run is last, even where two were accepted at one time.
        runs.sort_by_key(|(id, accepted)| (*accepted, agent.last_run().is_some_and(|last| last.id == *id)));
        Self {
            agent: agent.id(),
            name: agent.spec().labels.get(NAME_LABEL).cloned(),
            removed: agent.removed(),
            created: agent.created(),
            runs,
        }
    }
}

async fn candidates(client: &Client) -> Result<Vec<Candidate>> {
    Ok(client.agents().await?.agents.iter().map(Candidate::of).collect())
}

fn not_found(message: String) -> anyhow::Error {
    ErrorBody::new(ErrorCode::NotFound, message).into()
}

/// What was named: an agent, or a run.
pub(crate) async fn target(client: &Client, named: Option<&str>) -> Result<Target> {
    let Some(text) = named else { return newest(&candidates(client).await?) };
    if let Some(exact) = exact(text) {
        return Ok(exact);
    }
    search(&candidates(client).await?, text)
}

/// What was named, with the last run where an agent was.
pub(crate) async fn run(client: &Client, named: Option<&str>) -> Result<(AgentId, RunId)> {
    if let Some(Target { agent, run: Some(run) }) = named.and_then(exact) {
        return Ok((agent, run));
    }
    let candidates = candidates(client).await?;
    let target = match named {
        Some(text) => search(&candidates, text)?,
        None => newest_run(&candidates)?,
    };
    with_last_run(&candidates, target)
}

/// Several runs, each once.
pub(crate) async fn runs(client: &Client, arguments: &RunArgs) -> Result<Vec<(AgentId, RunId)>> {
    if arguments.last {
        return Ok(vec![run(client, None).await?]);
    }
    let mut found = BTreeSet::new();
    let mut order = Vec::new();
    for named in &arguments.runs {
        let one = run(client, Some(named)).await?;
        if found.insert(one) {
            order.push(one);
        }
    }
    Ok(order)
}

/// What was named, as an agent.
pub(crate) async fn agent(client: &Client, named: Option<&str>) -> Result<AgentId> {
    let Some(text) = named else {
        return Ok(newest_agent(&candidates(client).await?)?.agent);
    };
    // A whole id is taken for an agent's only if there is such an agent.
    if let Ok(agent) = text.parse::<AgentId>()
        && client.bus().last(agent).await.ok().flatten().is_some()
    {
        return Ok(agent);
    }
    Ok(search(&candidates(client).await?, text)?.agent)
}

/// `AGENT/RUN` in whole ids needs no search.
fn exact(text: &str) -> Option<Target> {
    let (agent, run) = text.split_once('/')?;
    Some(Target { agent: agent.parse().ok()?, run: Some(run.parse().ok()?) })
}

fn newest_agent(candidates: &[Candidate]) -> Result<&Candidate> {
    candidates
        .iter()
        .filter(|candidate| !candidate.removed)
        .max_by_key(|candidate| candidate.created)
        .ok_or_else(|| not_found("there is no agent yet".to_owned()))
}

fn newest(candidates: &[Candidate]) -> Result<Target> {
    newest_run(candidates).or_else(|_| Ok(Target { agent: newest_agent(candidates)?.agent, run: None }))
}

fn newest_run(candidates: &[Candidate]) -> Result<Target> {
    candidates
        .iter()
        .flat_map(|candidate| candidate.runs.iter().map(move |(run, accepted)| (*accepted, candidate.agent, *run)))
        .max_by_key(|(accepted, ..)| *accepted)
        .map(|(_, agent, run)| Target { agent, run: Some(run) })
        .ok_or_else(|| not_found("there is no run yet".to_owned()))
}

fn with_last_run(candidates: &[Candidate], target: Target) -> Result<(AgentId, RunId)> {
    if let Some(run) = target.run {
        return Ok((target.agent, run));
    }
    candidates
        .iter()
        .find(|candidate| candidate.agent == target.agent)
        .and_then(|candidate| candidate.runs.last())
        .map(|(run, _)| (target.agent, *run))
        .ok_or_else(|| not_found(format!("agent {} has no run yet", target.agent)))
}

fn begins(id: impl std::fmt::Display, prefix: &str) -> bool {
    let id = id.to_string();
    id.starts_with(prefix) || (!prefix.contains('-') && id.replace('-', "").starts_with(prefix))
}

fn search(candidates: &[Candidate], text: &str) -> Result<Target> {
    let prefix = text.to_ascii_lowercase();
    let (agent_prefix, run_prefix) = match prefix.split_once('/') {
        Some((agent, run)) => (agent, Some(run)),
        None => (prefix.as_str(), None),
    };
    let name = text.split_once('/').map_or(text, |(name, _)| name);
    let named: Vec<_> =
        candidates.iter().filter(|candidate| !candidate.removed && candidate.name.as_deref() == Some(name)).collect();
    let is_meant = |candidate: &&Candidate| begins(candidate.agent, agent_prefix);
    let agents: Vec<_> = if named.is_empty() { candidates.iter().filter(is_meant).collect() } else { named };
    let found: BTreeSet<Target> = match run_prefix {
        Some(run_prefix) => agents
            .iter()
            .flat_map(|candidate| candidate.runs.iter().map(move |(run, _)| (candidate.agent, *run)))
            .filter(|(_, run)| begins(run, run_prefix))
            .map(|(agent, run)| Target { agent, run: Some(run) })
            .collect(),
        None => {
            let whole = agents.iter().map(|candidate| Target { agent: candidate.agent, run: None });
            let runs = candidates.iter().flat_map(|candidate| {
                let runs = candidate.runs.iter().filter(|(run, _)| begins(run, &prefix));
                runs.map(|(run, _)| Target { agent: candidate.agent, run: Some(*run) })
            });
            whole.chain(runs).collect()
        }
    };
    let mut iter = found.iter();
    match (iter.next(), iter.next()) {
        (Some(target), None) if !text.is_empty() => Ok(*target),
        (None, _) => Err(not_found(format!("no agent, run or name begins with {text:?}"))),
        _ => Err(ambiguous(text, &found)),
    }
}

/// How many candidates an ambiguity lists.
const LISTED_MAX: usize = 8;

fn ambiguous(text: &str, found: &BTreeSet<Target>) -> anyhow::Error {
    let mut message = format!("{text:?} may be any of {}:", found.len());
    for target in found.iter().take(LISTED_MAX) {
        // Writing to a string does not fail.
        let _ = match target.run {
            Some(run) => write!(message, "\n      run   {run} of agent {}", target.agent),
            None => write!(message, "\n      agent {}", target.agent),
        };
    }
    if found.len() > LISTED_MAX {
        message.push_str("\n      …");
    }
    Failure::new(USAGE, message).hint("write more of the id").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "aaaa1111-0000-8000-8000-000000000001";
    const B: &str = "aaaa2222-0000-8000-8000-000000000002";
    const R1: &str = "bbbb1111-0000-8000-8000-000000000011";
    const R2: &str = "cccc1111-0000-8000-8000-000000000012";

    fn world() -> Vec<Candidate> {
        let at = Timestamp::from_micros;
        vec![
            Candidate {
                agent: A.parse().unwrap(),
                name: Some("fixer".into()),
                removed: false,
                created: at(1),
                runs: vec![(R1.parse().unwrap(), at(2)), (R2.parse().unwrap(), at(5))],
            },
            Candidate { agent: B.parse().unwrap(), name: None, removed: false, created: at(3), runs: vec![] },
        ]
    }

    fn found(text: &str) -> String {
        match search(&world(), text) {
            Ok(target) => format!("{}/{}", target.agent, target.run.map(|run| run.to_string()).unwrap_or_default()),
            Err(error) => format!("error {}", crate::failure::status_of(&error)),
        }
    }

    #[test]
    fn a_prefix_that_only_one_has_is_enough() {
        assert_eq!(found("aaaa1"), format!("{A}/"));
        assert_eq!(found("AAAA2222-00"), format!("{B}/"));
        assert_eq!(found("aaaa22220000"), format!("{B}/"));
        assert_eq!(found("bbbb"), format!("{A}/{R1}"));
        assert_eq!(found("aaaa/cc"), format!("{A}/{R2}"));
        assert_eq!(found("fixer"), format!("{A}/"));
        assert_eq!(found("fixer/bb"), format!("{A}/{R1}"));
    }

    #[test]
    fn what_is_unknown_and_what_is_ambiguous_are_told_apart() {
        assert_eq!(found("dddd"), "error 3");
        assert_eq!(found("aaaa1/dd"), "error 3");
        assert_eq!(found("aaaa"), "error 2");
        assert_eq!(found(""), "error 2");
    }

    #[test]
    fn the_newest_is_the_last_run_that_was_accepted_and_an_agent_means_its_last_run() {
        assert_eq!(newest_run(&world()).unwrap().run, Some(R2.parse().unwrap()));
        assert_eq!(newest_agent(&world()).unwrap().agent, B.parse().unwrap());
        let target = search(&world(), "aaaa1").unwrap();
        assert_eq!(with_last_run(&world(), target).unwrap().1, R2.parse().unwrap());
        let none = search(&world(), "aaaa2").unwrap();
        assert_eq!(crate::failure::status_of(&with_last_run(&world(), none).unwrap_err()), 3);
    }
}
