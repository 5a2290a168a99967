//! Requests and replies.

use farside_fabric::{FaultSummary, NtbLimits, Usage};
use farside_pci::Description;
use serde::{Deserialize, Serialize};

use crate::{Fence, IrqUpdate};

/// The protocol version of this build. Peers of different versions refuse each
/// other by name.
pub const VERSION: u32 = 5;

/// Fencing number of a lease: each borrow of a device has a larger one than
/// the borrow before.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Epoch(pub u64);

impl std::fmt::Display for Epoch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// A message from a backend to a lender.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Envelope {
    /// The lease it is sent under; zero before there is one.
    pub epoch: Epoch,
    /// Register accesses that were sent under the lease before this request,
    /// which must not overtake them: they come by another connection.
    pub accesses: u64,
    /// The request itself.
    pub request: Request,
}

/// A request of a backend (or of `farside devices`, `farside status`).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// First message of a connection.
    Hello {
        /// [`VERSION`] of the sender.
        version: u32,
        /// The VM it speaks for; none for tools.
        vm: Option<String>,
    },
    /// The devices of this lender.
    Devices,
    /// The limits of this lender's fabric, so that a guest that cannot fit is
    /// refused before it boots.
    Limits,
    /// Describes a device: configuration space, BARs, vectors.
    Describe {
        /// Device id.
        device: String,
    },
    /// One device's counters.
    Status {
        /// Device id.
        device: String,
    },
    /// Whether a guest could borrow the device, as far as can be told before it
    /// boots: addresses that the device cannot reach, windows that do not
    /// fit, memory that may not be locked.
    Check {
        /// Device id.
        device: String,
        /// How the device would reach the guest.
        route: Route,
        /// The guest's RAM.
        ram: Vec<RamRange>,
    },
    /// Takes the device exclusively and resets it. Descriptors, for a device
    /// whose BARs are the [borrower's](BarOwner::Borrower): a file of the BAR's
    /// size for each BAR with mappable areas, in the order of the BARs. After
    /// the reply the connection is the lease: closing it returns the device.
    Borrow {
        /// Device id.
        device: String,
        /// How the device reaches the guest.
        route: Route,
        /// What the host of this VM has of a [handover](Request::Handover): a
        /// VM that was moved elsewhere since is refused.
        fence: Option<Epoch>,
    },
    /// Resets the device. Its windows, and what the borrower's domain maps,
    /// are gone when the reply comes.
    Reset,
    /// Lets the device master the bus: from here on it does DMA through the
    /// windows that are open.
    EnableBusMaster,
    /// Stops DMA, closes all windows and removes all mappings of the
    /// borrower's domain. When the reply comes, no DMA is in flight.
    Close,
    /// The command register's INTx disable (bit 10).
    SetIntxDisable {
        /// The bit.
        disabled: bool,
    },
    /// Maps memory into the borrower's IOMMU domain, for [`Route::Memory`]: the
    /// lender holds both ends of the way. Descriptor: the memory's file.
    FarMap {
        /// Borrower-side bus address.
        far: u64,
        /// Bytes.
        len: u64,
        /// Offset in the file.
        offset: u64,
        /// Whether the device may write.
        writable: bool,
    },
    /// Removes a mapping of the borrower's domain. When the reply comes, no
    /// DMA reaches the memory any more.
    FarUnmap {
        /// Borrower-side bus address.
        far: u64,
        /// Bytes.
        len: u64,
    },
    /// Opens an NTB window of `len` bytes onto `far` and maps it at `iova` in
    /// the device's domain.
    OpenWindow {
        /// IOVA of the first byte.
        iova: u64,
        /// Borrower-side bus address of the first byte.
        far: u64,
        /// Bytes.
        len: u64,
    },
    /// Closes the window that starts at `iova`.
    CloseWindow {
        /// IOVA of its first byte.
        iova: u64,
    },
    /// Changes triggers or masks. Descriptors: the eventfds of
    /// [`IrqVectors::EventFds`](crate::IrqVectors::EventFds).
    SetIrqs(IrqUpdate),
    /// Gives the device back.
    Return,
    /// First and only message of a connection that becomes the register channel
    /// of a lease, after the reply.
    Registers {
        /// What came with the lease.
        ticket: Ticket,
    },
    /// Takes the device from where the VM was, for where it goes to. A lease of
    /// the VM ends as when its connection closes, all writes are on the medium,
    /// and nobody may borrow the device until the VM has, with the epoch of the
    /// reply as its fence.
    Handover {
        /// Device id.
        device: String,
        /// The VM.
        vm: String,
        /// Id of the migration. Asking again with the same id gives the same
        /// epoch, and leaves a lease under it alone.
        migration: String,
        /// The fence that the VM has so far. Where the lender knows a larger
        /// one, somebody else has moved the VM meanwhile, and this is refused.
        supersedes: Option<Epoch>,
    },
    /// Lets others borrow a device that a handover reserved. The fence stays.
    EndReservation {
        /// Device id.
        device: String,
    },
}

