//! What the broker has of a device that goes on without its worker.

use std::{
    io,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use farside_vfio::{HandleParts, SecondHandle, VfioError};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{Shutdown, shutdown},
};

use crate::vfio_user::ServerConfig;

/// Timeout for a server to close a connection that has ended. With the time of a worker to end, shorter than the lender waits
/// for its threads.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(300);

/// A handle on a device that goes on without its worker, to stop its DMA, and for the next worker.
#[derive(Debug)]
pub(crate) enum Handle {
    /// On a function.
    Function(SecondHandle),
    /// On the device of a server.
    Server(Connection),
}

/// A duplicate of the connection to a server. Nothing is read from it here.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) config: Box<ServerConfig>,
    socket: OwnedFd,
}

impl Connection {
    pub(crate) fn new(config: Box<ServerConfig>, socket: OwnedFd) -> Self {
        Self { config, socket }
    }

    /// The same for a worker, or for the keeper.
    pub(crate) fn share(&self) -> io::Result<OwnedFd> {
        self.socket.try_clone()
    }

    /// Ends the connection, and waits until the server has closed it, which libvfio-user does after it has let the client's
    /// memory go.
    fn end(&self) {
        // Fails if the server has ended it.
        let _ = shutdown(&self.socket, Shutdown::Write);
        let until = Instant::now() + CLOSE_TIMEOUT;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).unwrap_or_default();
            // What it sends meanwhile is not of interest.
            let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
            match poll(&mut fds, Some(&left)) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(0) => log::warn!(
                    "vfio-user server {} has not closed its connection within {CLOSE_TIMEOUT:?}: it may access the memory of the lease's VM for as long as it runs",
                    self.config.path().display()
                ),
                _ => {}
            }
            if fds[0].revents().contains(PollFlags::RDHUP) || Instant::now() >= until {
                return;
            }
        }
    }
}

impl Handle {
    /// Stops the DMA of the device.
    ///
    /// # Errors
    /// As of [`SecondHandle::take_down`]. Call it again.
    pub(crate) fn take_down(&self) -> Result<(), VfioError> {
        match self {
            Self::Function(handle) => handle.take_down(),
            Self::Server(connection) => {
                connection.end();
                Ok(())
            }
        }
    }

    pub(crate) fn is_server(&self) -> bool {
        matches!(self, Self::Server(_))
    }

    /// Whether another worker can go on with the device.
    pub(crate) fn can_be_adopted(&self) -> bool {
        match self {
            Self::Function(handle) => handle.can_be_adopted(),
            Self::Server(_) => true,
        }
    }
}

/// A handle that was kept for the next broker. (A [`SecondHandle`] takes its function down when it is dropped, as when this
/// lender does not start.)
pub(crate) enum KeptHandle {
    Function(HandleParts, [OwnedFd; 2]),
    Server(Connection),
}

impl KeptHandle {
    pub(crate) fn into_handle(self) -> Handle {
        match self {
            Self::Function(parts, fds) => Handle::Function(SecondHandle::new(parts, fds)),
            Self::Server(connection) => Handle::Server(connection),
        }
    }
}
