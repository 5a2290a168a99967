//! The control socket on the event loop: an administrator adds and removes devices.
//! [`farside_backend_api::admin`] defines the protocol.

mod peer;

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    path::PathBuf,
    sync::{Arc, mpsc},
};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use farside_backend_api::admin::{Answer, Command, Refusal, RefusalKind, Request, Status, VERSION};
use farside_daemon::{DeviceId, OwnedListener, RateLimit, Wakeup};
use farside_error_chain::Chain;
use farside_lender_protocol::FindError;

use crate::{
    StartError,
    lookup::Lookup,
    served::{DetachError, Served, ServedState},
    server::DeviceServer,
};
use peer::Peer;

/// Maximum number of connections; bounds memory and threads. When full, the oldest idle connection
/// is closed; if none is idle, new ones stay in the backlog.
const MAX_PEERS: usize = 8;

/// Maximum number of concurrent device lookups. Each has a thread, which runs to its end even if
/// the peer disconnects.
const MAX_COMING: usize = 16;

/// The control socket.
pub(crate) struct AdminServer {
    socket: OwnedListener,
    lookup: Arc<Lookup>,
    served: Served,
    peers: Vec<Peer>,
    /// Devices that are being looked up.
    coming: Vec<DeviceId>,
    next_token: u64,
    done: mpsc::Receiver<Done>,
    outbox: mpsc::Sender<Done>,
    wakeup: Wakeup,
    evictions: RateLimit,
    /// Limits the log lines on requests that cannot be served.
    unserved: RateLimit,
}

/// A result computed on another thread.
struct Done {
    /// Identifies the requesting peer, which may have disconnected.
    token: u64,
    what: What,
}

enum What {
    Found {
        device: DeviceId,
        server: Result<Box<DeviceServer>, StartError>,
    },
    Detached,
}

impl AdminServer {
    pub(crate) fn new(
        socket: OwnedListener,
        lookup: Arc<Lookup>,
        served: Served,
    ) -> io::Result<Self> {
        let (outbox, done) = mpsc::channel();
        Ok(Self {
            socket,
            lookup,
            served,
            peers: Vec::new(),
            coming: Vec::new(),
            next_token: 0,
            done,
            outbox,
            wakeup: Wakeup::new()?,
            evictions: RateLimit::new(),
            unserved: RateLimit::new(),
        })
    }

    /// Accepts pending connections while there is room.
    fn accept(&mut self, ops: &mut EventOps) -> io::Result<()> {
        while self.has_room() {
            let Some(socket) = self.socket.accept()? else {
                break;
            };
            if self.peers.len() >= MAX_PEERS
                && let Some(at) = self.oldest_idle()
            {
                if let Some(held_back) = self.evictions.allow() {
                    log::info!(
                        "control socket: {MAX_PEERS} clients are connected, closing the oldest idle one{held_back}"
                    );
                }
                self.drop_peer(at, ops)?;
            }
            ops.add(Events::new(&socket, EventSet::IN))
                .map_err(io::Error::other)?;
            self.peers.push(Peer::new(socket.into(), self.next_token));
            self.next_token += 1;
        }
        self.watch_listener(ops)
    }

    fn has_room(&self) -> bool {
        self.peers.len() < MAX_PEERS || self.oldest_idle().is_some()
    }

    /// The oldest peer without a request in progress, so that idle connections cannot exhaust the
    /// limit.
    fn oldest_idle(&self) -> Option<usize> {
        let peers = self.peers.iter().enumerate();
        peers
            .filter(|(_, peer)| !peer.is_waiting())
            .min_by_key(|(_, peer)| peer.token)
            .map(|(at, _)| at)
    }

    fn watch_listener(&self, ops: &mut EventOps) -> io::Result<()> {
        let room = match self.has_room() {
            true => EventSet::IN,
            false => EventSet::empty(),
        };
        ops.modify(Events::new(&self.socket, room))
            .map_err(io::Error::other)
    }

