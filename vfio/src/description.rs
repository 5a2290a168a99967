//! What a borrower must know of a physical function, made from what VFIO says.

use farside_fabric::PAGE_SIZE;
use farside_irq_relay::{IrqCounts, IrqIndex};
use farside_pci::Bdf;
use farside_pci::{Bar, BarKind, Description, MappableArea};
use vfio_bindings::bindings::vfio::{VFIO_PCI_CONFIG_REGION_INDEX, VFIO_REGION_INFO_FLAG_MMAP};

use crate::VfioError;

const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const REVISION: usize = 0x08;
const CACHE_LINE_SIZE: usize = 0x0c;
const LATENCY_TIMER: usize = 0x0d;
const HEADER_TYPE: usize = 0x0e;
const BARS: usize = 0x10;
const EXPANSION_ROM: usize = 0x30;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;

const STATUS_CAPABILITIES: u16 = 1 << 4;

const CAP_PM: u8 = 0x01;
const CAP_MSI: u8 = 0x05;
const CAP_MSIX: u8 = 0x11;

/// What VFIO says of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    /// `VFIO_REGION_INFO_FLAG_*`.
    pub(crate) flags: u32,
    /// Bytes; 0 when there is no such region.
    pub(crate) size: u64,
    /// Where it begins in the function's descriptor.
    pub(crate) file_offset: u64,
    /// The only areas that can be mapped, as (offset, bytes), if not all can.
    pub(crate) sparse: Option<Vec<(u64, u64)>>,
}

/// Bytes of configuration space: 256 or 4096.
pub(crate) fn config_size(regions: &[Region]) -> usize {
    let region = regions.get(VFIO_PCI_CONFIG_REGION_INDEX as usize);
    match region.map_or(0, |region| region.size) {
        4096.. => 4096,
        _ => 256,
    }
}

/// Makes the description from the function's configuration space as it is now.
pub(crate) fn describe(
    bdf: Bdf,
    config: Vec<u8>,
    regions: &[Region],
    counts: IrqCounts,
) -> Result<Description, VfioError> {
    let unsupported = |problem: String| VfioError::Unsupported { bdf, problem };
    let mut image = Image(config);
    let header = image.u8(HEADER_TYPE) & 0x7f;
    if header != 0 {
        return Err(unsupported(format!(
            "it is a bridge (header type {header:#x}), and only endpoints are lent"
        )));
    }
    let summary = format!(
        "{:04x}:{:04x} {} at {bdf}",
        image.u16(0),
        image.u16(2),
        class_text(image.u32(REVISION) >> 8)
    );
    let traps = msix_areas(&image);
    let mut bars = [const { None }; 6];
    let mut bar = 0;
    while bar < 6 {
        let low = image.u32(BARS + 4 * bar);
        let size = regions.get(bar).map_or(0, |region| region.size);
        let wide = low & 0b111 == 0b100;
        if size != 0 {
            if !size.is_power_of_two() {
                return Err(unsupported(format!(
                    "BAR {bar} of {size:#x} bytes is no power of two"
                )));
            }
            let prefetchable = low & 1 << 3 != 0;
            let kind = match low & 1 {
                1 => BarKind::Io,
                _ if wide => BarKind::Memory64 { prefetchable },
                _ => BarKind::Memory32 { prefetchable },
            };
            let mine = traps.iter().filter(|(of, _)| *of == bar);
            let mine: Vec<(u64, u64)> = mine.map(|&(_, area)| area).collect();
            bars[bar] = Some(Bar {
                size,
                kind,
                mappable: match kind {
                    BarKind::Io => Vec::new(),
                    _ => mappable(&regions[bar], &mine),
                },
            });
        }
        bar += if wide { 2 } else { 1 };
    }
    image.as_after_reset();
    Ok(Description {
        config: image.0,
        bars,
        intx: counts.count(IrqIndex::Intx) != 0,
        msi_vectors: counts.count(IrqIndex::Msi),
        msix_vectors: counts.count(IrqIndex::Msix),
        summary,
    })
}

/// The page-aligned areas of a BAR that the guest may reach without a trap:
/// what the kernel lets be mapped, without pages that `traps` (as (offset,
/// bytes)) touch.
fn mappable(region: &Region, traps: &[(u64, u64)]) -> Vec<MappableArea> {
    if region.flags & VFIO_REGION_INFO_FLAG_MMAP == 0 || region.size < PAGE_SIZE {
        return Vec::new();
    }
    let areas = match &region.sparse {
        Some(areas) => areas.clone(),
        None => vec![(0, region.size)],
    };
    // Inward to whole pages, and inside the BAR.
    let mut areas: Vec<(u64, u64)> = areas
        .iter()
        .filter_map(|&(offset, len)| {
            let end = offset.checked_add(len)?.min(region.size);
            Some((
                offset.checked_next_multiple_of(PAGE_SIZE)?,
                end - end % PAGE_SIZE,
            ))
        })
        .collect();
    for &(offset, len) in traps {
        let from = offset - offset % PAGE_SIZE;
        let to = offset.saturating_add(len);
        let to = to.checked_next_multiple_of(PAGE_SIZE).unwrap_or(u64::MAX);
        areas = areas
            .iter()
            .flat_map(|&(start, end)| [(start, end.min(from)), (start.max(to), end)])
            .filter(|(start, end)| start < end)
            .collect();
    }
    areas.retain(|(start, end)| start < end);
    areas.sort_unstable();
    areas
        .iter()
        .map(|&(start, end)| MappableArea {
            offset: start,
            len: end - start,
        })
        .collect()
}

