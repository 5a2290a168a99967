//! The event loop: two listeners, at most two clients.

use std::{
    io,
    path::{Path, PathBuf},
    time::Instant,
};

use farside_daemon::{ListenError, Wakeup};
use farside_vfio_user::{
    Connection, ConnectionError, Listener, Reply, Session, Slot,
    serve::{Pumped, pump, pump_replies},
};
use rustix::{
    event::{PollFd, PollFlags, poll},
    time::Timespec,
};

use crate::{
    handler::{Machine, PortHandler},
    hosts::Hosts,
    model::{ConfigError, Ntb, PeerError, Port, PortConfig},
    side::Side,
};

/// Requests of one client that are served before the other client is. Each has up to 200 writes of QEMU's (`VFIO_USER_MULTI_MAX`): the
/// limit of DMA commands has room for those of so many requests.
const BUDGET: usize = 16;

/// Index of the first client in the `pollfd` array.
const CLIENTS: usize = 3;

/// Socket and sizes of one port.
#[derive(Clone, Debug)]
pub struct PortAt {
    /// Path of the socket.
    pub socket: PathBuf,
    /// Sizes of the port.
    pub sizes: PortConfig,
}

/// Configuration of a server.
#[derive(Clone, Debug)]
pub struct Config {
    /// The ports, A first.
    pub ports: [PortAt; 2],
}

/// Why an NTB cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Invalid sizes of a port.
    #[error(transparent)]
    Sizes(#[from] ConfigError),
    /// The server cannot listen at a socket.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Both ports have the same path.
    #[error("both ports have socket {}: configure different paths", .0.display())]
    SameSocket(PathBuf),
    /// The model's description is invalid: a bug in the model.
    #[error("invalid description of the NTB: {0}")]
    Description(String),
}

/// An NTB with a listener for each port.
pub struct NtbServer {
    machine: Machine,
    endpoints: [Endpoint; 2],
}

/// One port's listener and its client.
struct Endpoint {
    listener: Listener,
    client: Option<Client>,
}

struct Client {
    connection: Connection,
    session: Session,
    next: Next,
}

/// The event after which a client is served next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// None: more requests may be buffered.
    Now,
    /// The socket is readable.
    Input,
    /// The socket is writable.
    Room,
    /// The client's own read is complete, or there is room for DMA commands to the other client.
    Other,
}

impl NtbServer {
    /// Listens at both sockets.
    ///
    /// # Errors
    ///
    /// Fails if a socket cannot be bound or sizes are invalid.
    pub fn start(config: &Config) -> Result<Self, StartError> {
        let [a, b] = &config.ports;
        if a.socket == b.socket {
            return Err(StartError::SameSocket(a.socket.clone()));
        }
        let ntb = Ntb::new([a.sizes, b.sizes])?;
        let side = |port, at: &PortAt| {
            let name = format!("port {port:?} ({})", at.socket.display());
            let side = Side::new(name, ntb.description(port));
            side.map_err(|error| StartError::Description(error.to_string()))
        };
        let hosts = Hosts([side(Port::A, a)?, side(Port::B, b)?]);
        let endpoints = [Endpoint::new(&a.socket)?, Endpoint::new(&b.socket)?];
        for port in Port::BOTH {
            log::info!(
                "{} at {}",
                ntb.description(port).summary,
                endpoints[port as usize].listener.path().display()
            );
        }
        Ok(Self {
            machine: Machine { ntb, hosts },
            endpoints,
        })
    }

    /// Serves until `stop` is raised.
    ///
    /// # Errors
    ///
    /// Fails if poll(2) does.
    pub fn run(mut self, stop: &Wakeup) -> io::Result<()> {
        loop {
            let Ready {
                stopped,
                listeners,
                clients,
            } = self.wait(stop)?;
            if stopped {
                return Ok(());
            }
            for port in Port::BOTH {
                if listeners[port as usize] {
                    self.accept(port);
                }
                if let Some(ready) = clients[port as usize] {
                    self.on_client(port, ready);
                }
            }
            self.expire();
            for port in Port::BOTH {
                self.answer(port);
                self.resume(port);
                self.flush(port);
            }
        }
    }

