//! The interface between a device thread and its device, a software model or hardware.
//!
//! A lease is a value: [`DeviceSource::lease`] consumes the available device, and
//! [`LeasedDevice::end`] returns it. All calls come from the device thread.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use farside_devices::Waiting;
use farside_fabric::{
    FaultLog, FaultSummary, Iova, LenderPath, MemoryRange, PeerAddress, Usage, memory::SharedMemory,
};
use farside_irq_relay::{Relay, VectorCount};
use farside_lender_protocol::{
    BarMemory, Counter, Described, DeviceEntry, DeviceStatus, IrqUpdate, LimitUse, RamRange,
    RemoteError, Transport,
};
use farside_pci::Piece;
use serde::{Deserialize, Serialize};

use crate::{
    lease_owner::LeaseOwner,
    refusals::{invalid, no_disk},
    registry::GrantedChain,
    state_file::StateFile,
};

/// Vectors of a function: 2048 of MSI-X, the most of any kind (PCIe 7.7.2), and INTx.
const MAX_VECTORS: usize = 2049;

/// Timeout for DMA in flight to drain, after which the borrower receives an error.
pub(crate) const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);

/// What a device answers without a lease.
pub(crate) trait Available: Send {
    /// The kind of device source, for display.
    fn kind(&self) -> &'static str;

    /// The device's description. Constant but for the summary, which names the size of a disk.
    fn described(&self) -> &Described;

    /// Its expansion ROM; empty if it has none, or that cannot be read now. Constant.
    fn rom(&self) -> Arc<[u8]> {
        Arc::default()
    }

    /// Whether a guest with this RAM, of `owner` if known, could borrow it.
    fn check(
        &self,
        owner: Option<&LeaseOwner>,
        transport: Transport,
        ram: &[RamRange],
    ) -> Result<(), RemoteError>;

    /// Flushes all writes to the medium, if the lender is responsible for that, so that a crash of
    /// this host after the VM has moved loses no data. May block.
    fn flush(&mut self) -> Result<(), RemoteError>;

    /// The device's fault, if any: see [`farside_devices::Device::problem`].
    fn problem(&self) -> Option<&str> {
        None
    }

    /// Counters, and the faults of the last lease.
    fn report(&self) -> Report;

    /// Takes the size that its medium has now: of a device whose medium this process has opened.
    fn take_size(&mut self) -> Result<Resized, RemoteError> {
        Err(no_disk())
    }

    /// Takes the size that the process with the medium has ordered, and notifies the guest: of a device in a worker.
    fn resize(&mut self, _to: u64) -> Result<(), RemoteError> {
        Err(no_disk())
    }

    /// Stops the DMA of a device that was kept as it runs, for a VM that does not go on with it. Returns false if it still
    /// does DMA. Other devices do none without a lease.
    fn let_go(&mut self) -> bool {
        true
    }
}

/// The size of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Resized {
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// Of the device's description from now on.
    pub(crate) summary: String,
}

/// A device that can be lent to one VM at a time, by its thread.
pub(crate) trait DeviceSource: Available {
    /// Begins a lease: the device is reset, or goes on from the state that a process before this one has left, and has
    /// no DMA path to memory.
    fn lease(
        self: Box<Self>,
        transport: Transport,
        owner: &LeaseOwner,
        memory: BorrowerMemory,
    ) -> Result<Leased, NotLeased>;
}

/// What the borrower provides with a lease.
#[derive(Debug, Default)]
pub(crate) struct BorrowerMemory {
    /// Files behind the BARs with sparse mmap areas, in the order of the BARs.
    pub(crate) bars: Vec<OwnedFd>,
    /// Where the state outlives this process.
    pub(crate) state: Option<StateFile>,
}

impl BorrowerMemory {
    /// The files of a lease, with the state of one that may go on.
    pub(crate) fn new(
        bars: Vec<OwnedFd>,
        state: Option<OwnedFd>,
        chain: Option<GrantedChain>,
    ) -> Self {
        let state = chain.zip(state).map(|(chain, file)| StateFile {
            file,
            goes_on: chain.goes_on,
        });
        Self { bars, state }
    }
}

/// A new lease.
pub(crate) struct Leased {
    pub(crate) device: Box<dyn LeasedDevice>,
    /// For each BAR with sparse mmap areas, in the order of the BARs.
    pub(crate) bars: Vec<BarMemory>,
    /// The files of [`BarMemory::File`].
    pub(crate) files: Vec<OwnedFd>,
}

/// A failed lease.
pub(crate) struct NotLeased {
    pub(crate) source: Box<dyn DeviceSource>,
    pub(crate) error: RemoteError,
}

/// A device while it is lent: its registers, its interrupts, and its DMA path.
pub(crate) trait LeasedDevice: Send {
    /// The device, for requests that need no lease.
    fn source(&mut self) -> &mut dyn DeviceSource;

    /// As [`DeviceSource::report`], with the lease's windows, interrupts and faults.
    fn report(&mut self) -> Report;