    fn serve_peer(&mut self, fd: RawFd, events: EventSet, ops: &mut EventOps) -> io::Result<()> {
        let Some(at) = self.peers.iter().position(|peer| peer.fd() == fd) else {
            return Ok(());
        };
        let hung_up = events.intersects(EventSet::HANG_UP | EventSet::ERROR);
        let stays = !hung_up && self.exchange(at);
        self.settle(at, stays, ops)
    }

    /// Reads requests, executes them and sends answers. Returns whether to keep the connection.
    fn exchange(&mut self, at: usize) -> bool {
        let peer = &mut self.peers[at];
        if !peer.is_waiting() && !peer.wants_write() && peer.receive().is_err() {
            return false;
        }
        self.go_on(at)
    }

    /// Executes buffered requests until one has to wait.
    fn go_on(&mut self, at: usize) -> bool {
        loop {
            if self.peers[at].flush().is_err() {
                return false;
            }
            if self.peers[at].is_waiting() || self.peers[at].wants_write() {
                return true;
            }
            let line = match self.peers[at].next_line() {
                Ok(Some(line)) => line,
                Ok(None) => return !self.peers[at].has_ended(),
                Err(refusal) => {
                    self.peers[at].answer(&Answer::Refused(refusal));
                    // The stream cannot be resynchronized.
                    let _ = self.peers[at].flush();
                    return false;
                }
            };
            let token = self.peers[at].token;
            match self.perform(token, &line) {
                Some(answer) => self.peers[at].answer(&answer),
                None => self.peers[at].wait(),
            }
        }
    }

    fn settle(&mut self, at: usize, stays: bool, ops: &mut EventOps) -> io::Result<()> {
        let peer = &self.peers[at];
        if stays {
            let events = Events::new(peer, peer.interest());
            ops.modify(events).map_err(io::Error::other)?;
        } else {
            self.drop_peer(at, ops)?;
        }
        self.watch_listener(ops)
    }

    fn drop_peer(&mut self, at: usize, ops: &mut EventOps) -> io::Result<()> {
        let peer = self.peers.swap_remove(at);
        ops.remove(Events::empty(&peer)).map_err(io::Error::other)
    }

    /// Executes one request line. Returns `None` if the answer follows later.
    fn perform(&mut self, token: u64, line: &[u8]) -> Option<Answer> {
        let request: Request = match serde_json::from_slice(line) {
            Ok(request) => request,
            Err(error) => return Some(refused(RefusalKind::Malformed, format!("{error}"))),
        };
        if request.version != VERSION {
            return Some(refused(
                RefusalKind::Malformed,
                format!(
                    "version {} was asked for, and this backend has {VERSION}: use the farside of the same version",
                    request.version
                ),
            ));
        }
        match request.command {
            Command::Status => Some(Answer::Status(Status {
                vm: self.lookup.vm().to_owned(),
                pid: std::process::id(),
                devices: self.served.list(),
            })),
            Command::Attach { device } => self.attach(token, device),
            Command::Detach { device, force } => self.detach(token, &device, force),
        }
    }

    fn attach(&mut self, token: u64, device: DeviceId) -> Option<Answer> {
        match self.served.state(&device) {
            ServedState::Served(socket) => {
                return Some(Answer::Attached {
                    socket,
                    already: true,
                });
            }
            ServedState::Detaching => return Some(busy(&device)),
            ServedState::NotServed if self.coming.contains(&device) => return Some(busy(&device)),
            ServedState::NotServed if self.coming.len() >= MAX_COMING => {
                return Some(refused(
                    RefusalKind::Busy,
                    format!("{MAX_COMING} devices are being looked up already: ask again"),
                ));
            }
            ServedState::NotServed => {}
        }
        let lookup = Arc::clone(&self.lookup);
        let (outbox, wakeup) = (self.outbox.clone(), self.wakeup.clone());
        let id = device.clone();
        let look_up = move || {
            let found = lookup.find(&id);
            let server = found.and_then(|found| lookup.serve(&id, found));
            let what = What::Found {
                device: id,
                server: server.map(Box::new),
            };
            // Fails if the event loop has ended.
            let _ = outbox.send(Done { token, what });
            wakeup.raise();
        };
        let name = format!("lookup-{device}");
        match std::thread::Builder::new().name(name).spawn(look_up) {
            Ok(_) => {
                self.coming.push(device);
                None
            }
            Err(error) => Some(refused(
                RefusalKind::Failed,
                format!("cannot start the thread that looks device {device} up: {error}"),
            )),
        }
    }

