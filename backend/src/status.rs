//! The status socket, for `farside status`: sends each client the state of this backend as JSON,
//! then closes the connection.
//!
//! Not a command of the control socket: any tool that reads a socket reads the state, and it is there
//! while a command waits for the guest.

use std::{
    io::{self, ErrorKind, Write},
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::UnixStream,
    },
    sync::{Arc, OnceLock},
};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};

use crate::served::Served;
use farside_backend_api::{BackendReport, status::FORMAT};
use farside_daemon::{OwnedListener, RateLimit, VmName};
use farside_hand_over::FARSIDE;
use farside_keeper::{Kept, RECORDS};

/// Maximum number of peers with an unread report; others stay in the backlog. Bounds memory.
const MAX_PEERS: usize = 16;

/// What a backend without its keeper cannot do any more, and the remedy.
const NO_KEEPER: &str = "its keeper and the spare one have ended: its devices go on, but if it is killed, too, the VM loses them; stop the VM when that suits, and restart the backend";

/// The status socket on the event loop.
pub(crate) struct StatusServer {
    vm: VmName,
    socket: OwnedListener,
    served: Served,
    problem: Arc<OnceLock<&'static str>>,
    kept: Kept,
    peers: Vec<Peer>,
    /// Limits the log lines on requests that cannot be answered.
    unanswered: RateLimit,
}

/// A peer that is being sent a report. With thousands of vectors it can exceed the socket buffer.
struct Peer {
    socket: UnixStream,
    report: Vec<u8>,
    sent: usize,
}

impl Peer {
    /// Sends as much as the socket accepts. Returns whether the report is complete.
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
    /// `problem` is set when there is one.
    pub(crate) fn new(
        vm: &VmName,
        socket: OwnedListener,
        served: Served,
        problem: Arc<OnceLock<&'static str>>,
        kept: Kept,
    ) -> Self {
        Self {
            vm: vm.to_owned(),
            socket,
            served,
            problem,
            kept,
            peers: Vec::new(),
            unanswered: RateLimit::new(),
        }
    }

    fn problem(&self) -> Option<&'static str> {
        let problem = self.problem.get().copied();
        problem.or(self.kept.is_alone().then_some(NO_KEEPER))
    }

    fn report(&self) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(&BackendReport {
            format: FORMAT,
            vm: self.vm.clone(),
            pid: std::process::id(),
            problem: self.problem().map(str::to_owned),
            restarts: self.kept.restarts(),
            farside: Some(FARSIDE.to_owned()),
            records_version: self.kept.restarts().map(|_| RECORDS.version()),
            protocol_version: Some(farside_lender_protocol::VERSION),
            keeper_restarts: self.kept.replaced(),
            devices: self.served.reports(),
        })
    }

    /// Accepts and answers pending connections while there is room.
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
            // Until a peer disconnects.
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
