//! Ctrl-C and its like, one after the other.

use anyhow::{Context as _, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Which one came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Came {
    /// Ctrl-C.
    Interrupt,
    /// From a supervisor, or `kill`.
    Terminate,
    /// The terminal is gone.
    HangUp,
}

impl Came {
    /// Its number; a program that it ended has the status 128 + this.
    pub(crate) fn number(self) -> u8 {
        match self {
            Self::HangUp => 1,
            Self::Interrupt => 2,
            Self::Terminate => 15,
        }
    }
}

/// From its making on these signals do not end the program; they are told.
#[derive(Debug)]
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Signals {
    pub(crate) fn new() -> Result<Self> {
        let listen = |kind| signal(kind).context("failed to listen to signals");
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
            hang_up: listen(SignalKind::hangup())?,
        })
    }

    /// The next one.
    pub(crate) async fn next(&mut self) -> Came {
        tokio::select! {
            Some(()) = self.interrupt.recv() => Came::Interrupt,
            Some(()) = self.terminate.recv() => Came::Terminate,
            Some(()) = self.hang_up.recv() => Came::HangUp,
            else => std::future::pending().await,
        }
    }
}
