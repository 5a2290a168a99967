//! The queue of messages that the socket has not taken yet.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};

use super::MAX_QUEUED_BYTES;
use super::connection::ConnectionError;

/// A bounded queue of encoded messages. Nearly always empty: only the unsent rest of
/// a message is queued.
#[derive(Debug, Default)]
pub struct Outbox {
    queue: VecDeque<Queued>,
    bytes: usize,
}

/// A message of which `bytes[sent..]` has not been sent. `fd` is sent with the first
/// byte, and `None` afterwards.
#[derive(Debug)]
struct Queued {
    bytes: Vec<u8>,
    sent: usize,
    fd: Option<OwnedFd>,
}

impl Outbox {
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Sends `bytes` with `fd`, and queues the part that the socket does not take.
    pub fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        bytes: &[u8],
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), ConnectionError> {
        let sent = if self.queue.is_empty() {
            send_some(socket, bytes, fd)?
        } else {
            0
        };
        if sent == bytes.len() {
            return Ok(());
        }
        let waiting = self.bytes + (bytes.len() - sent);
        if waiting > MAX_QUEUED_BYTES {
            return Err(ConnectionError::ClientDoesNotRead { waiting });
        }
        let fd = match fd {
            Some(fd) if sent == 0 => {
                Some(fd.try_clone_to_owned().map_err(ConnectionError::QueueFd)?)
            }
            _ => None,
        };
        self.bytes = waiting;
        self.queue.push_back(Queued {
            bytes: bytes[sent..].to_vec(),
            sent: 0,
            fd,
        });
        Ok(())
    }

    /// Sends as much as the socket takes. Returns whether the queue is empty.
    pub fn flush(&mut self, socket: BorrowedFd<'_>) -> Result<bool, ConnectionError> {
        while let Some(first) = self.queue.front_mut() {
            let fd = first.fd.as_ref().map(|fd| fd.as_fd());
            let sent = send_some(socket, &first.bytes[first.sent..], fd)?;
            if sent == 0 {
                return Ok(false);
            }
            first.fd = None;
            first.sent += sent;
            self.bytes -= sent;
            if first.sent == first.bytes.len() {
                self.queue.pop_front();
            }
        }
        Ok(true)
    }
}

/// Sends a part of `bytes`, which is not empty. Returns 0 if the socket is full.
fn send_some(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> Result<usize, ConnectionError> {
    // NOSIGNAL: report a closed peer as EPIPE, without SIGPIPE.
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        let sent = match fd {
            // The common case: send(2) has less to copy in than sendmsg(2).
            None => send(socket, bytes, flags),
            Some(fd) => send_with(socket, bytes, fd, flags),
        };
        return match sent {
            Ok(sent) => Ok(sent),
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => Ok(0),
            Err(Errno::PIPE | Errno::CONNRESET) => Err(ConnectionError::Closed),
            Err(errno) => Err(ConnectionError::Send(errno)),
        };
    }
}

fn send_with(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fd: BorrowedFd<'_>,
    flags: SendFlags,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    let pushed = control.push(SendAncillaryMessage::ScmRights(&fds));
    assert!(pushed, "the buffer was made for one descriptor");
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)
}
