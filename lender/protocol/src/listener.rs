//! A lender's listening sockets.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::Arc,
};

use farside_daemon::{ListenError, OwnedListener, SocketKind};
use farside_pki::Renewed;

use crate::{Address, Channel};

/// Backlog of listen(2).
const BACKLOG: i32 = 128;

/// A listening socket.
#[derive(Debug)]
pub struct Listener(Socket);

#[derive(Debug)]
enum Socket {
    Unix(OwnedListener),
    Tcp {
        socket: TcpListener,
        at: SocketAddr,
        /// The certificates, with TLS.
        tls: Option<Arc<Renewed>>,
    },
}

impl Listener {
    /// Listens at `path`; see [`OwnedListener::bind`].
    pub fn bind(path: &Path) -> Result<Self, ListenError> {
        OwnedListener::bind(path, SocketKind::SeqPacket, BACKLOG).map(Self::from)
    }

    /// Listens at a TCP address: the first address of `host` that can be bound. Without certificates
    /// (`tls`) the caller is responsible for access control.
    pub fn bind_tcp(host: &str, port: u16, tls: Option<Arc<Renewed>>) -> io::Result<Self> {
        let host_name = host.to_owned();
        let address = match tls {
            Some(_) => Address::Tls {
                host: host_name,
                port,
            },
            None => Address::Tcp {
                host: host_name,
                port,
            },
        };
        let failed = |error: io::Error| io::Error::new(error.kind(), format!("{address}: {error}"));
        let resolved: Vec<SocketAddr> = (host, port).to_socket_addrs().map_err(failed)?.collect();
        let socket = TcpListener::bind(&resolved[..]).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        let at = socket.local_addr().map_err(failed)?;
        Ok(Self(Socket::Tcp { socket, at, tls }))
    }

    /// Takes a nonblocking TCP socket that already listens at `at`, such as one from a
    /// service manager.
    pub fn adopt_tcp(socket: OwnedFd, at: SocketAddr, tls: Option<Arc<Renewed>>) -> Self {
        let socket = socket.into();
        Self(Socket::Tcp { socket, at, tls })
    }

    /// Accepts a pending connection. Returns `None` if there is none.
    pub fn accept(&self) -> io::Result<Option<Channel>> {
        match &self.0 {
            Socket::Unix(socket) => Ok(socket.accept()?.map(Channel::from_socket)),
            Socket::Tcp { socket, tls, .. } => loop {
                match socket.accept() {
                    Ok((connection, _)) => {
                        let channel = match tls {
                            Some(tls) => Channel::accept_tls(connection, &tls.current())?,
                            None => Channel::from_tcp(connection)?,
                        };
                        return Ok(Some(channel));
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                    // This peer has disconnected; others may be pending.
                    Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                    Err(error) => return Err(error),
                }
            },
        }
    }

    /// The bound address; for TCP with the resolved IP address and, if port 0 was
    /// requested, the port that the kernel chose.
    pub fn address(&self) -> Address {
        match &self.0 {
            Socket::Unix(socket) => Address::Unix(socket.path().to_owned()),
            Socket::Tcp { at, tls, .. } => {
                let (host, port) = (at.ip().to_string(), at.port());
                match tls {
                    Some(_) => Address::Tls { host, port },
                    None => Address::Tcp { host, port },
                }
            }
        }
    }

    /// The IP address of a TCP listener without TLS.
    pub fn plain_ip(&self) -> Option<IpAddr> {
        match &self.0 {
            Socket::Tcp { at, tls: None, .. } => Some(at.ip()),
            Socket::Tcp { .. } | Socket::Unix(_) => None,
        }
    }
}

impl From<OwnedListener> for Listener {
    /// Takes a socket of [`SocketKind::SeqPacket`].
    fn from(socket: OwnedListener) -> Self {
        Self(Socket::Unix(socket))
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Socket::Unix(socket) => socket.as_fd(),
            Socket::Tcp { socket, .. } => socket.as_fd(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn connecting_does_not_wait_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lender.sock");
        let _listener = OwnedListener::bind(&path, SocketKind::SeqPacket, 0).unwrap();
        let mut waiting = Vec::new();
        let error = loop {
            match Channel::connect(&path.clone().into(), dir.path(), Duration::from_millis(20)) {
                Ok(channel) => waiting.push(channel),
                Err(error) => break error,
            }
            assert!(waiting.len() < 100, "the backlog is unlimited");
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
