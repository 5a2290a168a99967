//! A client's socket, drained before it is closed.
//!
//! If a UNIX socket is closed with unread data, the peer sees ECONNRESET rather than
//! EOF (unix(7)). QEMU 11.1 aborts on ECONNRESET: it sets the error of one failed
//! read twice.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::{
    io::{Errno, read},
    net::{Shutdown, shutdown},
};

/// A connected nonblocking stream socket.
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
        // No more data can arrive: the client's next write fails with EPIPE.
        if shutdown(&self.0, Shutdown::Both).is_err() {
            return;
        }
        // read(2) closes passed descriptors.
        let mut discarded = [0; 4096];
        while matches!(read(&self.0, &mut discarded), Ok(1..) | Err(Errno::INTR)) {}
    }
}
