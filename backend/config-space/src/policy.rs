//! Visible and hidden capabilities, with the reasons.
//!
//! A capability that is not in the tables is hidden, since its registers' effects at
//! the lender are unknown.

use std::fmt;

/// A capability of the device that is hidden from the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hidden {
    /// The capability list that holds it.
    pub list: List,
    /// Capability id.
    pub id: u16,
    /// Name, for log lines.
    pub name: &'static str,
    /// Reason, for log lines.
    pub reason: &'static str,
}

impl fmt::Display for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            list,
            id,
            name,
            reason,
        } = self;
        match list {
            List::Standard => write!(f, "capability {id:#04x} ({name}): {reason}"),
            List::Extended => write!(f, "extended capability {id:#06x} ({name}): {reason}"),
        }
    }
}

/// The two capability lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    /// From offset 0x40 (PCIe 7.5.1.1.11).
    Standard,
    /// From offset 0x100 (PCIe 7.6).
    Extended,
}

/// The treatment of a capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Treatment {
    Show(Shown),
    Hide(&'static str),
}

/// Capabilities that are visible to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    PowerManagement,
    Msi,
    VendorSpecific,
    PciExpress,
    Msix,
    AdvancedFeatures,
    AdvancedErrors,
    SerialNumber,
    VendorSpecificExtended,
    Ari,
}

pub(super) struct Rule {
    pub id: u16,
    pub name: &'static str,
    pub treatment: Treatment,
}

const fn show(id: u16, name: &'static str, shown: Shown) -> Rule {
    Rule {
        id,
        name,
        treatment: Treatment::Show(shown),
    }
}

const fn hide(id: u16, name: &'static str, reason: &'static str) -> Rule {
    Rule {
        id,
        name,
        treatment: Treatment::Hide(reason),
    }
}

const BRIDGES: &str = "it belongs to bridges and ports, not to endpoints";
const LINK: &str = "it tunes the physical link, which is the lender's";
const PLATFORM: &str = "it negotiates with the root complex, and the guest's is not the lender's";
const GUEST_IOMMU: &str = "the guest's IOMMU is not the lender's: translations and page requests \
                           would go to the wrong one";
const INDIRECT: &str = "its registers give indirect access to others, which only the device has";
const VIRTUAL_FUNCTIONS: &str = "virtual functions are lent on their own";
const FIXED_BARS: &str = "BAR sizes and layout are fixed for the duration of a borrow";
const OLD_BUS: &str = "it describes a bus that does not exist between guest and device";
const SECURITY: &str = "keys and measurements of the link are the lender's";
const DEBUGGER: &str = "it hands the device to a debugger outside the driver";
const ISOLATION: &str = "isolation between functions is the lender's to enforce";
const POWER: &str = "the device's power budget is the lender's";
const STEERING: &str = "steering tags name the lender's CPUs, not the guest's";
const RESET_TIME: &str = "a reset of a borrowed device takes longer than the device's own";
const CXL: &str = "it may be CXL's, whose memory and coherence a borrow does not carry";
const ENCLOSURE: &str = "the enclosure's lights are the lender's";

pub(super) const STANDARD: &[Rule] = &[
    show(0x01, "power management", Shown::PowerManagement),
    hide(0x02, "AGP", OLD_BUS),
    hide(0x03, "vital product data", INDIRECT),
    hide(0x04, "slot identification", BRIDGES),
    show(0x05, "MSI", Shown::Msi),
    hide(0x06, "CompactPCI hot swap", OLD_BUS),
    hide(0x07, "PCI-X", OLD_BUS),
    hide(0x08, "HyperTransport", OLD_BUS),
    show(0x09, "vendor-specific", Shown::VendorSpecific),
    hide(0x0a, "debug port", DEBUGGER),
    hide(0x0b, "CompactPCI resource control", OLD_BUS),
    hide(0x0c, "hot-plug controller", BRIDGES),
    hide(0x0d, "bridge subsystem id", BRIDGES),
    hide(0x0e, "AGP 8x", OLD_BUS),
    hide(0x0f, "secure device", SECURITY),
    show(0x10, "PCI Express", Shown::PciExpress),
    show(0x11, "MSI-X", Shown::Msix),
    hide(0x12, "SATA index and data", INDIRECT),
    show(0x13, "advanced features", Shown::AdvancedFeatures),
    hide(0x14, "enhanced allocation", FIXED_BARS),
    hide(0x15, "flattening portal bridge", BRIDGES),
];

