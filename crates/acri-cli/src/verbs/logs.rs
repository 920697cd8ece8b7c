//! `logs`: what a run wrote.

use crate::{
    app::App,
    output::{self, Format, Out},
    parse,
    resolve::{self, RunArg},
    verbs::flushed,
};
use acri::log::{LogEvent, LogType, Stream};
use acri_client::{Client, LogItem, Since};
use anyhow::Result;
use futures_util::StreamExt as _;
use serde_json::json;
use std::collections::VecDeque;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri logs -L                          everything that the newest run wrote
  acri logs -f 3fa8                     and what it will write, until it ends
  acri logs -L --tail 20 -t             the last 20 lines, with their times
  acri logs -L --since 10m -o json | jq -r .cursor
  acri logs fixer --since 2026-11-30T12:00:00Z

What the program wrote to stdout comes on stdout, byte for byte; its stderr on
stderr. A last line without its line feed gets one. In JSON each event bears a
`cursor`: `--since CURSOR` goes on exactly after it.
")]
pub(crate) struct Args {
    #[command(flatten)]
    run: RunArg,
    /// Go on until the run has ended and everything was told
    #[arg(long, short = 'f')]
    follow: bool,
    /// Where to begin: start, now, a cursor, a time (RFC 3339) or a time ago
    /// such as 10m
    #[arg(long, value_name = "WHERE", default_value = "start", value_parser = parse::log_since)]
    since: Since,
    /// Begin with the last N lines
    #[arg(long, value_name = "N")]
    tail: Option<usize>,
    /// Put the time before each line
    #[arg(long, short = 't')]
    timestamps: bool,
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let client = app.client().await?;
    let (agent, run) = resolve::run(&client, args.run.run.as_deref()).await?;
    let mut printer = Printer { timestamps: args.timestamps, ..Printer::default() };
    let mut since = args.since;
    if let Some(lines) = args.tail {
        let (tail, last) = tail(&client, agent, run, since, lines).await?;
        printer.print(&mut app.out, tail)?;
        if !args.follow {
            return Ok(());
        }
        since = last.unwrap_or(since);
    }
    let mut batches = client.log_batches(agent, run, since, args.follow);
    while let Some(items) = flushed(&mut batches, &mut app.out).await? {
        printer.print(&mut app.out, items?)?;
    }
    Ok(())
}

/// The items of the last lines, and where to go on after them.
async fn tail(
    client: &Client,
    agent: acri::AgentId,
    run: acri::RunId,
    since: Since,
    lines: usize,
) -> Result<(Vec<LogItem>, Option<Since>)> {
    let mut kept = VecDeque::new();
    let mut whole = 0;
    let mut last = None;
    let mut items = client.logs(agent, run, since, false);
    while let Some(item) = items.next().await {
        let item = item?;
        if let LogItem::Event(event, cursor) = &item {
            last = Some(Since::Cursor(*cursor));
            whole += usize::from(!event.more);
        }
        kept.push_back(item);
        while whole > lines {
            if let Some(LogItem::Event(event, _)) = kept.pop_front() {
                whole -= usize::from(!event.more);
            }
        }
    }
    Ok((kept.into(), last))
}

/// Writes log items as the program wrote them, or as objects.
#[derive(Debug, Default)]
pub(crate) struct Printer {
    pub(crate) timestamps: bool,
    /// Whether the last event of a stream said that its line goes on.
    inside_stdout: bool,
    inside_stderr: bool,
}

impl Printer {
    pub(crate) fn print(&mut self, out: &mut Out, items: Vec<LogItem>) -> Result<()> {
        for item in items {
            if out.format == Format::Table {
                self.text(out, &item)?;
            } else {
                out.item(&object(&item)?)?;
            }
        }
        Ok(())
    }

    fn text(&mut self, out: &mut Out, item: &LogItem) -> Result<()> {
        match item {
            LogItem::Event(event, _) => self.event(out, event),
            LogItem::Gap { from, to } => out.warn(format_args!("acri: log events {from} to {to} are gone")),
            LogItem::Rewound { after } => {
                out.warn(format_args!("acri: the log stream was replaced or put back; it goes on after event {after}"))
            }
            LogItem::Malformed { frame, detail } => {
                out.warn(format_args!("acri: the log frame at {frame} cannot be read: {detail}"))
            }
        }
    }

