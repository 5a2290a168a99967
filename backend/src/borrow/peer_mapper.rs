//! The borrower's end of a DMA path: peer addresses, and the IOMMU domain that maps memory there.

use std::os::fd::AsFd;

use farside_fabric::{BorrowerDomain, MemoryRange, PeerAddress};
use farside_lender_protocol::{BarOwner, Client};
use farside_ntb::{Adapter, BorrowerNtb, PeerRange};

use super::error::PathError;

/// Maps guest RAM at peer addresses.
#[derive(Default)]
pub(crate) enum PeerMapper {
    /// The lender, which holds both ends of the path.
    #[default]
    Lender,
    /// The lender, through its IOMMU. Slow, so it maps in steps that each meet the
    /// call's deadline.
    LendersIommu,
    /// This backend, in the IOMMU domain of this host's NTB endpoint.
    Ntb(BorrowerNtb),
}

impl PeerMapper {
    pub(crate) fn new(bars: BarOwner, ntb: Option<&Adapter>) -> Self {
        match (bars, ntb) {
            (_, Some(adapter)) => Self::Ntb(BorrowerNtb::new(adapter)),
            (BarOwner::Borrower, None) => Self::Lender,
            (BarOwner::Lender, None) => Self::LendersIommu,
        }
    }

    /// Whether an IOMMU translates the device's DMA: the time of a map or unmap then grows with its
    /// size.
    pub(crate) fn is_behind_iommu(&self) -> bool {
        !matches!(self, Self::Lender)
    }

    /// Whether a device that maps `wanted` may use the peer addresses of another device's window:
    /// whether it reaches nothing else there.
    pub(super) fn fits(&self, open: &PeerRange, wanted: &[(PeerAddress, MemoryRange)]) -> bool {
        match self {
            // Each device has a domain of its own.
            Self::Lender | Self::LendersIommu => true,
            Self::Ntb(domain) => domain.maps_only(open, wanted),
        }
    }

    /// Maps `memory`; sets `done` to the number of bytes mapped, also on error.
    pub(super) fn map(
        &mut self,
        client: &mut Client,
        peer_address: PeerAddress,
        memory: MemoryRange,
        done: &mut u64,
    ) -> Result<(), PathError> {
        *done = 0;
        let whole = memory.len;
        match self {
            Self::Lender => {
                let file = memory.file.as_fd();
                client.map_peer(
                    peer_address,
                    memory.len,
                    file,
                    memory.offset,
                    memory.writable,
                )?;
            }
            Self::LendersIommu => {
                let (file, step) = (memory.file.as_fd(), step(memory.len));
                while *done < memory.len {
                    let len = step.min(memory.len - *done);
                    let offset = memory.offset + *done;
                    // In an open window, which does not wrap.
                    let at = peer_address.wrapping_add(*done);
                    client.map_peer(at, len, file, offset, memory.writable)?;
                    *done += len;
                }
            }
            Self::Ntb(domain) => domain.map(peer_address, memory)?,
        }
        *done = whole;
        Ok(())
    }

    pub(super) fn unmap(
        &mut self,
        client: &mut Client,
        peer_address: PeerAddress,
        len: u64,
    ) -> Result<(), PathError> {
        match self {
            Self::Lender | Self::LendersIommu => client.unmap_peer(peer_address, len)?,
            Self::Ntb(domain) => domain.unmap(peer_address, len)?,
        }
        Ok(())
    }
}

/// Bytes per map request to the lender's IOMMU for a mapping of `len` bytes: small enough to meet
/// the call deadline, in few enough steps for the lender's tables.
fn step(len: u64) -> u64 {
    const STEPS: u64 = 64;
    len.div_ceil(STEPS).next_multiple_of(256 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_few_and_short() {
        assert_eq!(step(128 << 20), 256 << 20);
        assert_eq!(step(64 << 30), 1 << 30);
        assert_eq!(step(1 << 40), 16 << 30);
        for len in [1 << 12, 3 << 30, 5 << 40] {
            assert!(len / step(len) <= 64);
        }
    }
}