/// The right to open the register channel of one lease, once and soon.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ticket(pub [u8; 16]);

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Whoever sees it has it.
        f.write_str("Ticket")
    }
}

/// How the borrower comes by the register channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Registers {
    /// It is the first descriptor of the reply.
    Descriptor,
    /// By another connection ([`Request::Registers`]), where no descriptor can
    /// be sent. Good once, within [`TICKET_LIFE`].
    Ticket(Ticket),
}

/// How long a [`Ticket`] is good for.
pub const TICKET_LIFE: std::time::Duration = std::time::Duration::from_secs(5);

/// A reply of a lender.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Reply {
    /// To `Hello`.
    Welcome {
        /// The lender's name.
        lender: String,
    },
    /// To `Devices`.
    Devices(Vec<DeviceEntry>),
    /// To `Limits`.
    Limits(NtbLimits),
    /// To `Describe`.
    Description(Box<Described>),
    /// To `Status`.
    Status(Box<DeviceStatus>),
    /// To `Borrow`. Descriptors: the register channel, if it comes so, then the
    /// files of [`BarMemory::File`].
    Lease {
        /// The lease's fencing number.
        epoch: Epoch,
        /// How to come by the register channel.
        registers: Registers,
        /// For each BAR with mappable areas, in the order of the BARs, how the
        /// borrower's CPU reaches them.
        bars: Vec<BarMemory>,
    },
    /// To `OpenWindow`.
    Window {
        /// LUT entries that it costs.
        lut_entries: u32,
    },
    /// To all else.
    Done,
    /// The request was refused and had no effect.
    Refused(RemoteError),
    /// To `Handover`: the VM's fence.
    Fence {
        /// The least epoch to show.
        epoch: Epoch,
    },
}

/// What a device looks like before it is borrowed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Described {
    /// Its configuration space, BARs and interrupts.
    pub description: Description,
    /// Who brings the memory of its mappable areas.
    pub bars: BarOwner,
}

/// Who brings the memory behind the mappable areas of a device's BARs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BarOwner {
    /// The borrower: the device is a model, which looks at memory that the
    /// guest writes to.
    Borrower,
    /// The lender: the device is hardware, and its BARs are its own. Who wants
    /// to map them must borrow it first.
    Lender,
}

/// How the borrower's CPU reaches the mappable areas of one BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BarMemory {
    /// By the file that the borrower brought.
    Borrowers,
    /// By the next descriptor: the BAR begins at this offset of it.
    File {
        /// Offset of the BAR's first byte in the file.
        offset: u64,
    },
    /// Through the borrower's NTB: the BAR is at this address in the IOMMU
    /// domain of the lender's NTB endpoint.
    Far {
        /// Address of the BAR's first byte.
        address: u64,
    },
    /// Not at all: every access is to be sent on the register channel.
    Trapped,
}

