//! Walks and checks the capability lists, and relinks them without the hidden
//! capabilities.

use farside_pci::Description;
use farside_pci::policy::{self, BadLength, Hidden, List, Shown, Treatment};
use farside_pci::regs::*;

use super::builder::Builder;
use super::{ConfigSpaceError, Registers, aer, af, ari, msi, msix, pcie, pm, resizable_bar};

/// Why vital product data of a model is hidden.
const NOT_FORWARDED: &str = "only a device that registers are forwarded to can return its data";

/// A capability in the device's image.
struct Found {
    id: u16,
    at: usize,
}

/// Finds all capabilities, builds the registers of the visible ones, hides the others.
pub fn build(
    builder: &mut Builder,
    description: &Description,
    registers: &mut Registers,
) -> Result<Vec<Hidden>, ConfigSpaceError> {
    let mut hidden = Vec::new();

    // `header::build` has cleared this bit in the builder's image.
    let status = u16::from_le_bytes([description.config[STATUS], description.config[STATUS + 1]]);
    let found = if status & STATUS_CAP_LIST != 0 {
        find_standard(builder)?
    } else {
        Vec::new()
    };
    let shown = treat(
        builder,
        description,
        registers,
        List::Standard,
        &found,
        &mut hidden,
    )?;
    builder.image.set_u8(CAPABILITY_LIST, 0);
    for at in shown {
        builder.image.link_capability(at);
    }

    if builder.image.len() == CFG_SPACE_EXP_SIZE {
        // Only PCI Express functions have an extended space.
        let found = if registers.pcie.is_some() {
            find_extended(builder)?
        } else {
            Vec::new()
        };
        if found.is_empty() {
            builder.image[CFG_SPACE_SIZE..].fill(0);
        }
        let shown = treat(
            builder,
            description,
            registers,
            List::Extended,
            &found,
            &mut hidden,
        )?;
        for at in shown {
            builder.image.link_extended_capability(at);
        }
    }

    for (name, described, found) in [
        ("MSI", description.msi_vectors, registers.msi.is_some()),
        ("MSI-X", description.msix_vectors, registers.msix.is_some()),
    ] {
        if described != 0 && !found {
            return Err(ConfigSpaceError::Vectors {
                name,
                in_config: 0,
                described,
            });
        }
    }
    Ok(hidden)
}

/// Standard capabilities in the order of the list: at most 48, since no offset may
/// repeat.
fn find_standard(builder: &Builder) -> Result<Vec<Found>, ConfigSpaceError> {
    let mut found: Vec<Found> = Vec::new();
    let mut at = pointer(builder.image.u8(CAPABILITY_LIST));
    while at != 0 {
        if at < STD_HEADER_SIZEOF {
            return Err(ConfigSpaceError::CapabilityPointer {
                at,
                from: STD_HEADER_SIZEOF,
                to: CFG_SPACE_SIZE,
            });
        }
        if found.iter().any(|capability| capability.at == at) {
            return Err(ConfigSpaceError::CapabilityLoop { at });
        }
        found.push(Found {
            id: builder.image.u8(at).into(),
            at,
        });
        at = pointer(builder.image.u8(at + CAP_LIST_NEXT));
    }
    Ok(found)
}

/// "The bottom two bits are Reserved […] Software must mask these bits off"
/// (PCIe 7.5.1.1.11). So a structure's first dword is inside the space.
fn pointer(byte: u8) -> usize {
    usize::from(byte & !0b11)
}

/// Extended capabilities in the order of the list: at most 960.
fn find_extended(builder: &Builder) -> Result<Vec<Found>, ConfigSpaceError> {
    let mut found = Vec::new();
    let mut seen = [false; CFG_SPACE_EXP_SIZE / 4];
    let mut at = CFG_SPACE_SIZE;
    loop {
        if std::mem::replace(&mut seen[at / 4], true) {
            return Err(ConfigSpaceError::CapabilityLoop { at });
        }
        let header = builder.image.u32(at);
        // An empty list, or no response.
        if at == CFG_SPACE_SIZE && (header == 0 || header == !0) {
            return Ok(found);
        }
        // The id is the low half.
        found.push(Found {
            id: header as u16,
            at,
        });
        // Bits 1:0 of the pointer are reserved and masked off (7.6.3).
        at = (header >> 20) as usize & !0b11;
        if at == 0 {
            return Ok(found);
        }
        if at < CFG_SPACE_SIZE {
            return Err(ConfigSpaceError::CapabilityPointer {
                at,
                from: CFG_SPACE_SIZE,
                to: CFG_SPACE_EXP_SIZE,
            });
        }
    }
}

