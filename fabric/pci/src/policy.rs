//! The policy for a lent function's configuration space: which capabilities the guest sees, and for each bit of those
//! whether it is the backend's or the device's.
//!
//! The one table of it. The backend decides by it which accesses go to the device, and the lender checks by it what a
//! borrower asks for ([`Forwarding`](crate::Forwarding)). `docs/configuration-space.md` is generated from it.
//!
//! A capability that is not in the tables is hidden, since its registers' effects at the lender are unknown.

use std::fmt;

use crate::{ConfigImage, quirks, regs::*};

/// Whose a bit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The backend's: the guest reads what it wrote, or what the backend fills in. Writes never reach the device; those
    /// with an effect become requests of their own.
    Emulated,
    /// As the lender has read it when the device was not lent, or filled in. Writes are refused.
    Constant,
    /// Read from the device each time. Writes are refused: a write to other bits of the register writes 0 here, which
    /// neither clears a status bit nor starts anything.
    Live,
    /// Read from the device each time, and written to it.
    Forwarded,
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Emulated => "emulated",
            Self::Constant => "constant",
            Self::Live => "live",
            Self::Forwarded => "forwarded",
        })
    }
}

/// The part of a structure that a [`Field`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Bits of a register with so many bytes.
    Bits(usize, u32),
    /// All of so many bytes.
    Bytes(usize),
    /// All bytes to the end of the structure.
    Rest,
}

