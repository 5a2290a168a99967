//! Requests and replies.

use farside_daemon::{DeviceId, VmName};
use farside_fabric::{Iova, NtbLimits, PeerAddress};
use farside_pci::Description;
use serde::{Deserialize, Serialize};

use crate::{
    Availability, DeviceStatus, Fence, HeldFence, Instance, IrqUpdate, KeptFor, LimitUse,
    MAX_MESSAGE, Secret,
};

/// The protocol version of this build. A lender refuses other versions with
/// [`ErrorKind::Version`].
pub const VERSION: u32 = 17;

/// Lease generation, used as fencing token: it increases with each borrow of a device.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Generation(pub u64);

impl std::fmt::Display for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// A message from a backend to a lender.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Envelope {
    /// The sender's lease; zero without one.
    pub generation: Generation,
    /// Number of register accesses sent under the lease before this request. The
    /// lender serves those first, since the register channel is another connection.
    pub accesses: u64,
    /// The request.
    pub request: Request,
}

/// A request of a backend (or of `farside devices`, `farside status`).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// First message of a connection.
    Hello {
        /// [`VERSION`] of the sender.
        version: u32,
        /// The VM that borrows; `None` for tools. The connection of a VM borrows for that VM, and has
        /// none of the other rights of its user. Text, so that the lender can name an invalid name in
        /// its refusal.
        vm: Option<String>,
    },
    /// Lists the lender's devices in the order of their ids, as many as fit in a reply.
    Devices {
        /// Lists those after this one.
        after: Option<DeviceId>,
    },
    /// Queries the limits of the lender's fabric, to refuse a guest that cannot fit
    /// before it boots.
    Limits,
    /// Describes a device: configuration space, BARs, vectors.
    Describe {
        /// Device id.
        device: DeviceId,
    },
    /// Queries one device's counters.
    Status {
        /// Device id.
        device: DeviceId,
    },
    /// Checks before a guest boots whether it could borrow the device. Finds addresses
    /// that the device cannot reach, windows that do not fit, memory above the limit of
    /// locked memory.
    Check {
        /// Device id.
        device: DeviceId,
        /// How the device would reach the guest.
        transport: Transport,
        /// The guest's RAM.
        ram: Vec<RamRange>,
    },
    /// Borrows the device exclusively and resets it. Descriptors, for a device whose BARs
    /// the [borrower](BarOwner::Borrower) provides: a file of the BAR's size for each BAR
    /// with sparse mmap areas, in BAR order. After the reply the connection is the lease:
    /// closing it returns the device.
    Borrow {
        /// Device id.
        device: DeviceId,
        /// How the device reaches the guest.
        transport: Transport,
        /// The fence of the last [handover](Request::Handover) to this host, if any. The
        /// borrow is refused if the VM was moved elsewhere since.
        fence: Option<HeldFence>,
    },
    /// Resets the device. Closes its windows and removes all mappings of the borrower's
    /// domain before the reply.
    Reset,
    /// Enables bus mastering: the device may now do DMA through the open windows.
    EnableBusMaster,
    /// Stops DMA, closes all windows and removes all mappings of the
    /// borrower's domain. At the reply no DMA is in flight.
    Close,
    /// Sets the command register's INTx disable (bit 10).
    SetIntxDisable {
        /// The bit.
        disabled: bool,
    },
    /// Maps memory into the borrower's IOMMU domain, for [`Transport::SharedMemory`], where the
    /// lender manages both domains. Descriptor: the memory's file.
    MapPeer {
        /// Peer address.
        peer_address: PeerAddress,
        /// Bytes.
        len: u64,
        /// Offset in the file.
        offset: u64,
        /// Whether the device may write.
        writable: bool,
    },
    /// Removes a mapping of the borrower's domain. After the reply no DMA reaches the
    /// memory.
    UnmapPeer {
        /// Peer address.
        peer_address: PeerAddress,
        /// Bytes.
        len: u64,
    },
    /// Opens an NTB window of `len` bytes onto `peer_address` and maps it at `iova` in
    /// the device's domain.
    OpenWindow {
        /// IOVA of the first byte.
        iova: Iova,
        /// Peer address of the first byte.
        peer_address: PeerAddress,
        /// Bytes.
        len: u64,
    },
    /// Maps the BAR of another device of the VM, which the borrower reaches at [`BarMemory::Peer`], at `iova` in the device's
    /// domain. Of devices across an NTB. [`Request::CloseWindow`] undoes it.
    ReachBar {
        /// IOVA of the first byte.
        iova: Iova,
        /// The borrower's peer address of the first byte.
        exported: PeerAddress,
        /// Bytes.
        len: u64,
    },
    /// Closes the window that starts at `iova`.
    CloseWindow {
        /// IOVA of its first byte.
        iova: Iova,
    },
    /// Changes triggers or masks. Descriptors: the eventfds of
    /// [`IrqVectors::EventFds`](crate::IrqVectors::EventFds).
    SetIrqs(IrqUpdate),
    /// Returns the device.
    Return,
    /// First and only message of a connection that becomes the register channel
    /// of a lease, after the reply.
    Registers {
        /// The token of the lease.
        token: RegisterToken,
    },
    /// Transfers the device from the VM's source host to its destination host. Ends the
    /// VM's lease as if its connection were closed, flushes all writes to the medium, and
    /// reserves the device: only the VM may borrow it next, with the generation of the reply and
    /// `secret` as its fence. Of tools only, as the following ones.
    Handover {
        /// Device id.
        device: DeviceId,
        /// The VM. Text, as in [`Request::Hello`].
        vm: String,
        /// Id of the migration. A repeated request with the same id and secret returns the same
        /// generation, and does not end a lease under it.
        migration: String,
        /// The VM's current fence. Refused if the lender has a larger one: another
        /// migration has moved the VM meanwhile. Its secret is the proof that a peer other than
        /// an operator needs if the VM has the device or has moved with it before.
        supersedes: Option<HeldFence>,
        /// The secret of the new fence.
        secret: Secret,
    },
    /// Ends the reservation of a device by a handover, so that other VMs may borrow it.
    /// The fence stays.
    EndReservation {
        /// Device id.
        device: DeviceId,
        /// The secret of the fence that reserves it, which a peer other than an operator needs.
        secret: Option<Secret>,
    },
    /// Makes a device unavailable, and ends its lease: its guest is asked to release it
    /// ([`Event::Release`](crate::registers::Event::Release)) for up to `limit_ms`, then the lender
    /// ends the lease. Goes on without the requester. A repeated request can only shorten the limit.
    /// Operators only, as the following ones.
    Revoke {
        /// Device id.
        device: DeviceId,
        /// Milliseconds, at most those of [`MAX_REVOKE_LIMIT`].
        limit_ms: u64,
    },
    /// Sets whether VMs may borrow a device. A lease stays.
    SetAvailable {
        /// Device id.
        device: DeviceId,
        /// Whether they may.
        available: bool,
    },
    /// Adds a device to those that the lender lends, until it stops.
    AddDevice {
        /// A `[[device]]` table as in `lender.toml`, with the paths of the lender's host.
        table: String,
    },
    /// Removes a device that is not lent.
    RemoveDevice {
        /// Device id.
        device: DeviceId,
    },
    /// Queries how much of its limits the lender uses, which only operators are told.
    LimitsInUse,
    /// Borrows the medium of a device model exclusively, for a controller at the borrower
    /// ([`Transport::Network`]). After the reply the connection carries [frames](farside_medium::Frame).
    BorrowMedium {
        /// Device id.
        device: DeviceId,
        /// As in [`Request::Borrow`].
        fence: Option<HeldFence>,
        /// Time for which the device is kept for the VM after the connection is cut, in milliseconds;
        /// the lender's `keep-at-most` limits it.
        keep_ms: u64,
        /// The [chain](MediumLease::chain) of the lease that this one goes on with.
        resumes: Option<Secret>,
    },
    /// As [`Request::Borrow`] by [`Transport::SharedMemory`], of a device with [state](Described::state): a lease that
    /// goes on after its process, or the lender, has ended. Descriptors: those of `Borrow`, then a file of the state's
    /// size, sealed against resizing, which the device's process alone writes. The first page of it is
    /// [the lease's](crate::STATE_PAGE).
    BorrowAndKeep {
        /// Device id.
        device: DeviceId,
        /// As for `Borrow`.
        fence: Option<HeldFence>,
        /// For how long the lender keeps the device for the VM after its process has ended, milliseconds.
        keep_ms: u64,
        /// The chain of the lease that this one goes on with, from the state in the file. Its process has ended: the
        /// lender has closed the connection. Refused with [`ErrorKind::ChainEnded`] if the device was returned,
        /// revoked or borrowed by others since.
        resumes: Option<Secret>,
    },
    /// Reads a part of a device's expansion ROM, of up to [`ROM_PART`] bytes. Needs no lease.
    Rom {
        /// Device id.
        device: DeviceId,
        /// Offset in the ROM.
        offset: u32,
    },
    /// Has the disk of a device grow to the size of its medium, and those of other devices that have the same medium. Operators
    /// only.
    ResizeDevice {
        /// Device id.
        device: DeviceId,
    },
}

