//! The one way to the terminal: bytes, tables, JSON and YAML.
//!
//! A reader that has gone away (`acri logs … | head`) is no error: it comes
//! back as [`Closed`], and `main` ends quietly.

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use serde_json::Value;
use std::io::{self, BufWriter, ErrorKind, Write};

/// How an answer is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum Format {
    /// Columns for people.
    #[default]
    Table,
    /// One JSON document; streams have one object a line.
    Json,
    /// YAML; streams have one document an item.
    Yaml,
}

/// Nobody reads our output any more.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the output was closed")]
pub(crate) struct Closed;

const BUFFER_BYTES: usize = 64 * 1024;

/// Where a verb writes.
pub(crate) struct Out {
    pub(crate) format: Format,
    pub(crate) quiet: bool,
    stdout: BufWriter<Box<dyn Write + Send>>,
    stderr: Box<dyn Write + Send>,
}

fn written(result: io::Result<()>) -> Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(Closed.into()),
        result => result.context("failed to write the output"),
    }
}

impl Out {
    pub(crate) fn terminal(format: Format, quiet: bool) -> Self {
        Self::new(format, quiet, Box::new(io::stdout()), Box::new(io::stderr()))
    }

    pub(crate) fn new(
        format: Format,
        quiet: bool,
        stdout: Box<dyn Write + Send>,
        stderr: Box<dyn Write + Send>,
    ) -> Self {
        Self { format, quiet, stdout: BufWriter::with_capacity(BUFFER_BYTES, stdout), stderr }
    }

    /// Bytes to stdout, as they are.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> Result<()> {
        written(self.stdout.write_all(bytes))
    }

    /// Bytes to stderr, as they are, after what stdout has.
    pub(crate) fn error_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.flush()?;
        written(self.stderr.write_all(bytes))
    }

    /// A line to stdout.
    pub(crate) fn line(&mut self, line: impl std::fmt::Display) -> Result<()> {
        written(writeln!(self.stdout, "{line}"))
    }

    /// A line for the person at the terminal, to stderr; silent with `-q`.
    pub(crate) fn note(&mut self, line: impl std::fmt::Display) -> Result<()> {
        if self.quiet {
            return Ok(());
        }
        self.warn(line)
    }

    /// A line to stderr that `-q` does not silence.
    pub(crate) fn warn(&mut self, line: impl std::fmt::Display) -> Result<()> {
        self.flush()?;
        written(writeln!(self.stderr, "{line}"))
    }

    /// Why it fails, to stderr, whatever became of stdout.
    pub(crate) fn failure(&mut self, text: impl std::fmt::Display) {
        let _ = self.flush();
        // If stderr is closed, nobody is there to be told.
        let _ = writeln!(self.stderr, "{text}");
    }

    pub(crate) fn flush(&mut self) -> Result<()> {
        written(self.stdout.flush())
    }

    /// A table with a heading. `-q` callers print ids instead.
    pub(crate) fn table(&mut self, heading: &[&str], rows: &[Vec<String>]) -> Result<()> {
        let mut columns = tabwriter::TabWriter::new(Vec::new()).padding(2);
        let mut lines = heading.join("\t");
        for row in rows {
            lines.push('\n');
            let cells: Vec<_> = row.iter().map(|cell| plain(cell)).collect();
            lines.push_str(&cells.join("\t"));
        }
        lines.push('\n');
        columns.write_all(lines.as_bytes()).and_then(|()| columns.flush()).context("failed to lay out the table")?;
        let table = columns.into_inner().map_err(|error| anyhow::anyhow!("failed to lay out the table: {error}"))?;
        for line in table.split_inclusive(|byte| *byte == b'\n') {
            self.bytes(line.trim_ascii_end())?;
            self.bytes(b"\n")?;
        }
        Ok(())
    }

    /// One whole answer as JSON or YAML.
    pub(crate) fn document(&mut self, value: &Value) -> Result<()> {
        match self.format {
            Format::Yaml => {
                let text = serde_saphyr::to_string(value).context("failed to write YAML")?;
                self.line(text.trim_end())
            }
            Format::Json | Format::Table => {
                let text = serde_json::to_string_pretty(value).context("failed to write JSON")?;
                self.line(text)
            }
        }
    }

    /// One item of a stream as JSON or YAML.
    pub(crate) fn item(&mut self, value: &Value) -> Result<()> {
        if self.format == Format::Yaml {
            self.line("---")?;
            return self.document(value);
        }
        let text = serde_json::to_string(value).context("failed to write JSON")?;
        self.line(text)
    }
}

impl Out {
    /// A line for people, or an item for programs.
    pub(crate) fn line_or_item(&mut self, line: impl std::fmt::Display, item: impl FnOnce() -> Value) -> Result<()> {
        if self.format == Format::Table { self.line(line) } else { self.item(&item()) }
    }
}

/// Text of others on a terminal: without control characters, which could
/// move the cursor or break the columns.
pub(crate) fn plain(text: &str) -> String {
    text.chars().map(|character| if character.is_control() { ' ' } else { character }).collect()
}

/// What a contract type looks like in JSON.
pub(crate) fn json<T: serde::Serialize>(value: &T) -> Result<Value> {
    serde_json::to_value(value).context("failed to write JSON")
}

/// The beginning of an id, as tables show it; any unique prefix is accepted.
pub(crate) fn short(id: impl std::fmt::Display) -> String {
    id.to_string().chars().take(SHORT_ID_LENGTH).collect()
}

const SHORT_ID_LENGTH: usize = 8;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    /// Collects what is written.
    #[derive(Clone, Default)]
    pub(crate) struct Sink(pub(crate) Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Sink {
        pub(crate) fn text(&self) -> String {
            String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
        }
    }

    pub(crate) fn sinks(format: Format) -> (Out, Sink, Sink) {
        let (stdout, stderr) = (Sink::default(), Sink::default());
        (Out::new(format, false, Box::new(stdout.clone()), Box::new(stderr.clone())), stdout, stderr)
    }

    #[test]
    fn a_table_has_columns_without_trailing_blanks_and_without_foreign_control_characters() {
        let (mut out, stdout, _) = sinks(Format::Table);
        out.table(&["ID", "NAME", "STATE"], &[vec!["1".into(), "a\x1b[2J\tb".into(), "ok".into()]]).unwrap();
        out.flush().unwrap();
        assert_eq!(stdout.text(), "ID  NAME     STATE\n1   a [2J b  ok\n");
    }

    #[test]
    fn items_of_a_stream_are_one_object_a_line() {
        let (mut out, stdout, _) = sinks(Format::Json);
        out.item(&serde_json::json!({"a": "x\ny"})).unwrap();
        out.item(&serde_json::json!({"b": [1, 2]})).unwrap();
        out.flush().unwrap();
        assert_eq!(stdout.text(), "{\"a\":\"x\\ny\"}\n{\"b\":[1,2]}\n");
    }

    #[test]
    fn a_closed_pipe_is_told_apart_from_other_errors() {
        struct Gone;
        impl Write for Gone {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut out = Out::new(Format::Table, false, Box::new(Gone), Box::new(Sink::default()));
        out.line("x").unwrap();
        assert!(out.flush().unwrap_err().is::<Closed>());
    }
}
