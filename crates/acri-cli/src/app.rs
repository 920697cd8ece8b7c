//! What every verb has: the global options, the way to the terminal, and a
//! client when it asks for one.

use crate::{
    args::Global,
    bus::{self, BusOptions, Role},
    output::Out,
};
use acri_client::{Client, Limits};
use anyhow::Result;
use std::{env, fs};

pub(crate) struct App {
    pub(crate) global: Global,
    pub(crate) out: Out,
}

impl App {
    pub(crate) fn new(global: Global) -> Self {
        let out = Out::terminal(global.output, global.quiet);
        Self { global, out }
    }

    /// How the bus is reached: options, variables, else the context file.
    pub(crate) fn bus_options(&self) -> Result<BusOptions> {
        BusOptions::of(&self.global)
    }

    pub(crate) async fn client(&self) -> Result<Client> {
        let bus = bus::connect(&self.bus_options()?, "acri", Role::Client).await?;
        Ok(self.client_on(bus))
    }

    pub(crate) fn client_on(&self, bus: acri_client::SharedBus) -> Client {
        Client::with_limits(bus, self.principal(), self.limits())
    }

    fn limits(&self) -> Limits {
        let limits = Limits::default();
        match self.global.timeout {
            Some(timeout) => Limits {
                command_deadline: timeout,
                create_deadline: timeout,
                query_attempt_timeout: timeout.min(limits.query_attempt_timeout),
                ..limits
            },
            None => limits,
        }
    }

    pub(crate) fn principal(&self) -> String {
        self.global.principal.clone().unwrap_or_else(|| format!("{}@{}", user(), host()))
    }
}

fn user() -> String {
    ["USER", "LOGNAME"].iter().find_map(|name| env::var(name).ok()).unwrap_or_else(|| "unknown".to_owned())
}

/// The machine's name, as the kernel has it.
pub(crate) fn host() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "localhost".to_owned() } else { name.to_owned() }
}
