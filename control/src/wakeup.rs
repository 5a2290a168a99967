//! A flag that wakes whoever polls for it.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
};

use farside_irq_relay::TriggerFd;

/// A flag between threads: raised by some, polled for by others. Clones are
/// handles to the same flag.
#[derive(Clone, Debug)]
pub struct Wakeup(TriggerFd);

impl Wakeup {
    /// A flag that is down.
    pub fn new() -> io::Result<Self> {
        TriggerFd::new().map(Self)
    }

    /// Raises the flag: polls for reading end.
    pub fn raise(&self) {
        self.0
            .signal()
            .expect("an eventfd of our own takes a write");
    }

    /// Takes the flag down. Returns whether it was up.
    pub fn lower(&self) -> bool {
        self.take() > 0
    }

    /// Takes the flag down. Returns how often it was raised since it last was.
    pub fn take(&self) -> u64 {
        self.0.take().ok().flatten().unwrap_or(0)
    }
}

impl AsFd for Wakeup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Wakeup {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}
