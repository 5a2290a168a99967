//! Where peers connect.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Mode, fchmod},
    io::Errno,
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
        socket_with,
    },
};

use crate::{Address, Channel};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;

/// A listening socket. A UNIX socket is unlinked when dropped, unless somebody
/// else made it.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    at: At,
}

#[derive(Debug)]
enum At {
    Path {
        path: PathBuf,
        /// Device and inode of `path`, if we made it: what is there later is
        /// removed only if it is still this one.
        identity: Option<(u64, u64)>,
    },
    Port(SocketAddr),
}

impl Listener {
    /// Listens at `path`, readable and writable by the owner only. A socket
    /// left behind by a process that died is replaced; one that answers is an
    /// error (`AddrInUse`).
    pub fn bind(path: &Path) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path).map_err(|_| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "socket path {} is {} bytes long; the limit is 107: choose a shorter directory",
                    path.display(),
                    path.as_os_str().len()
                ),
            )
        })?;
        let failed = |errno: Errno| {
            let error = io::Error::from(errno);
            io::Error::new(error.kind(), format!("{}: {error}", path.display()))
        };
        let socket = new_socket().map_err(failed)?;
        // Before the bind: Linux makes the path with the socket's mode, so at
        // no time can another user connect.
        fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        match bind(&socket, &address) {
            Err(Errno::ADDRINUSE) => {
                remove_stale(path, &address)?;
                bind(&socket, &address).map_err(failed)?;
            }
            bound => bound.map_err(failed)?,
        }
        let listener = Self {
            socket,
            at: At::Path {
                path: path.to_owned(),
                identity: identity(path),
            },
        };
        // From here on a failure removes the path.
        listen(&listener.socket, BACKLOG).map_err(failed)?;
        Ok(listener)
    }

    /// Listens at a TCP address; at the first that a name stands for and that
    /// is this host's. Who may connect is for the caller to think of: see
    /// [`is_private`].
    pub fn bind_tcp(host: &str, port: u16) -> io::Result<Self> {
        let address = Address::Tcp {
            host: host.to_owned(),
            port,
        };
        let failed = |error: io::Error| io::Error::new(error.kind(), format!("{address}: {error}"));
        let resolved: Vec<SocketAddr> = (host, port).to_socket_addrs().map_err(failed)?.collect();
        let socket = TcpListener::bind(&resolved[..]).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        Ok(Self {
            at: At::Port(socket.local_addr().map_err(failed)?),
            socket: socket.into(),
        })
    }

    /// Takes a UNIX `SOCK_SEQPACKET` socket that listens at `path` already and
    /// does not block, such as one from a service manager. Its path stays.
    pub fn adopt(socket: OwnedFd, path: &Path) -> Self {
        Self {
            socket,
            at: At::Path {
                path: path.to_owned(),
                identity: None,
            },
        }
    }

    /// The same, for a TCP socket that listens at `at`.
    pub fn adopt_tcp(socket: OwnedFd, at: SocketAddr) -> Self {
        Self {
            socket,
            at: At::Port(at),
        }
    }

    /// Accepts one connection if one waits.
    pub fn accept(&self) -> io::Result<Option<Channel>> {
        loop {
            let socket =
                match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                    Ok(socket) => socket,
                    Err(Errno::INTR | Errno::CONNABORTED) => continue,
                    Err(Errno::AGAIN) => return Ok(None),
                    Err(errno) => return Err(errno.into()),
                };
            return match self.at {
                At::Path { .. } => Ok(Some(Channel::from_socket(socket))),
                At::Port(_) => Channel::from_tcp(socket.into()).map(Some),
            };
        }
    }

    /// Where it listens; at TCP with the port that was free, and the address
    /// that a name stands for.
    pub fn address(&self) -> Address {
        match &self.at {
            At::Path { path, .. } => Address::Unix(path.clone()),
            At::Port(at) => Address::Tcp {
                host: at.ip().to_string(),
                port: at.port(),
            },
        }
    }

    /// The address in the network, where there is one.
    pub fn ip(&self) -> Option<IpAddr> {
        match self.at {
            At::Path { .. } => None,
            At::Port(at) => Some(at.ip()),
        }
    }
}

/// Whether an address is of no public network: the host's own (loopback),
/// private (RFC 1918, RFC 4193) or of one link (RFC 3927, RFC 4291). Decides what
/// goes unencrypted without being asked for, such as a lender's port and guest RAM
/// in a live migration.
///
/// An IPv4-mapped address (RFC 4291, 2.5.5.2) is judged as the IPv4 address in it,
/// since that is where the kernel sends the packets: `::ffff:10.0.0.1` is private,
/// `::ffff:203.0.113.5` is not. Nothing public is taken for private.
pub fn is_private(ip: IpAddr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(ip) => ip.is_loopback() || ip.is_private() || ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_loopback() || ip.is_unique_local() || ip.is_unicast_link_local(),
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Another process may have put its own socket there since.
        if let At::Path {
            path,
            identity: Some(ours),
        } = &self.at
            && self::identity(path) == Some(*ours)
            && let Err(error) = std::fs::remove_file(path)
        {
            log::warn!("cannot unlink {}: {error}", path.display());
        }
    }
}

fn new_socket() -> Result<OwnedFd, Errno> {
    socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
}

/// Removes what is at `path` if it is a socket on which nobody listens.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> io::Result<()> {
    let in_use = |what: String| Err(io::Error::new(io::ErrorKind::AddrInUse, what));
    match connect(&new_socket()?, address) {
        Err(Errno::CONNREFUSED) if is_socket(path) => {
            log::info!("replacing the stale socket {}", path.display());
            std::fs::remove_file(path)
        }
        // It went away by itself.
        Err(Errno::NOENT) => Ok(()),
        // AGAIN: so many want to connect that there is a listener.
        Ok(()) | Err(Errno::AGAIN) => in_use(format!(
            "another process listens at {}: stop it or choose another path",
            path.display()
        )),
        Err(errno) => in_use(format!(
            "{} exists and is no lender's socket ({errno}): remove it or choose another path",
            path.display()
        )),
    }
}

fn is_socket(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let meta = std::fs::symlink_metadata(path).ok()?;
    Some((meta.dev(), meta.ino()))
}

#[cfg(test)]
mod tests;
