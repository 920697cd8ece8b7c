//! `verify`: is this history what was written?

use crate::{
    app::App,
    export,
    failure::{NO, Silent},
    output::{self, Format, Out},
    resolve,
};
use acri::{
    AgentId, Event, RunId, StreamSeq, Subject,
    event::RunLogsSealed,
    id::{LogSeq, Sha256Digest},
    log::{ResumeToken, decode},
};
use acri_bus::port::{EventSelection, Recorded, Until};
use acri_client::{Client, EventItem, EventTypes, EventsSince};
use acri_core::{
    appender::Stored,
    check::{Report, Verifier},
};
use anyhow::Result;
use futures_util::StreamExt as _;
use serde_json::json;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri verify                        everything on the bus
  acri verify fixer --logs           and the log of each of its ended runs
  acri verify fixer --save copy.jsonl
  acri verify --file copy.jsonl      a copy, without any bus

Each event bears the SHA-256 of the one before it, so a changed, missing or
reordered event is found and named. With --logs the log of each ended run is
held against the sum in its `run.logs_sealed`. What nobody can find: that the end was cut
off, or that all was written anew with a node's credentials. A copy has a sum
over itself, which finds a changed end too. Exit status 1: damage was found.
")]
pub(crate) struct Args {
    /// Only this agent
    #[arg(value_name = "AGENT", conflicts_with = "all")]
    agent: Option<String>,
    /// All agents, which is the default
    #[arg(long)]
    all: bool,
    /// A copy that `--save` made, instead of the bus
    #[arg(long, value_name = "FILE", conflicts_with_all = ["agent", "all"])]
    file: Option<PathBuf>,
    /// Read the logs of ended runs too, and hold them against what was sealed
    #[arg(long, conflicts_with = "file")]
    logs: bool,
    /// Save what is verified: one JSON object a line, with the stored bytes
    #[arg(long, value_name = "FILE", conflicts_with = "file")]
    save: Option<PathBuf>,
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let mut damage = Vec::new();
    let mut logs = Logs::default();
    let report = match &args.file {
        Some(path) => {
            let copy = export::read(path)?;
            damage = copy.damage.iter().map(|line| format!("the copy: {line}")).collect();
            let mut verifier = Verifier::default();
            copy.events.iter().for_each(|(subject, stored)| verifier.push(subject, stored));
            verifier.finish()
        }
        None => {
            let client = app.client().await?;
            let agent = match &args.agent {
                Some(name) => Some(resolve::agent(&client, Some(name)).await?),
                None => None,
            };
            let report = over_the_stream(&client, agent, args.save.as_deref()).await?;
            if args.logs {
                logs = Logs::verify(&client, agent).await?;
            }
            report
        }
    };
    damage.extend(logs.problems.iter().cloned());
    tell(&mut app.out, &report, &damage, &logs)?;
    if report.problem_count == 0 && damage.is_empty() { Ok(()) } else { Err(Silent(NO).into()) }
}

/// Verifies what the bus holds, and saves it as it goes.
pub(crate) async fn over_the_stream(
    client: &Client,
    agent: Option<AgentId>,
    save: Option<&std::path::Path>,
) -> Result<Report> {
    let selection = agent.map_or(EventSelection::All, EventSelection::Agent);
    let mut copy = save.map(export::Writer::create).transpose()?;
    let mut verifier = Verifier::default();
    let mut events = client.bus().read(selection, StreamSeq(1), Until::Now).await?;
    while let Some(recorded) = events.next().await {
        let (subject, stored) = pair(recorded?);
        verifier.push(&subject, &stored);
        if let Some(copy) = &mut copy {
            copy.event(&subject, &stored)?;
        }
    }
    if let Some(copy) = copy {
        copy.finish()?;
    }
    Ok(verifier.finish())
}

fn pair(recorded: Recorded) -> (Subject, Stored) {
    let stored = Stored { seq: recorded.seq, time: recorded.time, bytes: recorded.bytes.clone() };
    (recorded.subject, stored)
}

