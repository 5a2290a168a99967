//! Guests whose lender is on the same machine, by Linux VFIO: no windows, but
//! an IOMMU's addresses, page tables, and pinned memory.

use farside_fabric::{PAGE_SIZE, PageCounts};
use farside_guest_layout::GpaRange;
use serde::Serialize;

use crate::{AddressRules, Guest, PlanError, Span, largest::largest};

/// Sizes of the pages that guest RAM may consist of.
const BACKINGS: [u64; 3] = [PAGE_SIZE, 2 << 20, 1 << 30];

/// The resources of one host's IOMMU and memory that guests use.
#[derive(Clone, Debug, Serialize)]
pub struct VfioPlan {
    /// Bits of an IOVA.
    pub iova_bits: u32,
    /// Ranges that cannot be mapped, with the reason.
    pub reserved: Vec<(Span, String)>,
    /// Each kind of guest.
    pub guests: Vec<VfioGuest>,
    /// Memory that the lender must be allowed to lock for all of them, bytes.
    pub lender_memlock: u64,
    /// Whether all can be mapped.
    pub fits: bool,
    /// Problems, with remedies; empty if all ranges can be mapped.
    pub problems: Vec<String>,
}

/// One kind of guest.
#[derive(Clone, Debug, Serialize)]
pub struct VfioGuest {
    /// How many VMs.
    pub vms: u32,
    /// RAM of each, bytes.
    pub ram: u64,
    /// QEMU's name of the machine type.
    pub machine: &'static str,
    /// Devices of each.
    pub devices: u16,
    /// The RAM ranges: a device's domain identity-maps them.
    pub ram_ranges: Vec<Span>,
    /// Entries of a device's page tables, by the pages that RAM consists of.
    pub pages: Vec<PagesBySize>,
    /// Memory that the backend of a VM must be allowed to lock, bytes.
    pub backend_memlock: u64,
    /// Memory that the lender must be allowed to lock for one VM, bytes: each of
    /// its devices has a domain of its own, and VFIO (type 1) counts each.
    pub lender_memlock: u64,
    /// RAM of the largest guest of this machine type whose addresses the IOMMU
    /// has, bytes; `None` when there is none.
    pub largest: Option<u64>,
}

/// Page table entries when RAM consists of pages of one size.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PagesBySize {
    /// Bytes of the pages that RAM consists of.
    pub backing: u64,
    /// What the IOMMU maps them with.
    pub counts: PageCounts,
}

/// Plans for `guests` of one machine.
///
/// # Errors
/// Invalid guest or address rules.
pub fn plan_vfio(guests: &[Guest], rules: &AddressRules) -> Result<VfioPlan, PlanError> {
    if guests.is_empty() {
        return Err(PlanError::NoGuests);
    }
    rules.validate()?;
    for guest in guests {
        guest.check()?;
    }
    let kinds: Vec<VfioGuest> = guests.iter().map(|guest| kind(guest, rules)).collect();
    let problems: Vec<String> = guests
        .iter()
        .filter_map(|guest| {
            let error = rules.check(guest.layout().ranges()).err()?;
            Some(format!("{guest}: {error}"))
        })
        .collect();
    Ok(VfioPlan {
        iova_bits: rules.bits,
        reserved: rules
            .reserved
            .iter()
            .map(|reserved| (reserved.range.into(), reserved.what.clone()))
            .collect(),
        lender_memlock: kinds
            .iter()
            .map(|kind| kind.lender_memlock.saturating_mul(kind.vms.into()))
            .fold(0, u64::saturating_add),
        guests: kinds,
        fits: problems.is_empty(),
        problems,
    })
}

fn kind(guest: &Guest, rules: &AddressRules) -> VfioGuest {
    let layout = guest.layout();
    let granule = guest.huge_pages.granule();
    VfioGuest {
        vms: guest.vms,
        ram: guest.ram,
        machine: guest.machine.name(),
        devices: guest.devices,
        ram_ranges: layout.ranges().map(Span::from).collect(),
        pages: BACKINGS
            .iter()
            .map(|&backing| PagesBySize {
                backing,
                counts: layout
                    .ranges()
                    .map(|range| pages(range, backing))
                    .fold(PageCounts::default(), |sum, counts| sum + counts),
            })
            .collect(),
        backend_memlock: guest.ram,
        lender_memlock: guest.ram.saturating_mul(guest.devices.into()),
        largest: largest(guest.machine, granule, |plan| {
            let segments = plan.windows.iter().flat_map(|w| w.segments.iter());
            rules.check(segments.copied()).is_ok()
        }),
    }
}

/// Memory is aligned as its addresses are: QEMU puts low and high memory at
/// whole GiB of one file.
fn pages(range: GpaRange, backing: u64) -> PageCounts {
    let start = range.start().get();
    PageCounts::of(start, start, range.len(), backing)
}
