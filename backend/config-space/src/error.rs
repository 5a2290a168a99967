//! Errors in a device's configuration space.

/// An invalid configuration space: it contradicts the device's description, itself or
/// the specification.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages document the variants and fields")]
pub enum ConfigSpaceError {
    #[error("the configuration space has {0} bytes; it must have 256 or 4096")]
    Size(usize),
    #[error("the vendor id is {0:#06x}: no device responds")]
    NotPresent(u16),
    #[error("header type {0:#04x} is not an endpoint's (0)")]
    HeaderType(u8),
    #[error("PCI Express device type {0} is not an endpoint's (0, 1 or 9)")]
    PortType(u8),
    #[error("BAR {bar}: {problem}")]
    Bar { bar: usize, problem: &'static str },
    #[error("the capability list points to {at:#x}, outside {from:#x} to {to:#x}")]
    CapabilityPointer { at: usize, from: usize, to: usize },
    #[error("the capability list loops at {at:#x}")]
    CapabilityLoop { at: usize },
    #[error(
        "the {name} capability at {at:#x} has {length} bytes and extends past the configuration space"
    )]
    CapabilityOutside {
        name: &'static str,
        at: usize,
        length: usize,
    },
    #[error(
        "the {name} capability at {at:#x} has {length} bytes and overlaps the one at {other:#x}"
    )]
    CapabilityOverlap {
        name: &'static str,
        at: usize,
        length: usize,
        other: usize,
    },
    #[error("the {name} capability at {at:#x} declares {length} bytes, which is too short")]
    CapabilityTooShort {
        name: &'static str,
        at: usize,
        length: usize,
    },
    #[error("duplicate {name} capability at {at:#x}")]
    CapabilityTwice { name: &'static str, at: usize },
    #[error(
        "{name} has {in_config} vectors in the configuration space and {described} in the description"
    )]
    Vectors {
        name: &'static str,
        in_config: u16,
        described: u16,
    },
    #[error("the MSI capability at {at:#x} has {count} vectors; the most is 32")]
    TooManyVectors { at: usize, count: u16 },
    #[error("the MSI-X {part} at {offset:#x} of BAR {bar} is not inside a memory BAR")]
    MsixOutside {
        part: &'static str,
        bar: u8,
        offset: u64,
    },
}