/// What was found in the logs of sealed runs.
#[derive(Debug, Default)]
struct Logs {
    /// Runs whose log is whole, and is what was sealed.
    whole: usize,
    /// Runs of whose log retention took the beginning: nothing can be said.
    partly_gone: usize,
    problems: Vec<String>,
}

/// What `run.logs_sealed` says of a log.
struct Sealed {
    agent: AgentId,
    run: RunId,
    data: RunLogsSealed,
}

impl Logs {
    async fn verify(client: &Client, agent: Option<AgentId>) -> Result<Self> {
        let selection = agent.map_or(EventSelection::All, EventSelection::Agent);
        let types = EventTypes::Only(["run.logs_sealed".to_owned()].into());
        let mut events = client.events(selection, types, EventsSince::Start, false);
        let mut found = Self::default();
        while let Some(item) = events.next().await {
            if let EventItem::Event(event) = item?
                && let (Some(run), Event::RunLogsSealed(data)) = (event.envelope.run, event.envelope.event)
            {
                found.log(client, &Sealed { agent: event.envelope.agent, run, data }).await?;
            }
        }
        Ok(found)
    }

    async fn log(&mut self, client: &Client, sealed: &Sealed) -> Result<()> {
        let mut frames = client.bus().read_frames(sealed.agent, Some(sealed.run), StreamSeq(1), Until::Now).await?;
        let mut sum = LogSum::default();
        while let Some(frame) = frames.next().await {
            let frame = frame?;
            if frame.mark.is_none() {
                let what = "no owner of the run wrote this message";
                self.problems.push(format!("log of run {}, at {}: {what}", sealed.run, frame.seq));
                continue;
            }
            match sum.frame(&frame.bytes) {
                Ok(()) => {}
                Err(Odd::PartlyGone) => {
                    self.partly_gone += 1;
                    return Ok(());
                }
                Err(Odd::Wrong(what)) => {
                    self.problems.push(format!("log of run {}, frame at {}: {what}", sealed.run, frame.seq));
                    return Ok(());
                }
            }
        }
        match sum.end(&sealed.data) {
            Ok(()) => self.whole += 1,
            Err(Odd::PartlyGone) => self.partly_gone += 1,
            Err(Odd::Wrong(what)) => self.problems.push(format!("log of run {}: {what}", sealed.run)),
        }
        Ok(())
    }
}

/// The chain over a run's frames, as its writer made it.
struct LogSum {
    next: LogSeq,
    chain: Sha256Digest,
}

impl Default for LogSum {
    fn default() -> Self {
        Self { next: LogSeq(1), chain: ResumeToken::start().chain }
    }
}

enum Odd {
    PartlyGone,
    Wrong(String),
}

impl LogSum {
    fn frame(&mut self, bytes: &[u8]) -> Result<(), Odd> {
        let frame = decode::frame(bytes).map_err(|error| Odd::Wrong(error.to_string()))?;
        let (first, behind) = (frame.sequence, frame.next_sequence());
        if behind <= self.next {
            // Stored twice, which retention can do; readers skip it too.
            return Ok(());
        }
        if self.next == LogSeq(1) && first > self.next {
            return Err(Odd::PartlyGone);
        }
        if first != self.next {
            return Err(Odd::Wrong(format!("begins with log event {first}, and {} is missing", self.next)));
        }
        self.next = behind;
        self.chain = self.chain.chained(bytes);
        Ok(())
    }

    fn end(&self, sealed: &RunLogsSealed) -> Result<(), Odd> {
        let count = self.next.0 - 1;
        match (count, sealed.count.0) {
            (0, 1..) => Err(Odd::PartlyGone),
            (found, wanted) if found != wanted => {
                Err(Odd::Wrong(format!("has {found} log events, and {wanted} were sealed")))
            }
            _ if self.chain != sealed.chain => Err(Odd::Wrong("was changed: its sum is not the sealed one".to_owned())),
            _ => Ok(()),
        }
    }
}

