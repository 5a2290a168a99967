//! The environment of the guest's driver.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::device::Device;
use crate::ram::Ram;
use crate::vectors::Vectors;

/// RAM, a device, its interrupts, and a timeout.
pub struct Machine {
    /// Guest RAM.
    pub ram: Ram,
    /// The device.
    pub device: Device,
    /// Its interrupts.
    pub vectors: Vectors,
    /// Timeout of a command or a change of state.
    pub timeout: Duration,
    /// Interrupts that arrived before their completion was in memory.
    pub early_interrupts: u64,
}

impl Machine {
    /// The deadline of an operation that starts now.
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// Reads a register of BAR 0 until `done`. Returns its last value.
    ///
    /// # Errors
    /// If `done` does not hold in time.
    pub fn poll(&mut self, what: &str, at: u64, done: impl Fn(u32) -> bool) -> Result<u32> {
        let deadline = self.deadline();
        loop {
            let value = self.device.load(0, at)?;
            if done(value) {
                return Ok(value);
            }
            ensure!(
                Instant::now() < deadline,
                "{what}: not within {:?}; register {at:#x} reads {value:#x}",
                self.timeout
            );
            std::thread::yield_now();
        }
    }
}
