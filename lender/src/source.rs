//! The seam between a device's thread and the device, be that a software model
//! or hardware.
//!
//! A lease is a value: [`DeviceSource::lease`] consumes the available device, and
//! [`LeasedDevice::end`] gives it back. Every call comes from the device's thread.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    time::Duration,
};

use farside_fabric::{FarAddress, FaultSummary, LenderPath, MemoryRange, Usage};
use farside_irq_relay::Relay;
use farside_lender_protocol::{BarMemory, Described, IrqUpdate, RamRange, RemoteError, Route};

/// How long DMA in flight may take to drain before the borrower is told that
/// it does not.
pub(crate) const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);

/// A device that can be lent, to one VM at a time.
pub(crate) trait DeviceSource: Send {
    /// The kind of device source, for people.
    fn kind(&self) -> &'static str;

    /// The device's description. Constant.
    fn described(&self) -> &Described;

    /// Whether a guest with this RAM could borrow it.
    fn check(&self, route: Route, ram: &[RamRange]) -> Result<(), RemoteError>;

    /// Begins a lease: the device is reset, and has no DMA path to memory.
    /// `bar_memory` comes from the borrower.
    fn lease(
        self: Box<Self>,
        route: Route,
        vm: &str,
        bar_memory: Vec<OwnedFd>,
    ) -> Result<Leased, NotLeased>;

    /// Brings all that was written onto the medium, where that is the lender's
    /// to do: so that a crash of this host, after the VM went on at another
    /// one, loses nothing. May block.
    fn flush(&mut self) -> Result<(), RemoteError> {
        Ok(())
    }

    /// The device's fault, if any: see [`farside_devices::Device::problem`].
    fn problem(&self) -> Option<&str> {
        None
    }

    /// Counters, and the faults of the last lease.
    fn report(&self) -> Report;
}

/// A lease that has begun.
pub(crate) struct Leased {
    pub(crate) device: Box<dyn LeasedDevice>,
    /// For each BAR with mappable areas, in the order of the BARs.
    pub(crate) bars: Vec<BarMemory>,
    /// The files of [`BarMemory::File`].
    pub(crate) files: Vec<OwnedFd>,
}

/// A lease that has not begun.
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

    /// Reads `data.len()` (1, 2, 4 or 8, naturally aligned) bytes that are in
    /// the BAR.
    fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8]);

    /// Writes `data` (1, 2, 4 or 8 bytes, naturally aligned, in the BAR).
    fn bar_write(&mut self, bar: u8, offset: u64, data: &[u8]);

    /// The device's interrupts.
    fn irqs(&mut self) -> &mut dyn Irqs;

    /// The device's IOMMU domain and windows. [`LeasedDevice::quiesce`] before
    /// a window is closed.
    fn path(&mut self) -> &mut dyn LenderPath;

    /// See [`farside_lender_protocol::Request::FarMap`].
    fn map_peer(&mut self, at: FarAddress, memory: MemoryRange) -> Result<(), RemoteError>;

    /// See [`farside_lender_protocol::Request::FarUnmap`]. Drains DMA to that
    /// memory first.
    fn unmap_peer(&mut self, at: FarAddress, len: u64) -> Result<(), RemoteError>;

    /// Does what can be done now; returns whether there was anything.
    fn poll(&mut self) -> bool;

    /// Prepares to sleep until a register access comes or
    /// [`LeasedDevice::wake_fd`] is readable. False when there is something to do
    /// already.
    fn prepare_to_block(&mut self) -> bool {
        true
    }

    /// Readable when [`LeasedDevice::poll`] has something to do.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Drains DMA in flight, which has `patience` for that, and begins no more
    /// until [`LeasedDevice::resume`]. Hardware needs neither: the IOMMU's
    /// unmapping waits for DMA in flight.
    fn quiesce(&mut self, _patience: Duration) -> Result<(), RemoteError> {
        Ok(())
    }

    /// Lets a device go on that was quiesced or revoked, and not reset.
    fn resume(&mut self) {}

    /// Resets the device, after [`LeasedDevice::revoke`].
    fn reset(&mut self) -> Result<(), RemoteError>;

    /// Takes the borrower's memory away from the device: drains DMA in flight,
    /// which has `patience` for that, stops bus mastering, closes all windows and
    /// unmaps all memory; as much of it as possible. After an error the device may
    /// still reach memory, and the caller tries again.
    fn revoke(&mut self, patience: Duration) -> Result<(), RemoteError>;

    /// Ends the lease, after [`LeasedDevice::revoke`] has succeeded: resets the
    /// device and gives up all that the lease took.
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

    /// Relayed interrupts that were not sent yet. Everything that the device wrote
    /// before them is in the borrower's memory.
    fn relay(&self) -> &Relay;
}

/// The state of a device, for its status.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Whether it may master the bus.
    pub(crate) bus_master: bool,
    /// Windows and mappings.
    pub(crate) usage: Usage,
    /// (index, vector, count) of each vector that was raised.
    pub(crate) interrupts: Vec<(u8, u16, u64)>,
    /// DMA that was refused.
    pub(crate) faults: FaultSummary,
    /// The device's own counters.
    pub(crate) counters: Vec<(String, u64)>,
}
