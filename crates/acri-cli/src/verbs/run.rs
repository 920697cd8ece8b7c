//! `run`: create, start, follow, and end with the program's status.

use crate::{
    app::App,
    failure::{self, Failure, OUTPUT_CLOSED, RUN_FAILED, RUN_NO_PROGRAM, RUN_NOT_EXECUTABLE, Silent, USAGE},
    output::{self, Closed, Format},
    parse,
    signals::Signals,
    verbs::{logs::Printer, rm, show, spec::SpecArgs},
};
use acri::{
    AgentId, ErrorBody, ErrorCode, Payload, RunId,
    command::OnExpiry,
    event::{ExitStatus, FailReason},
    status::{RunStatus, Termination},
};
use acri_client::{Client, LogItem, Since};
use anyhow::{Context as _, Result};
use futures_util::{FutureExt as _, StreamExt as _, future::BoxFuture, stream::BoxStream};
use serde_json::json;
use std::{path::Path, time::Duration};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri run -- make test
  acri run --name fixer -e API_KEY --task 'fix the bug' -- python3 agent.py
  acri run --detach -- ./long.sh      prints AGENT/RUN and returns
  acri run --rm -- sh -c 'echo done; exit 3'

The program's stdout and stderr come through, byte for byte; a last line without
its line feed gets one. Ctrl-C asks it to stop (SIGTERM, then --grace), a second
one kills its whole process tree, a third one leaves it alone.

Exit status: the program's own; 128 + n if signal n ended it; 125 if acri
failed or the run was lost; 126 if the program cannot be executed; 127 if there
is no such program.
")]
pub(crate) struct Args {
    #[command(flatten)]
    spec: SpecArgs,
    /// Give the agent a fresh directory instead of the current one
    #[arg(long, conflicts_with = "cwd")]
    fresh: bool,
    /// What the agent is to do; a plain program finds it in ACRI_TASK
    #[arg(long, value_name = "TEXT", default_value = "")]
    task: String,
    /// Print AGENT/RUN and return
    #[arg(long, short = 'd')]
    detach: bool,
    /// Remove the agent when the run has ended
    #[arg(long, conflicts_with = "detach")]
    rm: bool,
    /// How long the program has to end after Ctrl-C
    #[arg(long, short = 'g', value_name = "DURATION", default_value = "30s", value_parser = parse::duration)]
    grace: Duration,
    /// Program and arguments
    #[arg(last = true, value_name = "COMMAND", required = true)]
    pub(crate) command: Vec<String>,
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let outcome = run(app, args).await.and_then(|status| app.out.flush().map(|()| status));
    let status = match outcome {
        Ok(status) => status,
        Err(error) if error.is::<Closed>() => OUTPUT_CLOSED,
        Err(error) => {
            if let Some(text) = failure::text_of(&error) {
                app.out.failure(text);
            }
            status_of(&error)
        }
    };
    if status == failure::OK { Ok(()) } else { Err(Silent(status).into()) }
}

/// docker's habit: a program that cannot be run is told apart from a fault.
fn status_of(error: &anyhow::Error) -> u8 {
    if let Some(failure) = error.downcast_ref::<Failure>().filter(|failure| failure.status == USAGE) {
        return failure.status;
    }
    match failure::body_of(error) {
        Some(ErrorBody { code, message, field: Some(field), .. }) if field == "command" => {
            status_of_command(code, &message)
        }
        _ => RUN_FAILED,
    }
}

fn status_of_command(code: ErrorCode, message: &str) -> u8 {
    // Not by what stands in quotes: that is the program's own name.
    let message = message.split('"').step_by(2).collect::<String>().to_ascii_lowercase();
    let has = |words: &[&str]| words.iter().any(|word| message.contains(word));
    if has(&["permission", "not be executed", "exec format", "is a directory"]) {
        RUN_NOT_EXECUTABLE
    } else if code == ErrorCode::NotFound || has(&["no such", "not found", "no file", "not on the path"]) {
        RUN_NO_PROGRAM
    } else {
        RUN_FAILED
    }
}

async fn run(app: &mut App, args: Args) -> Result<u8> {
    let mut spec = args.spec.spec(args.command)?;
    if spec.working_directory.is_none() && !args.fresh {
        spec.working_directory = Some(crate::verbs::spec::absolute(Path::new("."))?);
    }
    let mut signals = Signals::new()?;
    let client = app.client().await?;
    let begun = async {
        let agent = client.create(spec).await?;
        client.start(agent.agent, Payload::text(args.task)).await
    };
    let handle = tokio::select! {
        handle = begun => handle?,
        signal = signals.next() => {
            app.out.note("acri: interrupted before the run began; `acri ps -a` shows what came of it")?;
            return Ok(128 + signal.number());
        }
    };
    if args.detach {
        let shown = format!("{}/{}", handle.agent, handle.run);
        match app.out.format {
            Format::Table => app.out.line(shown)?,
            Format::Json | Format::Yaml => app.out.document(&output::json(&handle)?)?,
        }
        return Ok(failure::OK);
    }
    let follow = Follow::new(client.clone(), handle.agent, handle.run, args.grace);
    let status = follow.until_the_end(app, &mut signals).await?;
    if args.rm {
        rm::seal(&client, handle.agent, handle.run).await?;
        client.remove(handle.agent, "acri run --rm").await?;
    }
    report(app, &client, handle.agent, &status).await
}

