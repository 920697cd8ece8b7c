//! A real server, seen from outside.

use super::{ABSENCE_TIMEOUT, ARRIVAL_TIMEOUT, BusFactory};
use crate::{
    local::Server,
    login,
    nats::{NatsBus, Options},
    port::SharedBus,
};
use acri::{AgentId, RunId, Subject};
use async_nats::{Client, ConnectOptions, HeaderMap, ServerAddr};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{StreamExt as _, future::BoxFuture};
use std::sync::Arc;
use tokio::sync::Mutex;

/// Clients of one server.
#[derive(Debug)]
pub struct NatsFactory {
    server: Option<Mutex<Server>>,
    raw: Client,
    options: Options,
}

impl NatsFactory {
    /// Starts a server for a test, with the streams that it needs.
    ///
    /// # Errors
    /// What went wrong.
    pub async fn start() -> Result<Self, String> {
        let server = Server::start_for_test().await.map_err(|error| error.to_string())?;
        let options = Options::new([server.url()]);
        Self::with(options, Some(Mutex::new(server))).await
    }

    /// Uses a bus that is there; its cases must not end it.
    ///
    /// # Errors
    /// What went wrong.
    pub async fn of(options: Options) -> Result<Self, String> {
        Self::with(options, None).await
    }

    async fn with(options: Options, server: Option<Mutex<Server>>) -> Result<Self, String> {
        NatsBus::connect(Options { provision: true, ..options.clone() }).await.map_err(|error| error.to_string())?;
        let urls = options.urls.iter().map(|url| url.parse().map_err(|error| format!("{error}")));
        let urls = urls.collect::<Result<Vec<ServerAddr>, String>>()?;
        let connect = login::from_urls(ConnectOptions::new(), &urls);
        let raw = connect.connect(urls).await.map_err(|error| error.to_string())?;
        Ok(Self { server, raw, options })
    }

    /// How its clients connect.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// A client of the server that knows nothing of the port.
    #[must_use]
    pub fn raw(&self) -> &Client {
        &self.raw
    }

    /// The server, to be paused or restarted.
    ///
    /// # Panics
    /// If it is not the factory's own.
    pub async fn server(&self) -> tokio::sync::MutexGuard<'_, Server> {
        self.server.as_ref().expect("only a server of one's own is ended").lock().await
    }
}

#[async_trait]
impl BusFactory for NatsFactory {
    async fn client(&self) -> SharedBus {
        let bus = NatsBus::connect(self.options.clone()).await;
        Arc::new(bus.unwrap_or_else(|error| panic!("a client of the suite failed to {error}")))
    }

    async fn raw_request(&self, subject: &str, reply: &str, content_type: &str, handled: BoxFuture<'_, ()>) -> bool {
        let failed = |error: &dyn std::fmt::Display| panic!("a raw request failed to {error}");
        let mut answers = match self.raw.subscribe(reply.to_owned()).await {
            Ok(answers) => answers,
            Err(error) => failed(&error),
        };
        let mut headers = HeaderMap::new();
        headers.insert("Content-Type", content_type);
        let body = Bytes::from_static(b"{}");
        let sent = self.raw.publish_with_reply_and_headers(subject.to_owned(), reply.to_owned(), headers, body).await;
        if let Err(error) = sent {
            failed(&error);
        }
        handled.await;
        // Only the time can say that nothing comes; an answer comes at once.
        matches!(tokio::time::timeout(ABSENCE_TIMEOUT, answers.next()).await, Ok(Some(_)))
    }

    async fn drop_frames(&self, agent: AgentId, run: Option<RunId>) {
        let request = serde_json::json!({ "filter": Subject::Log(agent, run).to_string() });
        let answer = self.raw.request("$JS.API.STREAM.PURGE.ACRI_LOGS", Bytes::from(request.to_string())).await;
        match answer {
            Ok(message) if !message.payload.windows(7).any(|window| window == b"\"error\"") => {}
            other => panic!("a purge failed: {other:?}"),
        }
    }

    async fn crash(&self) {
        let mut server = self.server().await;
        if let Err(error) = server.kill9().await {
            panic!("{error}");
        }
    }

    async fn restore(&self) {
        let mut server = self.server().await;
        match tokio::time::timeout(ARRIVAL_TIMEOUT, server.restart()).await {
            Ok(Ok(())) => {}
            other => panic!("the server does not come back: {other:?}"),
        }
    }
}