    fn detach(&mut self, token: u64, device: &DeviceId, force: bool) -> Option<Answer> {
        let (outbox, wakeup) = (self.outbox.clone(), self.wakeup.clone());
        let on_detached = Box::new(move || {
            let what = What::Detached;
            let _ = outbox.send(Done { token, what });
            wakeup.raise();
        });
        let vm = self.lookup.vm();
        match self.served.remove(device, force, on_detached) {
            Ok(()) => None,
            Err(DetachError::Detaching) => Some(busy(device)),
            Err(DetachError::NotServed) if self.coming.iter().any(|id| id == device) => {
                Some(busy(device))
            }
            Err(DetachError::NotServed) => Some(refused(
                RefusalKind::UnknownDevice,
                format!("device {device} is not served to VM {vm}"),
            )),
            Err(DetachError::InUse) => Some(refused(
                RefusalKind::InUse,
                format!("device {device} is plugged into VM {vm}, which has not released it"),
            )),
        }
    }

    /// Takes the results of other threads and answers the waiting peers.
    fn take_done(&mut self, ops: &mut EventOps) -> io::Result<()> {
        self.wakeup.lower();
        while let Ok(Done { token, what }) = self.done.try_recv() {
            let answer = match what {
                What::Detached => Answer::Detached,
                What::Found { device, server } => {
                    self.coming.retain(|id| *id != device);
                    self.found(&device, server)
                }
            };
            let Some(at) = self.peers.iter().position(|peer| peer.token == token) else {
                continue;
            };
            self.peers[at].answer(&answer);
            let stays = self.go_on(at);
            self.settle(at, stays, ops)?;
        }
        Ok(())
    }

    fn found(&self, device: &DeviceId, server: Result<Box<DeviceServer>, StartError>) -> Answer {
        match server {
            Ok(server) => {
                let socket: PathBuf = server.socket().to_owned();
                self.served.add(device, *server, true);
                Answer::Attached {
                    socket,
                    already: false,
                }
            }
            Err(error) => {
                let kind = match error {
                    StartError::Find(FindError::Unknown { .. }) => RefusalKind::UnknownDevice,
                    _ => RefusalKind::Failed,
                };
                refused(kind, Chain(&error).to_string())
            }
        }
    }
}

fn refused(kind: RefusalKind, message: String) -> Answer {
    Answer::Refused(Refusal { kind, message })
}

fn busy(device: &DeviceId) -> Answer {
    refused(
        RefusalKind::Busy,
        format!("device {device} is on its way in or out: ask again"),
    )
}

impl MutEventSubscriber for AdminServer {
    fn init(&mut self, ops: &mut EventOps) {
        let added = ops
            .add(Events::new(&self.socket, EventSet::IN))
            .and_then(|()| ops.add(Events::new(&self.wakeup, EventSet::IN)));
        if let Err(error) = added {
            let vm = self.lookup.vm();
            log::error!("no device of VM {vm} can be added or removed: event loop: {error}");
        }
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        let fd = events.fd();
        let done = if fd == self.socket.as_raw_fd() {
            self.accept(ops)
        } else if fd == self.wakeup.as_raw_fd() {
            self.take_done(ops)
        } else {
            self.serve_peer(fd, events.event_set(), ops)
        };
        if let Err(error) = done
            && let Some(held_back) = self.unserved.allow()
        {
            let vm = self.lookup.vm();
            log::warn!("cannot serve the control socket of VM {vm}: {error}{held_back}");
        }
    }
}
