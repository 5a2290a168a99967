//! What a lease or a lender uses of its limits.

use std::fmt;

use farside_fabric::Size;
use serde::{Deserialize, Serialize};

/// Something that is limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Resource {
    /// Memory files of the borrower that are mapped.
    MemoryFiles,
    /// Bytes of these files.
    MemoryBytes,
    /// Mappings in the borrower's IOMMU domain.
    Mappings,
    /// Open DMA windows.
    Windows,
    /// LUT entries of the NTB adapter.
    LutEntries,
    /// Entries for devices in the adapter's requester table.
    RequesterEntries,
    /// Vectors with an eventfd of the borrower.
    Eventfds,
    /// Connections without a lease, at the address that has the most.
    Peers,
    /// Devices that the lender lends.
    Devices,
    /// Commands that the device has in flight.
    Commands,
    /// Entries for devices in the requester table of the lender's NTB endpoint.
    NtbRequesterEntries,
    /// LUT entries of the lender's NTB endpoint.
    NtbLutEntries,
}

/// How much of a limit is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitUse {
    /// The limited resource.
    pub resource: Resource,
    /// How much is used.
    pub used: u64,
    /// The most that may be.
    pub limit: u64,
}

impl LimitUse {
    /// Most entries of a status.
    pub const MAX: usize = 16;

    /// `used` of `limit`.
    pub fn new(resource: Resource, used: u64, limit: u64) -> Self {
        Self {
            resource,
            used,
            limit,
        }
    }
}

impl fmt::Display for LimitUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { used, limit, .. } = *self;
        let what = match self.resource {
            Resource::MemoryBytes => {
                return write!(f, "{} of {} of memory files", Size(used), Size(limit));
            }
            Resource::MemoryFiles => "memory files",
            Resource::Mappings => "mappings",
            Resource::Windows => "windows",
            Resource::LutEntries => "LUT entries",
            Resource::RequesterEntries => "requester entries",
            Resource::Eventfds => "eventfds",
            Resource::Peers => "connections without a lease",
            Resource::Devices => "devices",
            Resource::Commands => "commands in flight",
            Resource::NtbRequesterEntries => "NTB requester entries",
            Resource::NtbLutEntries => "NTB LUT entries",
        };
        write!(f, "{used} of {limit} {what}")
    }
}
