//! Software device models, which a lender can lend without hardware.
//!
//! A model is plain state behind the [`Device`] trait. It has the interface of a PCIe
//! function (configuration-space image, BAR accesses, DMA, interrupts) and does not
//! depend on vfio-user, sockets or threads: its owner calls it, from one thread at a
//! time.
//!
//! Only `block` has `unsafe` code: its engines pass pointers to guest memory to the
//! kernel.

#![deny(unsafe_code)]

pub mod block;
pub mod bus;
pub mod dma_test;
pub mod nvme;
pub mod remote;
pub mod state;
pub mod virtio;

#[cfg(test)]
mod test_bus;
#[cfg(test)]
mod test_links;

pub use bus::{Bus, Dma, Interrupts};

use std::{os::fd::BorrowedFd, time::Duration};

use farside_fabric::memory::HostSlice;
use farside_pci::Description;

/// Why a device does not get another size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResizeError {
    /// It has no medium.
    #[error("the device is not a disk")]
    NoDisk,
    /// Its disk cannot have that size.
    #[error(transparent)]
    Size(#[from] block::SizeError),
}

/// How a device's owner waits for the driver, if it would otherwise busy-poll. Polling takes CPU time, which the guest may need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// It busy-polls: the driver may be waiting for the device.
    BusyPoll,
    /// It polls at intervals, and looks at nothing else of the device meanwhile: the driver does not wait for each request, and takes
    /// longer to make one than to wait for a poll.
    Nap,
    /// It enables notifications and blocks: the device is waiting for the driver, which is behind.
    Block,
}

/// The model of a PCIe function.
///
/// All calls come from one thread. Except for [`Device::flush`], a call waits for the medium only for a
/// copy to or from the page cache that the kernel throttles, and then uses workers for a while: other
/// operations are started by one call and finished by [`Device::poll`].
pub trait Device: Send {
    /// The function's configuration space, BARs and vectors. Constant for the lifetime of
    /// the device.
    fn description(&self) -> &Description;

    /// Reads `data.len()` (1, 2, 4 or 8, naturally aligned) bytes at `offset`
    /// of BAR `bar`. The owner has checked `offset` against the BAR's size.
    fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8], bus: &mut Bus<'_>);

    /// Writes `data` (1, 2, 4 or 8 bytes, naturally aligned) at `offset` of
    /// BAR `bar`.
    fn bar_write(&mut self, bar: u8, offset: u64, data: &[u8], bus: &mut Bus<'_>);

    /// Sets the memory behind sparse mmap area `area` of BAR `bar` (see
    /// [`farside_pci::Bar::mappable`]), which the borrower's CPU accesses without a
    /// trap. `None` removes it.
    fn set_bar_memory(&mut self, bar: u8, area: usize, memory: Option<HostSlice>);

    /// Processes without blocking: fetches commands, reaps completions, raises
    /// interrupts. Returns whether there was any work.
    fn poll(&mut self, bus: &mut Bus<'_>) -> bool;

    /// Enables notifications, then checks for work again. Returns true if there is none:
    /// the owner may sleep until a BAR access arrives or [`Device::wake_fd`] is readable, unless it
    /// [is polled](Device::is_polled).
    fn enable_notifications(&mut self, bus: &mut Bus<'_>) -> bool;

    /// Whether the guest may give it work without any notification, so that its owner has to poll it.
    fn is_polled(&self) -> bool {
        false
    }

    /// The longest time for which its owner may sleep, if other processes give it work without a notification.
    fn looks_again(&self) -> Option<Duration> {
        None
    }

    /// How its owner waits after a [`Device::poll`] without work.
    fn waiting(&self) -> Waiting {
        Waiting::BusyPoll
    }

    /// Readable when there is work for [`Device::poll`] that no BAR access triggers,
    /// such as completions of the medium.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Stops new DMA. Returns true once none is in flight; until then the owner calls it
    /// again whenever `wake_fd` is readable. [`Device::resume`] restarts the device.
    fn quiesce(&mut self, bus: &mut Bus<'_>) -> bool;

    /// Ends a quiesce that was not followed by a reset.
    fn resume(&mut self, bus: &mut Bus<'_>);

    /// A current problem for the operator, such as a failing medium. The text does not
    /// change while the problem persists.
    fn problem(&self) -> Option<&str> {
        None
    }

    /// How many commands are in flight, and the most that may be; `None` for a device without
    /// commands.
    fn in_flight(&self) -> Option<(u64, u64)> {
        None
    }

    /// Counters for the user, by name, since the device was created.
    fn stats(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Restores the function's power-on state (conventional or function-level reset;
    /// PCIe 6.6). The owner has quiesced the device; the reset also resumes it.
    fn reset(&mut self);

    /// Bytes of the state that outlives the device's process; 0 if it has none.
    fn state_bytes(&self) -> u64 {
        0
    }

    /// Keeps the state in `memory`, [`Device::state_bytes`] of the borrower's, in a way that another process can
    /// go on from any instruction of this one. With `resume`, goes on with what such a process has left there;
    /// returns whether there was anything. The device has been reset. Other processes may write to the memory: it is
    /// read once, and what is found there does nothing that a guest could not do.
    ///
    /// # Errors
    /// What is there is invalid, or of another version, as text.
    fn set_state(&mut self, _memory: HostSlice, _resume: bool) -> Result<bool, String> {
        Err("the device has no state that outlives its process".into())
    }

    /// Leaves the state as it is from now on.
    fn detach_state(&mut self) {}

    /// The medium has grown to `size` bytes. The next [`Device::poll`] notifies the guest.
    ///
    /// # Errors
    /// A [`ResizeError`]: nothing has changed.
    fn resize(&mut self, _size: u64) -> Result<(), ResizeError> {
        Err(ResizeError::NoDisk)
    }

    /// Flushes all writes to the medium and waits for completion, after
    /// [`Device::quiesce`] has succeeded. A no-op for a device without a medium.
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
