//! The only clock of the crate.

use acri::Timestamp;
use std::{
    sync::atomic::{AtomicI64, Ordering},
    time::Duration,
};

/// Time since the machine booted, suspends included (`CLOCK_BOOTTIME`): what
/// leases and deadlines of our own are measured by.
#[must_use]
pub fn boot_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

fn wall_micros() -> i64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    time.tv_sec.saturating_mul(1_000_000).saturating_add(time.tv_nsec / 1_000)
}

/// The bus's clock as this node knows it: boot time plus a measured
/// difference, so that a jump of the local wall clock moves nothing.
#[derive(Debug)]
pub struct BusClock {
    above_boot_micros: AtomicI64,
}

impl Default for BusClock {
    fn default() -> Self {
        let clock = Self { above_boot_micros: AtomicI64::new(0) };
        clock.set_offset_from_wall(0);
        clock
    }
}

fn boot_micros() -> i64 {
    i64::try_from(boot_time().as_micros()).unwrap_or(i64::MAX)
}

impl BusClock {
    /// Takes a measurement: the bus's clock less the local wall clock.
    pub fn set_offset_from_wall(&self, offset_micros: i64) {
        let above = wall_micros().saturating_add(offset_micros).saturating_sub(boot_micros());
        self.above_boot_micros.store(above, Ordering::Relaxed);
    }

    /// Now, by the bus's clock.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        Timestamp::from_micros(boot_micros().saturating_add(self.above_boot_micros.load(Ordering::Relaxed)))
    }
}
