//! Errors of parsing or changing a domain.

use farside_daemon::{DeviceId, NameError, VmName};

use crate::VmError;

/// A domain's XML cannot be parsed or changed. Lines and columns count from 1.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum DomainError {
    /// It is not XML.
    #[error("line {line}, column {column}: this is not well-formed XML: {why}")]
    Malformed { line: u32, column: u32, why: String },
    /// It is XML of another type.
    #[error(
        "line {line}, column {column}: this is <{found}>, and not a libvirt <domain>: \
         give what `virsh dumpxml --inactive NAME` prints"
    )]
    NotADomain {
        line: u32,
        column: u32,
        found: String,
    },
    /// An element that every domain has is missing.
    #[error("line {line}, column {column}: the domain has no <{element}>")]
    Missing {
        line: u32,
        column: u32,
        element: &'static str,
    },
    /// A kind of VM in which devices cannot be borrowed.
    #[error("line {line}, column {column}: {what} {found:?}: borrowed devices need {needed}")]
    Unsupported {
        line: u32,
        column: u32,
        what: &'static str,
        found: String,
        needed: &'static str,
    },
    /// A value that cannot be parsed.
    #[error("line {line}, column {column}: {what} {found:?} cannot be read: {why}")]
    Value {
        line: u32,
        column: u32,
        what: &'static str,
        found: String,
        why: String,
    },
    /// Memory is explicitly private, or has another source.
    #[error(
        "line {line}, column {column}: {found} keeps guest RAM from being shared with farside: \
         change it to {needed}"
    )]
    Private {
        line: u32,
        column: u32,
        found: String,
        needed: &'static str,
    },
    /// Guest RAM is private to QEMU.
    #[error(
        "line {line}, column {column}: guest RAM is private to QEMU: <memoryBacking> needs \
         <source type='memfd'/> and <access mode='shared'/> (farside libvirt --edit adds them)"
    )]
    NotShared { line: u32, column: u32 },
    /// A NUMA cell that is not marked as shared.
    #[error(
        "line {line}, column {column}: this NUMA cell's memory is not marked as shared: \
         add memAccess='shared' (farside libvirt --edit does)"
    )]
    CellNotShared { line: u32, column: u32 },
    /// A vIOMMU that does not report the guest's mappings.
    #[error(
        "line {line}, column {column}: <iommu model='intel'> without caching mode: QEMU exits when \
         the guest enables the vIOMMU, since borrowed devices do not get the guest's mappings; \
         add <driver caching_mode='on'/>"
    )]
    Viommu { line: u32, column: u32 },
    /// An argument of a borrowed device or its port is missing.
    #[error(
        "line {line}, column {column}: QEMU is not given {option} {wanted}: \
         farside libvirt --edit adds it"
    )]
    NoArgument {
        line: u32,
        column: u32,
        option: &'static str,
        wanted: String,
    },
    /// An argument of a borrowed device or its port belongs to another VM, or is outdated.
    #[error(
        "line {line}, column {column}: {found} is to be {wanted} \
         ({mib} MiB of RAM, or the VM's open-timeout, take an x-msg-timeout of {timeout} ms): farside libvirt --edit fixes it"
    )]
    OtherArgument {
        line: u32,
        column: u32,
        found: String,
        wanted: String,
        mib: u64,
        timeout: u32,
    },
    /// Only the q35 has VT-d.
    #[error("a {machine} VM has no IOMMU: use the machine q35")]
    IommuNeedsQ35 { machine: &'static str },
    /// An address that farside's ports need is in use.
    #[error(
        "line {line}, column {column}: PCI address {address} is taken, and the ports of borrowed \
         devices are to be at device numbers {first:#x} to {last:#x} of bus 0: give this device \
         another address, or leave its <address> out and libvirt chooses one"
    )]
    AddressTaken {
        line: u32,
        column: u32,
        address: String,
        first: usize,
        last: usize,
    },
    /// An id that farside needs is in use.
    #[error(
        "line {line}, column {column}: an argument for QEMU has the id {id:?}, which a part of \
         farside is to have: rename it"
    )]
    IdTaken { line: u32, column: u32, id: String },
    /// The domain does not borrow the device.
    #[error("domain {domain} does not borrow device {device}; it borrows {known}")]
    UnknownDevice {
        domain: VmName,
        device: DeviceId,
        known: String,
    },
    /// A device would change its address in the guest.
    #[error(
        "domain {domain} has device {device} at port {}, not {}: remove it first \
         (--remove --device {device}) if it is to move",
        shown(has),
        shown(wanted)
    )]
    WouldMove {
        domain: VmName,
        device: DeviceId,
        has: (u16, u8),
        wanted: (u16, u8),
    },
    /// The domain's name cannot be a VM name, or a device's id is invalid.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The resulting VM is invalid.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// A NUMA layout with unequal cells.
    #[error("{cells} NUMA cells for {vcpus} vCPUs and {mib} MiB: {why}")]
    Numa {
        cells: u32,
        vcpus: u32,
        mib: u64,
        why: &'static str,
    },
}

/// A port, and the function there.
fn shown((port, function): &(u16, u8)) -> String {
    match function {
        0 => port.to_string(),
        1.. => format!("{port}, function {function}"),
    }
}
