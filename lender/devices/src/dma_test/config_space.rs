//! The configuration space of the DMA test device after power-on.

use farside_pci::regs::{
    CAP_ID_MSI, CAP_ID_VNDR, INTERRUPT_PIN, MSI_FLAGS, MSI_FLAGS_64BIT, MSI_FLAGS_MASKBIT,
};
use farside_pci::{Bar, ConfigImage};

use super::{DEVICE_ID, ID, PBA, VECTORS, VENDOR_ID};

/// The maximum of MSI.
pub(super) const MSI_VECTORS: u16 = 32;

/// Offsets of capabilities.
pub(super) mod at {
    pub(crate) const PM: usize = 0x40;
    pub(crate) const MSI: usize = 0x48;
    pub(crate) const MSIX: usize = 0x60;
    pub(crate) const PCIE: usize = 0x70;
    pub(crate) const VENDOR: usize = 0xb0;
    pub(crate) const SERIAL: usize = 0x100;
    pub(crate) const ATS: usize = 0x110;
    pub(crate) const VSEC: usize = 0x120;
}

/// Unassigned class.
const CLASS: u32 = 0xff_00_00;
/// The BAR of the MSI-X table and pending bits.
const MSIX_BAR: u8 = 4;

/// Section numbers are of the PCI Express Base Specification 6.0.
pub(super) fn image(bars: &[Option<Bar>; 6]) -> ConfigImage {
    let mut space = ConfigImage::endpoint(VENDOR_ID, DEVICE_ID, CLASS, bars);
    space
        .set_u8(INTERRUPT_PIN, 1)
        .add_power_management(at::PM)
        // 32 vectors (2^5).
        .add_capability(at::MSI, CAP_ID_MSI)
        .set_u16(
            at::MSI + MSI_FLAGS,
            5 << 1 | MSI_FLAGS_64BIT | MSI_FLAGS_MASKBIT,
        )
        .add_msix(at::MSIX, VECTORS, MSIX_BAR, 0, PBA)
        .add_express(at::PCIE, 1)
        // Vendor-specific (7.9.4): length, then the device's ID.
        .add_capability(at::VENDOR, CAP_ID_VNDR)
        .set_u8(at::VENDOR + 2, 16)
        .set_u32(at::VENDOR + 4, ID);
    space
        // Serial number (7.9.3).
        .add_extended_capability(at::SERIAL, 0x0003)
        .set_u16(at::SERIAL + 4, 1)
        .set_u16(at::SERIAL + 10, VENDOR_ID)
        // Address translation services (10.5.1): aligned requests, queue depth 32.
        .add_extended_capability(at::ATS, 0x000f)
        .set_u16(at::ATS + 4, 1 << 5)
        // Vendor-specific extended (7.9.5): id 1, revision 1, 16 bytes.
        .add_extended_capability(at::VSEC, 0x000b)
        .set_u32(at::VSEC + 4, 1 | 1 << 16 | 16 << 20)
        .set_u32(at::VSEC + 8, ID);
    space
}