fn tell(out: &mut Out, report: &Report, damage: &[String], logs: &Logs) -> Result<()> {
    let intact = report.problem_count == 0 && damage.is_empty();
    if out.format != Format::Table {
        let problems: Vec<_> = report
            .problems
            .iter()
            .map(|problem| {
                json!({
                    "stream_sequence": problem.seq,
                    "agent": problem.agent,
                    "run": problem.run,
                    "problem": problem.what,
                })
            })
            .collect();
        return out.document(&json!({
            "intact": intact,
            "agents": report.agents,
            "runs": report.runs,
            "events": report.events,
            "problem_count": report.problem_count,
            "problems": problems,
            "other_problems": damage,
            "logs": {"whole": logs.whole, "partly_gone": logs.partly_gone},
        }));
    }
    for line in damage {
        out.line(format_args!("DAMAGED  {line}"))?;
    }
    // What is wrong with one event stands in one line.
    for problems in report.problems.chunk_by(|one, other| one.seq == other.seq) {
        let [first, ..] = problems else { continue };
        let whose = match (first.agent, first.run) {
            (Some(agent), Some(run)) => format!(" (agent {agent}, run {run})"),
            (Some(agent), None) => format!(" (agent {agent})"),
            (None, _) => String::new(),
        };
        let what: Vec<_> = problems.iter().map(|problem| problem.what.as_str()).collect();
        out.line(format_args!("DAMAGED  event at {}{whose}: {}", first.seq, output::plain(&what.join("; "))))?;
    }
    if report.problem_count > report.problems.len() {
        out.line(format_args!("DAMAGED  and {} more", report.problem_count - report.problems.len()))?;
    }
    if out.quiet {
        return Ok(());
    }
    let verdict = if intact { "intact" } else { "not intact" };
    out.line(format_args!("{} events of {} agents and {} runs: {verdict}", report.events, report.agents, report.runs))?;
    if logs.whole + logs.partly_gone > 0 {
        let gone = match logs.partly_gone {
            0 => String::new(),
            gone => format!(", of {gone} retention took the beginning"),
        };
        out.line(format_args!("logs of {} ended runs are as sealed{gone}", logs.whole))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use acri::{
        Payload, Timestamp, codec,
        log::{LogFrame, LogRecord, LogType, Origin},
    };

    fn frame(sequence: u64, lines: &[&str]) -> Vec<u8> {
        let record = |line: &&str| LogRecord {
            time: Timestamp::from_micros(1),
            kind: LogType::Message,
            payload: Payload::text(*line),
            stream: None,
            origin: Origin::Passthrough,
            part: None,
            more: false,
        };
        let agent = "aaaa1111-0000-8000-8000-000000000001".parse().unwrap();
        let events = lines.iter().map(record).collect();
        codec::to_msgpack(&LogFrame { agent, run: None, sequence: LogSeq(sequence), events }).unwrap()
    }

    fn verdict(frames: &[Vec<u8>]) -> String {
        let written = [frame(1, &["a", "b"]), frame(3, &["c"])];
        let chain = written.iter().fold(Sha256Digest::default(), |chain, bytes| chain.chained(bytes));
        let sealed = RunLogsSealed { count: LogSeq(3), chain, gap: false };
        let mut sum = LogSum::default();
        let outcome = frames.iter().try_for_each(|bytes| sum.frame(bytes)).and_then(|()| sum.end(&sealed));
        match outcome {
            Ok(()) => "whole".to_owned(),
            Err(Odd::PartlyGone) => "partly gone".to_owned(),
            Err(Odd::Wrong(what)) => what,
        }
    }

    #[test]
    fn a_changed_or_missing_log_frame_is_found_and_a_doubled_one_is_harmless() {
        let (one, two) = (frame(1, &["a", "b"]), frame(3, &["c"]));
        assert_eq!(verdict(&[one.clone(), two.clone()]), "whole");
        assert_eq!(verdict(&[one.clone(), one.clone(), two.clone()]), "whole");
        assert_eq!(verdict(&[two]), "partly gone");
        assert_eq!(verdict(&[]), "partly gone");
        assert_eq!(verdict(std::slice::from_ref(&one)), "has 2 log events, and 3 were sealed");
        assert_eq!(verdict(&[one, frame(3, &["x"])]), "was changed: its sum is not the sealed one");
        let hole = [frame(1, &["a"]), frame(3, &["c"])];
        assert_eq!(verdict(&hole), "begins with log event 3, and 2 is missing");
    }
}
