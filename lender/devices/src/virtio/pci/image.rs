//! The function's configuration-space image: a virtio device with power management, PCI Express (with
//! function-level reset) and MSI-X.

use std::fmt;

use farside_pci::{
    Bar, BarKind, ConfigImage, Description,
    regs::{EXP_DEVCAP, EXP_DEVCAP2, EXP_LNKCAP, INTERRUPT_PIN},
};

use super::{
    BAR_SIZE, COMMON, COMMON_LEN, DEVICE, ISR, Kind, MSIX_PBA, MSIX_TABLE, NOTIFY,
    NOTIFY_MULTIPLIER, VENDOR_ID,
};

/// Device id of type 0.
const DEVICE_ID_BASE: u16 = 0x1040;

/// The description of a function with a vector for each of `queues` queues and one for its configuration, and its
/// summary with the `detail`.
pub(in crate::virtio) fn description(
    kind: Kind,
    queues: u16,
    detail: impl fmt::Display,
) -> Description {
    const EXPRESS: usize = 0x50;
    const PAYLOAD_256: u32 = 1;
    const ASPM_COMPLIANT: u32 = 1 << 22;
    const COMPLETION_TIMEOUT_DISABLE: u32 = 1 << 4;
    /// Configuration types (4.1.4).
    const COMMON_CFG: u8 = 1;
    const NOTIFY_CFG: u8 = 2;
    const ISR_CFG: u8 = 3;
    const DEVICE_CFG: u8 = 4;

    let vectors = queues + 1;
    let mut bars = [const { None }; 6];
    let prefetchable = false;
    bars[0] = Some(Bar::new(BAR_SIZE, BarKind::Memory64 { prefetchable }));
    let device = DEVICE_ID_BASE + kind.id;
    let mut image = ConfigImage::endpoint(VENDOR_ID, device, kind.class, &bars);
    image
        .set_u8(INTERRUPT_PIN, 1)
        .add_power_management(0x40)
        .add_express(EXPRESS, 4)
        .or_u32(EXPRESS + EXP_DEVCAP, PAYLOAD_256)
        .or_u32(EXPRESS + EXP_LNKCAP, ASPM_COMPLIANT)
        .set_u32(EXPRESS + EXP_DEVCAP2, COMPLETION_TIMEOUT_DISABLE)
        .add_msix(0x90, vectors, 0, MSIX_TABLE, MSIX_PBA);
    let notify_len = u32::from(queues) * NOTIFY_MULTIPLIER;
    for (at, kind, offset, len) in [
        (0xa0, COMMON_CFG, COMMON, COMMON_LEN as u32),
        (0xb0, ISR_CFG, ISR, 1),
        (0xc0, DEVICE_CFG, DEVICE, kind.config_len),
        (0xd0, NOTIFY_CFG, NOTIFY, notify_len),
    ] {
        let bytes = if kind == NOTIFY_CFG { 20 } else { 16 };
        image
            .add_capability(at, 0x09)
            .set_u8(at + 2, bytes)
            .set_u8(at + 3, kind)
            .set_u32(at + 8, offset as u32)
            .set_u32(at + 12, len);
        if kind == NOTIFY_CFG {
            image.set_u32(at + 16, NOTIFY_MULTIPLIER);
        }
    }
    Description {
        config: image.to_vec(),
        bars,
        intx: true,
        msi_vectors: 0,
        msix_vectors: vectors,
        summary: format!("farside {}, {detail}", kind.name),
    }
}
