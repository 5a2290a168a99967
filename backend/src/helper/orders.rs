//! What a backend orders of its helper process, and the answers.

use std::{io, path::PathBuf, time::Duration};

use farside_daemon::{DeviceId, VmName};
use farside_discovery::Discovery;
use farside_error_chain::Chain;
use farside_lender_protocol::{Address, CallError, HeldFence, Instance, RemoteError, Target};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::{Config, sockets::SocketName};

/// What a helper needs to know of its VM: the first message.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    pub(crate) vm: VmName,
    pub(crate) lenders: Vec<Address>,
    /// The directory of the VM's sockets.
    pub(crate) directory: PathBuf,
    pub(crate) socket_group: Option<String>,
    /// The directory of this host's certificates.
    pub(crate) pki: PathBuf,
    /// The file with the VM's fences.
    pub(crate) fences: Option<PathBuf>,
    /// How more lenders are found.
    pub(crate) discovery: Option<Discovery>,
}

impl Start {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            vm: config.vm.clone(),
            lenders: config.lenders.clone(),
            directory: config.directory.clone(),
            socket_group: config.socket_group.clone(),
            pki: config.pki.clone(),
            fences: config.fences.clone(),
            discovery: config.discovery.clone(),
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    Start(Box<Start>),
    /// To a lender at a UNIX socket.
    Greet {
        lender: PathBuf,
        timeout: Duration,
    },
    /// To another lender.
    Connect {
        target: Target,
        timeout: Duration,
    },
    Bind(SocketName),
    /// A file in the directory of the certificates.
    Certificate(String),
    Fence(DeviceId),
    /// The lenders that are found beside those in `Start`.
    Lenders,
    Release {
        device: DeviceId,
        limit: Duration,
    },
    Remove(Removed),
    /// Link the device's socket for SPDK's clients.
    Link(DeviceId),
}

/// What is removed when a backend ends.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Removed {
    /// The directory of the VM's sockets, if it is empty.
    Directory,
    /// The [links](crate::links) in it.
    Links,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// With a descriptor.
    Opened,
    /// With the connection to the lender of this name, which knows the VM.
    Welcome {
        lender: String,
        instance: Instance,
    },
    /// Of the lender, to Hello.
    Refused(RemoteError),
    /// The lender has not answered Hello.
    Late,
    Fence(Option<HeldFence>),
    /// As in [`Known`].
    Lenders {
        now: Vec<Address>,
        before: Vec<Address>,
    },
    Done,
    Failed {
        errno: Option<i32>,
        text: String,
    },
}

impl From<io::Error> for Answer {
    fn from(error: io::Error) -> Self {
        let late = error.kind() == io::ErrorKind::TimedOut;
        let errno = late.then(|| Errno::TIMEDOUT.raw_os_error());
        Self::Failed {
            errno: error.raw_os_error().or(errno),
            text: Chain(&error).to_string(),
        }
    }
}

impl From<CallError> for Answer {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Refused(error) => Self::Refused(error),
            CallError::Late(_) => Self::Late,
            CallError::Unreachable { source, .. } => source.into(),
            other => io::Error::other(other).into(),
        }
    }
}
