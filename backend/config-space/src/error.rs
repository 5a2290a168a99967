//! What is wrong with a device's configuration space.

/// A device that cannot be shown to a guest, because its description
/// contradicts itself or the specification.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it; the fields are in them")]
pub enum ConfigSpaceError {
    #[error("the configuration space has {0} bytes; it must have 256 or 4096")]
    Size(usize),
    #[error("the vendor id is {0:#06x}: no device answers")]
    NotPresent(u16),
    #[error("header type {0:#04x} is not that of an endpoint (0)")]
    HeaderType(u8),
    #[error("PCI Express device type {0} is not that of an endpoint (0, 1 or 9)")]
    PortType(u8),
    #[error("BAR {bar}: {problem}")]
    Bar { bar: usize, problem: &'static str },
    #[error("the capability list points to {at:#x}, outside {from:#x} to {to:#x}")]
    CapabilityPointer { at: usize, from: usize, to: usize },
    #[error("the capability list comes back to {at:#x}")]
    CapabilityLoop { at: usize },
    #[error(
        "the {name} capability at {at:#x} has {length} bytes and leaves the configuration space"
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
    #[error("the {name} capability at {at:#x} says it has {length} bytes, which is too short")]
    CapabilityTooShort {
        name: &'static str,
        at: usize,
        length: usize,
    },
    #[error("there is a second {name} capability at {at:#x}")]
    CapabilityTwice { name: &'static str, at: usize },
    #[error(
        "{name} has {in_config} vectors in the configuration space and {described} in the description"
    )]
    Vectors {
        name: &'static str,
        in_config: u16,
        described: u16,
    },
    #[error("the MSI-X {part} at {offset:#x} of BAR {bar} is not inside a memory BAR")]
    MsixOutside {
        part: &'static str,
        bar: u8,
        offset: u64,
    },
}
