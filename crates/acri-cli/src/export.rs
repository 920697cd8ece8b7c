//! A copy of stored events in a file: one JSON object a line, with the stored
//! bytes as they are, and a last line with the sum over all before it.
//!
//! ```text
//! {"seq":17,"time":"2026-…","subject":"…","stored":"<base64>"}
//! {"note":"…"}
//! {"end":{"events":1,"sha256":"…"}}
//! ```
//! Notes are for people: a simulation says there which fault it injected.
//!
//! The events carry their own proof (the chain); the sum finds what no chain
//! can: a change of the last event, of a position, or a cut.

use crate::failure::{Failure, NOT_FOUND};
use acri::{Subject, Timestamp, id::Sha256Digest, id::StreamSeq};
use acri_core::appender::Stored;
use anyhow::{Context as _, Result};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    io::{BufWriter, Write as _},
    path::{Path, PathBuf},
};

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    seq: StreamSeq,
    time: Timestamp,
    subject: String,
    stored: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    note: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Last {
    end: End,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct End {
    events: u64,
    sha256: Sha256Digest,
}

/// Writes a copy.
pub(crate) struct Writer {
    file: BufWriter<fs::File>,
    path: PathBuf,
    events: u64,
    sum: Sha256Digest,
}

impl Writer {
    pub(crate) fn create(path: &Path) -> Result<Self> {
        let file = fs::File::create(path).with_context(|| format!("failed to create {}", path.display()))?;
        Ok(Self { file: BufWriter::new(file), path: path.to_owned(), events: 0, sum: Sha256Digest::default() })
    }

    pub(crate) fn event(&mut self, subject: &Subject, stored: &Stored) -> Result<()> {
        let line = Line {
            seq: stored.seq,
            time: stored.time,
            subject: subject.to_string(),
            stored: STANDARD.encode(&stored.bytes),
        };
        let text = serde_json::to_string(&line).context("failed to write JSON")?;
        self.events += 1;
        self.sum = self.sum.chained(text.as_bytes());
        self.line(&text)
    }

    fn line(&mut self, text: &str) -> Result<()> {
        writeln!(self.file, "{text}").with_context(|| format!("failed to write {}", self.path.display()))
    }

    pub(crate) fn finish(mut self) -> Result<()> {
        let last = Last { end: End { events: self.events, sha256: self.sum } };
        let text = serde_json::to_string(&last).context("failed to write JSON")?;
        self.line(&text)?;
        self.file.flush().with_context(|| format!("failed to write {}", self.path.display()))
    }
}

/// What was found in a copy.
#[derive(Debug, Default)]
pub(crate) struct Copy {
    /// Its events, as far as they can be read.
    pub(crate) events: Vec<(Subject, Stored)>,
    /// Notes, each with the number of events before it.
    pub(crate) notes: Vec<(usize, String)>,
    /// What is wrong with the file itself.
    pub(crate) damage: Vec<String>,
}

pub(crate) fn read(path: &Path) -> Result<Copy> {
    let bytes = fs::read(path)
        .map_err(|error| Failure::new(NOT_FOUND, format!("failed to read {}: {error}", path.display())))?;
    Ok(parse(&bytes))
}

fn parse(bytes: &[u8]) -> Copy {
    let mut copy = Copy::default();
    let mut sum = Sha256Digest::default();
    let mut events = 0;
    let mut end: Option<End> = None;
    let mut lines: Vec<_> = bytes.split(|byte| *byte == b'\n').collect();
    if lines.pop().is_none_or(|rest| !rest.is_empty()) {
        copy.damage.push("it does not end with a line feed: it was cut, or changed".to_owned());
    }
    for (number, line) in (1..).zip(lines) {
        if end.is_some() {
            copy.damage.push(format!("line {number} stands behind its end"));
            break;
        }
        if let Ok(last) = serde_json::from_slice::<Last>(line)
            && is_as_written(&last, line)
        {
            end = Some(last.end);
            continue;
        }
        sum = sum.chained(line);
        if let Ok(note) = serde_json::from_slice::<Note>(line)
            && is_as_written(&note, line)
        {
            copy.notes.push((copy.events.len(), note.note));
            continue;
        }
        events += 1;
        match event(line) {
            Ok(event) => copy.events.push(event),
            Err(problem) => copy.damage.push(format!("line {number}: {problem}")),
        }
    }
    match end {
        None => copy.damage.push("its last line is missing: the end was cut off".to_owned()),
        Some(end) if end.events != events => {
            copy.damage.push(format!("it has {events} events, its last line says {}", end.events));
        }
        Some(end) if end.sha256 != sum => {
            copy.damage.push("its sum is not that of its last line: it was changed".to_owned());
        }
        Some(_) => {}
    }
    copy
}

/// JSON has many spellings of one value; a copy has one.
fn is_as_written<T: Serialize>(value: &T, line: &[u8]) -> bool {
    serde_json::to_vec(value).is_ok_and(|written| written == line)
}

fn event(text: &[u8]) -> Result<(Subject, Stored), String> {
    let line: Line = serde_json::from_slice(text).map_err(|error| format!("is no stored event: {error}"))?;
    if !is_as_written(&line, text) {
        return Err("is not written as it was saved".to_owned());
    }
    let subject = line.subject.parse().map_err(|error: acri::subject::Error| error.to_string())?;
    let bytes = STANDARD.decode(&line.stored).map_err(|error| format!("its stored bytes: {error}"))?;
    Ok((subject, Stored { seq: line.seq, time: line.time, bytes: bytes.into() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy() -> Vec<u8> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("copy");
        let mut writer = Writer::create(&path).unwrap();
        let agent: acri::AgentId = "aaaa1111-0000-8000-8000-000000000001".parse().unwrap();
        for seq in 1..=3 {
            let subject = Subject::Event(agent, None, "agent.assigned".into());
            let stored = Stored { seq: StreamSeq(seq), time: Timestamp::from_micros(1), bytes: vec![1, 2, 255].into() };
            writer.event(&subject, &stored).unwrap();
        }
        writer.finish().unwrap();
        fs::read(path).unwrap()
    }

    #[test]
    fn a_copy_is_read_back_whole() {
        let read = parse(&copy());
        assert_eq!(read.damage, Vec::<String>::new());
        assert_eq!(read.events.len(), 3);
        assert_eq!(read.events[2].1.bytes[..], [1, 2, 255]);
    }

    #[test]
    fn notes_keep_their_place_among_the_events() {
        let mut lines: Vec<_> = copy().split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
        lines.insert(1, br#"{"note":"the node crashed"}"#.to_vec());
        let read = parse(&lines.join(&b'\n'));
        assert_eq!(read.notes, [(1, "the node crashed".to_owned())]);
        assert_eq!(read.events.len(), 3);
        assert_eq!(read.damage.len(), 1, "the sum is over the notes too");
    }

    #[test]
    fn any_changed_byte_and_any_cut_is_damage() {
        let whole = copy();
        for at in 0..whole.len() {
            for flip in [1, 0x20, 0x80] {
                let mut changed = whole.clone();
                changed[at] ^= flip;
                assert!(!parse(&changed).damage.is_empty(), "byte {at} with {flip:#x}");
            }
            assert!(!parse(&whole[..at]).damage.is_empty(), "cut at {at}");
        }
    }
}