/// The exit status of an ended run, and a word where it is not the program's
/// own.
async fn report(app: &mut App, client: &Client, agent: AgentId, status: &RunStatus) -> Result<u8> {
    // Read again: meanwhile its log is complete.
    let folded = client.agent(agent).await?;
    let known = folded.run(status.run);
    let failure = known.and_then(|run| run.end.as_ref()).and_then(|end| end.failure);
    let status = &known.map_or_else(|| status.clone(), acri_client::Run::status);
    if app.out.format != Format::Table {
        app.out.item(&json!({"type": "ended", "status": output::json(status)?}))?;
    }
    let said = match status.termination {
        Some(Termination::Killed) => true,
        Some(Termination::Failed) => !matches!(failure, Some(FailReason::Exit) | None),
        Some(Termination::Completed | Termination::Stopped) | None => false,
    };
    if said {
        app.out.note(format_args!("acri: run {} {}: {}", status.run, show::state(status), show::detail(status)))?;
    }
    Ok(status_of_run(status, failure))
}

fn status_of_run(status: &RunStatus, failure: Option<FailReason>) -> u8 {
    match (status.exit, status.termination) {
        (Some(ExitStatus { code: Some(code), .. }), _) => u8::try_from(code & 0xff).unwrap_or(RUN_FAILED),
        (Some(ExitStatus { signal: Some(signal), .. }), _) => u8::try_from(128 + (signal & 0x7f)).unwrap_or(RUN_FAILED),
        (_, Some(Termination::Completed)) => failure::OK,
        (_, Some(Termination::Killed)) => 128 + 9,
        (_, Some(Termination::Stopped)) => 128 + 15,
        _ if failure == Some(FailReason::SpawnFailed) => {
            status_of_command(ErrorCode::Internal, status.reason.as_deref().unwrap_or_default())
        }
        _ => RUN_FAILED,
    }
}

/// A run that is watched to its end.
struct Follow {
    client: Client,
    agent: AgentId,
    run: RunId,
    grace: Duration,
    logs: BoxStream<'static, Result<Vec<LogItem>, acri_client::Error>>,
    end: BoxFuture<'static, Result<RunStatus, acri_client::Error>>,
    status: Option<RunStatus>,
    interrupts: u32,
    /// The Stop or Kill under way.
    order: BoxFuture<'static, Option<String>>,
}

/// What happened to a watched run.
enum Happened {
    Wrote(Option<Result<Vec<LogItem>, acri_client::Error>>),
    Ended(Result<RunStatus, acri_client::Error>),
    Interrupted,
    Ordered(Option<String>),
}

/// How long a closed output waits for its Stop to be acknowledged.
const CLOSED_STOP_TIMEOUT: Duration = Duration::from_secs(5);

impl Follow {
    fn new(client: Client, agent: AgentId, run: RunId, grace: Duration) -> Self {
        let waiter = client.clone();
        Self {
            logs: client.log_batches(agent, run, Since::Start, true),
            end: async move { waiter.wait(agent, run).await }.boxed(),
            client,
            agent,
            run,
            grace,
            status: None,
            interrupts: 0,
            order: futures_util::future::pending().boxed(),
        }
    }

    async fn until_the_end(mut self, app: &mut App, signals: &mut Signals) -> Result<RunStatus> {
        let mut printer = Printer::default();
        let mut logs_open = true;
        loop {
            match (&self.status, logs_open) {
                (Some(status), false) => return Ok(status.clone()),
                _ => app.out.flush()?,
            }
            match self.next(signals, logs_open).await {
                Happened::Wrote(None) => logs_open = false,
                Happened::Wrote(Some(items)) => {
                    let items = items.with_context(|| format!("failed to follow run {}", self.run))?;
                    if let Err(error) = printer.print(&mut app.out, items).and_then(|()| app.out.flush()) {
                        self.stop_unread(&error).await;
                        return Err(error);
                    }
                }
                Happened::Ended(status) => {
                    self.status = Some(status.with_context(|| format!("failed to wait for run {}", self.run))?);
                    self.end = futures_util::future::pending().boxed();
                }
                Happened::Interrupted => {
                    if let Some(status) = self.interrupt(app)? {
                        return status;
                    }
                }
                Happened::Ordered(said) => {
                    self.order = futures_util::future::pending().boxed();
                    if let Some(said) = said {
                        app.out.warn(said)?;
                    }
                }
            }
        }
    }

