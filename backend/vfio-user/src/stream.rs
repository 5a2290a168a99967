//! A client's socket, closed so that the client survives it.
//!
//! When a UNIX socket is closed in which something is left unread, Linux reports
//! a reset to the other end, and not an end. QEMU 11.1 aborts at that: it sets the
//! error of one failed read twice. So what is unread is read before.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::{
    io::{Errno, read},
    net::{Shutdown, shutdown},
};

/// A connected stream socket that does not block.
#[derive(Debug)]
pub(super) struct Stream(OwnedFd);

impl Stream {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self(socket)
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // From here on nothing is added to what is unread: that the client gets
        // no answer any more is told at its next write.
        if shutdown(&self.0, Shutdown::Both).is_err() {
            return;
        }
        // Descriptors among it are closed by the kernel.
        let mut thrown_away = [0; 4096];
        while matches!(read(&self.0, &mut thrown_away), Ok(1..) | Err(Errno::INTR)) {}
    }
}
