//! The hands: what a node does to a harness of one type, behind one trait.
//!
//! Begin with [`driver`]: it states the rules that an implementer keeps.
//! [`scripted`] is the smallest driver, in memory; [`process`] runs any
//! program through its holder. The suite behind the feature `testing` is what a
//! new driver has to pass.
//!
//! A driver never decides about a run's state, never appends an event and
//! never touches the bus: it carries out effects and tells what it sees.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod driver;
pub mod process;
pub mod scripted;
#[cfg(feature = "testing")]
pub mod suite;