/// Most bytes of a [`Reply::Rom`].
pub const ROM_PART: usize = 32 << 10;

/// Maximum time for a guest to release a revoked device.
pub const MAX_REVOKE_LIMIT: std::time::Duration = std::time::Duration::from_secs(60 * 60);

/// Token for opening the register channel of one lease: single-use, valid for
/// [`TOKEN_LIFE`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RegisterToken(pub [u8; 16]);

impl std::fmt::Debug for RegisterToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // A bearer token: must not be logged.
        f.write_str("RegisterToken")
    }
}

/// How the borrower obtains the register channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Registers {
    /// As the first descriptor of the reply.
    Descriptor,
    /// By a second connection ([`Request::Registers`]), where no descriptor can be
    /// sent.
    RegisterToken(RegisterToken),
}

/// Validity of a [`RegisterToken`].
pub const TOKEN_LIFE: std::time::Duration = std::time::Duration::from_secs(5);

/// A reply of a lender.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Reply {
    /// To `Hello`.
    Welcome {
        /// The lender's name.
        lender: String,
        /// This run of it.
        instance: Instance,
    },
    /// To `Devices`; empty at the end of the list.
    Devices(Vec<DeviceEntry>),
    /// To `Limits`.
    Limits(NtbLimits),
    /// To `Describe`.
    Description(Box<Described>),
    /// To `Status`.
    Status(Box<DeviceStatus>),
    /// To `Borrow`. Descriptors: the register channel for [`Registers::Descriptor`], then
    /// the files of [`BarMemory::File`].
    Lease {
        /// The lease's generation.
        generation: Generation,
        /// How to obtain the register channel.
        registers: Registers,
        /// How the borrower's CPU accesses the sparse mmap areas: one entry for each BAR
        /// with such areas, in BAR order.
        bars: Vec<BarMemory>,
        /// The right to go on with this lease over another connection; for [`Request::BorrowAndKeep`], unless the
        /// medium of the device cannot be identified.
        chain: Option<Secret>,
    },
    /// To `OpenWindow`.
    Window {
        /// LUT entries that the window uses.
        lut_entries: u32,
    },
    /// To all other requests.
    Done,
    /// The request was refused and had no effect.
    Refused(RemoteError),
    /// To `Handover`: the VM's fence.
    Fence {
        /// The least generation with which the VM may borrow the device.
        generation: Generation,
    },
    /// To `Revoke`.
    Revocation(Revocation),
    /// To `LimitsInUse`; empty for peers that are no operators.
    LimitsInUse(Vec<LimitUse>),
    /// To `BorrowMedium`: the last message, which frames follow.
    Medium(Box<MediumLease>),
    /// The last message of a lease that goes on, in answer to no request: its process has ended, with all DMA. The
    /// lender keeps the device for the VM while the borrower keeps this connection open, for `keep_ms` at most.
    ProcessEnded,
    /// To `Rom`; empty at the end of the ROM.
    Rom(Vec<u8>),
    /// To `ResizeDevice`.
    Resized {
        /// Up to [`MAX_RESIZED`] of the devices.
        devices: Vec<ResizedDevice>,
        /// The number of the others.
        more: u32,
    },
}

