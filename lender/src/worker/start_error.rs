//! Why a worker cannot be started.

use std::{ffi::OsString, io};

use farside_devices::nvme;
use farside_lender_protocol::{ChannelError, RemoteError};

/// Why a worker could not be started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error("cannot start the worker process {program:?}")]
    Spawn {
        program: OsString,
        source: io::Error,
    },
    #[error("cannot limit the memory of a worker process (worker-memory-max)")]
    Group(#[source] io::Error),
    #[error("cannot make the channels to a worker process")]
    Channel(#[source] io::Error),
    #[error("cannot encode the device's configuration")]
    Config(#[source] serde_json::Error),
    #[error("cannot hand the lease to the worker process")]
    Send(#[source] ChannelError),
    #[error("cannot tell the borrower of its lease")]
    Reply(#[source] ChannelError),
    #[error("the device has no medium")]
    NoMedium,
    #[error("the reservations of its namespace are out of reach")]
    Reservations(#[source] nvme::ConfigError),
    #[error(transparent)]
    Server(RemoteError),
}
