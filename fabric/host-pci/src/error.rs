//! Errors about PCI functions of this host, with remedies.

use std::fmt;
use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::usage::InUse;
use farside_pci::Bdf;

/// A failed operation on a PCI function of this host.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum PciError {
    /// No function has that address.
    #[error("this host has no PCI function {bdf}; {near}")]
    NoFunction { bdf: Bdf, near: String },
    /// A filter selects nothing.
    #[error("no PCI function of this host matches {filter:?}; {near}")]
    NothingMatches { filter: String, near: String },
    /// The host runs without an IOMMU.
    #[error(
        "this host runs without an IOMMU, so a lent device's DMA could not be confined: {advice}"
    )]
    NoIommu { advice: String },
    /// There is an IOMMU, but it does not cover this function.
    #[error(
        "PCI function {bdf} is in no IOMMU group although this host has an IOMMU: the IOMMU does \
         not cover it (see \"iommu\" lines of `dmesg` for a firmware table that leaves it out)"
    )]
    NoGroup { bdf: Bdf },
    /// Other functions of the group are bound to host drivers.
    #[error(
        "IOMMU group {group} of {bdf} cannot be lent: the IOMMU cannot tell {bdf} from {others}, \
         which the host uses. Lend each of those, too: one VM at a time can have functions of a group. \
         Or take them from their drivers (`echo BDF > /sys/bus/pci/devices/BDF/driver/unbind`) and \
         leave them unused, or put the device behind a port with ACS (another slot, or ACS enabled in \
         the firmware)"
    )]
    GroupNotViable {
        bdf: Bdf,
        group: u32,
        /// The conflicting members with their drivers, such as `0000:00:1f.3 (snd_hda_intel)`.
        others: String,
    },
    /// The driver vfio-pci is not available.
    #[error("the kernel has no driver vfio-pci: {advice}")]
    VfioPciMissing { advice: String },
    /// Something on the host uses the function.
    #[error(
        "PCI function {bdf} is in use: {}. Unmount, stop or bring down what uses it, or take it \
         with --force (which can lose data)",
        InUse::list(uses)
    )]
    Busy {
        bdf: Bdf,
        /// Never empty.
        uses: Vec<InUse>,
    },
    /// The function is of a kind that is never lent.
    #[error("PCI function {bdf} cannot be lent: {why}")]
    NotLendable { bdf: Bdf, why: NotLendable },
    /// The kernel accepted the request, but the function is bound to the wrong driver.
    #[error(
        "PCI function {bdf} should now have {wanted} but has {}: see the last lines of `dmesg` \
         about {bdf}", driver_name(found.as_deref())
    )]
    WrongDriver {
        bdf: Bdf,
        wanted: String,
        found: Option<String>,
    },
    /// The function or its driver does not support virtual functions.
    #[error("PCI function {pf} cannot have virtual functions: {why}")]
    NoSriov { pf: Bdf, why: String },
    /// More virtual functions than the device supports, or none.
    #[error(
        "PCI function {pf} has 1 to {total} virtual functions, so {wanted} cannot be created; ask \
         for {total} or fewer, and for one at least"
    )]
    TooManyVfs { pf: Bdf, wanted: u32, total: u32 },
    /// Virtual functions would be removed while another process uses them.
    #[error(
        "PCI function {pf} has {existing} virtual functions, and to have {wanted} they must all go \
         first, but {vf} is in use: {}",
        InUse::list(uses)
    )]
    VfsInUse {
        pf: Bdf,
        existing: u32,
        wanted: u32,
        vf: Bdf,
        uses: Vec<InUse>,
    },
    /// The kernel accepted the number, but created fewer functions.
    #[error(
        "PCI function {pf} was told to have {wanted} virtual functions but has {found}: see the \
         last lines of `dmesg` about {pf} (often: no bus numbers or no BAR space left for them)"
    )]
    VfsMissing { pf: Bdf, wanted: u32, found: usize },
    /// A command to an NVMe controller failed.
    #[error(
        "command {command} to NVMe controller {pf} through {} failed{}", node.display(), match source.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::NotFound => " (it needs the capability CAP_SYS_ADMIN, and in a unit of systemd DeviceAllow=char-nvme rw)",
            _ => "",
        }
    )]
    NvmeCommand {
        pf: Bdf,
        node: PathBuf,
        command: String,
        source: io::Error,
    },
    /// The list of secondary controllers has none for a virtual function.
    #[error(
        "NVMe controller {pf} lists {listed} secondary controllers, of which none is that of its \
         virtual function {vf}; create fewer virtual functions"
    )]
    NvmeNoSecondary { pf: Bdf, vf: u32, listed: usize },
    /// Too few flexible resources.
    #[error(
        "the {vfs} virtual functions of NVMe controller {pf} need {needed} flexible {resource} resources, but \
         {free} of {total} are free; {advice}"
    )]
    NvmeResources {
        pf: Bdf,
        vfs: u32,
        resource: &'static str,
        needed: u32,
        free: u32,
        total: u32,
        advice: String,
    },
    /// The controller gives a secondary controller fewer flexible resources than it needs.
    #[error(
        "NVMe controller {pf} gives a virtual function at most {most} flexible {resource} resources, and none can be \
         used with fewer than {least}: lend {pf} itself"
    )]
    NvmeMaximum {
        pf: Bdf,
        resource: &'static str,
        least: u16,
        most: u16,
    },
    /// A virtual function that no driver can use.
    #[error(
        "virtual function {vf} is secondary controller {id} of NVMe controller {pf}, and offline: no driver \
         could use it. Lend it with --vfs {pf}=N, N being the number of them that {pf} has, which sets them online, or do so by hand: `nvme virt-mgmt {} -c {id} \
         -r 0 -a 8 -n QUEUES`, the same with `-r 1 -a 8 -n INTERRUPTS`, then with `-r 0 -a 9 -n 0`",
        node.display()
    )]
    NvmeVfOffline {
        vf: Bdf,
        pf: Bdf,
        node: PathBuf,
        /// The secondary controller's identifier.
        id: u16,
    },
    /// The kernel's log cannot be read.
    #[error(
        "{} cannot be read, so DMA faults cannot be shown{}", path.display(), match source.kind() {
            io::ErrorKind::PermissionDenied => {
                " (it needs root, or the capability CAP_SYSLOG where kernel.dmesg_restrict is set)"
            }
            _ => "",
        }
    )]
    KernelLog { path: PathBuf, source: io::Error },
    /// A kernel file cannot be read.
    #[error("{} cannot be read", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// A kernel file cannot be written.
    #[error("writing {text:?} to {} failed", path.display())]
    Write {
        path: PathBuf,
        text: String,
        source: io::Error,
    },
    /// A kernel file cannot be parsed.
    #[error("cannot parse {}: {text:?}: {why}", path.display())]
    Malformed {
        path: PathBuf,
        text: String,
        why: String,
    },
}

impl PciError {
    /// Whether this process cannot send commands to an NVMe controller: it lacks the right, or its unit the device node.
    pub(crate) fn is_denied(&self) -> bool {
        use io::ErrorKind::{NotFound, PermissionDenied};
        matches!(self, Self::NvmeCommand { source, .. } if matches!(source.kind(), PermissionDenied | NotFound))
    }
}

/// The reason that a kind of function is never lent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotLendable {
    /// It has a bridge's header: other functions are behind it.
    PciBridge,
    /// It is part of the host's chipset.
    HostBridge,
}

impl fmt::Display for NotLendable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PciBridge => "it is a PCI bridge; name the function behind it",
            Self::HostBridge => "it is a host or ISA bridge, which belongs to the host's chipset",
        })
    }
}

fn driver_name(driver: Option<&str>) -> &str {
    driver.unwrap_or("no driver")
}
