//! The peer of a connection.

use std::{
    fmt, io,
    net::SocketAddr,
    os::{fd::AsFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
};

use farside_daemon::{PeerCredentials, peer_credentials, user_name};

/// The peer of a connection, as the kernel reports it, or its certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    /// A process of this host, with the credentials of the moment at which it connected or listened
    /// (SO_PEERCRED, `unix(7)`).
    User {
        /// Its effective uid.
        uid: u32,
        /// Its process id, for messages only: it may have been reused since. 0 in a PID namespace that
        /// this process does not see.
        pid: i32,
    },
    /// A host with a certificate, at a TCP port with TLS.
    Host {
        /// Its name: the first DNS name in the certificate's subjectAltName extension, else its common
        /// name; in lower case.
        name: String,
        /// Its address, for messages only.
        address: SocketAddr,
    },
    /// A peer at a TCP port without TLS. Nothing authenticates the address.
    Network {
        /// Its address.
        address: SocketAddr,
    },
}

impl Identity {
    /// What is verified of it, in words: equal for all connections of one user, host or address, and for no others.
    pub fn credential(&self) -> String {
        match self {
            Self::User { uid, .. } => format!("user {uid}"),
            Self::Host { name, .. } => format!("host {name}"),
            // Nobody else has the connection, whoever has the address.
            Self::Network { address } => {
                let mut address = *address;
                address.set_ip(address.ip().to_canonical());
                // The interface of a link-local address stays.
                address.set_port(0);
                format!("address {address}")
            }
        }
    }

    /// Whether it is a TCP peer, with TLS or without, to which no descriptors can be sent.
    pub fn is_network(&self) -> bool {
        matches!(self, Self::Host { .. } | Self::Network { .. })
    }

    /// Whether a second connection with the identity `other` may be of the same TCP peer: without TLS,
    /// any may.
    pub fn may_be(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Host { name, .. }, Self::Host { name: other, .. }) => name == other,
            (Self::Network { .. }, Self::Network { .. }) => true,
            _ => false,
        }
    }
}

impl fmt::Display for Identity {
    /// Looks the user's name up.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User { uid, pid } => {
                let name = user_name(*uid);
                write!(f, "user {name} (uid {uid}, process {pid})")
            }
            Self::Host { name, address } => write!(f, "host {name} ({address})"),
            Self::Network { address } => write!(f, "network peer {address}"),
        }
    }
}

/// The process that listens at a UNIX socket has a uid that this process has no reason to trust with
/// guest memory.
#[derive(Debug, thiserror::Error)]
#[error(
    "{path} belongs to a lender of user {} (uid {uid}), who is neither root, nor this user, nor the owner of the socket's directory: remove the socket",
    user_name(*uid), path = path.display()
)]
pub struct UntrustedListener {
    path: PathBuf,
    uid: u32,
}

/// Refuses a lender of another user, unless that user owns the directory of the socket and could
/// replace it anyway. In a sticky directory such as /tmp, every user can create a socket that does
/// not exist.
pub(crate) fn check_listener(path: &Path, socket: &impl AsFd) -> io::Result<()> {
    let PeerCredentials { uid, .. } = peer_credentials(socket)?;
    let directory = path.parent().unwrap_or(path).metadata()?;
    let user = rustix::process::geteuid().as_raw();
    check_uid(path, uid, user, directory.uid()).map_err(io::Error::other)
}

fn check_uid(path: &Path, uid: u32, user: u32, owner: u32) -> Result<(), UntrustedListener> {
    match [0, user, owner].contains(&uid) {
        true => Ok(()),
        false => Err(UntrustedListener {
            path: path.to_owned(),
            uid,
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Channel, Listener};

    #[test]
    fn a_lender_of_an_unrelated_user_is_refused_by_name() {
        let me = rustix::process::geteuid().as_raw();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lender.sock");
        let listener = Listener::bind(&path).unwrap();
        let pki = directory.path();
        let channel = Channel::connect(&path.clone().into(), pki, Duration::from_secs(5)).unwrap();
        assert!(matches!(channel.identity(), Ok(Identity::User { uid, .. }) if uid == me));
        check_listener(&path, &channel).unwrap();
        drop(listener);
        for (uid, trusted) in [(0, true), (me, true), (4_242_424, true), (4_242_425, false)] {
            let checked = check_uid(&path, uid, me, 4_242_424);
            assert_eq!(checked.is_ok(), trusted, "{uid}");
            if let Err(error) = checked {
                assert!(error.to_string().contains("uid 4242425"), "{error}");
            }
        }
    }
}
