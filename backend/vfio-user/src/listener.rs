//! The socket that a VMM connects to.

use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
};

use farside_daemon::{ListenError, OwnedListener, RateLimit, SocketKind};
use rustix::net::{Shutdown, shutdown};

use super::connection::{Connection, ConnectionError};
use super::stream::Stream;

/// A listening socket for one client at a time.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedListener,
    /// Limits log lines on clients refused because another one is served.
    refused: RateLimit,
}

/// Whether a client may be served now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// No client is served: accept the next one.
    Free,
    /// A client is served: refuse others.
    Taken,
}

/// Why a client cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// accept(2) failed.
    #[error("cannot accept a client at {path}", path = path.display())]
    Accept {
        /// The socket's path.
        path: PathBuf,
        /// The error of accept(2).
        source: io::Error,
    },
    /// The accepted socket could not be set up.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
}

impl Listener {
    /// Backlog of listen(2). Above 1, so that a surplus client's connect(2) does not
    /// block and the refusal reaches it at once.
    pub const BACKLOG: i32 = 4;

    /// Listens at `path`; see [`OwnedListener::bind`].
    pub fn bind(path: &Path) -> Result<Self, ListenError> {
        OwnedListener::bind(path, SocketKind::Stream, Self::BACKLOG).map(Self::from)
    }

    /// The socket's path.
    pub fn path(&self) -> &Path {
        self.socket.path()
    }

    /// Accepts the next client if `slot` is free, and refuses pending ones if not.
    /// Returns `None` if no client was accepted.
    ///
    /// # Errors
    ///
    /// Fails if accept(2) does, for instance with EMFILE.
    pub fn accept(&self, slot: Slot) -> Result<Option<Connection>, AcceptError> {
        let stream = self.accept_stream(slot)?;
        Ok(stream.map(Connection::new).transpose()?)
    }

    /// As [`accept`](Self::accept), and leaves the stream as it is.
    ///
    /// # Errors
    ///
    /// As [`accept`](Self::accept).
    pub fn accept_stream(&self, slot: Slot) -> Result<Option<UnixStream>, AcceptError> {
        loop {
            let accepted = self.socket.accept().map_err(|source| AcceptError::Accept {
                path: self.path().to_owned(),
                source,
            });
            let Some(client) = accepted? else {
                return Ok(None);
            };
            match slot {
                Slot::Free => return Ok(Some(UnixStream::from(client))),
                Slot::Taken => drop(Stream::new(client)),
            }
            if let Some(held_back) = self.refused.allow() {
                log::warn!(
                    "{}: refused a client, since another one is being served{held_back}",
                    self.path().display()
                );
            }
        }
    }
}

impl From<OwnedListener> for Listener {
    /// Takes a socket of [`SocketKind::Stream`].
    fn from(socket: OwnedListener) -> Self {
        Self {
            socket,
            refused: RateLimit::new(),
        }
    }
}

impl AsFd for Listener {
    /// For the event loop: readable while a client is pending.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    /// Accepts and closes pending connections, which the kernel would reset. An
    /// adopted socket is left alone: its next owner accepts them.
    fn drop(&mut self) {
        if self.socket.owns_path() && shutdown(&self.socket, Shutdown::Read).is_ok() {
            while let Ok(Some(client)) = self.socket.accept() {
                drop(Stream::new(client));
            }
        }
    }
}
