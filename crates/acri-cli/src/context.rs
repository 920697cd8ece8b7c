//! The context file: where `acri up` says how its bus is reached, so that the
//! other verbs find it.

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use std::{
    env, fs,
    io::{ErrorKind, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

/// What is written. It may hold a password: only its owner can read it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ContextFile {
    /// URLs of the bus, separated by commas.
    pub(crate) nats: String,
    /// Credentials file, if the bus wants one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) creds: Option<PathBuf>,
    /// File with an nkey seed, if the bus wants one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) nkey: Option<PathBuf>,
    /// Certificate authority of the bus.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tls_ca: Option<PathBuf>,
    /// Our certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Its key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Where answers come.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) inbox_prefix: Option<String>,
    /// Where the server of the `acri up` that wrote it stores, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) store: Option<PathBuf>,
    /// Process id of the `acri up` that wrote it, for a person's eyes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pid: Option<u32>,
}

/// `$XDG_STATE_HOME/acri`, or `~/.local/state/acri`.
pub(crate) fn state_dir() -> Result<PathBuf> {
    let home =
        || env::var_os("HOME").filter(|home| !home.is_empty()).map(|home| PathBuf::from(home).join(".local/state"));
    let base = env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|path| path.is_absolute()).or_else(home);
    let base = base.context("failed to find a state directory: neither XDG_STATE_HOME nor HOME is set")?;
    Ok(base.join("acri"))
}

/// Makes a directory that only its owner can enter.
pub(crate) fn private_dir(path: &Path) -> Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .with_context(|| format!("failed to create {}", path.display()))
}

/// The context file that is meant.
pub(crate) fn path(named: Option<&Path>) -> Result<PathBuf> {
    match named {
        Some(path) => Ok(path.to_owned()),
        None => Ok(state_dir()?.join("context.json")),
    }
}

/// Reads it; `None` if there is none.
pub(crate) fn read(path: &Path) -> Result<Option<ContextFile>> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => {
            return Err(error).with_context(|| format!("failed to read {}", path.display()));
        }
    };
    let context = serde_json::from_str(&text).with_context(|| format!("failed to understand {}", path.display()))?;
    Ok(Some(context))
}

/// Writes it whole or not at all.
pub(crate) fn write(path: &Path, context: &ContextFile) -> Result<()> {
    if let Some(parent) = path.parent() {
        private_dir(parent)?;
    }
    let text = serde_json::to_string_pretty(context).context("failed to write the context")?;
    let staged = path.with_extension(format!("new-{}", std::process::id()));
    let write = || -> std::io::Result<()> {
        let mut file = fs::OpenOptions::new().create(true).write(true).truncate(true).mode(0o600).open(&staged)?;
        writeln!(file, "{text}")?;
        fs::rename(&staged, path)
    };
    write().with_context(|| format!("failed to write {}", path.display()))
}

/// Removes it, if it is still the one that was written.
pub(crate) fn remove(path: &Path, written: &ContextFile) {
    if read(path).ok().flatten().as_ref() == Some(written) {
        // Left behind it only names a bus that does not answer.
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn a_context_is_read_back_is_private_and_is_removed_only_by_its_writer() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state/context.json");
        assert_eq!(read(&path).unwrap(), None);
        let context = ContextFile {
            nats: "nats://127.0.0.1:4222".into(),
            creds: None,
            nkey: None,
            tls_ca: None,
            tls_cert: None,
            tls_key: None,
            inbox_prefix: None,
            store: Some("/var/lib/nats".into()),
            pid: Some(7),
        };
        write(&path, &context).unwrap();
        assert_eq!(read(&path).unwrap(), Some(context.clone()));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        remove(&path, &ContextFile { pid: Some(8), ..context.clone() });
        assert!(path.exists());
        remove(&path, &context);
        assert!(!path.exists());
    }
}