/// Most devices of a [`Reply::Resized`]: a message is bounded.
pub const MAX_RESIZED: usize = 256;

/// The size of a device's disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResizedDevice {
    /// Device id.
    pub device: DeviceId,
    /// Bytes that borrowers saw.
    pub from: u64,
    /// Bytes that they see from now on.
    pub to: u64,
}

/// The lease of a medium.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MediumLease {
    /// The lease's generation.
    pub generation: Generation,
    /// The right to go on with this lease over another connection: the same for all leases that did.
    pub chain: Secret,
    /// The configuration of the model, as JSON.
    pub model: String,
    /// Bytes of the medium.
    pub size: u64,
    /// Whether deallocated blocks read as zeroes.
    pub punches_holes: bool,
}

/// The progress of a [`Request::Revoke`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Revocation {
    /// The lease has not ended yet; a repeated request waits on.
    Pending,
    /// The device was not lent.
    NotLent,
    /// The guest released the device, or the borrower has gone.
    Released,
    /// The lender ended the lease: the guest did not release the device within the limit.
    Ended,
}

/// The description of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Described {
    /// Its configuration space, BARs and interrupts.
    pub description: Description,
    /// The provider of the memory of its sparse mmap areas.
    pub bars: BarOwner,
    /// Bytes of a file in which the device's state outlives the process that serves it; 0 if it has none. See
    /// [`Request::BorrowAndKeep`].
    pub state: u64,
    /// Bytes of its expansion ROM, at most [`farside_pci::rom::MAX`]; 0 if it has none. See [`Request::Rom`].
    #[serde(default)]
    pub rom: u32,
}

