//! A flag that wakes whoever polls for it.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
};

use rustix::{
    event::{EventfdFlags, eventfd},
    io::Errno,
};

/// An eventfd used as a flag: raised by one thread, polled for by others.
#[derive(Debug)]
pub struct Wakeup(OwnedFd);

impl Wakeup {
    /// A flag that is down.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(
            0,
            EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
        )?))
    }

    /// Another handle to the same flag.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Raises the flag: polls for reading end.
    pub fn raise(&self) {
        // AGAIN means that the counter is full, so the flag is up.
        if let Err(errno) = rustix::io::write(&self.0, &1u64.to_ne_bytes())
            && errno != Errno::AGAIN
        {
            panic!("an eventfd of our own refuses a write: {errno}");
        }
    }

    /// Takes the flag down. Returns whether it was up.
    pub fn lower(&self) -> bool {
        rustix::io::read(&self.0, &mut [0; 8]).is_ok()
    }
}

impl AsFd for Wakeup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Wakeup {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
