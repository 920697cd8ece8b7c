//! A history in a file: what `acri verify --file` and `acri replay --file`
//! read, and beside it what was done.

use acri::{StreamSeq, id::Sha256Digest};
use acri_bus::{memory::State, port::EventSelection};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Where the files go: under the build directory.
pub(crate) fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
}

/// Every stored event, in the form of an exported copy.
pub(crate) fn write(bus: &State, path: &Path) -> io::Result<()> {
    let (mut text, mut sum, mut events) = (String::new(), Sha256Digest::default(), 0_u64);
    for recorded in bus.read(&EventSelection::All, StreamSeq(1)) {
        let (seq, time) = (serde_json::to_string(&recorded.seq)?, serde_json::to_string(&recorded.time)?);
        let (subject, stored) = (recorded.subject.to_string(), STANDARD.encode(&recorded.bytes));
        let line = format!(r#"{{"seq":{seq},"time":{time},"subject":"{subject}","stored":"{stored}"}}"#);
        sum = sum.chained(line.as_bytes());
        events += 1;
        text.push_str(&line);
        text.push('\n');
    }
    let sum = serde_json::to_string(&sum)?;
    text.push_str(&format!(r#"{{"end":{{"events":{events},"sha256":{sum}}}}}"#));
    text.push('\n');
    fs::write(path, text)
}