    /// Waits for the next event.
    fn wait(&self, stop: &Wakeup) -> io::Result<Ready> {
        let [a, b] = &self.endpoints;
        let nothing = || PollFd::new(stop, PollFlags::empty());
        let mut fds = [
            PollFd::new(stop, PollFlags::IN),
            PollFd::new(&a.listener, PollFlags::IN),
            PollFd::new(&b.listener, PollFlags::IN),
            nothing(),
            nothing(),
        ];
        for (fd, endpoint) in fds[CLIENTS..].iter_mut().zip(&self.endpoints) {
            if let Some(client) = &endpoint.client {
                *fd = PollFd::new(&client.connection, client.interest());
            }
        }
        match poll(&mut fds, self.timeout().as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let is_ready = |at: usize| !fds[at].revents().is_empty();
        let mut ready = Ready {
            stopped: is_ready(0),
            listeners: [is_ready(1), is_ready(2)],
            clients: [None, None],
        };
        for port in Port::BOTH {
            let at = port as usize;
            if let Some(client) = &self.endpoints[at].client
                && (client.next == Next::Now || is_ready(CLIENTS + at))
            {
                ready.clients[at] = Some(fds[CLIENTS + at].revents());
            }
        }
        Ok(ready)
    }

    /// The timeout for poll(2); `None` if there is no deadline.
    fn timeout(&self) -> Option<Timespec> {
        let mut clients = self.endpoints.iter().flat_map(|endpoint| &endpoint.client);
        let mut sides = self.machine.hosts.0.iter();
        if clients.any(|client| client.next == Next::Now)
            || sides.any(|side| side.held.as_ref().is_some_and(|held| held.done))
        {
            return Some(Timespec::default());
        }
        let sides = self.machine.hosts.0.iter();
        let deadline = sides.filter_map(|side| side.commands.deadline()).min()?;
        Timespec::try_from(deadline.saturating_duration_since(Instant::now())).ok()
    }

    fn accept(&mut self, port: Port) {
        // Drop the old client now, so that neither a quick VM restart is refused (its
        // HUP may not have been processed), nor a repeated hot-plug (QEMU keeps the old
        // connection after an unplug).
        let unplugged = self.machine.hosts.side(port).unplugged;
        let endpoint = &mut self.endpoints[port as usize];
        let over = |client: &Client| unplugged || client.has_hung_up();
        if endpoint.client.as_ref().is_some_and(over) {
            self.drop_client(port, &ConnectionError::Closed);
        }
        let endpoint = &mut self.endpoints[port as usize];
        let slot = match endpoint.client {
            Some(_) => Slot::Taken,
            None => Slot::Free,
        };
        let side = self.machine.hosts.side(port);
        match endpoint.listener.accept(slot) {
            Ok(Some(mut connection)) => {
                side.client_log.connected(&side.name);
                connection.read_ahead();
                endpoint.client = Some(Client {
                    connection,
                    session: Session::new(),
                    next: Next::Now,
                });
            }
            Ok(None) => {}
            Err(error) => side.client_log.not_accepted(&side.name, &error),
        }
    }

    fn on_client(&mut self, port: Port, ready: PollFlags) {
        let Some(client) = &mut self.endpoints[port as usize].client else {
            return;
        };
        let hung_up = ready.intersects(PollFlags::HUP | PollFlags::ERR);
        let result = match client.next {
            // Nothing is received now that would report it.
            Next::Other if hung_up => Err(ConnectionError::Closed),
            _ => self.serve(port),
        };
        if let Err(error) = result {
            self.drop_client(port, &error);
        }
    }

    /// Serves up to [`BUDGET`] requests of a client, unless they [must wait](Hosts::must_wait).
    fn serve(&mut self, port: Port) -> Result<(), ConnectionError> {
        let Some(client) = &mut self.endpoints[port as usize].client else {
            return Ok(());
        };
        let Client {
            connection,
            session,
            next,
        } = client;
        let waits = self.machine.hosts.must_wait(port);
        self.machine.hosts.side(port).waits = waits;
        let mut handler = PortHandler {
            machine: &mut self.machine,
            port,
        };
        *next = if connection.wants_write() && !connection.flush()? {
            Next::Room
        } else if waits {
            match pump_replies(connection, &mut handler)? {
                true => Next::Other,
                false => Next::Input,
            }
        } else {
            match pump(connection, session, &mut handler, BUDGET)? {
                Pumped::Idle => Next::Input,
                Pumped::Full => Next::Room,
                Pumped::Budget | Pumped::Later => Next::Now,
            }
        };
        Ok(())
    }

    /// Fails the DMA commands that have timed out.
    fn expire(&mut self) {
        let waiting = Port::BOTH.map(|port| self.machine.hosts.side(port).commands.deadline());
        if waiting == [None; 2] {
            return;
        }
        let now = Instant::now();
        for port in Port::BOTH {
            while let Some(tag) = self.machine.hosts.side(port).commands.expire(now) {
                let side = self.machine.hosts.side(port);
                side.answers = false;
                if let Some(held_back) = side.unanswered.allow() {
                    let name = &side.name;
                    log::warn!("{name}: the VMM did not answer a DMA command in time{held_back}");
                }
                self.machine.concluded(tag, Err(PeerError::Timeout));
            }
        }
    }

    /// Answers a client's held read if it is done.
    fn answer(&mut self, port: Port) {
        let side = self.machine.hosts.side(port);
        let Some(held) = side.held.take_if(|held| held.done) else {
            return;
        };
        let Some(client) = &mut self.endpoints[port as usize].client else {
            return;
        };
        let reply = Reply::RegionRead {
            region: held.region,
            offset: held.offset,
            data: &side.buffer,
        };
        if let Err(error) = client.connection.send(held.to, Ok(reply)) {
            self.drop_client(port, &error);
        }
    }

    /// Serves a client again that has waited, if it has sent a request meanwhile.
    fn resume(&mut self, port: Port) {
        if self.machine.hosts.must_wait(port) {
            return;
        }
        self.machine.hosts.side(port).waits = false;
        if let Some(client) = &mut self.endpoints[port as usize].client
            && client.next == Next::Other
        {
            client.next = Next::Now;
        }
    }

    /// Sends DMA commands to a VMM.
    fn flush(&mut self, port: Port) {
        if let Some(client) = &mut self.endpoints[port as usize].client {
            let commands = &mut self.machine.hosts.side(port).commands;
            if let Err(error) = commands.flush(&mut client.connection) {
                self.drop_client(port, &error);
            }
        }
    }

    fn drop_client(&mut self, port: Port, error: &ConnectionError) {
        let side = self.machine.hosts.side(port);
        let (mappings, shared) = side.memory.counts();
        let stats = self.machine.ntb.stats(port);
        side.client_log.ended(
            &side.name,
            error,
            format_args!("; {mappings} mappings, {shared} of shared memory; {stats:?}"),
        );
        self.endpoints[port as usize].client = None;
        self.machine.client_gone(port);
    }
}

/// The result of a wait.
struct Ready {
    stopped: bool,
    listeners: [bool; 2],
    /// For each client that is to be served, its socket's events.
    clients: [Option<PollFlags>; 2],
}

impl Endpoint {
    fn new(socket: &Path) -> Result<Self, ListenError> {
        Ok(Self {
            listener: Listener::bind(socket)?,
            client: None,
        })
    }
}

impl Client {
    fn interest(&self) -> PollFlags {
        let mut flags = match self.next {
            Next::Now | Next::Other => PollFlags::empty(),
            Next::Input => PollFlags::IN,
            Next::Room => PollFlags::OUT,
        };
        flags.set(PollFlags::OUT, self.connection.wants_write());
        flags
    }

    fn has_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(&self.connection, PollFlags::empty())];
        let ready = poll(&mut fds, Some(&Timespec::default()));
        ready.is_ok_and(|ready| ready != 0)
    }
}
