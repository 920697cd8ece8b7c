//! Simulation and exhaustive walk over the pure core and the memory bus.
#![forbid(unsafe_code)]

#[cfg(test)]
mod check;
#[cfg(test)]
mod random;
#[cfg(test)]
mod stage;
#[cfg(test)]
mod walk;
