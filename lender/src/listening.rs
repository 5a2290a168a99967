//! The lender's listeners, and their access rules.
//!
//! A UNIX socket is accessible to this user only. A TCP port has neither encryption nor
//! authentication, so the lender listens only at loopback and private addresses, unless the
//! configuration explicitly allows others.

use std::{
    io,
    net::{SocketAddr, ToSocketAddrs},
    os::fd::{AsFd, BorrowedFd},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use farside_daemon::{Activated, RateLimit, SocketKind, is_private, paths};
use farside_lender_protocol::{Address, Channel, Listener};

use crate::{config::Config, server::StartError};

/// Maximum number of peers without a lease. Per listener, so that a flood on a TCP port does not
/// lock out this host. Bounds threads.
const MAX_PEERS: usize = 256;

/// Limits the log lines that peers without a lease cause. Per listener, so that a flood on a TCP
/// port does not suppress lines about this host's peers.
#[derive(Default)]
pub(crate) struct PeerLines {
    /// A connection exceeded the limit, or its thread could not be created.
    pub(crate) refused: RateLimit,
    /// A peer did not send Hello.
    pub(crate) silent: RateLimit,
    /// A connection failed, or its peer violated the protocol.
    pub(crate) broken: RateLimit,
    /// A peer sent an invalid token.
    pub(crate) token: RateLimit,
    /// A device was handed over.
    pub(crate) handover: RateLimit,
}

/// The shared state of one listener's peers.
#[derive(Default)]
struct Peers {
    connected: AtomicUsize,
    lines: PeerLines,
}

/// A listener of the lender.
pub(crate) struct PeerListener {
    listener: Listener,
    peers: Arc<Peers>,
}

impl PeerListener {
    /// Opens the listeners in `config`, and takes those of the service manager.
    pub(crate) fn open_all(
        config: &Config,
        mut activated: Activated,
    ) -> Result<Vec<Self>, StartError> {
        let mut listeners = vec![Self::new(open_socket(&config.socket, &mut activated)?)];
        let ports = activated.take_ports();
        for address in &config.listen {
            if !ports.iter().any(|(_, at)| is_there(*at, address)) {
                listeners.push(Self::new(open_port(address, config.listen_plain)?));
            }
        }
        for (socket, at) in ports {
            let listener = Listener::adopt_tcp(socket, at);
            let address = listener.address();
            listeners.push(Self::new(checked(listener, &address, config.listen_plain)?));
        }
        activated.finish(&format!(
            "what this lender listens at ({}, and TCP ports)",
            config.socket.display()
        ))?;
        Ok(listeners)
    }

    fn new(listener: Listener) -> Self {
        Self {
            listener,
            peers: Arc::default(),
        }
    }

    /// The listener's address.
    pub(crate) fn address(&self) -> Address {
        self.listener.address()
    }

    /// Accepts the next peer, if any, with a guard that counts it. Closes connections above the
    /// limit.
    pub(crate) fn accept(&self) -> io::Result<Option<(Channel, Counted)>> {
        while let Some(channel) = self.listener.accept()? {
            if self.peers.connected.load(Ordering::Relaxed) < MAX_PEERS {
                return Ok(Some((channel, Counted::new(&self.peers))));
            }
            if let Some(held_back) = self.peers.lines.refused.allow() {
                log::warn!(
                    "refusing a connection of {}: {MAX_PEERS} peers are connected to {} already{held_back}",
                    channel.peer(),
                    self.address()
                );
            }
        }
        Ok(None)
    }
}

impl AsFd for PeerListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// Opens the UNIX socket for this host.
fn open_socket(path: &Path, activated: &mut Activated) -> Result<Listener, StartError> {
    if let Some(socket) = activated.take_path(path, SocketKind::SeqPacket)? {
        return Ok(socket.into());
    }
    if let Some(directory) = path.parent() {
        paths::create_directory(directory).map_err(|source| StartError::Directory {
            path: directory.to_owned(),
            source,
        })?;
    }
    Listener::bind(path).map_err(StartError::Listen)
}

fn open_port(address: &Address, plain: bool) -> Result<Listener, StartError> {
    let Address::Tcp { host, port } = address else {
        return Err(StartError::NotTcp(address.clone()));
    };
    let listener = Listener::bind_tcp(host, *port).map_err(StartError::ListenTcp)?;
    checked(listener, address, plain)
}

/// Whether a socket that listens at `at` is the listener for `address`.
fn is_there(at: SocketAddr, address: &Address) -> bool {
    match address {
        Address::Tcp { host, port } => {
            let resolved = (host.as_str(), *port).to_socket_addrs();
            resolved.is_ok_and(|mut resolved| resolved.any(|one| one == at))
        }
        Address::Unix(_) => false,
    }
}

/// Checks that the listener is reachable only by the operator's hosts. Errors name it as `address`.
fn checked(listener: Listener, address: &Address, plain: bool) -> Result<Listener, StartError> {
    let Some(ip) = listener.ip() else {
        return Ok(listener);
    };
    if !is_private(ip) && !plain {
        return Err(StartError::Public(address.clone()));
    }
    if !ip.is_loopback() {
        log::warn!(
            "{}: every host that reaches this address can borrow every device, and the connection is not encrypted: use a network that carries nothing else",
            listener.address()
        );
    }
    Ok(listener)
}

/// A guard that counts a connected peer.
pub(crate) struct Counted(Arc<Peers>);

impl Counted {
    fn new(peers: &Arc<Peers>) -> Self {
        peers.connected.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(peers))
    }

    /// The rate limits of log lines about the listener's peers.
    pub(crate) fn lines(&self) -> &PeerLines {
        &self.0.lines
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.connected.fetch_sub(1, Ordering::Relaxed);
    }
}
