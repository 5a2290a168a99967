//! A daemon's listening UNIX sockets.

use std::{
    fs, io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::{
            ffi::OsStrExt,
            fs::{FileTypeExt, MetadataExt},
        },
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

use crate::SocketKind;

/// Longest path of a UNIX socket on Linux, bytes without the final NUL (`unix(7)`).
const MAX_PATH: usize = 107;

/// A nonblocking listening UNIX socket. Dropping it removes its path, if
/// [`bind`](Self::bind) has created that and no other process has replaced it since.
#[derive(Debug)]
pub struct OwnedListener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode of the path, if this process created it.
    identity: Option<(u64, u64)>,
}

/// Why a daemon cannot listen at a path.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages document the fields")]
pub enum ListenError {
    /// The path does not fit in a socket address.
    #[error(
        "socket path {path} has {length} bytes, the limit is {MAX_PATH}: choose a shorter directory",
        path = path.display()
    )]
    PathTooLong { path: PathBuf, length: usize },
    /// The path contains a NUL or is empty.
    #[error("invalid socket path {path:?}")]
    PathInvalid { path: PathBuf, source: Errno },
    /// Another process listens there.
    #[error(
        "another process listens at {path}: stop it or choose another path",
        path = path.display()
    )]
    InUse { path: PathBuf },
    /// The path is a file other than a socket, which is not removed.
    #[error("{path} exists and is not a socket: remove it or choose another path", path = path.display())]
    NotASocket { path: PathBuf },
    /// The path is a socket of another type, or this user may not connect to it.
    #[error(
        "cannot determine whether {path} is in use: stop the process that uses it or choose another path",
        path = path.display()
    )]
    Probe { path: PathBuf, source: io::Error },
    /// A stale socket cannot be removed.
    #[error("cannot remove the stale socket {path}", path = path.display())]
    Remove { path: PathBuf, source: io::Error },
    /// The socket cannot be created or bound.
    #[error("cannot listen at {path}", path = path.display())]
    Listen { path: PathBuf, source: Errno },
}

impl OwnedListener {
    /// Listens at `path`, to which only this user may connect. Replaces the stale socket
    /// of a dead process. `backlog` is that of listen(2).
    ///
    /// # Errors
    ///
    /// Fails if the path is too long, in use, not a socket, or cannot be bound.
    pub fn bind(path: &Path, kind: SocketKind, backlog: i32) -> Result<Self, ListenError> {
        let address = address(path)?;
        let failed = |source| ListenError::Listen {
            path: path.to_owned(),
            source,
        };
        let socket = new_socket(kind).map_err(failed)?;
        // Before bind(2): Linux creates the path with the socket's mode, so other users
        // can never connect.
        fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        match bind(&socket, &address) {
            Err(Errno::ADDRINUSE) => {
                remove_stale(path, &address, kind)?;
                bind(&socket, &address).map_err(failed)?;
            }
            bound => bound.map_err(failed)?,
        }
        let listener = Self {
            socket,
            path: path.to_owned(),
            identity: identity(path),
        };
        // After `listener` exists: a failure removes the path.
        listen(&listener.socket, backlog).map_err(failed)?;
        Ok(listener)
    }

    /// Takes a nonblocking UNIX socket that already listens at `path`, such as one from a
    /// service manager. Its path is not removed on drop.
    pub fn adopt(socket: OwnedFd, path: &Path) -> Self {
        Self {
            socket,
            path: path.to_owned(),
            identity: None,
        }
    }

    /// Takes a socket that another process of this daemon has bound to `path` and
    /// [disowned](Self::disown): its peers then see this process, and dropping it removes the path.
    ///
    /// # Errors
    /// [`ListenError::Listen`].
    pub fn take_over(socket: OwnedFd, path: &Path, backlog: i32) -> Result<Self, ListenError> {
        let listener = Self {
            socket,
            path: path.to_owned(),
            identity: identity(path),
        };
        // SO_PEERCRED is of the process that called listen(2) last.
        listen(&listener.socket, backlog).map_err(|source| ListenError::Listen {
            path: path.to_owned(),
            source,
        })?;
        Ok(listener)
    }

    /// Leaves the path to the process that [takes](Self::take_over) the socket over.
    pub fn disown(mut self) {
        self.identity = None;
    }

    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the path is removed on drop.
    pub fn owns_path(&self) -> bool {
        self.identity.is_some()
    }

    /// Accepts a pending connection, as a nonblocking socket. Returns `None` if there is
    /// none.
    pub fn accept(&self) -> io::Result<Option<OwnedFd>> {
        loop {
            match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => return Ok(Some(socket)),
                Err(Errno::AGAIN) => return Ok(None),
                // This peer has disconnected; others may be pending.
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl AsFd for OwnedListener {
    /// Readable while a connection is pending.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsRawFd for OwnedListener {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl Drop for OwnedListener {
    fn drop(&mut self) {
        // Another process may have replaced the path.
        if self.owns_path()
            && identity(&self.path) == self.identity
            && let Err(error) = fs::remove_file(&self.path)
        {
            log::warn!("cannot remove {}: {error}", self.path.display());
        }
    }
}

fn address(path: &Path) -> Result<SocketAddrUnix, ListenError> {
    let length = path.as_os_str().as_bytes().len();
    let invalid = |source| ListenError::PathInvalid {
        path: path.to_owned(),
        source,
    };
    match length {
        // Linux binds an empty address to a generated abstract one.
        0 => Err(invalid(Errno::NOENT)),
        1..=MAX_PATH => SocketAddrUnix::new(path).map_err(invalid),
        _ => Err(ListenError::PathTooLong {
            path: path.to_owned(),
            length,
        }),
    }
}

fn new_socket(kind: SocketKind) -> Result<OwnedFd, Errno> {
    let kind = match kind {
        SocketKind::Stream => SocketType::STREAM,
        SocketKind::SeqPacket => SocketType::SEQPACKET,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, kind, flags, None)
}

/// Removes a socket at which no process listens.
fn remove_stale(
    path: &Path,
    address: &SocketAddrUnix,
    kind: SocketKind,
) -> Result<(), ListenError> {
    let path = || path.to_owned();
    match fs::symlink_metadata(path()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => {
            return Err(ListenError::Probe {
                path: path(),
                source,
            });
        }
        Ok(meta) if !meta.file_type().is_socket() => {
            return Err(ListenError::NotASocket { path: path() });
        }
        Ok(_) => {}
    }
    match new_socket(kind).and_then(|socket| connect(&socket, address)) {
        // AGAIN: a listener's backlog is full.
        Ok(()) | Err(Errno::AGAIN) => Err(ListenError::InUse { path: path() }),
        // Its owner has just removed it.
        Err(Errno::NOENT) => Ok(()),
        Err(Errno::CONNREFUSED) => {
            log::info!("replacing the stale socket {}", path().display());
            fs::remove_file(path()).map_err(|source| ListenError::Remove {
                path: path(),
                source,
            })
        }
        Err(errno) => Err(ListenError::Probe {
            path: path(),
            source: errno.into(),
        }),
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let meta = fs::symlink_metadata(path).ok()?;
    Some((meta.dev(), meta.ino()))
}

#[cfg(test)]
mod tests;
