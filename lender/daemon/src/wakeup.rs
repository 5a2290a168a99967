//! An eventfd for waking another thread.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::Arc,
};

use rustix::{
    event::{EventfdFlags, eventfd},
    io::{Errno, read, write},
};

/// A flag that some threads raise and others poll. Clones are handles to the same flag.
///
/// vmm-sys-util's `EventFd` has no way to share one descriptor between threads but to duplicate it.
#[derive(Clone, Debug)]
pub struct Wakeup(Arc<OwnedFd>);

impl Wakeup {
    /// A lowered flag.
    pub fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(fd)))
    }

    /// Raises the flag: the descriptor becomes readable.
    pub fn raise(&self) {
        match write(&*self.0, &1u64.to_ne_bytes()) {
            // AGAIN: the counter is at its maximum, so the flag is raised.
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(errno) => panic!("cannot write to an eventfd: {errno}"),
        }
    }

    /// Lowers the flag. Returns whether it was raised.
    pub fn lower(&self) -> bool {
        self.take() > 0
    }

    /// Lowers the flag. Returns how often it was raised since it was last lowered.
    pub fn take(&self) -> u64 {
        let mut count = [0; 8];
        match read(&*self.0, &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            // AGAIN: lowered.
            Err(_) => 0,
        }
    }
}

impl From<OwnedFd> for Wakeup {
    /// The flag of an eventfd, of which another process has a descriptor.
    fn from(eventfd: OwnedFd) -> Self {
        Self(Arc::new(eventfd))
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
    fn raises_are_counted_until_the_flag_is_lowered() {
        let flag = Wakeup::new().unwrap();
        assert!(!flag.lower());
        flag.clone().raise();
        flag.raise();
        assert_eq!(flag.take(), 2);
        assert_eq!(flag.take(), 0);
    }
}
