//! The process at the other end of a UNIX socket.

use std::{io, os::fd::AsFd};

use nix::sys::socket::{getsockopt, sockopt};
use rustix::process::Pid;

/// The credentials of a process at the moment when it connected or listened (SO_PEERCRED,
/// `unix(7)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Its effective uid.
    pub uid: u32,
    /// Its process id; `None` if it is in a PID namespace that this process does not see, such as
    /// that of a container.
    pub pid: Option<Pid>,
}

/// The peer of a connected UNIX socket.
pub fn peer_credentials(socket: &impl AsFd) -> io::Result<PeerCredentials> {
    // Not by rustix, whose type of a PID cannot hold the 0 of a process in another namespace.
    let peer = getsockopt(socket, sockopt::PeerCredentials)?;
    Ok(PeerCredentials {
        uid: peer.uid(),
        pid: Pid::from_raw(peer.pid()),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_peer_of_an_own_socket_is_this_process() {
        let (socket, _other) = UnixStream::pair().unwrap();
        let peer = peer_credentials(&socket).unwrap();
        assert_eq!(peer.uid, rustix::process::geteuid().as_raw());
        assert_eq!(peer.pid, Some(rustix::process::getpid()));
    }
}
