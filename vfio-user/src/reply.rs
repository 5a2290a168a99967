//! Typed replies.

use std::os::fd::BorrowedFd;

use farside_irq_relay::IrqCounts;

use super::header::{ReplyTo, finish};
use super::irq::{IrqFlags, IrqIndex, NUM_IRQS};
use super::region::{NUM_REGIONS, Region, RegionInfo};
use super::request::DmaUnmap;
use super::version::Negotiated;
use super::wire::Put;
use rustix::io::Errno;

/// An answer. It goes with the request of the same name.
#[derive(Clone, Copy, Debug)]
pub enum Reply<'a> {
    /// Done, nothing to say: for `DMA_MAP`, `DEVICE_SET_IRQS` and
    /// `DEVICE_RESET`.
    Done,
    /// Version and capabilities.
    Version(Negotiated),
    /// The range is no longer reachable.
    DmaUnmap(DmaUnmap),
    /// What the device is.
    DeviceInfo(DeviceInfo),
    /// What a region is.
    RegionInfo {
        /// The region.
        info: RegionInfo<'a>,
        /// The request's `argsz`: most payload bytes of this reply.
        argsz: u32,
    },
    /// What an interrupt type is.
    IrqInfo(IrqInfo),
    /// What was read; `data` has at most
    /// [`MAX_DATA_XFER_SIZE`](super::MAX_DATA_XFER_SIZE) bytes.
    RegionRead {
        /// The request's region.
        region: Region,
        /// The request's offset.
        offset: u64,
        /// As many bytes as were asked for.
        data: &'a [u8],
    },
    /// The write was done.
    RegionWrite {
        /// The request's region.
        region: Region,
        /// The request's offset.
        offset: u64,
        /// Bytes written.
        count: u32,
    },
    /// The writes were done.
    RegionWriteMulti {
        /// How many.
        done: u64,
    },
}

/// What the device is. It is a PCI device with 9 regions and 5 interrupt types
/// (`linux/vfio.h`), present or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Whether `DEVICE_RESET` is served.
    pub resettable: bool,
}

/// What an interrupt type is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IrqInfo {
    /// The type.
    pub index: IrqIndex,
    /// What can be done with it.
    pub flags: IrqFlags,
    /// Number of vectors; 0 when the device has none.
    pub count: u32,
}

impl IrqInfo {
    /// What a function that has `counts` says of `index`.
    pub fn of(counts: &IrqCounts, index: IrqIndex) -> Self {
        let info = counts.info(farside_irq_relay::IrqIndex::ALL[index.index() as usize]);
        Self {
            index,
            flags: IrqFlags::from_bits_truncate(info.flags),
            count: info.count,
        }
    }

    /// The description of an interrupt type with `count` vectors, with the
    /// flags that Linux VFIO gives it: INTx is level triggered and masks
    /// itself; MSI and MSI-X are set up as a set; the rest just signal.
    pub fn pci(index: IrqIndex, count: u32) -> Self {
        let flags = match index {
            _ if count == 0 => IrqFlags::empty(),
            IrqIndex::Intx => IrqFlags::EVENTFD | IrqFlags::MASKABLE | IrqFlags::AUTOMASKED,
            IrqIndex::Msi | IrqIndex::Msix => IrqFlags::EVENTFD | IrqFlags::NORESIZE,
            IrqIndex::Error | IrqIndex::Request => IrqFlags::EVENTFD | IrqFlags::NORESIZE,
        };
        Self {
            index,
            flags,
            count,
        }
    }
}

const DEVICE_RESET: u32 = 1 << 0;
const DEVICE_PCI: u32 = 1 << 1;
const UNMAP_ALL: u32 = 1 << 1;

/// Appends a reply to `out`, which is empty, and returns the descriptor that
/// goes with it.
pub(super) fn encode<'a>(
    to: ReplyTo,
    reply: Result<Reply<'a>, Errno>,
    out: &mut Vec<u8>,
) -> Option<BorrowedFd<'a>> {
    let reply = match reply {
        Ok(reply) => reply,
        Err(errno) => {
            to.begin(Some(errno.raw_os_error().unsigned_abs()), out);
            return None;
        }
    };
    to.begin(None, out);
    let mut fd = None;
    match reply {
        Reply::Done => {}
        Reply::Version(negotiated) => negotiated.encode(out),
        Reply::DmaUnmap(range) => {
            let (flags, address, size) = match range {
                DmaUnmap::Range { address, size } => (0, address, size),
                DmaUnmap::All => (UNMAP_ALL, 0, 0),
            };
            out.put_u32(24);
            out.put_u32(flags);
            out.put_u64(address);
            out.put_u64(size);
        }
        Reply::DeviceInfo(info) => {
            out.put_u32(16);
            out.put_u32(DEVICE_PCI | if info.resettable { DEVICE_RESET } else { 0 });
            out.put_u32(NUM_REGIONS);
            out.put_u32(NUM_IRQS);
        }
        Reply::RegionInfo { info, argsz } => fd = info.encode(argsz, out),
        Reply::IrqInfo(info) => {
            out.put_u32(16);
            out.put_u32(info.flags.bits());
            out.put_u32(info.index.index());
            out.put_u32(info.count);
        }
        Reply::RegionRead {
            region,
            offset,
            data,
        } => {
            out.put_u64(offset);
            out.put_u32(region.index());
            out.put_u32(data.len() as u32); // at most MAX_DATA_XFER_SIZE
            out.extend_from_slice(data);
        }
        Reply::RegionWrite {
            region,
            offset,
            count,
        } => {
            out.put_u64(offset);
            out.put_u32(region.index());
            out.put_u32(count);
        }
        Reply::RegionWriteMulti { done } => out.put_u64(done),
    }
    finish(out);
    fd
}
