//! Opening connections to lenders.

use std::{
    ffi::OsStr,
    fmt,
    fs::File,
    io,
    net::SocketAddr,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::{
    Address, CallError, Instance,
    channel::{connect_tcp, connect_tcp_to, connect_unix},
    identity::check_listener,
};

/// Where a connection goes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Target {
    /// A UNIX socket.
    Unix(PathBuf),
    /// A TCP port of a host.
    Tcp {
        /// A name or an IP address.
        host: String,
        /// The port.
        port: u16,
    },
    /// The address of an earlier connection to a host.
    Peer(SocketAddr),
}

impl From<&Address> for Target {
    fn from(address: &Address) -> Self {
        match address {
            Address::Unix(path) => Self::Unix(path.clone()),
            Address::Tcp { host, port } | Address::Tls { host, port } => Self::Tcp {
                host: host.clone(),
                port: *port,
            },
        }
    }
}

/// Opens connections for a process that may not do so itself, for one VM.
pub trait Dial: fmt::Debug + Send + Sync {
    /// As [`dial`], to a target other than a UNIX socket.
    ///
    /// # Errors
    /// As [`dial`].
    fn dial(&self, target: &Target, timeout: Duration) -> io::Result<OwnedFd>;

    /// Opens a file of this host's certificates.
    ///
    /// # Errors
    /// Those of open(2).
    fn certificate(&self, name: &str) -> io::Result<File>;

    /// Connects to the lender at a UNIX socket, and exchanges Hello for the VM. The lender knows this
    /// peer by its user, whose rights the connection has only if its Hello names no VM.
    ///
    /// # Errors
    /// As [`Client::connect`](crate::Client::connect).
    fn greet(&self, lender: &Path, timeout: Duration) -> Result<Greeted, CallError>;
}

/// A connection whose Hello the lender has accepted.
#[derive(Debug)]
pub struct Greeted {
    /// Connected, nonblocking.
    pub socket: OwnedFd,
    /// The lender's name.
    pub lender: String,
    /// Its run.
    pub instance: Instance,
}

/// Connects to `target`. Waits at most `timeout` for a full backlog or an unresponsive host, not
/// counting name resolution. A UNIX socket is nonblocking; its listener is trusted with guest memory
/// ([`UntrustedListener`](crate::UntrustedListener)).
///
/// # Errors
/// Those of connect(2) and of name resolution.
pub fn dial(target: &Target, timeout: Duration) -> io::Result<OwnedFd> {
    match target {
        Target::Unix(path) => {
            let socket = connect_unix(path, timeout)?;
            check_listener(path, &socket)?;
            Ok(socket)
        }
        Target::Tcp { host, port } => Ok(connect_tcp(host, *port, timeout)?.into()),
        Target::Peer(address) => Ok(connect_tcp_to(*address, timeout)?.into()),
    }
}

/// How a process connects to lenders.
#[derive(Clone, Debug)]
pub struct Dialer {
    pki: PathBuf,
    by: Option<Arc<dyn Dial>>,
}

impl Dialer {
    /// By itself, with the certificates in the directory `pki` at `tls:` addresses.
    pub fn new(pki: &Path) -> Self {
        Self {
            pki: pki.to_owned(),
            by: None,
        }
    }

    /// As [`Dialer::new`], by means of another process, for its VM.
    pub fn by(pki: &Path, by: Arc<dyn Dial>) -> Self {
        Self {
            pki: pki.to_owned(),
            by: Some(by),
        }
    }

    pub(crate) fn pki(&self) -> &Path {
        &self.pki
    }

    /// Opens a file in the directory of the certificates.
    pub(crate) fn open(&self, path: &Path) -> io::Result<File> {
        match (&self.by, path.file_name().and_then(OsStr::to_str)) {
            (Some(by), Some(name)) => by.certificate(name),
            _ => File::open(path),
        }
    }

    pub(crate) fn other(&self) -> Option<&dyn Dial> {
        self.by.as_deref()
    }

    pub(crate) fn dial(&self, target: &Target, timeout: Duration) -> io::Result<OwnedFd> {
        match &self.by {
            Some(by) => by.dial(target, timeout),
            None => dial(target, timeout),
        }
    }
}
