//! Simulation and exhaustive walk over the pure core and the memory bus.
#![forbid(unsafe_code)]