impl Described {
    /// Compares all but the summaries, which name the size of a disk: that may grow, and the device is the same.
    pub fn is_same_to_guests(&self, other: &Self) -> bool {
        let same = Self {
            description: Description {
                summary: other.description.summary.clone(),
                ..self.description.clone()
            },
            ..self.clone()
        };
        same == *other
    }
}

/// The provider of the memory behind the sparse mmap areas of a device's BARs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BarOwner {
    /// The borrower: the device is a model, which reads memory that the guest writes.
    Borrower,
    /// The lender: the device is hardware, whose BARs can be mapped only under a lease.
    Lender,
}

/// How the borrower's CPU accesses the sparse mmap areas of one BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BarMemory {
    /// Through the borrower's own file.
    Borrowers,
    /// Through the next descriptor.
    File {
        /// Offset of the BAR's first byte in the file.
        offset: u64,
    },
    /// Through the borrower's NTB: the BAR is at this address in the IOMMU
    /// domain of the lender's NTB endpoint.
    Peer {
        /// Address of the BAR's first byte.
        address: PeerAddress,
    },
    /// Not mappable: every access goes over the register channel.
    Trapped,
}

/// The DMA path from a device to the guest's RAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// Shared memory, on one host: the lender maps the memory's files, which the borrower
    /// passes ([`Request::MapPeer`]).
    #[default]
    SharedMemory,
    /// An NTB, between two hosts: the borrower maps its memory in the IOMMU domain of its
    /// own NTB endpoint, and the lender opens windows onto that domain.
    Ntb,
    /// The network, between two hosts: the controller of a device model runs next to the guest, and
    /// only the I/O on its medium crosses.
    Network,
}

/// A range of guest RAM, as the device addresses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamRange {
    /// IOVA of the first byte: windows map guest RAM at its GPA.
    pub start: Iova,
    /// Bytes.
    pub len: u64,
}

/// Why a lender refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct RemoteError {
    /// The class, for callers.
    pub kind: ErrorKind,
    /// The message for the user: names the thing, the value and the limit.
    pub message: String,
}

/// Classes of refusals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ErrorKind {
    /// Another protocol version.
    Version,
    /// The lender has no such device.
    UnknownDevice,
    /// Borrowed by or reserved for another VM, or unavailable.
    Busy,
    /// The lease has ended: another VM may have borrowed the device since.
    StaleGeneration,
    /// A window, LUT, requester or mapping limit.
    Limit,
    /// The request is invalid.
    Invalid,
    /// The lender failed.
    Internal,
    /// The VM was moved to another host.
    Fenced,
    /// The peer has no right to it.
    Denied,
    /// The lease cannot go on: the device is given up.
    ChainEnded,
}

/// A line of `farside devices`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceEntry {
    /// Cluster-wide device id.
    pub id: DeviceId,
    /// Device source, such as `model`.
    pub source: String,
    /// Model name and size.
    pub summary: String,
    /// The current borrow.
    pub borrowed_by: Option<BorrowedBy>,
    /// The fences of VMs that migrated with it.
    pub fences: Vec<Fence>,
    /// A current problem for the operator, such as a failing medium.
    pub problem: Option<String>,
    /// Whether VMs may borrow it.
    #[serde(default)]
    pub availability: Availability,
    /// The VM whose connection was cut, and for which the device is kept.
    #[serde(default)]
    pub kept: Option<KeptFor>,
}

impl DeviceEntry {
    /// The first of `entries` that fit in one [`Reply::Devices`].
    pub fn page(entries: impl Iterator<Item = Self>) -> Vec<Self> {
        // The reply's tag and the number of entries take up to four bytes.
        let mut room = MAX_MESSAGE - 4;
        let fits = |entry: &Self| {
            let len = postcard::to_stdvec(entry).map_or(usize::MAX, |bytes| bytes.len());
            let left = room.checked_sub(len);
            room = left.unwrap_or(0);
            left.is_some()
        };
        entries.take_while(fits).collect()
    }

    /// The fence that reserves it.
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
    pub vm: VmName,
    /// The lease's generation.
    #[serde(rename = "epoch")]
    pub generation: Generation,
    /// Seconds since the borrow.
    pub seconds: u64,
}

impl BorrowedBy {
    /// The refusal for another VM that tries to borrow `device`.
    pub fn refusal(&self, device: &DeviceId) -> RemoteError {
        RemoteError {
            kind: ErrorKind::Busy,
            message: format!(
                "device {device} is borrowed by VM {} (generation {}, for {} s); stop that VM, or borrow another device",
                self.vm, self.generation, self.seconds
            ),
        }
    }
}

#[cfg(test)]
mod tests;
