//! Where a lender listens, and who gets in.
//!
//! A UNIX socket is for this user alone. A TCP port has no such guard: nothing
//! that comes there is encrypted, and nobody proves who he is. So only the
//! host's own and private addresses are listened at, unless the configuration
//! says otherwise in so many words.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use farside_control::{Address, Channel, Listener, is_private, paths};

use crate::{config::Config, server::StartError};

/// Most peers without a lease at a time, of one listener: who floods a TCP port
/// does not lock out this host. Bounds threads.
const MAX_PEERS: usize = 256;

/// One place where a lender listens.
pub(crate) struct Entrance {
    listener: Listener,
    peers: Arc<AtomicUsize>,
}

impl Entrance {
    /// Listens everywhere that `config` says.
    pub(crate) fn open_all(config: &Config) -> Result<Vec<Self>, StartError> {
        if let Some(folder) = config.socket.parent() {
            paths::create_folder(folder).map_err(|source| StartError::Folder {
                path: folder.to_owned(),
                source,
            })?;
        }
        let mut entrances = vec![Self::new(
            Listener::bind(&config.socket).map_err(StartError::Listen)?,
        )];
        for address in &config.listen {
            entrances.push(Self::new(open_port(address, config.listen_plain)?));
        }
        Ok(entrances)
    }

    fn new(listener: Listener) -> Self {
        Self {
            listener,
            peers: Arc::default(),
        }
    }

    /// Where it is.
    pub(crate) fn address(&self) -> Address {
        self.listener.address()
    }

    /// The next peer, if one waits, and what counts it while it is served. One
    /// too many is turned away.
    pub(crate) fn accept(&self) -> io::Result<Option<(Channel, Counted)>> {
        while let Some(channel) = self.listener.accept()? {
            if self.peers.load(Ordering::Relaxed) < MAX_PEERS {
                return Ok(Some((channel, Counted::new(&self.peers))));
            }
            log::warn!(
                "refusing a connection of {}: {MAX_PEERS} peers are connected to {} already",
                channel.peer(),
                self.address()
            );
        }
        Ok(None)
    }
}

impl AsFd for Entrance {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

fn open_port(address: &Address, plain: bool) -> Result<Listener, StartError> {
    let Address::Tcp { host, port } = address else {
        return Err(StartError::NotTcp(address.clone()));
    };
    let listener = Listener::bind_tcp(host, *port).map_err(StartError::Listen)?;
    let Some(ip) = listener.ip() else {
        return Ok(listener);
    };
    if !is_private(ip) && !plain {
        return Err(StartError::Public(address.clone()));
    }
    if !ip.is_loopback() {
        log::warn!(
            "{}: whoever reaches this address can borrow every device here, and what is said there can be read on the way; use a network that carries nothing else",
            listener.address()
        );
    }
    Ok(listener)
}

/// Counts itself for as long as it lives.
pub(crate) struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
