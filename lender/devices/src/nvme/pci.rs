//! The function's configuration-space image: an NVMe endpoint with power
//! management, PCI Express (with function-level reset) and MSI-X.

use farside_pci::regs::{EXP_DEVCAP, EXP_DEVCAP2, EXP_LNKCAP, INTERRUPT_PIN};
use farside_pci::{Bar, BarKind, ConfigImage, Description, SparseMmapArea};

use super::cmb;
use super::registers::{BAR_SIZE, DOORBELLS, MSIX_PBA, MSIX_TABLE};

/// Vendor id of the range for virtual devices.
///
/// 1af4:10f0 to 1af4:10ff are for experimental use without registration
/// (QEMU, docs/specs/pci-ids). Drivers bind to NVMe by class code. Not 1b36:0010, QEMU's
/// own controller: guests have quirks for it, and the two would be indistinguishable in
/// a VM.
pub const VENDOR_ID: u16 = 0x1af4;
/// Device id; see [`VENDOR_ID`].
pub const DEVICE_ID: u16 = 0x10f0;

/// Offset of the PCI Express capability.
const EXPRESS: usize = 0x50;

/// Mass storage, non-volatile memory, NVM Express.
const CLASS: u32 = 0x01_08_02;

/// The function's description, with `vectors` MSI-X vectors, a controller memory buffer of `cmb` bytes, and doorbells that
/// the guest can map if they are `mapped`.
pub fn description(vectors: u16, cmb: Option<u64>, mapped: bool, summary: String) -> Description {
    const PAYLOAD_256: u32 = 1;
    const ASPM_COMPLIANT: u32 = 1 << 22;
    const COMPLETION_TIMEOUT_DISABLE: u32 = 1 << 4;

    let mut bars = [const { None }; 6];
    let prefetchable = false;
    let doorbells = SparseMmapArea {
        offset: DOORBELLS,
        len: MSIX_TABLE - DOORBELLS,
    };
    bars[0] = Some(Bar {
        mappable: if mapped { vec![doorbells] } else { Vec::new() },
        ..Bar::new(BAR_SIZE, BarKind::Memory64 { prefetchable })
    });
    bars[cmb::BAR] = cmb.map(|size| Bar {
        mappable: vec![SparseMmapArea {
            offset: 0,
            len: size,
        }],
        ..Bar::new(size, BarKind::Memory64 { prefetchable: true })
    });
    let mut image = ConfigImage::endpoint(VENDOR_ID, DEVICE_ID, CLASS, &bars);
    image
        .set_u8(INTERRUPT_PIN, 1)
        .add_power_management(0x40)
        .add_express(EXPRESS, 4)
        .or_u32(EXPRESS + EXP_DEVCAP, PAYLOAD_256)
        .or_u32(EXPRESS + EXP_LNKCAP, ASPM_COMPLIANT)
        .set_u32(EXPRESS + EXP_DEVCAP2, COMPLETION_TIMEOUT_DISABLE)
        .add_msix(0x90, vectors, 0, MSIX_TABLE, MSIX_PBA);
    Description {
        config: image.to_vec(),
        bars,
        intx: true,
        msi_vectors: 0,
        msix_vectors: vectors,
        summary,
    }
}
