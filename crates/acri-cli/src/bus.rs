//! How the bus is reached.

use crate::{
    args::Global,
    context::{self, ContextFile},
    failure::{Failure, NOT_FOUND, PRECONDITION, UNAVAILABLE, USAGE},
};
use acri_bus::nats::{self, NatsBus};
use acri_client::SharedBus;
use anyhow::Result;
use std::{path::PathBuf, sync::Arc};

/// Everything that a connection needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BusOptions {
    /// URLs of a server or cluster, separated by commas.
    pub(crate) nats: String,
    /// Credentials file.
    pub(crate) creds: Option<PathBuf>,
    /// File with an nkey seed.
    pub(crate) nkey: Option<PathBuf>,
    /// Certificate authority.
    pub(crate) tls_ca: Option<PathBuf>,
    /// Our certificate.
    pub(crate) tls_cert: Option<PathBuf>,
    /// Its key.
    pub(crate) tls_key: Option<PathBuf>,
    /// Where answers come.
    pub(crate) inbox_prefix: Option<String>,
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// It asks and reads, as an orchestrator does.
    Client,
    /// It is a node's.
    Node,
    /// It makes the streams and buckets that are missing.
    SetUp,
}

/// Commands that may wait in one subscription of a node: each agent has one.
const NODE_SUBSCRIPTION_MESSAGES_MAX: usize = 256;

/// The variables that stand for options of a connection.
pub(crate) const BUS_VARIABLES: [&str; 7] =
    ["ACRI_NATS", "ACRI_CREDS", "ACRI_NKEY", "ACRI_TLS_CA", "ACRI_TLS_CERT", "ACRI_TLS_KEY", "ACRI_INBOX_PREFIX"];

impl BusOptions {
    /// From options and variables; where they name no bus, from the context
    /// file.
    pub(crate) fn of(global: &Global) -> Result<Self> {
        // A variable that is set to nothing names nothing.
        if let Some(nats) = global.nats.as_ref().filter(|nats| !nats.trim().is_empty()) {
            return Ok(Self::named(global, nats.clone()));
        }
        let path = context::path(global.context.as_deref())?;
        match context::read(&path)? {
            Some(context) => Ok(Self::with_context(global, context)),
            None => Err(Failure::new(UNAVAILABLE, "no bus is named, and none was started here")
                .hint(format!(
                    "start one with `acri up` in another terminal, or name one with --nats URL\n      (looked for {})",
                    path.display()
                ))
                .into()),
        }
    }

    /// A bus that was named, with the options that stand beside it.
    pub(crate) fn named(global: &Global, nats: String) -> Self {
        Self {
            nats,
            creds: global.creds.clone(),
            nkey: global.nkey.clone(),
            tls_ca: global.tls_ca.clone(),
            tls_cert: global.tls_cert.clone(),
            tls_key: global.tls_key.clone(),
            inbox_prefix: global.inbox_prefix.clone(),
        }
    }

    /// A server that this program started: it takes whoever reaches it.
    pub(crate) fn own(nats: String) -> Self {
        Self { nats, creds: None, nkey: None, tls_ca: None, tls_cert: None, tls_key: None, inbox_prefix: None }
    }

    fn with_context(global: &Global, context: ContextFile) -> Self {
        // What options and variables say of certificates is of another bus.
        if context.store.is_some() {
            return Self::own(context.nats);
        }
        let named = Self::named(global, context.nats);
        Self {
            creds: named.creds.or(context.creds),
            nkey: named.nkey.or(context.nkey),
            tls_ca: named.tls_ca.or(context.tls_ca),
            tls_cert: named.tls_cert.or(context.tls_cert),
            tls_key: named.tls_key.or(context.tls_key),
            inbox_prefix: named.inbox_prefix.or(context.inbox_prefix),
            nats: named.nats,
        }
    }

    /// As the adapter takes them.
    pub(crate) fn nats_options(&self, name: &str, role: Role) -> nats::Options {
        let urls = self.nats.split(',').map(str::trim).filter(|url| !url.is_empty());
        nats::Options {
            credentials: self.creds.clone(),
            nkey_seed: self.nkey.clone(),
            tls_ca: self.tls_ca.clone(),
            tls_identity: self.tls_cert.clone().zip(self.tls_key.clone()),
            // Who names certificates wants no conversation without them.
            tls_required: self.tls_ca.is_some() || self.tls_cert.is_some(),
            name: Some(name.to_owned()),
            inbox_prefix: self.inbox_prefix.clone(),
            client_only: role == Role::Client,
            provision: role == Role::SetUp,
            subscription_messages_max: (role == Role::Node).then_some(NODE_SUBSCRIPTION_MESSAGES_MAX),
            ..nats::Options::new(urls)
        }
    }

