//! The borrower's end of a device's way to guest RAM: far addresses, and who
//! maps memory there.

use std::os::fd::AsFd;

use farside_control::Client;
use farside_fabric::{BorrowerDomain, FarAddress, MemoryRange};
use farside_ntb::{Adapter, BorrowerNtb, FarRange};

use super::error::PathError;

/// Windows begin at multiples of this where far addresses are only numbers to
/// the lender: a multiple of what any adapter's translation is aligned to.
pub(super) const FAR_STEP: u64 = 1 << 40;

/// Who maps guest RAM at far addresses.
#[derive(Default)]
pub(crate) enum FarSide {
    /// The lender, which has both ends of the way.
    #[default]
    Lender,
    /// We, in the IOMMU domain of this host's NTB endpoint.
    Ntb(BorrowerNtb),
}

/// Far addresses of one window.
pub(crate) struct Far {
    pub(super) start: u64,
    /// Where they are shared with others: given back on drop.
    _range: Option<FarRange>,
}

impl FarSide {
    pub(crate) fn new(ntb: Option<&Adapter>) -> Self {
        ntb.map_or(Self::Lender, |adapter| Self::Ntb(BorrowerNtb::new(adapter)))
    }

    /// Room for a window; `free` finds it where nobody else takes any.
    pub(super) fn take(&self, len: u64, free: impl FnOnce() -> u64) -> Result<Far, PathError> {
        Ok(match self {
            Self::Lender => Far::at(free()),
            Self::Ntb(domain) => {
                let range = domain.adapter().far_space().take(len)?;
                Far {
                    start: range.start().get(),
                    _range: Some(range),
                }
            }
        })
    }

    pub(super) fn map(
        &mut self,
        client: &mut Client,
        far: u64,
        memory: MemoryRange,
    ) -> Result<(), PathError> {
        match self {
            Self::Lender => {
                let MemoryRange {
                    file,
                    offset,
                    len,
                    writable,
                } = memory;
                client.far_map(far, len, file.as_fd(), offset, writable)?;
            }
            Self::Ntb(domain) => domain.map(FarAddress::new(far), memory)?,
        }
        Ok(())
    }

    pub(super) fn unmap(
        &mut self,
        client: &mut Client,
        far: u64,
        len: u64,
    ) -> Result<(), PathError> {
        match self {
            Self::Lender => client.far_unmap(far, len)?,
            Self::Ntb(domain) => domain.unmap(FarAddress::new(far), len)?,
        }
        Ok(())
    }

    /// Unmaps all, whatever has become of the lender.
    pub(super) fn unmap_all(&mut self) {
        if let Self::Ntb(domain) = self
            && let Err(error) = domain.unmap_all()
        {
            log::error!("guest RAM stays within the NTB's reach: {error}");
        }
    }
}

impl Far {
    pub(super) fn at(start: u64) -> Self {
        Self {
            start,
            _range: None,
        }
    }
}
