//! An eventfd with which one thread wakes another.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::Arc,
};

use rustix::{
    event::{EventfdFlags, eventfd},
    io::{Errno, read, write},
};

/// A flag between threads: raised by some, polled for by others. Clones are
/// handles to the same flag.
#[derive(Clone, Debug)]
pub struct Wakeup(Arc<OwnedFd>);

impl Wakeup {
    /// A flag that is down.
    pub fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(fd)))
    }

    /// Raises the flag: the descriptor polls readable.
    pub fn raise(&self) {
        match write(&*self.0, &1u64.to_ne_bytes()) {
            // AGAIN: the counter is full, so the flag is up.
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(errno) => panic!("cannot write to our own eventfd: {errno}"),
        }
    }

    /// Takes the flag down. Returns whether it was up.
    pub fn lower(&self) -> bool {
        self.take() > 0
    }

    /// Takes the flag down. Returns how often it was raised since it last was.
    pub fn take(&self) -> u64 {
        let mut count = [0; 8];
        match read(&*self.0, &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            // AGAIN: it is down.
            Err(_) => 0,
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raises_are_counted_until_the_flag_is_taken_down() {
        let flag = Wakeup::new().unwrap();
        assert!(!flag.lower());
        flag.clone().raise();
        flag.raise();
        assert_eq!(flag.take(), 2);
        assert_eq!(flag.take(), 0);
    }
}