/// Bits of a structure that are of one class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Offset of the register from the start of the structure.
    pub at: usize,
    /// Its bits.
    pub extent: Extent,
    /// Their name in the specification.
    pub name: &'static str,
    /// Whose they are.
    pub class: Class,
    /// Reason for the class.
    pub reason: &'static str,
}

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
pub enum Treatment {
    /// The guest sees it.
    Show(Shown),
    /// The guest does not, for this reason.
    Hide(&'static str),
}

/// Capabilities that are visible to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as in the specification")]
pub enum Shown {
    PowerManagement,
    VitalProductData,
    Msi,
    VendorSpecific,
    PciExpress,
    Msix,
    AdvancedFeatures,
    AdvancedErrors,
    SerialNumber,
    VendorSpecificExtended,
    Ari,
    ResizableBar,
}

/// The rule for a capability.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// Capability id.
    pub id: u16,
    /// Name.
    pub name: &'static str,
    /// Treatment.
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

/// Capabilities from offset 0x40.
pub const STANDARD: &[Rule] = &[
    show(0x01, "power management", Shown::PowerManagement),
    hide(0x02, "AGP", OLD_BUS),
    show(0x03, "vital product data", Shown::VitalProductData),
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

/// Capabilities from offset 0x100.
pub const EXTENDED: &[Rule] = &[
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
    show(0x15, "resizable BAR", Shown::ResizableBar),
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
pub fn rule(list: List, id: u16) -> (&'static str, Treatment) {
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

const fn field(
    at: usize,
    extent: Extent,
    name: &'static str,
    class: Class,
    reason: &'static str,
) -> Field {
    Field {
        at,
        extent,
        name,
        class,
        reason,
    }
}

/// Bits of a 16-bit register.
const fn bits(mask: u32) -> Extent {
    Extent::Bits(2, mask)
}

use Class::{Constant, Emulated, Forwarded, Live};
use Extent::{Bytes, Rest};

const IDENTITY: &str = "identifies the device";
const LINKS: &str = "the list is relinked around hidden capabilities";
const RESERVED: &str = "reserved";
const CAPABLE: &str = "what the device can do, less what cannot work in a VM";
const ERRORS: &str =
    "errors of the device go to the lender's root port, and its kernel handles them";
const MESSAGES: &str =
    "the VMM's: an interrupt signals an eventfd, and the kernel programs the device";
const STORAGE: &str = "without effect on a PCI Express device: the guest reads what it wrote";
const HOST_LINK: &str = "the link is the lender's; VFIO refuses writes as well";
const PORTS: &str = "of ports only";

/// The header (PCIe 7.5.1).
#[rustfmt::skip]
pub const HEADER: &[Field] = &[
    field(0x00, Bytes(4), "vendor and device id", Constant, IDENTITY),
    field(0x04, Bytes(2), "command", Emulated, "decoding stays on at the device, whose BARs are mapped; bus mastering and INTx disable are requests of their own"),
    field(0x06, Bytes(2), "status", Emulated, "errors are the lender's; Interrupt Status is read by a request of its own while INTx is in use"),
    field(0x08, Bytes(4), "revision and class code", Constant, IDENTITY),
    field(0x0c, Bytes(1), "cache line size", Emulated, STORAGE),
    field(0x0d, Bytes(1), "latency timer", Constant, "0 in PCI Express"),
    field(0x0e, Bytes(1), "header type", Constant, "functions are lent singly, so each is function 0"),
    field(0x0f, Bytes(1), "BIST", Constant, "a self-test could take longer than the VMM waits"),
    field(0x10, Bytes(24), "BARs", Emulated, "the guest's addresses; the device decodes the lender's"),
    field(0x28, Bytes(4), "CardBus CIS pointer", Constant, "no CardBus"),
    field(0x2c, Bytes(4), "subsystem ids", Constant, IDENTITY),
    field(0x30, Bytes(4), "expansion ROM address", Emulated, "as BARs"),
    field(0x34, Bytes(1), "capabilities pointer", Constant, LINKS),
    field(0x35, Bytes(7), "", Constant, RESERVED),
    field(0x3c, Bytes(1), "interrupt line", Emulated, STORAGE),
    field(0x3d, Bytes(1), "interrupt pin", Constant, "as the lender can deliver INTx"),
    field(0x3e, Bytes(2), "Min_Gnt and Max_Lat", Constant, "0 in PCI Express"),
];

/// Bytes of 0x40 to 0xff that are in no capability.
#[rustfmt::skip]
pub const DEVICE_SPECIFIC: Field = field(0, Rest, "device-specific", Forwarded, "only the device knows their meaning, and VFIO forwards them too, with the rare standard capabilities that it unlinks (debug port, secure device, enhanced allocation)");

/// Bytes from 0x100 on that are in no capability.
#[rustfmt::skip]
pub const EXTENDED_GAPS: Field = field(0, Rest, "outside capabilities", Constant, "VFIO unlinks capabilities that its table lacks, such as PASID, and gives raw access to their registers, which then look like device-specific ones");

impl Shown {
    /// Each bit of the capability, once.
    #[rustfmt::skip]
    pub fn fields(self) -> &'static [Field] {
        match self {
            Self::PowerManagement => const { &[
                field(0, Bytes(2), "header", Constant, LINKS),
                field(2, Bytes(2), "capabilities", Constant, CAPABLE),
                field(4, bits(0x0003), "PowerState", Emulated, "in D3hot the device would not answer the accesses to its mapped BARs, which kills the VMM and the lender's process; leaving it is a reset, which is forwarded"),
                field(4, bits(0x0008), "No_Soft_Reset", Constant, CAPABLE),
                field(4, bits(0xfff4), "PME and data", Constant, "no path carries a PME to the guest"),
                field(6, Bytes(2), "bridge extensions and data", Constant, PORTS),
            ] },
            Self::VitalProductData => const { &[
                field(0, Bytes(2), "header", Constant, LINKS),
                field(2, bits(0x7fff), "VPD Address", Forwarded, "starts a read"),
                field(2, bits(0x8000), "F", Live, "set when a read has completed. Written 1, it would start a write"),
                field(4, Bytes(4), "VPD Data", Live, "written, it would stay in the device's EEPROM for the next borrower"),
            ] },
            Self::Msi => const { &[
                field(0, Bytes(2), "header", Constant, LINKS),
                field(2, Rest, "control, address, data, mask and pending bits", Emulated, MESSAGES),
            ] },
            Self::VendorSpecific => const { &[
                field(0, Bytes(2), "header", Constant, LINKS),
                field(2, Bytes(1), "length", Constant, IDENTITY),
                field(3, Rest, "body", Forwarded, "only the device knows its meaning"),
            ] },
            Self::PciExpress => const { &[
                field(0, Bytes(2), "header", Constant, LINKS),
                field(2, Bytes(2), "capabilities", Constant, CAPABLE),
                field(EXP_DEVCAP, Bytes(4), "device capabilities", Constant, CAPABLE),
                field(EXP_DEVCTL, bits(0x000f), "error reporting enables", Emulated, ERRORS),
                field(EXP_DEVCTL, bits(EXP_DEVCTL_RELAX_EN), "Enable Relaxed Ordering", Forwarded, "orders the device's own requests"),
                field(EXP_DEVCTL, bits(0x00e0), "Max_Payload_Size", Emulated, "must suit every port on the lender's path"),
                field(EXP_DEVCTL, bits(0x0100), "Extended Tag Field Enable", Emulated, "must suit the lender's root complex"),
                field(EXP_DEVCTL, bits(0x0200), "Phantom Functions Enable", Constant, "would use requester ids of other functions, whose IOMMU domains are others'"),
                field(EXP_DEVCTL, bits(0x0400), "Aux Power PM Enable", Constant, "the power budget is the lender's"),
                field(EXP_DEVCTL, bits(0x0800), "Enable No Snoop", Emulated, "coherence with the CPUs' caches is the lender's to keep"),
                field(EXP_DEVCTL, bits(EXP_DEVCTL_READRQ), "Max_Read_Request_Size", Forwarded, "sizes the device's own requests; VFIO raises it to the maximum payload size"),
                field(EXP_DEVCTL, bits(0x8000), "Initiate Function Level Reset", Emulated, "a request of its own: DMA is stopped and unmapped first"),
                field(EXP_DEVSTA, bits(0x000f), "errors detected", Emulated, ERRORS),
                field(EXP_DEVSTA, bits(0x0010), "AUX Power Detected", Constant, IDENTITY),
                field(EXP_DEVSTA, bits(0x0020), "Transactions Pending", Live, "drivers wait for its end before a reset"),
                field(EXP_DEVSTA, bits(0xffc0), "", Constant, RESERVED),
                field(EXP_LNKCAP, Bytes(4), "link capabilities", Constant, CAPABLE),
                field(EXP_LNKCTL, bits(0x00cb), "ASPM, RCB, common clock, extended synch", Emulated, HOST_LINK),
                field(EXP_LNKCTL, bits(0xff34), "other link control", Constant, HOST_LINK),
                field(EXP_LNKSTA, bits(0x3fff), "speed, width, training, clock, active", Live, "the link may be retrained while the device is lent"),
                field(EXP_LNKSTA, bits(0xc000), "bandwidth events", Constant, "of the lender's port"),
                field(0x14, Bytes(16), "slot and root registers", Constant, PORTS),
                field(EXP_DEVCAP2, Bytes(4), "device capabilities 2", Constant, CAPABLE),
                field(EXP_DEVCTL2, bits(0x001f), "completion timeout", Emulated, "suits the lender's path"),
                field(EXP_DEVCTL2, bits(0x0300), "ID-based ordering enables", Emulated, "must suit the lender's root complex"),
                field(EXP_DEVCTL2, bits(0xfce0), "ARI forwarding, atomics, LTR, OBFF, 10-bit tags, prefixes", Constant, "negotiated with the lender's root complex"),
                field(EXP_DEVSTA2, Bytes(2), "device status 2", Constant, RESERVED),
                field(0x2c, Bytes(4), "link capabilities 2", Constant, CAPABLE),
                field(0x30, Bytes(2), "link control 2", Constant, HOST_LINK),
                field(0x32, bits(0x7fdf), "de-emphasis, equalization, retimers", Live, "as link status"),
                field(0x32, bits(0x8020), "equalization request, DRS received", Constant, "events of the lender's link"),
                field(0x34, Bytes(8), "slot registers 2", Constant, PORTS),
            ] },
            Self::Msix => const { &[
                field(0, Bytes(2), "header", Constant, LINKS),
                field(2, bits(0xc000), "enable, function mask", Emulated, MESSAGES),
                field(2, bits(0x3fff), "table size", Constant, CAPABLE),
                field(4, Bytes(8), "table and pending bit array", Constant, IDENTITY),
            ] },
            Self::AdvancedFeatures => const { &[
                field(0, Bytes(2), "header", Constant, LINKS),
                field(2, Bytes(2), "length and capabilities", Constant, CAPABLE),
                field(4, Bytes(1), "Initiate FLR", Emulated, "a request of its own: DMA is stopped and unmapped first"),
                field(5, Extent::Bits(1, 0x01), "Transactions Pending", Live, "drivers wait for its end before a reset"),
                field(5, Extent::Bits(1, 0xfe), "", Constant, RESERVED),
            ] },
            Self::AdvancedErrors => const { &[
                field(0, Bytes(4), "header", Constant, LINKS),
                field(4, Bytes(20), "status, masks and severities", Emulated, "filled with the values after a reset; errors of the device go to the lender's root port"),
                field(0x18, Bytes(20), "capabilities, control and header log", Constant, "filled with 0: no error is logged, and ECRC is the lender's"),
            ] },
            Self::SerialNumber => const { &[
                field(0, Bytes(4), "header", Constant, LINKS),
                field(4, Bytes(8), "serial number", Constant, IDENTITY),
            ] },
            Self::VendorSpecificExtended => const { &[
                field(0, Bytes(4), "header", Constant, LINKS),
                field(4, Bytes(4), "VSEC id, revision and length", Constant, IDENTITY),
                field(8, Rest, "body", Forwarded, "only the device knows its meaning"),
            ] },
            Self::Ari => const { &[
                field(0, Bytes(4), "header", Constant, LINKS),
                field(4, Bytes(4), "capabilities and control", Constant, "functions are lent singly"),
            ] },
            Self::ResizableBar => const { &[
                field(0, Bytes(4), "header", Constant, LINKS),
                field(4, Rest, "capabilities and control", Constant, "the size that the BAR has is the only one offered: VFIO and the IOMMU's mappings keep it"),
            ] },
        }
    }

    /// Bytes of the capability at `at`, from its first two dwords.
    ///
    /// # Errors
    /// It declares a length that cannot be, or begins at the end of the space.
    pub fn length(self, image: &ConfigImage, at: usize) -> Result<usize, BadLength> {
        let least = |length: usize, least| match length < least {
            true => Err(BadLength::TooShort(length)),
            false => Ok(length),
        };
        let second = || match image.get(at + 4..at + 8) {
            Some(_) => Ok(image.u32(at + 4)),
            None => Err(BadLength::Outside(8)),
        };
        Ok(match self {
            Self::PowerManagement => PM_SIZEOF,
            Self::VitalProductData | Self::Ari => 8,
            Self::Msi => msi_length(image.u16(at + MSI_FLAGS)),
            Self::VendorSpecific => least(image.u8(at + 2).into(), 3)?,
            Self::PciExpress => express_length(image.u16(at + EXP_FLAGS)),
            Self::Msix => MSIX_SIZEOF,
            Self::AdvancedFeatures => 6,
            Self::AdvancedErrors => 0x2c,
            Self::SerialNumber => 12,
            Self::VendorSpecificExtended => least((second()? >> 20) as usize, 8)?,
            Self::ResizableBar => {
                if at + 12 > image.len() {
                    return Err(BadLength::Outside(12));
                }
                // Number of Resizable BARs, in the first control register (7.8.6.3).
                let bars = (image.u32(at + 8) >> 5 & 0b111) as usize;
                match bars {
                    1..=6 => 4 + 8 * bars,
                    _ => return Err(BadLength::TooShort(4 + 8 * bars)),
                }
            }
        })
    }
}

/// The tables as markdown, for the documentation.
pub fn markdown() -> String {
    use fmt::Write;
    let mut text = String::new();
    let mut table = |title: &str, fields: &[Field]| {
        let _ = writeln!(
            text,
            "\n### {title}\n\n| offset | bits | name | | reason |\n| --- | --- | --- | --- | --- |"
        );
        for Field {
            at,
            extent,
            name,
            class,
            reason,
        } in fields
        {
            let extent = match extent {
                Extent::Bits(_, mask) => format!("{mask:#x}"),
                Bytes(1) => "all of 1 byte".to_owned(),
                Bytes(bytes) => format!("all of {bytes} bytes"),
                Rest => "all to the end".to_owned(),
            };
            let _ = writeln!(
                text,
                "| {at:#04x} | {extent} | {name} | {class} | {reason} |"
            );
        }
    };
    table("Header", HEADER);
    for (list, rules) in [("capability", STANDARD), ("extended capability", EXTENDED)] {
        for rule in rules {
            if let Treatment::Show(shown) = rule.treatment {
                let Rule { id, name, .. } = rule;
                table(&format!("{name} ({list} {id:#04x})"), shown.fields());
            }
        }
    }
    table("0x40 to 0xff, outside capabilities", &[DEVICE_SPECIFIC]);
    table("0x100 to 0xfff, outside capabilities", &[EXTENDED_GAPS]);
    let _ = writeln!(
        text,
        "\n### Hidden capabilities\n\n| id | name | reason |\n| --- | --- | --- |"
    );
    for (list, rules) in [("", STANDARD), ("extended ", EXTENDED)] {
        for Rule {
            id,
            name,
            treatment,
        } in rules
        {
            if let Treatment::Hide(reason) = treatment {
                let _ = writeln!(text, "| {list}{id:#04x} | {name} | {reason} |");
            }
        }
    }
    let _ = writeln!(text, "| any other | | {UNKNOWN} |");
    text += &quirks::markdown();
    text
}

/// Bytes of an MSI capability with this control register.
pub fn msi_length(control: u16) -> usize {
    match (
        control & MSI_FLAGS_64BIT != 0,
        control & MSI_FLAGS_MASKBIT != 0,
    ) {
        (false, false) => 0x0a,
        (true, false) => 0x0e,
        (false, true) => 0x14,
        (true, true) => 0x18,
    }
}

/// Bytes of an endpoint's PCI Express capability with this flags register. Version 1 ends with the
/// link registers. A root complex integrated endpoint has no link registers in version
/// 1; in version 2 it reserves their space but lacks the second set.
fn express_length(flags: u16) -> usize {
    const ROOT_COMPLEX_ENDPOINT: u16 = 9;
    match (flags & 0xf, flags >> 4 & 0xf) {
        (0 | 1, ROOT_COMPLEX_ENDPOINT) => 0x0c,
        (0 | 1, _) => 0x14,
        (_, ROOT_COMPLEX_ENDPOINT) => 0x2c,
        _ => 0x3c,
    }
}

/// Why a capability has no length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadLength {
    /// It declares so many bytes, too few or too many.
    TooShort(usize),
    /// It has at least so many bytes, and the space ends before.
    Outside(usize),
}
