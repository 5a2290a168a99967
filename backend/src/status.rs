//! Answers `farside status`: whoever connects to the status socket is sent the
//! state of this backend as JSON, and the connection is closed.

use std::{
    io::{self, ErrorKind, Write},
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::UnixStream,
    },
};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};

use crate::served::Served;
use farside_backend_api::{BackendReport, status::FORMAT};
use farside_daemon::{OwnedListener, RateLimit};

/// Most peers that have not read all of their report yet. Others wait to be
/// accepted. Bounds memory.
const MAX_PEERS: usize = 16;

/// The status socket on the event loop.
pub(crate) struct StatusServer {
    vm: String,
    socket: OwnedListener,
    served: Served,
    peers: Vec<Peer>,
    /// Lines on requests that cannot be answered.
    unanswered: RateLimit,
}

/// Who is being sent a report. One of functions with thousands of vectors can be
/// more than a socket takes at once.
struct Peer {
    socket: UnixStream,
    report: Vec<u8>,
    sent: usize,
}

impl Peer {
    /// Sends what the socket takes. Returns whether that was the rest.
    fn send(&mut self) -> io::Result<bool> {
        while self.sent < self.report.len() {
            match self.socket.write(&self.report[self.sent..]) {
                Ok(sent) => self.sent += sent,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

impl StatusServer {
    pub(crate) fn new(vm: &str, socket: OwnedListener, served: Served) -> Self {
        Self {
            vm: vm.to_owned(),
            socket,
            served,
            peers: Vec::new(),
            unanswered: RateLimit::new(),
        }
    }

    fn report(&self) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(&BackendReport {
            format: FORMAT,
            vm: self.vm.clone(),
            pid: std::process::id(),
            devices: self.served.reports(),
        })
    }

    /// Accepts and answers those who wait, for as long as there is room.
    fn accept(&mut self, ops: &mut EventOps) -> io::Result<()> {
        while self.peers.len() < MAX_PEERS {
            let Some(socket) = self.socket.accept()? else {
                break;
            };
            let mut peer = Peer {
                socket: socket.into(),
                report: self.report()?,
                sent: 0,
            };
            if !peer.send()? {
                ops.add(Events::new(&peer.socket, EventSet::OUT))
                    .map_err(io::Error::other)?;
                self.peers.push(peer);
            }
        }
        if self.peers.len() == MAX_PEERS {
            // Until one has gone.
            ops.modify(Events::new(&self.socket, EventSet::empty()))
                .map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// Sends more to a peer.
    fn go_on(&mut self, fd: RawFd, ops: &mut EventOps) -> io::Result<()> {
        let Some(at) = self
            .peers
            .iter()
            .position(|peer| peer.socket.as_raw_fd() == fd)
        else {
            return Ok(());
        };
        let sent = self.peers[at].send();
        if let Ok(false) = sent {
            return Ok(());
        }
        let peer = self.peers.swap_remove(at);
        ops.remove(Events::empty(&peer.socket))
            .map_err(io::Error::other)?;
        ops.modify(Events::new(&self.socket, EventSet::IN))
            .map_err(io::Error::other)?;
        sent.map(|_| ())
    }
}

impl MutEventSubscriber for StatusServer {
    fn init(&mut self, ops: &mut EventOps) {
        if let Err(error) = ops.add(Events::new(&self.socket, EventSet::IN)) {
            log::error!("no status for VM {}: event loop: {error}", self.vm);
        }
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        let answered = if events.fd() == self.socket.as_raw_fd() {
            self.accept(ops)
        } else {
            self.go_on(events.fd(), ops)
        };
        if let Err(error) = answered
            && let Some(held_back) = self.unanswered.allow()
        {
            log::warn!(
                "cannot answer a status request of VM {}: {error}{held_back}",
                self.vm
            );
        }
    }
}
