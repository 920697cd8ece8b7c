//! The client against a bus in memory, with histories written by hand.

mod author;
mod commands;
mod streams;