pub(super) const EXTENDED: &[Rule] = &[
    show(0x01, "advanced error reporting", Shown::AdvancedErrors),
    hide(0x02, "virtual channel", LINK),
    show(0x03, "device serial number", Shown::SerialNumber),
    hide(0x04, "power budgeting", INDIRECT),
    hide(0x05, "root complex link declaration", BRIDGES),
    hide(0x06, "root complex link control", BRIDGES),
    hide(0x07, "root complex event collector", BRIDGES),
    hide(0x08, "multi-function virtual channel", LINK),
    hide(0x09, "virtual channel", LINK),
    hide(0x0a, "root complex register block", BRIDGES),
    show(0x0b, "vendor-specific", Shown::VendorSpecificExtended),
    hide(0x0c, "configuration access correlation", PLATFORM),
    hide(0x0d, "access control services", ISOLATION),
    show(0x0e, "alternative routing id", Shown::Ari),
    hide(0x0f, "address translation services", GUEST_IOMMU),
    hide(0x10, "single-root I/O virtualization", VIRTUAL_FUNCTIONS),
    hide(0x11, "multi-root I/O virtualization", VIRTUAL_FUNCTIONS),
    hide(0x12, "multicast", PLATFORM),
    hide(0x13, "page request", GUEST_IOMMU),
    hide(0x15, "resizable BAR", FIXED_BARS),
    hide(0x16, "dynamic power allocation", POWER),
    hide(0x17, "TPH requester", STEERING),
    hide(0x18, "latency tolerance reporting", PLATFORM),
    hide(0x19, "secondary PCI Express", LINK),
    hide(0x1a, "protocol multiplexing", LINK),
    hide(0x1b, "process address space id", GUEST_IOMMU),
    hide(0x1c, "lightweight notification", PLATFORM),
    hide(0x1d, "downstream port containment", BRIDGES),
    hide(0x1e, "L1 PM substates", LINK),
    hide(0x1f, "precision time measurement", PLATFORM),
    hide(0x20, "M-PCIe", LINK),
    hide(0x21, "function readiness status", PLATFORM),
    hide(0x22, "readiness time", RESET_TIME),
    hide(0x23, "designated vendor-specific", CXL),
    hide(0x24, "virtual function resizable BAR", VIRTUAL_FUNCTIONS),
    hide(0x25, "data link feature", LINK),
    hide(0x26, "physical layer 16 GT/s", LINK),
    hide(0x27, "lane margining", LINK),
    hide(0x28, "hierarchy id", PLATFORM),
    hide(0x29, "native enclosure management", ENCLOSURE),
    hide(0x2a, "physical layer 32 GT/s", LINK),
    hide(0x2b, "alternate protocol", LINK),
    hide(0x2c, "system firmware intermediary", BRIDGES),
    hide(0x2d, "shadow functions", VIRTUAL_FUNCTIONS),
    hide(0x2e, "data object exchange", INDIRECT),
    hide(0x2f, "device 3", PLATFORM),
    hide(0x30, "integrity and data encryption", SECURITY),
    hide(0x31, "physical layer 64 GT/s", LINK),
    hide(0x32, "flit logging", LINK),
    hide(0x33, "flit performance measurement", LINK),
    hide(0x34, "flit error injection", LINK),
];

const UNKNOWN: &str = "the effects of its registers at the lender are unknown";

/// Name and treatment of a capability.
pub(super) fn rule(list: List, id: u16) -> (&'static str, Treatment) {
    let table = match list {
        List::Standard => STANDARD,
        List::Extended => EXTENDED,
    };
    table
        .iter()
        .find(|rule| rule.id == id)
        .map_or(("unknown", Treatment::Hide(UNKNOWN)), |rule| {
            (rule.name, rule.treatment)
        })
}
