//! The configuration space of the DMA test device after power-on.

use super::{DEVICE_ID, ID, PBA, VECTORS, VENDOR_ID};

/// As many as MSI has.
pub(super) const MSI_VECTORS: u16 = 32;

/// Where capabilities are. Tests of the backend look for them here.
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

/// The BAR of the MSI-X table and pending bits.
const MSIX_BAR: u32 = 4;

/// 4096 bytes. Section numbers are of the PCI Express Base Specification 6.0.
pub(super) fn image() -> Vec<u8> {
    let mut space = Image(vec![0; 4096]);

    // Type 0 header (7.5.1).
    space.u16(0x00, VENDOR_ID);
    space.u16(0x02, DEVICE_ID);
    space.u16(0x06, 1 << 4); // status: has capabilities
    space.u8(0x08, 1); // revision
    space.u8(0x0b, 0xff); // class: none of the defined ones
    space.u32(0x18, 0b1100); // BAR 2: 64-bit, prefetchable
    space.u16(0x2c, VENDOR_ID);
    space.u16(0x2e, DEVICE_ID);
    space.u8(0x34, at::PM as u8);
    space.u8(0x3d, 1); // INTA

    // Power management (7.5.2): version 3; D3hot keeps the state.
    space.capability(at::PM, 0x01, at::MSI);
    space.u16(at::PM + 2, 3);
    space.u16(at::PM + 4, 1 << 3);

    // MSI (7.7.1): 32 vectors (2^5), 64-bit addresses, masks.
    space.capability(at::MSI, 0x05, at::MSIX);
    space.u16(at::MSI + 2, 5 << 1 | 1 << 7 | 1 << 8);

    // MSI-X (7.7.2).
    space.capability(at::MSIX, 0x11, at::PCIE);
    space.u16(at::MSIX + 2, VECTORS - 1);
    space.u32(at::MSIX + 4, MSIX_BAR);
    space.u32(at::MSIX + 8, PBA as u32 | MSIX_BAR);

    // PCI Express (7.5.3): version 2, endpoint; role-based error reporting,
    // function-level reset; 8 GT/s by one lane.
    space.capability(at::PCIE, 0x10, at::VENDOR);
    space.u16(at::PCIE + 2, 2);
    space.u32(at::PCIE + 0x04, 1 << 15 | 1 << 28);
    space.u16(at::PCIE + 0x08, 0x2810); // what the specification says after reset
    space.u32(at::PCIE + 0x0c, 1 << 4 | 3);
    space.u16(at::PCIE + 0x12, 1 << 4 | 3);
    space.u32(at::PCIE + 0x2c, 0b1110); // speeds
    space.u16(at::PCIE + 0x30, 3);

    // Vendor-specific (7.9.4): length, then our letters.
    space.capability(at::VENDOR, 0x09, 0);
    space.u8(at::VENDOR + 2, 16);
    space.u32(at::VENDOR + 4, ID);

    // Serial number (7.9.3).
    space.extended(at::SERIAL, 0x0003, at::ATS);
    space.u16(at::SERIAL + 4, 1);
    space.u16(at::SERIAL + 10, VENDOR_ID);

    // Address translation services (10.5.1): aligned requests, queue depth 32.
    space.extended(at::ATS, 0x000f, at::VSEC);
    space.u16(at::ATS + 4, 1 << 5);

    // Vendor-specific extended (7.9.5): id 1, revision 1, 16 bytes.
    space.extended(at::VSEC, 0x000b, 0);
    space.u32(at::VSEC + 4, 1 | 1 << 16 | 16 << 20);
    space.u32(at::VSEC + 8, ID);

    space.0
}

struct Image(Vec<u8>);

impl Image {
    fn u8(&mut self, at: usize, value: u8) {
        self.0[at] = value;
    }

    fn u16(&mut self, at: usize, value: u16) {
        self.0[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }

    fn u32(&mut self, at: usize, value: u32) {
        self.0[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    fn capability(&mut self, at: usize, id: u8, next: usize) {
        self.u8(at, id);
        self.u8(at + 1, next as u8);
    }

    /// Version 1 of an extended capability.
    fn extended(&mut self, at: usize, id: u16, next: usize) {
        self.u32(at, u32::from(id) | 1 << 16 | (next as u32) << 20);
    }
}
