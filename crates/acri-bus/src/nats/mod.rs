//! The port over NATS JetStream.
//!
//! ```text
//!   link     one connection, and the gate that is open only while the server
//!            behind it is known to be new enough and set up as authored
//!   config   streams and buckets, as authored in `subjects/`
//!   reader   a read in stream order: pulls, gaps, reconnects
//!   events logs lease command     the port
//! ```
//! Requests and acknowledgements are awaited here one by one, with a time-out
//! of their own: the client library's publish futures resolve late or never
//! when a connection is lost.

mod command;
mod config;
mod events;
mod lease;
mod link;
mod logs;
mod reader;
mod service;
mod wire;

use crate::{Version, login, port::Fault};
use async_nats::{ConnectOptions, ServerAddr};
use link::{Limits, Link};
use serde_json::{Map, Value};
use std::{collections::BTreeMap, io, path::PathBuf, sync::Arc, time::Duration};

/// How long one publish or one request to JetStream may take.
pub const ACK_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A silent connection is noticed after about three of these.
const PING_EVERY: Duration = Duration::from_secs(10);
/// Messages that one subscription may hold before the newest are dropped. A
/// reader never asks for as many.
pub const SUBSCRIPTION_MESSAGES_MAX: usize = 2048;
/// Fewer would make a reader ask one by one.
const SUBSCRIPTION_MESSAGES_MIN: usize = 32;
/// Longest pause between two attempts to connect.
const RECONNECT_PAUSE_MAX: Duration = Duration::from_secs(2);
/// How long [`NatsBus`] waits for a drain.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// How to connect. `Options::new(urls)` and the fields that matter.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// `nats://`, `tls://`; user and password or a token may stand in it.
    pub urls: Vec<String>,
    /// A credentials file (JWT and seed).
    pub credentials: Option<PathBuf>,
    /// A file with an nkey seed.
    pub nkey_seed: Option<PathBuf>,
    /// Certificates of the authorities that are trusted, instead of the system's.
    pub tls_ca: Option<PathBuf>,
    /// Own certificate and its key.
    pub tls_identity: Option<(PathBuf, PathBuf)>,
    /// Whether the server speaks TLS before its greeting.
    pub tls_first: bool,
    /// Whether a connection without TLS is refused.
    pub tls_required: bool,
    /// What the server calls this connection.
    pub name: Option<String>,
    /// Where answers come: `_INBOX_<user>` where permissions say so.
    pub inbox_prefix: Option<String>,
    /// How long one publish or request may take; [`ACK_TIMEOUT`] if `None`.
    pub ack_timeout: Option<Duration>,
    /// Messages that one subscription may hold; [`SUBSCRIPTION_MESSAGES_MAX`]
    /// if `None`. A connection that serves commands to strangers wants fewer.
    pub subscription_messages_max: Option<usize>,
    /// Whether it only asks and reads, as an orchestrator does: then the
    /// buckets, of which it has no need and no permission, are not checked.
    pub client_only: bool,
    /// Whether streams and buckets that are missing are created.
    pub provision: bool,
    /// Settings of a deployment that differ from the authored ones, per stream
    /// (`ACRI_LOGS`, `KV_ACRI_NODES`): `max_bytes`, `max_age`, `num_replicas`.
    /// They are created and checked in place of the authored ones.
    pub overrides: BTreeMap<String, Map<String, Value>>,
}

impl Options {
    /// Connects to these and asks for nothing else.
    #[must_use]
    pub fn new<S: Into<String>>(urls: impl IntoIterator<Item = S>) -> Self {
        Self { urls: urls.into_iter().map(Into::into).collect(), ..Self::default() }
    }
}

/// Why the bus cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Text that is no URL of a server. The text is not shown, it may hold a password.
    #[error("read the URL of the bus, number {index}: {source}")]
    Url {
        /// Which one, from 1.
        index: usize,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A file with credentials or certificates cannot be read.
    #[error("read {}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// Nobody answers, or not to us.
    #[error("connect to the bus: {detail}")]
    Connect {
        /// What the client library said.
        detail: String,
    },
    /// The server is too old: it would drop what it does not know in silence.
    #[error("use this bus: nats-server is version {found}, and {} is the oldest that will do", Version::FLOOR)]
    TooOld {
        /// What it says that it is.
        found: String,
    },
    /// A setting of the server does not do.
    #[error("use this bus: the server's {field} is {found}, and {wanted} is needed")]
    Server {
        /// Which setting.
        field: &'static str,
        /// What it is.
        found: String,
        /// What it has to be.
        wanted: String,
    },
    /// A stream or bucket is missing.
    #[error("use this bus: it has no stream {stream}; provision it")]
    Missing {
        /// Which.
        stream: String,
    },
    /// A stream or bucket is not as authored.
    #[error("use this bus: {field} of stream {stream} is {found}, and {wanted} is needed")]
    Config {
        /// Of which stream.
        stream: String,
        /// Which field.
        field: String,
        /// What the server echoes; `null` if it does not know the field.
        found: Value,
        /// What is authored.
        wanted: Value,
    },
    /// The bus did not say.
    #[error(transparent)]
    Fault(#[from] Fault),
}

/// The bus over one NATS connection. Cheap to clone; the connection ends with
/// the last clone and the last stream that came from one.
#[derive(Clone)]
pub struct NatsBus {
    link: Arc<Link>,
    service: Arc<service::Service>,
}

impl std::fmt::Debug for NatsBus {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("NatsBus").finish_non_exhaustive()
    }
}