/// How a device's DMA reaches the guest's RAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Route {
    /// One machine: the borrower shares the memory's files with the lender
    /// ([`Request::FarMap`]), which maps them.
    #[default]
    Memory,
    /// Two machines: through an NTB. The borrower maps its memory in the IOMMU
    /// domain of its own endpoint, the lender opens windows onto that.
    Ntb,
}

/// A range of guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamRange {
    /// GPA of the first byte.
    pub start: u64,
    /// Bytes.
    pub len: u64,
}

/// Why a lender refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct RemoteError {
    /// For programs.
    pub kind: ErrorKind,
    /// For people: names the thing, the value and the limit.
    pub message: String,
}

/// Classes of refusals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ErrorKind {
    /// Other protocol version.
    Version,
    /// No such device here.
    UnknownDevice,
    /// Another VM has it.
    Busy,
    /// The lease is over: someone may have borrowed it since.
    StaleEpoch,
    /// A window, LUT, requester or mapping limit.
    Limit,
    /// The request is invalid.
    Invalid,
    /// The lender itself failed.
    Internal,
    /// The VM was moved to another host.
    Fenced,
}

/// A line of `farside devices`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceEntry {
    /// Cluster-wide device id.
    pub id: String,
    /// Device source, such as `model`.
    pub source: String,
    /// Model name and size.
    pub summary: String,
    /// Who has it now.
    pub borrowed_by: Option<BorrowedBy>,
    /// The VMs that it moved to another host with.
    pub fences: Vec<Fence>,
    /// What is wrong with it now that an operator should know, such as a medium
    /// that fails.
    pub problem: Option<String>,
}

impl DeviceEntry {
    /// For whom it is reserved.
    pub fn reservation(&self) -> Option<&Fence> {
        self.fences.iter().find(|fence| fence.reserved)
    }

    /// The fence of a VM.
    pub fn fence(&self, vm: &str) -> Option<&Fence> {
        self.fences.iter().find(|fence| fence.vm == vm)
    }
}

/// The lender's record of a borrow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BorrowedBy {
    /// VM name.
    pub vm: String,
    /// Fencing number.
    pub epoch: Epoch,
    /// Seconds since it was borrowed.
    pub seconds: u64,
}

impl BorrowedBy {
    /// What somebody else is told who wants `device`.
    pub fn refusal(&self, device: &str) -> RemoteError {
        RemoteError {
            kind: ErrorKind::Busy,
            message: format!(
                "device {device} is borrowed by VM {} (epoch {}, for {} s); stop that VM, or borrow another device",
                self.vm, self.epoch, self.seconds
            ),
        }
    }
}

/// What a lender knows of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// As in the listing.
    pub entry: DeviceEntry,
    /// Bus-master enable at the device.
    pub bus_master: bool,
    /// Windows and mappings of the current borrow.
    pub usage: Usage,
    /// Fired interrupts of the current borrow: (index, vector, count), those
    /// that are not zero.
    pub interrupts: Vec<(u8, u16, u64)>,
    /// DMA refused in the current borrow, or in the last one.
    pub faults: FaultSummary,
    /// The model's own counters.
    pub counters: Vec<(String, u64)>,
}

impl DeviceStatus {
    /// Whether the device reaches no memory.
    pub fn is_closed(&self) -> bool {
        !self.bus_master && self.usage.windows == 0 && self.usage.bytes_mapped == 0
    }

    /// Whether no VM has the device, which reaches no memory.
    pub fn is_free(&self) -> bool {
        self.entry.borrowed_by.is_none() && self.is_closed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The encoding says nothing of field names: a field that is left out
    /// when it has its default shifts all that follow.
    #[test]
    fn limits_survive_the_journey() {
        for alignment in [None, Some(4096)] {
            let limits = NtbLimits {
                alignment,
                ..NtbLimits::default()
            };
            let bytes = postcard::to_stdvec(&Reply::Limits(limits.clone())).unwrap();
            match postcard::from_bytes(&bytes) {
                Ok(Reply::Limits(received)) => assert_eq!(received, limits),
                other => panic!("{other:?}"),
            }
        }
    }
}