    async fn next(&mut self, signals: &mut Signals, logs_open: bool) -> Happened {
        tokio::select! {
            biased;
            _ = signals.next() => Happened::Interrupted,
            said = &mut self.order => Happened::Ordered(said),
            items = self.logs.next(), if logs_open => Happened::Wrote(items),
            status = &mut self.end => Happened::Ended(status),
        }
    }

    /// The first Ctrl-C stops, the second kills, the third leaves.
    fn interrupt(&mut self, app: &mut App) -> Result<Option<Result<RunStatus>>> {
        if let Some(status) = &self.status {
            // It has ended; only the rest of its log is waited for.
            return Ok(Some(Ok(status.clone())));
        }
        self.interrupts += 1;
        let (client, agent, run, grace) = (self.client.clone(), self.agent, self.run, self.grace);
        match self.interrupts {
            1 => {
                app.out.note(format_args!(
                    "acri: stopping the run, {} of grace; Ctrl-C again kills it",
                    show::duration(grace)
                ))?;
                let stop = async move { client.stop(agent, run, "interrupted", Some(grace), OnExpiry::Kill).await };
                self.order = async move { said("stop", stop.await.map(|_| ())) }.boxed();
                Ok(None)
            }
            2 => {
                app.out.note("acri: killing the run and its whole process tree")?;
                let kill = async move { client.kill(agent, run, "interrupted twice").await };
                self.order = async move { said("kill", kill.await.map(|_| ())) }.boxed();
                Ok(None)
            }
            _ => {
                let message = format!("the run {run} was left alone; `acri status {run}` tells what becomes of it");
                Ok(Some(Err(Failure::new(RUN_FAILED, message).into())))
            }
        }
    }

    /// Like a program whose pipe is closed: the run ends too.
    async fn stop_unread(&self, error: &anyhow::Error) {
        if error.is::<Closed>() {
            let stop =
                self.client.stop(self.agent, self.run, "its output was closed", Some(self.grace), OnExpiry::Kill);
            // Nobody is there to be told how that went.
            let _ = tokio::time::timeout(CLOSED_STOP_TIMEOUT, stop).await;
        }
    }
}

/// What to say of an order that failed; a run that has ended meanwhile is no
/// failure.
fn said(verb: &str, outcome: Result<(), acri_client::Error>) -> Option<String> {
    match outcome {
        Ok(()) => None,
        Err(error) if error.code() == ErrorCode::FailedPrecondition => None,
        Err(error) => Some(format!("acri: {verb} failed: {}; Ctrl-C again tries the next", error.body())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use acri::{RunState, Timestamp};

    fn ended(termination: Termination, exit: Option<ExitStatus>, reason: &str) -> RunStatus {
        RunStatus {
            run: "bbbb1111-0000-8000-8000-000000000011".parse().unwrap(),
            state: RunState::Failed,
            phase: None,
            reason: Some(reason.to_owned()),
            since: Timestamp::from_micros(0),
            termination: Some(termination),
            exit,
            sealed: true,
        }
    }

    #[test]
    fn the_exit_status_is_the_programs_or_a_shells() {
        let code = |code| Some(ExitStatus { code: Some(code), signal: None });
        let signal = |signal| Some(ExitStatus { code: None, signal: Some(signal) });
        let of = |termination, exit| status_of_run(&ended(termination, exit, ""), Some(FailReason::Exit));
        assert_eq!(of(Termination::Completed, code(0)), 0);
        assert_eq!(of(Termination::Failed, code(3)), 3);
        assert_eq!(of(Termination::Failed, signal(11)), 139);
        assert_eq!(of(Termination::Stopped, signal(15)), 143);
        assert_eq!(of(Termination::Killed, None), 137);
        assert_eq!(of(Termination::Failed, None), 125);
    }

    #[test]
    fn a_program_that_is_missing_is_told_apart_from_one_that_cannot_be_executed() {
        let refused = |code, message: &str| {
            let body = ErrorBody { field: Some("command".into()), ..ErrorBody::new(code, message) };
            status_of(&anyhow::Error::from(body))
        };
        assert_eq!(refused(ErrorCode::InvalidArgument, "field `command` no such program: nope"), 127);
        assert_eq!(refused(ErrorCode::NotFound, "nope"), 127);
        assert_eq!(refused(ErrorCode::FailedPrecondition, "names \"a\", which may not be executed"), 126);
        let spawn = ended(Termination::Failed, None, "exec: No such file or directory");
        assert_eq!(status_of_run(&spawn, Some(FailReason::SpawnFailed)), 127);
        assert_eq!(status_of(&anyhow::anyhow!("bus gone")), 125);
    }
}
