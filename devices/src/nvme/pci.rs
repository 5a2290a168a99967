//! The function's configuration-space image: an NVMe endpoint with power
//! management, PCI Express (with function-level reset) and MSI-X.

use super::registers::{BAR_SIZE, MSIX_PBA, MSIX_TABLE};
use farside_pci::{Bar, BarKind, Description};

/// Vendor id: the block that its owner opened to virtual devices.
///
/// 1af4:10f0 to 1af4:10ff are for experimental use without registration
/// (QEMU, docs/specs/pci-ids). Drivers bind to NVMe by class code. We do not
/// take 1b36:0010, QEMU's own controller: guests have quirks for it, and in a
/// VM with both one could not tell them apart.
pub const VENDOR_ID: u16 = 0x1af4;
/// Device id; see [`VENDOR_ID`].
pub const DEVICE_ID: u16 = 0x10f0;

const CONFIG_SIZE: usize = 4096;
const PM: usize = 0x40;
const EXPRESS: usize = 0x50;
const MSIX: usize = 0x90;

/// What the function looks like, with `vectors` MSI-X vectors.
pub fn description(vectors: u16, summary: String) -> Description {
    let mut bars = [const { None }; 6];
    bars[0] = Some(Bar {
        size: BAR_SIZE,
        kind: BarKind::Memory64 {
            prefetchable: false,
        },
        mappable: Vec::new(),
    });
    Description {
        config: config_image(vectors),
        bars,
        intx: true,
        msi_vectors: 0,
        msix_vectors: vectors,
        summary,
    }
}

fn config_image(vectors: u16) -> Vec<u8> {
    let mut image = Image(vec![0; CONFIG_SIZE]);
    // Type 0 header (PCI 3.0, 6.1).
    image.put16(0x00, VENDOR_ID);
    image.put16(0x02, DEVICE_ID);
    image.put16(0x06, 1 << 4); // status: capabilities list
    image.put8(0x08, 1); // revision
    image.put8(0x09, 0x02); // programming interface: NVM Express
    image.put8(0x0a, 0x08); // sub class: non-volatile memory
    image.put8(0x0b, 0x01); // class: mass storage
    image.put32(0x10, 0x4); // BAR 0: memory, 64-bit
    image.put16(0x2c, VENDOR_ID);
    image.put16(0x2e, DEVICE_ID);
    image.put8(0x34, PM as u8);
    image.put8(0x3d, 1); // interrupt pin A

    // Power management (PCI-PM 1.2): version 3, D0 and D3hot, no PME.
    image.capability(PM, 0x01, EXPRESS);
    image.put16(PM + 2, 3);
    image.put16(PM + 4, 1 << 3); // D3hot to D0 keeps the state

    // PCI Express (PCIe 3.0, 7.8): version 2, endpoint.
    image.capability(EXPRESS, 0x10, MSIX);
    image.put16(EXPRESS + 2, 2);
    const PAYLOAD_256: u32 = 1;
    const ROLE_BASED_ERRORS: u32 = 1 << 15;
    const FUNCTION_LEVEL_RESET: u32 = 1 << 28;
    image.put32(
        EXPRESS + 0x04,
        PAYLOAD_256 | ROLE_BASED_ERRORS | FUNCTION_LEVEL_RESET,
    );
    // Relaxed ordering, no snoop, 512-byte read requests: the defaults.
    image.put16(EXPRESS + 0x08, 0x2810);
    const SPEED_8GT: u32 = 3;
    const WIDTH_X4: u32 = 4 << 4;
    const ASPM_COMPLIANT: u32 = 1 << 22;
    image.put32(EXPRESS + 0x0c, SPEED_8GT | WIDTH_X4 | ASPM_COMPLIANT);
    image.put16(EXPRESS + 0x12, (SPEED_8GT | WIDTH_X4) as u16);
    const COMPLETION_TIMEOUT_DISABLE: u32 = 1 << 4;
    image.put32(EXPRESS + 0x24, COMPLETION_TIMEOUT_DISABLE);
    image.put32(EXPRESS + 0x2c, 0b111 << 1); // link speeds: 2.5 to 8 GT/s
    image.put16(EXPRESS + 0x30, SPEED_8GT as u16);

    // MSI-X (PCI 3.0, 6.8.2): table and pending bits in BAR 0.
    image.capability(MSIX, 0x11, 0);
    image.put16(MSIX + 2, vectors - 1);
    image.put32(MSIX + 4, MSIX_TABLE as u32);
    image.put32(MSIX + 8, MSIX_PBA as u32);
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
