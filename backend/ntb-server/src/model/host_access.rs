//! The model's interface to the two hosts.

use farside_fabric::PeerAddress;

use super::{Port, Read, regs::error};

/// The two hosts, as the model accesses them.
///
/// Accesses are those of PCIe memory requests: they do not cross a 4 KiB
/// boundary.
pub trait HostAccess {
    /// Reads in the DMA address space of the peer's port: memory of that host, or a
    /// register of a device there. A read that takes time returns [`Read::Later`]
    /// and is completed by [`Ntb::complete_read`](super::Ntb::complete_read); at most
    /// one such read is pending for each port.
    ///
    /// # Errors
    ///
    /// Fails if the access is refused at once.
    fn memory_read(&mut self, at: Target, data: &mut [u8]) -> Result<Read, PeerError>;

    /// Writes in the same address space. Writes are posted: a later refusal is reported
    /// by [`Ntb::write_failed`](super::Ntb::write_failed).
    ///
    /// # Errors
    ///
    /// Fails if the access is refused at once.
    fn memory_write(&mut self, at: Target, data: &[u8]) -> Result<(), PeerError>;

    /// Sends the message of an MSI-X vector to the host of `port`. A masked
    /// vector stays pending.
    fn raise(&mut self, port: Port, vector: u16);

    /// The pending bit of a vector: whether a mask holds back its message.
    fn is_pending(&self, port: Port, vector: u16) -> bool;
}

/// A translated access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// The port whose window is accessed.
    pub from: Port,
    /// Offset in that port's window BAR, bytes.
    pub offset: u64,
    /// In the DMA address space of the other port.
    pub address: PeerAddress,
}

/// Why the peer host refused an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerError {
    /// Unmapped address, missing permission, or the host is disconnected.
    Refused,
    /// No reply in time.
    Timeout,
    /// Too many accesses are outstanding.
    Busy,
}

impl PeerError {
    /// The reason's code in `ERROR_INFO`.
    pub(super) fn reason(self) -> u32 {
        match self {
            Self::Refused => error::PEER_REFUSED,
            Self::Timeout => error::TIMEOUT,
            Self::Busy => error::BUSY,
        }
    }
}
