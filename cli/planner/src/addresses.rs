//! Addresses that a device's IOMMU cannot map: those beyond its width, and ranges that the platform
//! keeps.
//!
//! A borrowed device uses guest-physical addresses as IOVAs, so a guest has to
//! stay clear of both.

use farside_guest_layout::{Gpa, GpaRange};
use serde::Serialize;

/// The range of x86's interrupt messages: a write there is an interrupt, never
/// a DMA (Intel SDM volume 3, 12.11; `/sys/kernel/iommu_groups/*/reserved_regions`).
const X86_MSI: (u64, u64) = (0xfee0_0000, 0xfef0_0000);

/// A range of addresses as numbers; `end` is the first address after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Span {
    /// First address.
    pub start: u64,
    /// First address after.
    pub end: u64,
}

impl From<GpaRange> for Span {
    fn from(range: GpaRange) -> Self {
        Self {
            start: range.start().get(),
            end: range.end().get(),
        }
    }
}

impl std::fmt::Display for Span {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // As /proc/iomem and reserved_regions show ranges.
        write!(f, "{:#x}-{:#x}", self.start, self.end.saturating_sub(1))
    }
}

/// A range that cannot be mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// Which addresses.
    pub range: GpaRange,
    /// The reason.
    pub what: String,
}

/// The IOVAs that a device can use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressRules {
    /// Bits of an IOVA: 39, 48 or 57 for 3, 4 or 5 levels of page tables.
    pub bits: u32,
    /// Ranges that cannot be mapped.
    pub reserved: Vec<Reserved>,
}

impl Default for AddressRules {
    /// An x86 host whose IOMMU has 4 levels of page tables.
    fn default() -> Self {
        let (start, end) = X86_MSI;
        let range = GpaRange::between(Gpa::new(start), Gpa::new(end));
        let msi = range.map(|range| Reserved {
            range,
            what: "interrupt messages (MSI)".into(),
        });
        Self {
            bits: 48,
            reserved: msi.into_iter().collect(),
        }
    }
}

/// Why guest RAM cannot be mapped at IOVA = GPA.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum AddressError {
    /// No IOMMU has such addresses.
    #[error("iova-bits = {bits} must be from 32 to 64; IOMMUs have 39, 48 or 57")]
    Bits { bits: u32 },
    /// RAM where the IOMMU has no addresses.
    #[error(
        "guest RAM at {} reaches beyond the {bits} bits of an IOVA, the limit is {limit:#x}; give \
         the VM less RAM, or use a host whose IOMMU has more bits",
        Span::from(*.ram)
    )]
    TooHigh {
        ram: GpaRange,
        bits: u32,
        limit: u64,
    },
    /// RAM where the platform keeps addresses for something else.
    #[error(
        "guest RAM at {} meets the reserved range {} ({what}): no device can reach RAM there; give \
         the VM another machine type or less RAM",
        Span::from(*.ram), Span::from(*.reserved)
    )]
    Reserved {
        ram: GpaRange,
        reserved: GpaRange,
        what: String,
    },
}

impl AddressRules {
    /// Whether the rules themselves can be.
    pub(crate) fn validate(&self) -> Result<(), AddressError> {
        match self.bits {
            32..=64 => Ok(()),
            bits => Err(AddressError::Bits { bits }),
        }
    }

    /// Checks that all of `ranges` can be identity-mapped.
    ///
    /// # Errors
    /// The first range that cannot, and why.
    pub fn check(&self, ranges: impl IntoIterator<Item = GpaRange>) -> Result<(), AddressError> {
        let limit = self.last();
        for ram in ranges {
            if let Some(reserved) = self.reserved.iter().find(|r| r.range.overlaps(ram)) {
                return Err(AddressError::Reserved {
                    ram,
                    reserved: reserved.range,
                    what: reserved.what.clone(),
                });
            }
            if ram.end().get() - 1 > limit {
                let bits = self.bits;
                return Err(AddressError::TooHigh { ram, bits, limit });
            }
        }
        Ok(())
    }

    /// The last IOVA there is.
    fn last(&self) -> u64 {
        match 1u64.checked_shl(self.bits) {
            Some(end) => end - 1,
            None => u64::MAX,
        }
    }
}
