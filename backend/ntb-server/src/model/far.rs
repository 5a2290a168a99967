//! What the model needs of the two hosts.

use super::{Port, regs::error};

/// The two hosts, as the model reaches them.
///
/// Accesses are those of PCIe memory requests: they do not cross a 4 KiB
/// boundary.
pub trait Far {
    /// Reads in the address space in which the DMA of the *target*'s endpoint
    /// is translated: memory of that host, or a register of a device there.
    /// When that takes time, says [`FarRead::Later`] and lets
    /// [`Ntb::complete_read`](super::Ntb::complete_read) know; one such read of
    /// each port at a time.
    ///
    /// # Errors
    ///
    /// When the access is known to be refused.
    fn memory_read(&mut self, at: Target, data: &mut [u8]) -> Result<FarRead, FarError>;

    /// Writes there. Writes are posted: one that is found to be refused later
    /// is told by [`Ntb::write_failed`](super::Ntb::write_failed).
    ///
    /// # Errors
    ///
    /// When the access is known to be refused.
    fn memory_write(&mut self, at: Target, data: &[u8]) -> Result<(), FarError>;

    /// Sends the message of an MSI-X vector to the host of `port`. A masked
    /// vector stays pending.
    fn raise(&mut self, port: Port, vector: u16);

    /// Whether the message of a vector is held back by a mask: its pending bit.
    fn is_pending(&self, port: Port, vector: u16) -> bool;
}

/// An access that was translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// The port through whose window it goes. It comes out at the peer.
    pub from: Port,
    /// Where in that port's window BAR it begins, bytes.
    pub offset: u64,
    /// Far address: in the peer's DMA address space.
    pub address: u64,
}

/// How far a read has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FarRead {
    /// The data is there.
    Done,
    /// The data is not there yet.
    Later,
}

/// Why the far side did not take an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FarError {
    /// Nothing is there, it may not be done there, or the host has gone.
    Refused,
    /// No answer in time.
    Timeout,
    /// Too much is under way.
    Busy,
}

impl FarError {
    /// For `ERROR_INFO`.
    pub(super) fn reason(self) -> u32 {
        match self {
            Self::Refused => error::FAR_REFUSED,
            Self::Timeout => error::TIMEOUT,
            Self::Busy => error::BUSY,
        }
    }
}
