//! Errors of NTB endpoints, with remedies.

use std::fmt;
use std::io;
use std::time::Duration;

use farside_fabric::{FabricError, LimitError, PeerAddress, Size};
use farside_pci::Bdf;
use farside_vfio::VfioError;

use crate::LinkState;

/// An error of an NTB endpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum NtbError {
    /// The thread or the descriptor that watches it cannot be created.
    #[error("{bdf}: its events cannot be watched")]
    Watch { bdf: Bdf, source: io::Error },
    /// The endpoint cannot be taken from the host.
    #[error(transparent)]
    Pci(#[from] farside_host_pci::PciError),
    /// Not a supported NTB.
    #[error(
        "{bdf} is no NTB endpoint that farside has a driver for: its PCI ids are \
         {vendor:04x}:{device:04x}, expected {want_vendor:04x}:{want_device:04x}; name the NTB's \
         own function (`lspci -D -d {want_vendor:04x}:{want_device:04x}`)"
    )]
    WrongDevice {
        bdf: Bdf,
        vendor: u16,
        device: u16,
        want_vendor: u16,
        want_device: u16,
    },
    /// The registers are not those of the driver's device.
    #[error(
        "{bdf}: the identification register reads {found:#010x}, expected {expected:#010x}{}",
        gone(*found)
    )]
    WrongRegisters { bdf: Bdf, found: u32, expected: u32 },
    /// The register set has an unsupported version.
    #[error(
        "{bdf}: its register set has version {found}, this farside knows {supported}; use the \
         same release of farside for the NTB and for both hosts"
    )]
    Version {
        bdf: Bdf,
        found: u32,
        supported: u32,
    },
    /// Its registers hold invalid values.
    #[error("{bdf} cannot be used as an NTB: {problem}")]
    Unusable { bdf: Bdf, problem: String },
    /// The link does not come up, or is no longer up.
    #[error(
        "{bdf}: NTB link down{}: {}", after(*waited), peer(link)
    )]
    LinkDown {
        bdf: Bdf,
        /// The timeout; `None` if the link was only checked.
        waited: Option<Duration>,
        link: LinkState,
    },
    /// The two ports' windows differ.
    #[error(
        "{bdf}: this port's window BAR has {}, the peer port's has {}; give both ports of the NTB \
         the same size",
        Size(*own), Size(*peer)
    )]
    WindowSizesDiffer { bdf: Bdf, own: u64, peer: u64 },
    /// A register does not hold the value written to it.
    #[error(
        "{bdf}: {register} reads {found:#x} after {written:#x} was written; the NTB was reset, or \
         has failed: restart this farside, and if that does not help, this host's NTB"
    )]
    Register {
        bdf: Bdf,
        register: String,
        written: u64,
        found: u64,
    },
    /// The hardware's requester table is full.
    #[error(
        "{bdf}: no entry is free in the NTB's requester table of {limit}; return a device or lend \
         through another adapter"
    )]
    RequesterTable { bdf: Bdf, limit: u32 },
    /// The endpoint's domain has no room.
    #[error(
        "no room for {} of peer addresses, aligned to {}, in the IOMMU domain of the NTB endpoint; \
         at most {} fit: give the VM less RAM, or this host's IOMMU wider addresses",
        Size(*bytes), Size(*alignment), Size(*largest)
    )]
    PeerSpace {
        bytes: u64,
        alignment: u64,
        largest: u64,
    },
    /// No BAR of another device of the VM is there.
    #[error(
        "{bdf}: no other device of VM {vm} has a BAR with the {len:#x} bytes at peer address {exported}; borrow it from \
         this lender first"
    )]
    NotExported {
        bdf: Bdf,
        vm: String,
        exported: PeerAddress,
        len: u64,
    },
    /// The adapter's resources are exhausted or too small.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// The endpoint cannot be opened.
    #[error(transparent)]
    Vfio(VfioError),
    /// An error of a domain or function.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// A system call failed.
    #[error("{bdf}: cannot {what}")]
    System {
        bdf: Bdf,
        what: &'static str,
        source: io::Error,
    },
}

impl NtbError {
    /// Whether another process has the endpoint open.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(self, Self::Vfio(VfioError::Busy { .. }))
    }
}

impl From<NtbError> for FabricError {
    fn from(error: NtbError) -> Self {
        match error {
            NtbError::Limit(error) => Self::Limit(error),
            NtbError::Fabric(error) => error,
            NtbError::Vfio(error) => error.into(),
            error => Self::Other(Box::new(error)),
        }
    }
}

fn gone(found: u32) -> &'static str {
    match found {
        u32::MAX => ": the device does not answer; was it unplugged, or is its memory space off?",
        _ => "",
    }
}

fn after(waited: Option<Duration>) -> impl fmt::Display {
    match waited {
        Some(waited) => format!(" after {} s", waited.as_secs_f32()),
        None => String::new(),
    }
}

fn peer(link: &LinkState) -> &'static str {
    if !link.peer_present {
        "the peer port has no host; is the other host up, and is the cable (or `farside ntb`) in \
         place?"
    } else if !link.peer_enabled {
        "the other host is up, but no farside there has enabled its port; is the other host's \
         farside running, with --ntb naming its port?"
    } else if !link.up {
        "the other host enables its port and this one does not yet"
    } else {
        "the link is up, but the peer port may not master its bus; is the other host's farside \
         still starting?"
    }
}
