//! Typed replies.

use std::os::fd::BorrowedFd;

use farside_irq_relay::{IrqIndex, IrqInfo};

use super::region::{NUM_REGIONS, Region, RegionInfo};
use super::request::DmaUnmap;
use super::version::Negotiated;
use farside_vfio_user_wire::Put;
use farside_vfio_user_wire::{ReplyTo, finish};
use rustix::io::Errno;

/// A reply to the request of the same name.
#[derive(Clone, Copy, Debug)]
pub enum Reply<'a> {
    /// Success without a payload: for `DMA_MAP`, `DEVICE_SET_IRQS` and
    /// `DEVICE_RESET`.
    Done,
    /// Version and capabilities.
    Version(Negotiated),
    /// The range is no longer reachable.
    DmaUnmap(DmaUnmap),
    /// The device's properties.
    DeviceInfo(DeviceInfo),
    /// A region's properties.
    RegionInfo {
        /// The region.
        info: RegionInfo<'a>,
        /// The request's `argsz`: most payload bytes of this reply.
        argsz: u32,
    },
    /// An interrupt type's properties.
    IrqInfo {
        /// The request's index.
        index: IrqIndex,
        /// Flags and number of vectors.
        info: IrqInfo,
    },
    /// The data read; at most
    /// [`MAX_DATA_XFER_SIZE`](super::MAX_DATA_XFER_SIZE) bytes.
    RegionRead {
        /// The request's region.
        region: Region,
        /// The request's offset.
        offset: u64,
        /// As many bytes as requested.
        data: &'a [u8],
    },
    /// The write is done.
    RegionWrite {
        /// The request's region.
        region: Region,
        /// The request's offset.
        offset: u64,
        /// Bytes written.
        count: u32,
    },
    /// The writes are done.
    RegionWriteMulti {
        /// Number of writes.
        done: u64,
    },
}

/// The properties of a PCI device, which always has 9 regions and 5 interrupt types
/// (`linux/vfio.h`), some of them empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Whether `DEVICE_RESET` is served.
    pub resettable: bool,
}

const DEVICE_RESET: u32 = 1 << 0;
const DEVICE_PCI: u32 = 1 << 1;
const UNMAP_ALL: u32 = 1 << 1;

/// Appends a reply to `out`, which is empty, and returns its descriptor.
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
            out.put_u32(IrqIndex::ALL.len() as u32);
        }
        Reply::RegionInfo { info, argsz } => fd = info.encode(argsz, out),
        Reply::IrqInfo { index, info } => {
            out.put_u32(16);
            out.put_u32(info.flags);
            out.put_u32(index as u32);
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
