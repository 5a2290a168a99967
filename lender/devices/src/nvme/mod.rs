//! An NVMe controller (NVM Express 1.4) with one namespace on an image file or
//! block device.
//!
//! # Command processing
//!
//! 1. The guest writes an entry to a submission queue and moves the tail, by a
//!    doorbell register (`controller`) or a shadow doorbell (`doorbells`).
//! 2. A poll copies the entry out of guest memory, once, and decodes it
//!    (`command`, `admin`, `io`). Lists of pages or descriptors are copied
//!    once too, within bounds (`prp`, `sgl`).
//! 3. The pages become host slices, the slices vectors of one system call
//!    ([`block`](crate::block)): data moves between the image and guest memory without a
//!    bounce buffer.
//! 4. When the I/O is complete, the completion is posted and, once per batch, the
//!    interrupt raised (`queues`).
//!
//! # Limits
//!
//! Commands in flight (`slots`), bytes of a transfer (`identify::MDTS`),
//! descriptors of a list (`sgl`), ranges of a deallocation (256), event
//! requests (`events`), entries of the error log (`logs`), pages of reservation notifications (`reservation_log`), queues and their
//! sizes (`registers`). These bound the memory that a guest can make the model use.
//!
//! # Teardown
//!
//! The guest memory of a command is released when the kernel has finished the I/O on it,
//! and all of it before the device is quiesced; CSTS.RDY of a disabled controller stays
//! set until then.

mod admin;
mod cmb;
mod command;
mod config;
mod controller;
mod doorbells;
mod events;
mod features;
mod identify;
mod io;
mod logs;
mod namespace;
mod pci;
mod prp;
mod queues;
mod recovery;
mod registers;
mod reservation_log;
mod reservations;
mod ring;
pub(crate) mod saved;
mod sgl;
mod slots;
mod stats;
mod status;

#[cfg(test)]
pub(crate) mod tests;

pub use config::{Config, ConfigError, MODEL_LEN};
pub use controller::Nvme;
pub use pci::{DEVICE_ID, VENDOR_ID};
pub use reservations::{FileError, Lent as LentReservations, ReservationFile};

pub(crate) use reservations::{Group, MAX_REQUEST};
pub(crate) use saved::STATE_KIND;

use farside_fabric::{Access, memory::HostSlice};

use crate::Dma;
use command::DataPointer;
use status::Status;

/// Appends the host memory behind `len` bytes at a data pointer.
fn gather(
    dma: &mut dyn Dma,
    pointer: &DataPointer,
    len: usize,
    page_size: u64,
    access: Access,
    out: &mut Vec<HostSlice>,
) -> Result<(), Status> {
    match pointer {
        DataPointer::Prp(prp1, prp2) => {
            prp::gather(dma, (*prp1, *prp2), len, page_size, access, out)
        }
        DataPointer::Sgl(first) => sgl::gather(dma, first, len, access, out),
    }
}
