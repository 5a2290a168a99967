//! A port's PCI function: configuration-space image and BARs.

use farside_pci::{Bar, BarKind, ConfigImage, Description};

use super::{
    config::PortConfig,
    regs::{
        CLASS, DEVICE_ID, MSIX_PBA, MSIX_TABLE, REGISTERS_BAR, REGISTERS_SIZE, VECTORS, VENDOR_ID,
        WINDOW_BAR,
    },
};

/// Describes a port. No area is mappable: each access is translated by the current
/// tables.
pub(super) fn description(number: u32, config: &PortConfig) -> Description {
    let prefetchable = false;
    let registers = Bar::new(REGISTERS_SIZE, BarKind::Memory32 { prefetchable });
    let prefetchable = true;
    let window = Bar::new(config.window_size, BarKind::Memory64 { prefetchable });
    let mut bars = [const { None }; 6];
    bars[usize::from(REGISTERS_BAR)] = Some(registers);
    bars[usize::from(WINDOW_BAR)] = Some(window);
    let mut image = ConfigImage::endpoint(VENDOR_ID, DEVICE_ID, CLASS, &bars);
    image.add_power_management(0x40).add_express(0x50, 8);
    image.add_msix(0x90, VECTORS, REGISTERS_BAR, MSIX_TABLE, MSIX_PBA);
    Description {
        config: image.to_vec(),
        bars,
        intx: false,
        msi_vectors: 0,
        msix_vectors: VECTORS,
        summary: format!(
            "farside NTB, port {number}: window of {} MiB, {} LUT entries",
            config.window_size >> 20,
            config.lut_entries
        ),
    }
}
