//! VFIO errors, with remedies.

use std::io;

use farside_fabric::{FabricError, Iova, Size};
use farside_irq_relay::IrqIndex;
use farside_pci::Bdf;

use crate::Api;

/// A failed operation on a domain or a function.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum VfioError {
    /// The kernel has no VFIO, or its module is not loaded.
    #[error("this kernel offers no VFIO: there is no {missing}; {remedy}")]
    NoVfio {
        missing: &'static str,
        remedy: &'static str,
    },
    /// The interface cannot be opened.
    #[error("cannot open a VFIO {api} domain: {reason}")]
    OpenDomain { api: Api, reason: String },
    /// No such PCI function.
    #[error("there is no PCI function {bdf}: see `lspci -D`")]
    NoFunction { bdf: Bdf },
    /// The function is behind no IOMMU.
    #[error(
        "{bdf} is in no IOMMU group, so nothing would hold its DMA in bounds: turn the IOMMU on \
         in the firmware (VT-d, AMD-Vi) and on the kernel command line (intel_iommu=on)"
    )]
    NoIommu { bdf: Bdf },
    /// The function is not bound to vfio-pci.
    #[error("{bdf} is not bound to vfio-pci ({node} does not exist): bind it first")]
    NotBound { bdf: Bdf, node: String },
    /// Another process has it open.
    #[error(
        "{bdf} is in use: another process has {node} open, or still holds a descriptor or a \
         mapping of the function (a VMM that it was lent to, or another device of that VM, which \
         has its BAR mapped?); end that VM first (`fuser -v {node}` names the process)"
    )]
    Busy { bdf: Bdf, node: String },
    /// Other members of the IOMMU group have drivers.
    #[error(
        "IOMMU group {group} of {bdf} is not viable: other functions of the group are bound to \
         drivers of the host; bind all of them to vfio-pci or to none"
    )]
    NotViable { bdf: Bdf, group: String },
    /// This process may not open it.
    #[error("no permission to open {node} for {bdf}: run as root, or give this user the node")]
    Permission { bdf: Bdf, node: String },
    /// MSIs of the device could be forged.
    #[error(
        "the kernel refuses an IOMMU domain for {bdf}: its IOMMU has no interrupt remapping, so \
         a device could raise any interrupt; turn that on (intremap=on), or load \
         vfio_iommu_type1 with allow_unsafe_interrupts=1 where all guests are trusted"
    )]
    NoInterruptRemapping { bdf: Bdf },
    /// Any other step of opening.
    #[error("cannot open {bdf} through VFIO: {step}")]
    Open {
        bdf: Bdf,
        step: &'static str,
        source: io::Error,
    },
    /// A domain exists in the IOMMU only with a device in it.
    #[error("the IOMMU domain has no function in it yet: open one first")]
    EmptyDomain,
    /// A range that cannot be mapped or unmapped: unaligned, overlapping,
    /// cutting a mapping.
    #[error(transparent)]
    Range(#[from] FabricError),
    /// An IOVA range is reserved by the platform.
    #[error(
        "IOVA range {at}..{end:#x} cannot be mapped: {reserved_start:#x}..={reserved_last:#x} \
         is not usable for DMA on this machine (reserved, such as the MSI window at 0xfee00000, \
         or beyond what its IOMMU can translate); keep guest RAM out of it"
    )]
    Reserved {
        at: Iova,
        end: u64,
        reserved_start: u64,
        reserved_last: u64,
    },
    /// Pinning needs more memory than this process may lock.
    #[error(
        "cannot pin {} at IOVA {at} for DMA: {}; raise it to the size of all guest RAM and \
         some more (LimitMEMLOCK= of a systemd unit, `ulimit -l` of a shell), or run with \
         CAP_IPC_LOCK",
        Size(*len), memlock(*limit)
    )]
    Memlock {
        at: Iova,
        len: u64,
        /// `RLIMIT_MEMLOCK`, bytes; `None` when there is none.
        limit: Option<u64>,
    },
    /// The kernel's table of mappings is full.
    #[error(
        "cannot map {len:#x} bytes at IOVA {at}: the IOMMU domain has as many mappings as the \
         kernel allows (module option dma_entry_limit of vfio_iommu_type1)"
    )]
    TooManyMappings { at: Iova, len: u64 },
    /// Any other refusal to map.
    #[error("cannot map {len:#x} bytes at IOVA {at} for DMA")]
    Map {
        at: Iova,
        len: u64,
        source: io::Error,
    },
    /// The kernel did not unmap all.
    #[error("cannot unmap {len:#x} bytes at IOVA {at} ({unmapped:#x} bytes are unmapped)")]
    Unmap {
        at: Iova,
        len: u64,
        unmapped: u64,
        source: io::Error,
    },
    /// A BAR cannot be a target of DMA.
    #[error("cannot let devices reach BAR {bar} of {bdf} by DMA: {reason}")]
    PeerToPeer { bdf: Bdf, bar: u8, reason: String },
    /// A domain's capabilities cannot be read.
    #[error("cannot query the IOMMU domain's IOVA ranges")]
    Info(#[source] io::Error),
    /// An access outside a BAR or configuration space, or of an odd size.
    #[error("{bdf}: access of {len} bytes at {offset:#x} of {region}, which has {size:#x}")]
    BadAccess {
        bdf: Bdf,
        region: String,
        offset: u64,
        len: usize,
        size: u64,
    },
    /// The kernel refused an access.
    #[error("{bdf}: cannot {verb} {len} bytes at {offset:#x} of {region}")]
    Access {
        bdf: Bdf,
        verb: &'static str,
        region: String,
        offset: u64,
        len: usize,
        source: io::Error,
    },
    /// A part of a BAR cannot be mapped into a process.
    #[error("{bdf}: cannot map {len:#x} bytes at {offset:#x} of BAR {bar}")]
    MapRegion {
        bdf: Bdf,
        bar: u8,
        offset: u64,
        len: u64,
        source: io::Error,
    },
    /// The device reports invalid values.
    #[error("{bdf} cannot be lent: {problem}")]
    Unsupported { bdf: Bdf, problem: String },
    /// The device has no reset that leaves its neighbours alone.
    #[error(
        "{bdf} cannot be reset on its own (no FLR, no power-state reset, and it shares its bus); \
         see /sys/bus/pci/devices/{bdf}/reset_method"
    )]
    NoReset { bdf: Bdf },
    /// A reset failed.
    #[error("cannot reset {bdf}")]
    Reset { bdf: Bdf, source: io::Error },
    /// A reset of a bus failed.
    #[error(
        "{bdf} cannot be reset alone, nor with all other functions of its bus: lend those, too, or lend it with allow-dirty"
    )]
    ResetBus { bdf: Bdf, source: io::Error },
    /// Interrupts cannot be set up.
    #[error("{bdf}: cannot set up {index} vectors {start}..{end}")]
    Irqs {
        bdf: Bdf,
        index: IrqIndex,
        start: u16,
        end: u16,
        source: io::Error,
    },
    /// The kernel signals eventfds and nothing else.
    #[error(
        "{bdf}: VFIO cannot signal a relay for {index} vector {vector}: an eventfd is required"
    )]
    NotAnEventFd {
        bdf: Bdf,
        index: IrqIndex,
        vector: u16,
    },
}

impl From<VfioError> for FabricError {
    fn from(error: VfioError) -> Self {
        match error {
            VfioError::Range(error) => error,
            other => Self::Other(Box::new(other)),
        }
    }
}

fn memlock(limit: Option<u64>) -> String {
    match limit {
        Some(limit) => format!("the memlock limit (RLIMIT_MEMLOCK) is {}", Size(limit)),
        None => "there is no memlock limit, so the kernel itself is out of memory".to_owned(),
    }
}
