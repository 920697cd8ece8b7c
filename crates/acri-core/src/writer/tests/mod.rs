//! The writer against a spool, a stream and an agent's history in memory.

mod random;
mod readers;
mod scripts;
mod speed;
mod splitting;
mod world;
