//! Builds a function's description from VFIO's information.

use std::fmt;

use farside_fabric::PAGE_SIZE;
use farside_irq_relay::{IrqCounts, IrqIndex};
use farside_pci::regs::*;
use farside_pci::{Bar, BarKind, ConfigImage, Description, SparseMmapArea};
use serde::{Deserialize, Serialize};
use vfio_bindings::bindings::vfio::VFIO_PCI_CONFIG_REGION_INDEX;

/// VFIO's information about a region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// Whether it can be mapped.
    pub can_map: bool,
    /// Bytes; 0 when there is no such region.
    pub size: u64,
    /// Its offset in the descriptor that it is mapped from.
    pub file_offset: u64,
    /// The only areas that can be mapped, as (offset, bytes), if not all can.
    pub sparse: Option<Vec<(u64, u64)>>,
}

/// Bytes of configuration space: 256 or 4096.
pub fn config_size(regions: &[Region]) -> usize {
    let region = regions.get(VFIO_PCI_CONFIG_REGION_INDEX as usize);
    match region.map_or(0, |region| region.size) {
        4096.. => CFG_SPACE_EXP_SIZE,
        _ => CFG_SPACE_SIZE,
    }
}

/// Builds the description of the function at `place` from its current configuration space.
///
/// # Errors
/// Why it cannot be lent.
pub fn describe(
    place: impl fmt::Display,
    config: Vec<u8>,
    regions: &[Region],
    counts: IrqCounts,
) -> Result<Description, String> {
    let mut image = ConfigImage::from(config);
    let header = image.u8(HEADER_TYPE) & HEADER_TYPE_MASK;
    if header != 0 {
        return Err(format!(
            "it is a bridge (header type {header:#x}), and only endpoints are lent"
        ));
    }
    let summary = format!(
        "{:04x}:{:04x} {} at {place}",
        image.u16(VENDOR_ID),
        image.u16(DEVICE_ID),
        class_text(image.u32(CLASS_REVISION) >> 8)
    );
    // QEMU emulates the MSI-X table: guest writes must not reach the device, whose table the kernel
    // programs.
    let msix = image.find_capability(CAP_ID_MSIX, MSIX_SIZEOF);
    let traps = msix.map(|at| image.msix_areas(at));
    let mut bars = [const { None }; 6];
    let mut bar = 0;
    while bar < 6 {
        let kind = BarKind::from_register(image.u32(BASE_ADDRESS_0 + 4 * bar));
        let size = regions.get(bar).map_or(0, |region| region.size);
        if size != 0 {
            if !size.is_power_of_two() {
                return Err(format!("BAR {bar} of {size:#x} bytes is no power of two"));
            }
            let mine = traps.iter().flatten();
            let mine = mine.filter(|&&(of, ..)| usize::from(of) == bar);
            let mine: Vec<(u64, u64)> = mine.map(|&(_, offset, len)| (offset, len)).collect();
            bars[bar] = Some(Bar {
                size,
                kind,
                mappable: match kind {
                    BarKind::Io => Vec::new(),
                    _ => mappable(&regions[bar], &mine),
                },
            });
        }
        bar += match kind {
            BarKind::Memory64 { .. } => 2,
            BarKind::Memory32 { .. } | BarKind::Io => 1,
        };
    }
    clear_settings(&mut image);
    Ok(Description {
        config: image.to_vec(),
        bars,
        intx: counts.count(IrqIndex::Intx) != 0,
        msi_vectors: counts.count(IrqIndex::Msi),
        msix_vectors: counts.count(IrqIndex::Msix),
        summary,
    })
}

/// The page-aligned areas of a BAR that the guest may access without a trap: those that the kernel
/// allows to be mapped, without pages that `traps` (as (offset, bytes)) touch.
fn mappable(region: &Region, traps: &[(u64, u64)]) -> Vec<SparseMmapArea> {
    if !region.can_map || region.size < PAGE_SIZE {
        return Vec::new();
    }
    let areas = match &region.sparse {
        Some(areas) => areas.clone(),
        None => vec![(0, region.size)],
    };
    // Inward to whole pages, and inside the BAR.
    let mut areas: Vec<SparseMmapArea> = areas
        .iter()
        .filter_map(|&(offset, len)| {
            let end = offset.checked_add(len)?.min(region.size);
            let offset = offset.checked_next_multiple_of(PAGE_SIZE)?;
            let len = (end - end % PAGE_SIZE).checked_sub(offset)?;
            Some(SparseMmapArea { offset, len })
        })
        .collect();
    for &(offset, len) in traps {
        let from = offset - offset % PAGE_SIZE;
        let to = offset.saturating_add(len);
        let to = to.checked_next_multiple_of(PAGE_SIZE).unwrap_or(u64::MAX);
        areas = areas
            .into_iter()
            .flat_map(|area| area.without(from, to))
            .collect();
    }
    areas.retain(|area| area.len != 0);
    areas.sort_unstable_by_key(|area| area.offset);
    areas
}

/// The name of a class code (24 bits: base class, sub-class, interface), for display.
fn class_text(class: u32) -> String {
    let text = match (class >> 16, class >> 8 & 0xff, class & 0xff) {
        (0x01, 0x08, 0x02) => "NVMe controller",
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

/// Clears the bits that the host or VFIO has set since power-on.
fn clear_settings(image: &mut ConfigImage) {
    image
        .set_u16(COMMAND, 0)
        .set_u8(CACHE_LINE_SIZE, 0)
        .set_u8(LATENCY_TIMER, 0)
        .set_u32(ROM_ADDRESS, 0)
        .set_u8(INTERRUPT_LINE, 0);
    let mut upper_half = false;
    for bar in 0..6 {
        let at = BASE_ADDRESS_0 + 4 * bar;
        let register = image.u32(at);
        let kind = BarKind::from_register(register);
        let address = if upper_half { !0 } else { kind.address_mask() };
        image.set_u32(at, register & !address);
        upper_half = !upper_half && matches!(kind, BarKind::Memory64 { .. });
    }
    for (id, length, register, set) in [
        // D0, and no power-management event.
        (CAP_ID_PM, PM_SIZEOF, PM_CTRL, 0x8100 | PM_CTRL_STATE_MASK),
        // Disabled, one message.
        (
            CAP_ID_MSI,
            10,
            MSI_FLAGS,
            MSI_FLAGS_ENABLE | MSI_FLAGS_QSIZE,
        ),
        // Disabled, not masked as a whole.
        (
            CAP_ID_MSIX,
            MSIX_SIZEOF,
            MSIX_FLAGS,
            MSIX_FLAGS_ENABLE | MSIX_FLAGS_MASKALL,
        ),
    ] {
        if let Some(at) = image.find_capability(id, length) {
            image.set_u16(at + register, image.u16(at + register) & !set);
        }
    }
}

#[cfg(test)]
mod tests;