    /// Reads `data.len()` bytes (1, 2, 4 or 8, naturally aligned, in the BAR).
    fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8]);

    /// Writes `data` (1, 2, 4 or 8 bytes, naturally aligned, in the BAR).
    fn bar_write(&mut self, bar: u8, offset: u64, data: &[u8]);

    /// Reads configuration space, as far as a borrower may: `None` if not at all. Software models have nothing to read.
    fn config_read(&mut self, _piece: Piece) -> Option<u32> {
        None
    }

    /// Writes configuration space, as far as a borrower may. Returns whether it may at all.
    fn config_write(&mut self, _piece: Piece, _value: u32) -> bool {
        false
    }

    /// The borrower's process may be told that `count` register accesses of this lease are served.
    fn accessed(&mut self, _count: u64) {}

    /// Leaves the state that outlives this process as it is, for the next one. Returns whether there is any.
    fn leave_state(&mut self) -> bool {
        false
    }

    /// Whether the next process goes on with the device as it runs: with its DMA and its interrupts.
    fn is_left_running(&self) -> bool {
        false
    }

    /// The device's interrupts.
    fn irqs(&mut self) -> &mut dyn Irqs;

    /// The device's IOMMU domain and windows. [`LeasedDevice::quiesce`] before
    /// a window is closed.
    fn path(&mut self) -> &mut dyn LenderPath;

    /// See [`farside_lender_protocol::Request::ReachBar`]. A device of this host gets the BAR's descriptor from its borrower
    /// instead.
    fn reach_bar(
        &mut self,
        _iova: Iova,
        exported: PeerAddress,
        _len: u64,
    ) -> Result<(), RemoteError> {
        Err(invalid(format!(
            "no BAR is reached at peer address {exported}: the device's borrower is not across an NTB"
        )))
    }

    /// See [`farside_lender_protocol::Request::MapPeer`]. `memory` is `range`, mapped into this process.
    fn map_peer(
        &mut self,
        at: PeerAddress,
        range: &MemoryRange,
        memory: Arc<SharedMemory>,
    ) -> Result<(), RemoteError>;

    /// See [`farside_lender_protocol::Request::UnmapPeer`]. Drains DMA to that
    /// memory first.
    fn unmap_peer(&mut self, at: PeerAddress, len: u64) -> Result<(), RemoteError>;

    /// Whether the device is gone for good: the lease ends.
    fn is_gone(&self) -> bool;

    /// Processes pending work; returns whether there was any.
    fn poll(&mut self) -> bool;

    /// Prepares to block until a register access or until [`LeasedDevice::wake_fd`] is readable.
    /// Returns false if there is work already.
    fn prepare_to_block(&mut self) -> bool {
        true
    }

    /// As [`Device::is_polled`](farside_devices::Device::is_polled).
    fn is_polled(&self) -> bool {
        false
    }

    /// As [`Device::looks_again`](farside_devices::Device::looks_again).
    fn looks_again(&self) -> Option<Duration> {
        None
    }

    /// As [`Device::waiting`](farside_devices::Device::waiting).
    fn waiting(&self) -> Waiting {
        Waiting::BusyPoll
    }

    /// Readable when [`LeasedDevice::poll`] has work.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Drains DMA in flight, for up to `patience`, and starts no more until
    /// [`LeasedDevice::resume`].
    fn quiesce(&mut self, patience: Duration) -> Result<(), RemoteError>;

    /// Resumes a device that was quiesced or revoked, and not reset.
    fn resume(&mut self) {}

    /// Resets the device, after [`LeasedDevice::revoke`].
    fn reset(&mut self) -> Result<(), RemoteError>;

    /// Revokes the device's access to the borrower's memory: drains DMA in flight for up to
    /// `patience`, stops bus mastering, closes all windows and unmaps all memory, as far as
    /// possible. After an error the device may still reach memory, and the caller retries.
    fn revoke(&mut self, patience: Duration) -> Result<(), RemoteError>;

    /// Ends the lease, after [`LeasedDevice::revoke`] has succeeded: resets the device and releases
    /// the lease's resources.
    fn end(self: Box<Self>) -> Box<dyn DeviceSource>;
}

/// The interrupts of a leased device.
pub(crate) trait Irqs {
    /// Changes targets or masks.
    fn set(&mut self, update: IrqUpdate, fds: Vec<OwnedFd>) -> Result<(), RemoteError>;

    /// Sets the command register's INTx disable.
    fn set_intx_disable(&mut self, disabled: bool) -> Result<(), RemoteError>;

    /// Whether the device asserts INTx, be that disabled or masked: Interrupt
    /// Status in its status register (PCIe 7.5.1.1.4).
    fn intx_status(&mut self) -> bool;

    /// Relayed interrupts that are not sent yet. All device writes before them have reached the
    /// borrower's memory.
    fn relay(&self) -> &Relay;
}

/// The state of a device, for its status.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Whether bus mastering is enabled.
    pub(crate) bus_master: bool,
    /// Windows and mappings.
    pub(crate) usage: Usage,
    /// Every raised vector.
    pub(crate) interrupts: Vec<VectorCount>,
    /// Refused DMA.
    pub(crate) faults: FaultSummary,
    /// The device's own counters.
    pub(crate) counters: Vec<Counter>,
    /// What the lease uses of its limits.
    pub(crate) limits: Vec<LimitUse>,
}

impl Report {
    /// The report of a process that may be a guest's: as long as that of an honest one at most, so that it fits
    /// in a message.
    pub(crate) fn bounded(mut self) -> Self {
        const COUNTERS: usize = 32;
        const NAME: usize = 32;
        let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
        self.counters
            .retain(|Counter { name, .. }| name.len() <= NAME && name.chars().all(is_name));
        self.counters.truncate(COUNTERS);
        self.interrupts.truncate(MAX_VECTORS);
        self.faults.recent.truncate(FaultLog::REMEMBERED);
        self.limits.truncate(LimitUse::MAX);
        self
    }

    /// The status of the device of that entry.
    pub(crate) fn status_of(self, entry: DeviceEntry) -> DeviceStatus {
        DeviceStatus {
            entry,
            bus_master: self.bus_master,
            usage: self.usage,
            interrupts: self.interrupts,
            faults: self.faults,
            counters: self.counters,
            limits: self.limits,
        }
    }
}
