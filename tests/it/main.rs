//! Tests over a real nats-server and real processes. Begin with
//! `acri_tests::site`: each test has a bus and nodes of its own.
#![forbid(unsafe_code)]

#[cfg(test)]
mod cli;
#[cfg(test)]
mod crash;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod lifecycle;
#[cfg(test)]
mod login;
#[cfg(test)]
mod outage;
#[cfg(test)]
mod output;
#[cfg(test)]
mod owners;
#[cfg(test)]
mod readers;
#[cfg(test)]
mod room;
#[cfg(test)]
mod silence;
#[cfg(test)]
mod trees;
#[cfg(test)]
mod up;

/// A site for this package's build of the program.
#[cfg(test)]
async fn site() -> acri_tests::site::Site {
    site_with(Vec::new()).await
}

/// The same, with further users of the bus.
#[cfg(test)]
async fn site_with(users: Vec<acri_bus::local::User>) -> acri_tests::site::Site {
    Box::pin(acri_tests::site::Site::start_with(env!("CARGO_BIN_EXE_acri-under-test"), users)).await
}
