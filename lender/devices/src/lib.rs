//! Software device models that a lender can lend where there is no hardware.
//!
//! A model is plain state behind the [`Device`] trait. It sees what a PCIe
//! function sees (configuration-space image, BAR accesses, DMA, interrupt
//! lines) and knows nothing of vfio-user, sockets or threads: its owner calls
//! it, from one thread at a time.
//!
//! `unsafe` is in `nvme::block` alone, whose engines hand pointers to guest
//! memory to the kernel.

#![deny(unsafe_code)]

pub mod bus;
pub mod dma_test;
pub mod nvme;

pub use bus::{Bus, Dma, Interrupts};

use std::os::fd::BorrowedFd;

use farside_fabric::memory::HostSlice;
use farside_pci::Description;

/// A PCIe function, as its owner drives it.
///
/// Every call comes from one thread. A call never blocks on the medium: work
/// that takes time is started here and finished in [`Device::poll`].
pub trait Device: Send {
    /// What the function looks like from outside. Constant for the life of
    /// the device.
    fn description(&self) -> &Description;

    /// Reads `data.len()` (1, 2, 4 or 8, naturally aligned) bytes at `offset`
    /// of BAR `bar`. The owner has checked `offset` against the BAR's size.
    fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8], bus: &mut Bus<'_>);

    /// Writes `data` (1, 2, 4 or 8 bytes, naturally aligned) at `offset` of
    /// BAR `bar`.
    fn bar_write(&mut self, bar: u8, offset: u64, data: &[u8], bus: &mut Bus<'_>);

    /// Gives the memory behind the mappable area number `area` of BAR `bar`
    /// (see [`farside_pci::Bar::mappable`]): the borrower's CPU reads and writes
    /// it without a trap from now on. `None` takes it back.
    fn set_bar_memory(&mut self, bar: u8, area: usize, memory: Option<HostSlice>);

    /// Does what can be done now: fetches commands, reaps completions, raises
    /// interrupts. Returns whether there was anything to do.
    fn poll(&mut self, bus: &mut Bus<'_>) -> bool;

    /// Asks to be woken for the next event, then looks once more. Returns true
    /// when nothing is pending, so that the owner may sleep until a BAR
    /// access comes or [`Device::wake_fd`] is readable.
    fn arm(&mut self, bus: &mut Bus<'_>) -> bool;

    /// Readable when [`Device::poll`] has something to do that no BAR access
    /// announced, such as the medium's completions.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Stops new DMA. Returns true when none is in flight any more; until then
    /// the owner calls again after `wake_fd` was readable. A quiesced device
    /// starts again with [`Device::resume`].
    fn quiesce(&mut self, bus: &mut Bus<'_>) -> bool;

    /// Ends a quiesce that was not followed by a reset.
    fn resume(&mut self, bus: &mut Bus<'_>);

    /// What is wrong with the device now that an operator should know, such as a
    /// medium that fails. The same text for as long as it is the same.
    fn problem(&self) -> Option<&str> {
        None
    }

    /// Counters for people, by name, since the device was made.
    fn stats(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Puts the function in its state after power-on (conventional or
    /// function-level reset; PCIe 6.6). The owner has quiesced it, and resumes
    /// it implicitly.
    fn reset(&mut self);

    /// Brings all that was written onto the medium and waits until it is there,
    /// after [`Device::quiesce`] has succeeded. Nothing to do for a device
    /// without a medium.
    fn settle(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
