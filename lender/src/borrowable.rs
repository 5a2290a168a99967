//! What a device source gives the lender: a device that can be borrowed.
//!
//! Everything that a device's thread asks of its device goes through
//! [`Borrowable`], so that it need not know whether the device is a software
//! model or hardware. Every call comes from that one thread.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    time::Duration,
};

use farside_fabric::{FarAddress, FaultSummary, Iova, MemoryRange, Usage};
use farside_irq_relay::Fire;
use farside_lender_protocol::{BarMemory, Described, IrqUpdate, RamRange, RemoteError, Route};

/// How long DMA in flight may take to drain before the borrower is told that
/// it does not.
pub(crate) const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);

/// A device that can be borrowed, by one VM at a time.
pub(crate) trait Borrowable: Send {
    /// The device source's name, for people.
    fn source(&self) -> &'static str;

    /// What the device looks like from outside. Constant.
    fn described(&self) -> &Described;

    /// Whether a guest with this RAM could borrow it.
    fn check(&self, route: Route, ram: &[RamRange]) -> Result<(), RemoteError>;

    /// Begins a lease: the device is reset, and has no way to memory.
    /// `bar_memory` is what the borrower brought. On an error nothing has
    /// begun.
    fn begin(
        &mut self,
        route: Route,
        vm: &str,
        bar_memory: Vec<OwnedFd>,
    ) -> Result<Begun, RemoteError>;

    /// Ends a lease, after [`Borrowable::close`] has succeeded: resets the
    /// device and gives up all that the lease took.
    fn end(&mut self);

    /// Resets the device, after [`Borrowable::close`].
    fn reset(&mut self) -> Result<(), RemoteError>;

    /// Stops DMA and takes away every path to memory, as far as possible. DMA
    /// in flight has `patience` to drain. After an error the device may still
    /// reach memory, and the caller tries again.
    fn close(&mut self, patience: Duration) -> Result<(), RemoteError>;

    /// Brings all that was written onto the medium, where that is the lender's
    /// to do: so that a crash of this host, after the VM went on at another
    /// one, loses nothing. May block.
    fn settle(&mut self) -> Result<(), RemoteError> {
        Ok(())
    }

    /// Lets a device go on that was closed and not reset.
    fn resume(&mut self) {}

    /// Lets the device master the bus.
    fn enable_bus_master(&mut self) -> Result<(), RemoteError>;

    /// See [`farside_lender_protocol::Request::FarMap`].
    fn far_map(&mut self, at: FarAddress, memory: MemoryRange) -> Result<(), RemoteError>;

    /// See [`farside_lender_protocol::Request::FarUnmap`].
    fn far_unmap(&mut self, at: FarAddress, len: u64) -> Result<(), RemoteError>;

    /// Opens a window. Returns the LUT entries it takes.
    fn open_window(&mut self, iova: Iova, far: FarAddress, len: u64) -> Result<u32, RemoteError>;

    /// Closes a window.
    fn close_window(&mut self, iova: Iova) -> Result<(), RemoteError>;

    /// Changes triggers or masks.
    fn set_irqs(&mut self, update: IrqUpdate, fds: Vec<OwnedFd>) -> Result<(), RemoteError>;

    /// Sets the command register's INTx disable.
    fn set_intx_disable(&mut self, disabled: bool) -> Result<(), RemoteError>;

    /// Whether the device asserts INTx, be that disabled or masked: Interrupt
    /// Status in its status register (PCIe 7.5.1.1.4).
    fn interrupt_status(&mut self) -> bool;

    /// Whether relayed interrupts wait to be sent.
    fn relay_waits(&self) -> bool;

    /// Sends the relayed interrupts that wait, for as long as `send` finds
    /// room.
    fn drain_relay(&mut self, send: &mut dyn FnMut(Fire) -> bool);

    /// Reads `data.len()` (1, 2, 4 or 8, naturally aligned) bytes that are in
    /// the BAR.
    fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8]);

    /// Writes `data` (1, 2, 4 or 8 bytes, naturally aligned, in the BAR).
    fn bar_write(&mut self, bar: u8, offset: u64, data: &[u8]);

    /// Does what can be done now; returns whether there was anything.
    fn poll(&mut self) -> bool;

    /// Prepares to sleep until a register access comes or
    /// [`Borrowable::wake_fd`] is readable. False when there is something to do
    /// already.
    fn arm(&mut self) -> bool;

    /// Readable when [`Borrowable::poll`] has something to do.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>>;

    /// What is wrong with the device now: see [`farside_devices::Device::problem`].
    fn problem(&self) -> Option<&str> {
        None
    }

    /// How it stands, in this lease or after the last.
    fn report(&self) -> Report;
}

/// What a lease comes with.
#[derive(Debug, Default)]
pub(crate) struct Begun {
    /// For each BAR with mappable areas, in the order of the BARs.
    pub(crate) bars: Vec<BarMemory>,
    /// The files of [`BarMemory::File`].
    pub(crate) files: Vec<OwnedFd>,
}

/// What there is to say of a device.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Whether it may master the bus.
    pub(crate) bus_master: bool,
    /// Windows and mappings.
    pub(crate) usage: Usage,
    /// (index, vector, count) of each vector that fired.
    pub(crate) interrupts: Vec<(u8, u16, u64)>,
    /// DMA that was refused.
    pub(crate) faults: FaultSummary,
    /// The device's own counters.
    pub(crate) counters: Vec<(String, u64)>,
}