impl NatsBus {
    /// Connects, and checks the server's version and the configuration of
    /// every stream and bucket; so it does at each later connection, and until
    /// that is done nothing is sent. A server that fails the check then is
    /// answered by [`Fault::Refused`] in every operation.
    ///
    /// One thing cannot be prevented from here: what was handed to the client
    /// library just before a connection was lost may be written to the server
    /// that is connected next. A cluster must not hold a server below the
    /// floor.
    ///
    /// # Errors
    /// [`Error`], which names the field.
    pub async fn connect(options: Options) -> Result<Self, Error> {
        let config = Arc::new(config::Authored::with(&options.overrides, !options.client_only)?);
        let urls = options
            .urls
            .iter()
            .enumerate()
            .map(|(index, url)| url.parse::<ServerAddr>().map_err(|source| Error::Url { index: index + 1, source }))
            .collect::<Result<Vec<_>, _>>()?;
        let connect = connect_options(&options, &urls).await?;
        let limits =
            Limits { timeout: options.ack_timeout.unwrap_or(ACK_TIMEOUT), messages_max: messages_max(&options) };
        let link = Link::open(connect, urls, config, limits, options.provision).await?;
        let service = Arc::new(service::Service::new(&link));
        Ok(Self { link, service })
    }

    /// Creates the streams and buckets that are missing, and checks the others.
    ///
    /// # Errors
    /// [`Error`], which names the field.
    pub async fn provision(&self) -> Result<(), Error> {
        self.link.config().check(&self.link, true).await
    }

    /// The server's name, for people.
    #[must_use]
    pub fn server_name(&self) -> String {
        self.link.client().server_info().server_name
    }
}

fn messages_max(options: &Options) -> usize {
    options.subscription_messages_max.unwrap_or(SUBSCRIPTION_MESSAGES_MAX).max(SUBSCRIPTION_MESSAGES_MIN)
}

async fn connect_options(options: &Options, urls: &[ServerAddr]) -> Result<ConnectOptions, Error> {
    let mut connect = login::from_urls(ConnectOptions::new(), urls)
        .name(options.name.as_deref().unwrap_or("acri"))
        .connection_timeout(CONNECT_TIMEOUT)
        .ping_interval(PING_EVERY)
        .subscription_capacity(messages_max(options))
        .reconnect_delay_callback(reconnect_pause);
    if let Some(path) = &options.credentials {
        let file = |source| Error::File { path: path.clone(), source };
        connect = connect.credentials_file(path).await.map_err(file)?;
    }
    if let Some(path) = &options.nkey_seed {
        let file = |source| Error::File { path: path.clone(), source };
        let seed = tokio::fs::read_to_string(path).await.map_err(file)?;
        let seed = seed.trim();
        // The library would say no more than that it cannot sign.
        if !seed.starts_with("SU") {
            return Err(file(io::Error::new(io::ErrorKind::InvalidData, "it holds no nkey seed of a user")));
        }
        connect = connect.nkey(seed.to_owned());
    }
    if let Some(path) = &options.tls_ca {
        connect = connect.add_root_certificates(path.clone());
    }
    if let Some((certificate, key)) = &options.tls_identity {
        connect = connect.add_client_certificate(certificate.clone(), key.clone());
    }
    if options.tls_first {
        connect = connect.tls_first();
    }
    if options.tls_required {
        connect = connect.require_tls(true);
    }
    if let Some(prefix) = &options.inbox_prefix {
        connect = connect.custom_inbox_prefix(prefix);
    }
    Ok(connect)
}

/// None before the first attempt; then doubling, with jitter, so that a
/// thousand nodes do not come back in one instant.
fn reconnect_pause(attempt: usize) -> Duration {
    if attempt <= 1 {
        return Duration::ZERO;
    }
    let doublings = u32::try_from(attempt - 2).unwrap_or(u32::MAX).min(8);
    let longest = Duration::from_millis(50 << doublings).min(RECONNECT_PAUSE_MAX);
    link::jittered(longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_between_attempts_grow_to_their_limit_and_no_further() {
        assert_eq!(reconnect_pause(1), Duration::ZERO);
        for attempt in 2..10_000 {
            let pause = reconnect_pause(attempt);
            assert!(pause > Duration::ZERO && pause <= RECONNECT_PAUSE_MAX, "{attempt}: {pause:?}");
        }
    }
}
