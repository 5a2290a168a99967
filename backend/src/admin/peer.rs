//! One connection to the control socket. Processes one request line at a time.

use std::{
    io::{self, ErrorKind, Read, Write},
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::UnixStream,
    },
};

use event_manager::EventSet;
use farside_backend_api::admin::{Answer, MAX_REQUEST, Refusal, RefusalKind};

pub(super) struct Peer {
    socket: UnixStream,
    /// Identifies the peer to the threads that work for it.
    pub(super) token: u64,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    /// A request is in progress; no other is read.
    waiting: bool,
    /// The peer has shut down its sending direction.
    ended: bool,
}

impl Peer {
    pub(super) fn new(socket: UnixStream, token: u64) -> Self {
        Self {
            socket,
            token,
            inbox: Vec::new(),
            outbox: Vec::new(),
            waiting: false,
            ended: false,
        }
    }

    pub(super) fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// Reads the available input, up to the length of one request.
    pub(super) fn receive(&mut self) -> io::Result<()> {
        while !self.ended && self.inbox.len() < MAX_REQUEST {
            let mut piece = [0; MAX_REQUEST];
            let room = MAX_REQUEST - self.inbox.len();
            match self.socket.read(&mut piece[..room]) {
                Ok(0) => self.ended = true,
                Ok(len) => self.inbox.extend_from_slice(&piece[..len]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Returns the next complete line. Fails if a request is too long; close the connection then.
    pub(super) fn next_line(&mut self) -> Result<Option<Vec<u8>>, Refusal> {
        match self.inbox.iter().position(|&byte| byte == b'\n') {
            Some(end) => Ok(Some(self.inbox.drain(..=end).collect())),
            None if self.inbox.len() >= MAX_REQUEST => Err(Refusal {
                kind: RefusalKind::Malformed,
                message: format!("a request has {MAX_REQUEST} bytes at most"),
            }),
            None => Ok(None),
        }
    }

    pub(super) fn answer(&mut self, answer: &Answer) {
        self.waiting = false;
        match serde_json::to_vec(answer) {
            Ok(line) => self.outbox.extend(line),
            Err(error) => log::error!("an answer does not become JSON: {error}"),
        }
        self.outbox.push(b'\n');
    }

    /// Sends as much as the socket accepts.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        while !self.outbox.is_empty() {
            match self.socket.write(&self.outbox) {
                Ok(sent) => drop(self.outbox.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    pub(super) fn wait(&mut self) {
        self.waiting = true;
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.waiting
    }

    pub(super) fn wants_write(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Whether the peer has shut down its sending direction.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Events to watch. epoll always reports `EPOLLHUP`.
    pub(super) fn interest(&self) -> EventSet {
        let mut set = EventSet::empty();
        set.set(EventSet::OUT, self.wants_write());
        set.set(EventSet::IN, !self.waiting && !self.wants_write());
        set
    }
}

impl AsRawFd for Peer {
    fn as_raw_fd(&self) -> RawFd {
        self.fd()
    }
}
