//! The shim as a process: started, asked, killed, read back.

mod killing;
mod launching;
mod measuring;
mod recovery;
mod socket;
mod spooling;
mod support;
