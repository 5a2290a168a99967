//! The socket that a VMM connects to.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, shutdown, socket_with,
};

use super::connection::{Connection, ConnectionError};
use super::stream::Stream;
use farside_daemon::RateLimit;

/// Longest path of a UNIX socket on Linux, bytes without the final NUL
/// (`unix(7)`).
const MAX_PATH: usize = 107;

/// Connections that may wait to be accepted. More than one, so that a client
/// that is refused hears of it at once.
const BACKLOG: i32 = 4;

/// A listening socket for one client at a time. Its path is removed on drop,
/// unless somebody else made it.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode of the socket's path, if we made it: what is there later
    /// is removed only if it is still this one.
    identity: Option<(u64, u64)>,
}

/// Whether a client may be served now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// No client is served: the next one will be.
    Free,
    /// A client is served: others are turned away.
    Taken,
}

/// A listening socket could not be had.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The path does not fit in a socket address.
    #[error("socket path {path} has {length} bytes; at most {MAX_PATH} are possible", path = path.display())]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its bytes.
        length: usize,
    },
    /// The path holds a NUL, or is empty.
    #[error("{path:?} cannot be the path of a socket")]
    PathInvalid {
        /// The path.
        path: PathBuf,
        /// What the system says.
        source: Errno,
    },
    /// Another process listens there.
    #[error("{path} is in use: another process listens on it", path = path.display())]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// Something that is not a socket is there, and is left alone.
    #[error("{path} exists and is not a socket", path = path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// A socket is there and it cannot be told whether anybody listens.
    #[error("cannot tell whether {path} is in use", path = path.display())]
    Probe {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A stale socket cannot be removed.
    #[error("cannot remove the stale socket {path}", path = path.display())]
    Remove {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The socket cannot be made or bound.
    #[error("cannot listen on {path}", path = path.display())]
    Listen {
        /// The path.
        path: PathBuf,
        /// Why.
        source: Errno,
    },
    /// A client cannot be accepted.
    #[error("cannot accept a client on {path}", path = path.display())]
    Accept {
        /// The path.
        path: PathBuf,
        /// Why.
        source: Errno,
    },
    /// A client was accepted and cannot be served.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
}

impl Listener {
    /// Listens on `path`, which only this user may connect to. A socket that a
    /// dead process left there is replaced.
    ///
    /// # Errors
    ///
    /// When the path is too long, in use, not a socket, or cannot be bound.
    pub fn bind(path: &Path) -> Result<Self, ListenError> {
        let address = address(path)?;
        remove_stale(path, &address)?;

        let failed = |source| ListenError::Listen {
            path: path.to_owned(),
            source,
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(failed)?;
        // Before the bind: Linux makes the path with the socket's mode, so at
        // no time can another user connect.
        rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        bind(&socket, &address).map_err(failed)?;
        let identity = fs::symlink_metadata(path)
            .ok()
            .map(|meta| (meta.dev(), meta.ino()));
        let listener = Self {
            socket,
            path: path.to_owned(),
            identity,
        };
        // From here on a failure removes the path.
        listen(&listener.socket, BACKLOG).map_err(failed)?;
        Ok(listener)
    }

    /// Takes a UNIX stream socket that listens at `path` already and does not
    /// block, such as one from a service manager. Its path stays.
    pub fn adopt(socket: OwnedFd, path: &Path) -> Self {
        Self {
            socket,
            path: path.to_owned(),
            identity: None,
        }
    }

    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Accepts the next client if `slot` is free, and turns it away if not.
    /// `None` when no client waits that may be served.
    ///
    /// # Errors
    ///
    /// When accepting fails, such as for want of descriptors.
    pub fn accept(&self, slot: Slot) -> Result<Option<Connection>, ListenError> {
        static TURNED_AWAY: RateLimit = RateLimit::new();

        loop {
            match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(client) if slot == Slot::Free => {
                    return Ok(Some(Connection::new(UnixStream::from(client))?));
                }
                Ok(client) => {
                    drop(Stream::new(client));
                    if let Some(held_back) = TURNED_AWAY.allow() {
                        log::warn!(
                            "{}: a client is being served; a second one was turned away{held_back}",
                            self.path.display()
                        );
                    }
                }
                Err(Errno::AGAIN) => return Ok(None),
                // That client gave up; the next may not have.
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(source) => {
                    return Err(ListenError::Accept {
                        path: self.path.clone(),
                        source,
                    });
                }
            }
        }
    }
}

impl Listener {
    /// Turns away those who wait, for whom nobody will ever come.
    fn turn_away_all(&self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        while let Ok(client) = accept_with(&self.socket, flags) {
            drop(Stream::new(client));
        }
    }
}

impl AsFd for Listener {
    /// For the event loop: readable when a client waits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // One that somebody else made, somebody else listens at next.
        if self.identity.is_some() && shutdown(&self.socket, Shutdown::Read).is_ok() {
            self.turn_away_all();
        }
        let now = fs::symlink_metadata(&self.path)
            .ok()
            .map(|meta| (meta.dev(), meta.ino()));
        // Another process may have put its own socket there since.
        if now.is_some()
            && now == self.identity
            && let Err(error) = fs::remove_file(&self.path)
        {
            log::warn!("cannot remove {}: {error}", self.path.display());
        }
    }
}

fn address(path: &Path) -> Result<SocketAddrUnix, ListenError> {
    let length = path.as_os_str().as_bytes().len();
    if length > MAX_PATH {
        return Err(ListenError::PathTooLong {
            path: path.to_owned(),
            length,
        });
    }
    if length == 0 {
        return Err(ListenError::PathInvalid {
            path: path.to_owned(),
            source: Errno::NOENT,
        });
    }
    SocketAddrUnix::new(path).map_err(|source| ListenError::PathInvalid {
        path: path.to_owned(),
        source,
    })
}

/// Removes a socket that nobody listens on.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), ListenError> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => {
            return Err(ListenError::Probe {
                path: path.to_owned(),
                source,
            });
        }
        Ok(meta) if !meta.file_type().is_socket() => {
            return Err(ListenError::NotASocket {
                path: path.to_owned(),
            });
        }
        Ok(_) => {}
    }
    let probe = |source: Errno| ListenError::Probe {
        path: path.to_owned(),
        source: source.into(),
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(probe)?;
    match connect(&socket, address) {
        // AGAIN: the listener's backlog is full, so there is a listener.
        Ok(()) | Err(Errno::AGAIN) => Err(ListenError::InUse {
            path: path.to_owned(),
        }),
        Err(Errno::NOENT) => Ok(()),
        Err(Errno::CONNREFUSED) => {
            log::info!(
                "replacing {}, which a process that is gone left behind",
                path.display()
            );
            fs::remove_file(path).map_err(|source| ListenError::Remove {
                path: path.to_owned(),
                source,
            })
        }
        Err(errno) => Err(probe(errno)),
    }
}
