//! One connection of an administrator: lines in, answers out, one at a time.

use std::{
    io::{self, ErrorKind, Read, Write},
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::UnixStream,
    },
};

use event_manager::EventSet;
use farside_backend_api::admin::{Answer, MAX_REQUEST, Refusal, RefusalKind};

/// A peer.
pub(super) struct Peer {
    socket: UnixStream,
    /// By which those who work for it know it.
    pub(super) token: u64,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    /// Its request is in hand: no other is read.
    waiting: bool,
    /// It sends no more.
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

    /// Reads what is there, but no more than a request's length.
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

    /// The next whole line. A request that is too long is an error, after which
    /// the peer is of no more use.
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

    /// Sends what the socket takes.
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

    /// Whether nothing more comes from it.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// What the event loop is to watch. That it hangs up is told in any case.
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