/// Builds the registers of visible capabilities and zeroes hidden ones. Returns the
/// offsets of the visible ones.
fn treat(
    builder: &mut Builder,
    description: &Description,
    registers: &mut Registers,
    list: List,
    found: &[Found],
    hidden: &mut Vec<Hidden>,
) -> Result<Vec<usize>, ConfigSpaceError> {
    let end = match list {
        List::Standard => CFG_SPACE_SIZE,
        List::Extended => CFG_SPACE_EXP_SIZE,
    };
    let mut shown_at = Vec::new();
    for &Found { id, at } in found {
        let next = found
            .iter()
            .map(|other| other.at)
            .filter(|&other| other > at)
            .min();
        let (name, treatment) = policy::rule(list, id);
        let treatment = match treatment {
            Treatment::Show(Shown::VitalProductData) if builder.forwarding.is_none() => {
                Treatment::Hide(NOT_FORWARDED)
            }
            treatment => treatment,
        };
        match treatment {
            Treatment::Hide(reason) => {
                // Its length may be unknown: zero all up to the next capability.
                builder.image[at..next.unwrap_or(end)].fill(0);
                // Id 0 is a placeholder ("Null Capability"): nothing to report.
                if id != 0 {
                    hidden.push(Hidden {
                        list,
                        id,
                        name,
                        reason,
                    });
                }
            }
            Treatment::Show(shown) => {
                let length = length(builder, shown, name, at)?;
                if at + length > end {
                    return Err(ConfigSpaceError::CapabilityOutside { name, at, length });
                }
                if let Some(other) = next.filter(|&next| next < at + length) {
                    return Err(ConfigSpaceError::CapabilityOverlap {
                        name,
                        at,
                        length,
                        other,
                    });
                }
                make(builder, description, registers, shown, name, at)?;
                shown_at.push(at);
            }
        }
    }
    Ok(shown_at)
}

/// Bytes of a capability, from its first one or two dwords.
fn length(
    builder: &Builder,
    shown: Shown,
    name: &'static str,
    at: usize,
) -> Result<usize, ConfigSpaceError> {
    shown
        .length(&builder.image, at)
        .map_err(|error| match error {
            BadLength::TooShort(length) => {
                ConfigSpaceError::CapabilityTooShort { name, at, length }
            }
            BadLength::Outside(length) => ConfigSpaceError::CapabilityOutside { name, at, length },
        })
}

fn make(
    builder: &mut Builder,
    description: &Description,
    registers: &mut Registers,
    shown: Shown,
    name: &'static str,
    at: usize,
) -> Result<(), ConfigSpaceError> {
    let taken = match shown {
        Shown::PowerManagement => registers.pm.is_some(),
        Shown::Msi => registers.msi.is_some(),
        Shown::PciExpress => registers.pcie.is_some(),
        Shown::Msix => registers.msix.is_some(),
        Shown::AdvancedFeatures => registers.af.is_some(),
        _ => false,
    };
    if taken {
        return Err(ConfigSpaceError::CapabilityTwice { name, at });
    }
    match shown {
        Shown::PowerManagement => registers.pm = Some(pm::Registers::build(builder, at)),
        Shown::Msi => {
            registers.msi = Some(msi::Registers::build(builder, at, description.msi_vectors)?);
        }
        Shown::PciExpress => registers.pcie = Some(pcie::Registers::build(builder, at)?),
        Shown::Msix => {
            let vectors = description.msix_vectors;
            registers.msix = Some(msix::Registers::build(
                builder,
                at,
                vectors,
                &registers.bars,
            )?);
        }
        Shown::AdvancedFeatures => registers.af = Some(af::Registers::build(builder, at)),
        Shown::AdvancedErrors => aer::build(builder, at),
        Shown::Ari => ari::build(builder, at),
        // Read-only, or the device's.
        Shown::VendorSpecific
        | Shown::SerialNumber
        | Shown::VendorSpecificExtended
        | Shown::VitalProductData => {}
        Shown::ResizableBar => resizable_bar::build(builder, at),
    }
    Ok(())
}
