//! A connection to the bus that can be held up: what was sent stays on the
//! way, and arrives when the line is let go.

use std::sync::Arc;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
};

const CHUNK_BYTES: usize = 64 * 1024;

/// What a line does with bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Held,
    Cut,
}

/// A line from nodes to a bus.
#[derive(Debug)]
pub struct Line {
    url: String,
    state: Arc<watch::Sender<State>>,
}

impl Line {
    /// A line to the server at `url`, open.
    ///
    /// # Panics
    /// If there is no port, or the URL is none.
    pub async fn to(url: &str) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let (login, upstream) = url.rsplit_once('@').expect("a URL with a login");
        let (state, upstream) = (Arc::new(watch::Sender::new(State::Open)), upstream.to_owned());
        let states = Arc::clone(&state);
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                if *states.borrow() == State::Cut {
                    continue;
                }
                let Ok(far) = TcpStream::connect(&upstream).await else { continue };
                let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
                tokio::spawn(pass(near_in, far_out, states.subscribe()));
                tokio::spawn(pass(far_in, near_out, states.subscribe()));
            }
        });
        Self { url: format!("{login}@127.0.0.1:{port}"), state }
    }

    /// By what nodes reach the bus over this line.
    #[must_use]
    pub fn url(&self) -> String {
        self.url.clone()
    }

    /// Nothing comes through in either direction, and nothing is lost.
    pub fn hold(&self) {
        self.state.send_replace(State::Held);
    }

    /// What was held comes through.
    pub fn release(&self) {
        self.state.send_replace(State::Open);
    }

    /// Every connection ends, and none can be made until [`Line::release`].
    pub fn cut(&self) {
        self.state.send_replace(State::Cut);
    }
}

async fn pass(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut state: watch::Receiver<State>) {
    let mut bytes = vec![0; CHUNK_BYTES];
    loop {
        let read = tokio::select! {
            read = from.read(&mut bytes) => read,
            cut = state.wait_for(|state| *state == State::Cut) => {
                drop(cut);
                return;
            }
        };
        let Ok(read @ 1..) = read else { return };
        match state.wait_for(|state| *state != State::Held).await {
            Ok(now) if *now == State::Open => {}
            _ => return,
        }
        if to.write_all(&bytes[..read]).await.is_err() {
            return;
        }
    }
}