/// Where MSI-X table and pending bits are, as BAR and (offset, bytes).
///
/// The table is QEMU's to emulate: what the guest writes there must not reach
/// the device, whose table the kernel programs.
fn msix_areas(image: &Image) -> Vec<(usize, (u64, u64))> {
    let Some(at) = image.capability(CAP_MSIX) else {
        return Vec::new();
    };
    let vectors = u64::from(image.u16(at + 2) & 0x7ff) + 1;
    let place = |register: u32, bytes: u64| {
        let bar = (register & 0b111) as usize;
        (bar, (u64::from(register & !0b111), bytes))
    };
    vec![
        place(image.u32(at + 4), 16 * vectors),
        place(image.u32(at + 8), vectors.div_ceil(64) * 8),
    ]
}

/// What a class code (24 bits: base class, sub-class, interface) says, for
/// people.
fn class_text(class: u32) -> String {
    let text = match (class >> 16, class >> 8 & 0xff, class & 0xff) {
        (0x01, 0x08, 0x02) => "NVMe drive",
        (0x01, 0x06, _) => "SATA controller",
        (0x01, 0x07, _) => "SAS controller",
        (0x01, ..) => "storage controller",
        (0x02, 0x00, _) => "Ethernet adapter",
        (0x02, ..) => "network adapter",
        (0x03, ..) => "graphics adapter",
        (0x04, ..) => "multimedia device",
        (0x05, ..) => "memory controller",
        (0x06, 0x80, _) => "bridge device",
        (0x07, ..) => "communication controller",
        (0x08, ..) => "system peripheral",
        (0x0c, 0x03, _) => "USB controller",
        (0x0c, ..) => "serial bus controller",
        (0x10, ..) => "encryption controller",
        (0x12, ..) => "processing accelerator",
        _ => return format!("device of class {class:06x}"),
    };
    text.to_owned()
}

/// A configuration space. What is outside reads as zero.
struct Image(Vec<u8>);

impl Image {
    fn u8(&self, at: usize) -> u8 {
        self.0.get(at).copied().unwrap_or(0)
    }

    fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.u8(at), self.u8(at + 1)])
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from(self.u16(at)) | u32::from(self.u16(at + 2)) << 16
    }

    fn set(&mut self, at: usize, bytes: &[u8]) {
        if let Some(place) = self.0.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }

    /// Where a capability is (PCIe 7.5.1.1.11).
    fn capability(&self, id: u8) -> Option<usize> {
        if self.u16(STATUS) & STATUS_CAPABILITIES == 0 {
            return None;
        }
        let mut at = usize::from(self.u8(CAPABILITIES) & !0b11);
        // No more fit, so a chain that goes in circles ends.
        for _ in 0..48 {
            if at < 0x40 {
                return None;
            }
            if self.u8(at) == id {
                return Some(at);
            }
            at = usize::from(self.u8(at + 1) & !0b11);
        }
        None
    }

    /// Clears what software has set since power-on: the host's, or VFIO's.
    fn as_after_reset(&mut self) {
        self.set(COMMAND, &[0; 2]);
        self.set(CACHE_LINE_SIZE, &[0]);
        self.set(LATENCY_TIMER, &[0]);
        for bar in 0..6 {
            let at = BARS + 4 * bar;
            let after_wide = bar > 0 && self.u32(at - 4) & 0b111 == 0b100;
            let type_bits = match self.u32(at) {
                _ if after_wide => 0,
                low if low & 1 != 0 => low & 0b11,
                low => low & 0b1111,
            };
            self.set(at, &type_bits.to_le_bytes());
        }
        self.set(EXPANSION_ROM, &[0; 4]);
        self.set(INTERRUPT_LINE, &[0]);
        if let Some(at) = self.capability(CAP_PM) {
            // D0, and no power-management event.
            let control = self.u16(at + 4) & !0x8103;
            self.set(at + 4, &control.to_le_bytes());
        }
        if let Some(at) = self.capability(CAP_MSI) {
            // Disabled, one message.
            let control = self.u16(at + 2) & !0x0071;
            self.set(at + 2, &control.to_le_bytes());
        }
        if let Some(at) = self.capability(CAP_MSIX) {
            // Disabled, not masked as a whole.
            let control = self.u16(at + 2) & !0xc000;
            self.set(at + 2, &control.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests;
