//! What a port looks like from outside: configuration-space image and BARs.

use super::{
    config::PortConfig,
    registers::{
        CLASS, DEVICE_ID, MSIX_PBA, MSIX_TABLE, REGISTERS_BAR, REGISTERS_SIZE, VECTORS, VENDOR_ID,
        WINDOW_BAR,
    },
};
use farside_pci::{Bar, BarKind, Description};

const CONFIG_SIZE: usize = 4096;
const PM: usize = 0x40;
const EXPRESS: usize = 0x50;
const MSIX: usize = 0x90;

/// Describes a port. Nothing of it can be mapped: each access is translated
/// by what the tables say at that moment.
pub(super) fn description(number: u32, config: &PortConfig) -> Description {
    let mut bars = [const { None }; 6];
    bars[usize::from(REGISTERS_BAR)] = Some(Bar {
        size: REGISTERS_SIZE,
        kind: BarKind::Memory32 {
            prefetchable: false,
        },
        mappable: Vec::new(),
    });
    bars[usize::from(WINDOW_BAR)] = Some(Bar {
        size: config.window_size,
        kind: BarKind::Memory64 { prefetchable: true },
        mappable: Vec::new(),
    });
    Description {
        config: image(),
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

/// Section numbers are of the PCI Express Base Specification 6.0.
fn image() -> Vec<u8> {
    let mut image = Image(vec![0; CONFIG_SIZE]);
    // Type 0 header (7.5.1).
    image.put16(0x00, VENDOR_ID);
    image.put16(0x02, DEVICE_ID);
    image.put16(0x06, 1 << 4); // status: has capabilities
    image.put32(0x08, CLASS << 8 | 1); // revision 1
    image.put32(0x10 + 4 * usize::from(WINDOW_BAR), 0b1100); // 64-bit, prefetchable
    image.put16(0x2c, VENDOR_ID);
    image.put16(0x2e, DEVICE_ID);
    image.put8(0x34, PM as u8);

    // Power management (7.5.2): version 3; D3hot keeps the state.
    image.capability(PM, 0x01, EXPRESS);
    image.put16(PM + 2, 3);
    image.put16(PM + 4, 1 << 3);

    // PCI Express (7.5.3): version 2, endpoint; role-based error reporting,
    // function-level reset; 8 GT/s by eight lanes.
    const LINK: u32 = 8 << 4 | 3;
    image.capability(EXPRESS, 0x10, MSIX);
    image.put16(EXPRESS + 2, 2);
    image.put32(EXPRESS + 0x04, 1 << 15 | 1 << 28);
    image.put16(EXPRESS + 0x08, 0x2810); // what the specification says after reset
    image.put32(EXPRESS + 0x0c, LINK);
    image.put16(EXPRESS + 0x12, LINK as u16);
    image.put32(EXPRESS + 0x2c, 0b1110); // speeds
    image.put16(EXPRESS + 0x30, 3);

    // MSI-X (7.7.2).
    image.capability(MSIX, 0x11, 0);
    image.put16(MSIX + 2, VECTORS - 1);
    image.put32(MSIX + 4, MSIX_TABLE as u32 | u32::from(REGISTERS_BAR));
    image.put32(MSIX + 8, MSIX_PBA as u32 | u32::from(REGISTERS_BAR));
    image.0
}

struct Image(Vec<u8>);

impl Image {
    fn put8(&mut self, at: usize, value: u8) {
        self.0[at] = value;
    }

    fn put16(&mut self, at: usize, value: u16) {
        self.0[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }

    fn put32(&mut self, at: usize, value: u32) {
        self.0[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    fn capability(&mut self, at: usize, id: u8, next: usize) {
        self.put8(at, id);
        self.put8(at + 1, next as u8);
    }
}