    fn event(&mut self, out: &mut Out, event: &LogEvent) -> Result<()> {
        let inside = match event.stream {
            Some(Stream::Stderr) => &mut self.inside_stderr,
            Some(Stream::Stdout) | None => &mut self.inside_stdout,
        };
        let mut line = Vec::with_capacity(event.payload.as_bytes().len() + 40);
        if !*inside {
            if self.timestamps {
                line.extend(event.time.to_string().into_bytes());
                line.push(b' ');
            }
            if event.kind != LogType::Message {
                line.extend(format!("[{}] ", crate::verbs::show::name(&event.kind)).into_bytes());
            }
        }
        line.extend(event.payload.as_bytes());
        if !event.more {
            line.push(b'\n');
        }
        *inside = event.more;
        match event.stream {
            Some(Stream::Stderr) => out.error_bytes(&line),
            Some(Stream::Stdout) | None => out.bytes(&line),
        }
    }
}

fn object(item: &LogItem) -> Result<serde_json::Value> {
    Ok(match item {
        LogItem::Event(event, cursor) => {
            let mut value = output::json(event)?;
            value["cursor"] = cursor.to_string().into();
            value
        }
        LogItem::Gap { from, to } => json!({"type": "gap", "from": from.0, "to": to.0}),
        LogItem::Rewound { after } => json!({"type": "rewound", "after": after.0}),
        LogItem::Malformed { frame, detail } => {
            json!({"type": "malformed", "frame": frame.0, "detail": detail})
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::tests::sinks;
    use acri::{Payload, StreamSeq, Timestamp, cursor::Cursor, id::LogSeq, log::Origin};

    fn event(sequence: u64, stream: Stream, bytes: &[u8], more: bool) -> LogItem {
        let event = LogEvent {
            agent: "aaaa1111-0000-8000-8000-000000000001".parse().unwrap(),
            run: None,
            sequence: LogSeq(sequence),
            time: Timestamp::from_micros(1_764_500_000_000_000),
            kind: LogType::Message,
            payload: Payload::of_output(bytes.to_vec()),
            stream: Some(stream),
            origin: Origin::Passthrough,
            part: None,
            more,
        };
        let cursor = Cursor { stream: 1, frame: StreamSeq(1), index: 0, sequence: LogSeq(sequence), hash: [0; 8] };
        LogItem::Event(event, cursor)
    }

    #[test]
    fn what_the_program_wrote_comes_byte_for_byte_on_its_own_stream() {
        let (mut out, stdout, stderr) = sinks(Format::Table);
        let items = vec![
            event(1, Stream::Stdout, b"one\r", false),
            event(2, Stream::Stdout, b"split ", true),
            event(3, Stream::Stderr, b"oops \xff", false),
            event(4, Stream::Stdout, b"line", false),
            event(5, Stream::Stdout, b"", false),
        ];
        Printer::default().print(&mut out, items).unwrap();
        out.flush().unwrap();
        assert_eq!(stdout.0.lock().unwrap().as_slice(), b"one\r\nsplit line\n\n");
        assert_eq!(stderr.0.lock().unwrap().as_slice(), b"oops \xff\n");
    }

    #[test]
    fn times_stand_before_lines_and_not_within_them() {
        let (mut out, stdout, _) = sinks(Format::Table);
        let items = vec![event(1, Stream::Stdout, b"a", true), event(2, Stream::Stdout, b"b", false)];
        Printer { timestamps: true, ..Printer::default() }.print(&mut out, items).unwrap();
        out.flush().unwrap();
        assert_eq!(stdout.text(), "2025-11-30T10:53:20.000000Z ab\n");
    }

    #[test]
    fn objects_bear_a_cursor_and_gaps_are_items_of_their_own() {
        let (mut out, stdout, _) = sinks(Format::Json);
        let items = vec![LogItem::Gap { from: LogSeq(1), to: LogSeq(4) }, event(5, Stream::Stdout, b"x", false)];
        Printer::default().print(&mut out, items).unwrap();
        out.flush().unwrap();
        let lines: Vec<serde_json::Value> =
            stdout.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines[0], json!({"type": "gap", "from": 1, "to": 4}));
        assert_eq!(lines[1]["payload"]["text"], "x");
        assert!(lines[1]["cursor"].as_str().unwrap().parse::<Cursor>().is_ok());
    }
}