    /// What the context file says of it.
    pub(crate) fn context(&self) -> ContextFile {
        // Other verbs read it from other directories.
        let absolute =
            |path: &Option<PathBuf>| path.as_ref().map(|path| std::path::absolute(path).unwrap_or(path.clone()));
        ContextFile {
            nats: self.nats.clone(),
            creds: absolute(&self.creds),
            nkey: absolute(&self.nkey),
            tls_ca: absolute(&self.tls_ca),
            tls_cert: absolute(&self.tls_cert),
            tls_key: absolute(&self.tls_key),
            inbox_prefix: self.inbox_prefix.clone(),
            store: None,
            pid: Some(std::process::id()),
        }
    }
}

/// Connects; the server's version and streams are checked before this
/// returns.
pub(crate) async fn connect(options: &BusOptions, name: &str, role: Role) -> Result<SharedBus> {
    Ok(Arc::new(open(options, name, role).await?))
}

/// The same, as the NATS adapter.
pub(crate) async fn open(options: &BusOptions, name: &str, role: Role) -> Result<NatsBus> {
    // The library reads the certificates itself, and does not say which file is not there.
    for path in [&options.tls_ca, &options.tls_cert, &options.tls_key].into_iter().flatten() {
        std::fs::File::open(path).map_err(|source| explained(nats::Error::File { path: path.clone(), source }))?;
    }
    NatsBus::connect(options.nats_options(name, role)).await.map_err(explained)
}

fn explained(error: nats::Error) -> anyhow::Error {
    let (status, hint) = match &error {
        nats::Error::Url { .. } => (USAGE, "a URL is nats://HOST:PORT or tls://HOST:PORT"),
        nats::Error::File { .. } => (NOT_FOUND, "--creds, --nkey and --tls-* name files"),
        nats::Error::Connect { .. } if is_denied(&error) => (
            UNAVAILABLE,
            "the server wants other credentials: --creds FILE, --nkey FILE, or nats://USER:PASSWORD@HOST:PORT",
        ),
        nats::Error::Connect { .. } => {
            (UNAVAILABLE, "is it up? start one with `acri up`, or name another with --nats URL")
        }
        nats::Error::TooOld { .. } => (PRECONDITION, "upgrade the server, or let `acri up` start one"),
        nats::Error::Server { .. } => (
            PRECONDITION,
            "in the server's configuration: `max_payload: 2MB`, and JetStream with `max_file_store: 40GB`",
        ),
        nats::Error::Config { .. } => (PRECONDITION, "`acri doctor` compares all of it with what is needed"),
        nats::Error::Missing { .. } => (PRECONDITION, "the first node makes it: `acri node --nats URL`"),
        nats::Error::Fault(_) => (UNAVAILABLE, "try again; `acri doctor` looks closer"),
    };
    let causes: Vec<_> = anyhow::Error::from(error).chain().map(ToString::to_string).collect();
    Failure::new(status, format!("failed to {}", causes.join(": "))).hint(hint).into()
}

fn is_denied(error: &nats::Error) -> bool {
    let mut causes = std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source());
    causes.any(|cause| cause.to_string().contains("authorization violation"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::Parser as _;
    use std::path::Path;

    fn global(arguments: &[&str]) -> Global {
        let arguments = ["acri"].iter().chain(arguments).chain(&["nodes"]);
        Cli::try_parse_from(arguments).unwrap().global
    }

    #[test]
    fn options_stand_above_the_context_but_for_a_server_of_our_own_and_a_named_bus_asks_for_none() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("context.json");
        let path = path.to_str().unwrap();
        let from_nowhere = BusOptions::of(&global(&["--context", path])).unwrap_err();
        assert_eq!(crate::failure::status_of(&from_nowhere), UNAVAILABLE);
        let named = BusOptions::of(&global(&["--nats", "nats://a:1,nats://b:2", "--context", path])).unwrap();
        assert_eq!(named.nats_options("x", Role::Client).urls, ["nats://a:1", "nats://b:2"]);
        let written = BusOptions { creds: Some("/c".into()), nkey: Some("/n".into()), ..named };
        context::write(Path::new(path), &written.context()).unwrap();
        let read = BusOptions::of(&global(&["--context", path, "--creds", "/mine"])).unwrap();
        assert_eq!((read.creds, read.nkey), (Some("/mine".into()), Some("/n".into())));
        let own = BusOptions::own("nats://127.0.0.1:1".to_owned());
        context::write(Path::new(path), &ContextFile { store: Some("/store".into()), ..own.context() }).unwrap();
        assert_eq!(BusOptions::of(&global(&["--context", path, "--creds", "/mine", "--tls-ca", "/ca"])).unwrap(), own);
    }
}
