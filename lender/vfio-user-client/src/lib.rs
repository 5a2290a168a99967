//! The client's side of the vfio-user protocol, for servers that are not trusted.
//!
//! Every request has a deadline, every reply a limit, and a reply is the one to the request or ends the
//! connection: after an error that [is fatal](ClientError::is_fatal) each further request fails at once, as for a
//! device that was removed. While a request waits, the server may access the client's memory with `DMA_READ` and
//! `DMA_WRITE`, which [`Memory`] serves.
//!
//! The crate `vfio_user` has a client, too. It is not used because it has no deadline, ignores error replies and
//! message ids, and panics on sizes that a server chooses
//! ([decision 51](../../../docs/decisions/0051-vfio-user-servers.md)).
//!
//! Specification: "vfio-user Protocol Specification", version 0.1, in the documentation of QEMU.

#![forbid(unsafe_code)]

mod client;
mod info;
mod socket;
mod wire;

pub use client::{Client, Limits, Memory, NoMemory};
pub use farside_vfio_user_wire::Command;
pub use info::{DeviceInfo, RegionInfo, SparseArea};

use std::{io, time::Duration};

/// Most bytes of the data of one message, of which servers may want less.
pub const MAX_DATA: usize = 1 << 20;

/// Most descriptors of a message from the server: a region has one.
pub const MAX_REPLY_FDS: usize = 8;

/// Timeout for a request, except where it says another.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Configuration space, as a region.
pub const CONFIG_REGION: u32 = 7;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no server at the socket, or it accepts no connections.
    #[error("cannot connect (is the server running, and does it accept another client?)")]
    Connect(#[source] io::Error),
    /// The server refuses the request, with this errno.
    #[error("{command}: refused by the server: {}", io::Error::from_raw_os_error(*.errno as i32))]
    Refused {
        /// The request.
        command: Command,
        /// As in the reply.
        errno: u32,
    },
    /// The server has not answered.
    #[error("{command}: no answer from the server within {limit:.1?}")]
    TimedOut {
        /// The request.
        command: Command,
        /// The timeout.
        limit: Duration,
    },
    /// The answer violates the protocol.
    #[error("{command}: the server's answer is invalid: {problem}")]
    Invalid {
        /// The request.
        command: Command,
        /// What is wrong.
        problem: String,
    },
    /// The request exceeds a limit that the server has named.
    #[error("{command}: {what} of {value} exceeds the server's limit of {limit}")]
    Limit {
        /// The request.
        command: Command,
        /// What is limited.
        what: &'static str,
        /// The value.
        value: u64,
        /// The server's limit.
        limit: u64,
    },
    /// The server has closed the connection, or an earlier request has failed.
    #[error("the connection to the server has ended")]
    Ended,
    /// The socket failed.
    #[error("{command}: socket error")]
    Socket {
        /// The request.
        command: Command,
        /// The system's.
        source: io::Error,
    },
}

impl ClientError {
    /// Whether the connection has ended with it.
    pub fn is_fatal(&self) -> bool {
        !matches!(self, Self::Refused { .. } | Self::Limit { .. })
    }
}
