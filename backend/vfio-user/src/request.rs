//! Typed requests, with all checks that do not depend on the device.

use std::os::fd::OwnedFd;

use farside_irq_relay::{IrqIndex, SetIrqsMessage};

use super::refusal::Refusal;
use super::region::{REGION_INFO_SIZE, Region};
use super::version::Negotiated;
use super::{Command, DMA_PAGE_SIZE, MAX_DATA_XFER_SIZE};
use farside_vfio_user_wire::Cursor;

/// A request that is valid by the protocol. The device checks the rest, such as
/// accesses against the size of a region.
#[derive(Debug)]
pub enum Request<'a> {
    /// The first request, already negotiated: answer with
    /// [`Reply::Version`](super::Reply::Version).
    Version(Negotiated),
    /// Maps client memory.
    DmaMap(DmaMap),
    /// Unmaps client memory.
    DmaUnmap(DmaUnmap),
    /// Queries the device.
    DeviceGetInfo,
    /// Queries a region.
    DeviceGetRegionInfo {
        /// The region.
        region: Region,
        /// Most bytes that the client accepts as the reply's payload.
        argsz: u32,
    },
    /// Queries an interrupt type.
    DeviceGetIrqInfo {
        /// The type.
        index: IrqIndex,
    },
    /// Sets up, masks or triggers interrupts.
    ///
    /// [`SetIrqs::decode`](farside_irq_relay::SetIrqs::decode) checks the request
    /// against the function's vectors.
    DeviceSetIrqs(SetIrqsMessage<'a>),
    /// Reads `count` bytes, at most [`MAX_DATA_XFER_SIZE`].
    ///
    /// An error reply to this request hangs clients built on the crate `vfio_user`:
    /// where a device would complete a read with Unsupported Request, reply all ones.
    RegionRead {
        /// The region.
        region: Region,
        /// Offset in the region, bytes; `offset + count` does not overflow.
        offset: u64,
        /// Bytes.
        count: u32,
    },
    /// Writes to a region.
    RegionWrite(RegionWrite<'a>),
    /// Several writes, in order, of at most 8 bytes each.
    RegionWriteMulti(WriteMulti<'a>),
    /// Resets the device.
    DeviceReset,
}

/// A range of client memory that the device may access.
#[derive(Debug)]
pub struct DmaMap {
    /// First address on the device's bus: page aligned; the range does not
    /// wrap.
    pub address: u64,
    /// Bytes: page aligned, not 0.
    pub size: u64,
    /// File offset of the range in `fd`: page aligned; the range does not wrap. Not
    /// checked against the file's size.
    pub offset: u64,
    /// Whether the device may read it.
    pub readable: bool,
    /// Whether the device may write it.
    pub writable: bool,
    /// The file to map. `None`: the memory is reachable by `DMA_READ` and `DMA_WRITE`
    /// only.
    pub fd: Option<OwnedFd>,
}

/// The client memory to unmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaUnmap {
    /// Every mapping within the range: QEMU unmaps in one request what it mapped in
    /// parts (virtio-mem's blocks), as VFIO's type 1 allows. `ENOENT` if the range
    /// holds no mapping, `EINVAL` if a mapping would be split.
    Range {
        /// First address on the device's bus.
        address: u64,
        /// Bytes, not 0; the range does not wrap.
        size: u64,
    },
    /// All mappings.
    All,
}

/// A write to a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionWrite<'a> {
    /// The region.
    pub region: Region,
    /// Offset in the region, bytes; `offset + data.len()` does not overflow.
    pub offset: u64,
    /// At most [`MAX_DATA_XFER_SIZE`] bytes.
    pub data: &'a [u8],
}

/// The writes of a `REGION_WRITE_MULTI`, all of them checked.
#[derive(Clone, Copy, Debug)]
pub struct WriteMulti<'a> {
    records: &'a [u8],
}

/// Bytes of one record of a `REGION_WRITE_MULTI`.
const MULTI_RECORD: usize = 24;

/// `DMA_MAP` flags. Other flags are ignored: newer clients set hints on the use of the
/// descriptor.
const MAP_READ: u32 = 1 << 0;
const MAP_WRITE: u32 = 1 << 1;

/// `DMA_UNMAP` flags, as in `linux/vfio.h`.
const UNMAP_DIRTY_BITMAP: u32 = 1 << 0;
const UNMAP_ALL: u32 = 1 << 1;

impl<'a> Request<'a> {
    /// Decodes the payload of `command`. `DEVICE_GET_REGION_IO_FDS` is refused, since
    /// its reply must carry at least one descriptor.
    ///
    /// Descriptors that the command does not take are closed and the request is
    /// served, as libvfio-user does: SPDK's client sends one with `DMA_UNMAP`, and a
    /// refusal would leave the range mapped. `fds_refused` matters only to the
    /// commands that take descriptors.
    pub(super) fn decode(
        command: Command,
        payload: &'a [u8],
        fds: Vec<OwnedFd>,
        fds_refused: bool,
    ) -> Result<Self, Refusal> {
        let takes_fds = matches!(command, Command::DmaMap | Command::DeviceSetIrqs);
        if takes_fds && fds_refused {
            return Err(Refusal::TooManyFds(command));
        }
        let fields = Fields { command, payload };

        match command {
            Command::Version => Ok(Self::Version(Negotiated::decode(payload)?)),
            Command::DmaMap => DmaMap::decode(fields, fds.into_iter().next()).map(Self::DmaMap),
            Command::DmaUnmap => DmaUnmap::decode(fields).map(Self::DmaUnmap),
            Command::DeviceGetInfo => {
                fields.query(16)?;
                Ok(Self::DeviceGetInfo)
            }
            Command::DeviceGetRegionInfo => {
                let (argsz, index) = fields.query(REGION_INFO_SIZE)?;
                Ok(Self::DeviceGetRegionInfo {
                    region: index.try_into()?,
                    argsz,
                })
            }
            Command::DeviceGetIrqInfo => {
                let (_, index) = fields.query(16)?;
                Ok(Self::DeviceGetIrqInfo {
                    index: IrqIndex::try_from(index).map_err(|_| Refusal::IrqIndex(index))?,
                })
            }
            Command::DeviceSetIrqs => fields.set_irqs(fds).map(Self::DeviceSetIrqs),
            Command::RegionRead => {
                let access = fields.access()?;
                fields.exactly(16)?;
                let Access {
                    region,
                    offset,
                    count,
                    ..
                } = access.checked()?;
                Ok(Self::RegionRead {
                    region,
                    offset,
                    count,
                })
            }
            Command::RegionWrite => {
                let Access {
                    region,
                    offset,
                    count,
                    data,
                } = fields.access()?.checked()?;
                // `checked` has limited `count` to MAX_DATA_XFER_SIZE.
                fields.exactly(16 + count as usize)?;
                Ok(Self::RegionWrite(RegionWrite {
                    region,
                    offset,
                    data,
                }))
            }
            Command::RegionWriteMulti => WriteMulti::decode(fields).map(Self::RegionWriteMulti),
            Command::DeviceReset => {
                fields.exactly(0)?;
                Ok(Self::DeviceReset)
            }
            Command::DeviceGetRegionIoFds
            | Command::DmaRead
            | Command::DmaWrite
            | Command::DirtyPages
            | Command::DeviceFeature
            | Command::MigDataRead
            | Command::MigDataWrite => Err(Refusal::Unsupported(command)),
        }
    }

    /// The request's command.
    pub fn command(&self) -> Command {
        match self {
            Self::Version(_) => Command::Version,
            Self::DmaMap(_) => Command::DmaMap,
            Self::DmaUnmap(_) => Command::DmaUnmap,
            Self::DeviceGetInfo => Command::DeviceGetInfo,
            Self::DeviceGetRegionInfo { .. } => Command::DeviceGetRegionInfo,
            Self::DeviceGetIrqInfo { .. } => Command::DeviceGetIrqInfo,
            Self::DeviceSetIrqs(_) => Command::DeviceSetIrqs,
            Self::RegionRead { .. } => Command::RegionRead,
            Self::RegionWrite(_) => Command::RegionWrite,
            Self::RegionWriteMulti(_) => Command::RegionWriteMulti,
            Self::DeviceReset => Command::DeviceReset,
        }
    }
}

impl DmaMap {
    fn decode(fields: Fields<'_>, fd: Option<OwnedFd>) -> Result<Self, Refusal> {
        const SIZE: usize = 32;
        let mut cursor = fields.exactly(SIZE)?;
        let parts = (
            cursor.u32(),
            cursor.u32(),
            cursor.u64(),
            cursor.u64(),
            cursor.u64(),
        );
        let (Some(argsz), Some(flags), Some(offset), Some(address), Some(size)) = parts else {
            return Err(fields.size(SIZE));
        };
        fields.argsz(argsz, SIZE as u32)?;
        check_dma_range(address, size)?;
        if !offset.is_multiple_of(DMA_PAGE_SIZE) || offset.checked_add(size).is_none() {
            return Err(Refusal::DmaOffset { offset, size });
        }
        Ok(Self {
            address,
            size,
            offset,
            readable: flags & MAP_READ != 0,
            writable: flags & MAP_WRITE != 0,
            fd,
        })
    }
}

impl DmaUnmap {
    fn decode(fields: Fields<'_>) -> Result<Self, Refusal> {
        const SIZE: usize = 24;
        let command = fields.command;
        let mut cursor = Cursor::new(fields.payload);
        let parts = (cursor.u32(), cursor.u32(), cursor.u64(), cursor.u64());
        let (Some(argsz), Some(flags), Some(address), Some(size)) = parts else {
            return Err(fields.size(SIZE));
        };
        // Before the length check: a request for the dirty bitmap is longer, and
        // must fail with ENOTSUP.
        match flags {
            0 | UNMAP_ALL => fields.exactly(SIZE)?,
            _ if flags == UNMAP_ALL | UNMAP_DIRTY_BITMAP => {
                return Err(Refusal::Flags { command, flags });
            }
            _ => return Err(Refusal::UnsupportedFlags { command, flags }),
        };
        fields.argsz(argsz, SIZE as u32)?;
        if flags == UNMAP_ALL {
            if address != 0 || size != 0 {
                return Err(Refusal::DmaRange { address, size });
            }
            return Ok(Self::All);
        }
        check_dma_range(address, size)?;
        Ok(Self::Range { address, size })
    }
}

/// Not empty, whole pages, and the last byte is below 2⁶⁴.
fn check_dma_range(address: u64, size: u64) -> Result<(), Refusal> {
    let aligned = address.is_multiple_of(DMA_PAGE_SIZE) && size.is_multiple_of(DMA_PAGE_SIZE);
    // By the last byte: a range may end at 2⁶⁴ exactly.
    match size
        .checked_sub(1)
        .and_then(|last| address.checked_add(last))
    {
        Some(_) if aligned => Ok(()),
        _ => Err(Refusal::DmaRange { address, size }),
    }
}

impl<'a> WriteMulti<'a> {
    fn decode(fields: Fields<'a>) -> Result<Self, Refusal> {
        let mut cursor = Cursor::new(fields.payload);
        let count = cursor.u64().ok_or_else(|| fields.size(8))?;
        let records = cursor.rest();
        let expected = usize::try_from(count)
            .ok()
            .and_then(|count| count.checked_mul(MULTI_RECORD))
            .unwrap_or(usize::MAX);
        if records.len() != expected {
            return Err(fields.size(expected.saturating_add(8)));
        }
        // All writes are checked before the first is carried out.
        for record in records.chunks_exact(MULTI_RECORD) {
            record_write(fields.command, record)?;
        }
        Ok(Self { records })
    }

    /// Number of writes.
    pub fn len(&self) -> usize {
        self.records.len() / MULTI_RECORD
    }

    /// Whether the request holds no writes.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// The writes, in order.
    pub fn writes(&self) -> impl Iterator<Item = RegionWrite<'a>> + use<'a> {
        // Each was checked when the request was decoded.
        let records = self.records.chunks_exact(MULTI_RECORD);
        records.filter_map(|record| record_write(Command::RegionWriteMulti, record).ok())
    }
}

fn record_write(command: Command, record: &[u8]) -> Result<RegionWrite<'_>, Refusal> {
    let Access {
        region,
        offset,
        count,
        data,
    } = Fields {
        command,
        payload: record,
    }
    .access()?
    .checked()?;
    let data = data
        .get(..count as usize)
        .ok_or(Refusal::MultiWriteTooLarge(count))?;
    Ok(RegionWrite {
        region,
        offset,
        data,
    })
}

/// An unchecked payload.
#[derive(Clone, Copy)]
struct Fields<'a> {
    command: Command,
    payload: &'a [u8],
}

/// The fields that region reads and writes share, and the bytes behind them.
struct Access<'a, R> {
    region: R,
    offset: u64,
    count: u32,
    data: &'a [u8],
}

impl<'a> Fields<'a> {
    fn size(&self, expected: usize) -> Refusal {
        Refusal::PayloadSize {
            command: self.command,
            actual: self.payload.len(),
            expected,
        }
    }

    /// The payload, if it has exactly `expected` bytes.
    fn exactly(&self, expected: usize) -> Result<Cursor<'a>, Refusal> {
        if self.payload.len() != expected {
            return Err(self.size(expected));
        }
        Ok(Cursor::new(self.payload))
    }

    fn argsz(&self, argsz: u32, needed: u32) -> Result<(), Refusal> {
        if argsz < needed {
            return Err(Refusal::Argsz {
                command: self.command,
                argsz,
                needed,
            });
        }
        Ok(())
    }

    /// `argsz` and the index of a query whose reply has at least `reply` bytes. The
    /// payload may be longer: clients send the buffer that the reply is to fill.
    fn query(&self, reply: u32) -> Result<(u32, u32), Refusal> {
        let needed = reply as usize;
        let mut cursor = Cursor::new(self.payload);
        let (Some(argsz), Some(_flags), Some(index)) = (cursor.u32(), cursor.u32(), cursor.u32())
        else {
            return Err(self.size(needed));
        };
        if self.payload.len() < needed {
            return Err(self.size(needed));
        }
        self.argsz(argsz, reply)?;
        Ok((argsz, index))
    }

    /// `struct vfio_irq_set`, with the eventfds that are its data.
    fn set_irqs(&self, fds: Vec<OwnedFd>) -> Result<SetIrqsMessage<'a>, Refusal> {
        let mut cursor = Cursor::new(self.payload);
        let parts = (
            cursor.u32(),
            cursor.u32(),
            cursor.u32(),
            cursor.u32(),
            cursor.u32(),
        );
        let (Some(argsz), Some(flags), Some(index), Some(start), Some(count)) = parts else {
            return Err(self.size(20));
        };
        // Below MAX_MESSAGE_SIZE, so it fits.
        self.argsz(argsz, self.payload.len() as u32)?;
        Ok(SetIrqsMessage {
            flags,
            index,
            start,
            count,
            data: cursor.rest(),
            fds,
        })
    }

    fn access(&self) -> Result<Access<'a, u32>, Refusal> {
        let mut cursor = Cursor::new(self.payload);
        let (Some(offset), Some(region), Some(count)) = (cursor.u64(), cursor.u32(), cursor.u32())
        else {
            return Err(self.size(16));
        };
        Ok(Access {
            region,
            offset,
            count,
            data: cursor.rest(),
        })
    }
}

impl<'a> Access<'a, u32> {
    fn checked(self) -> Result<Access<'a, Region>, Refusal> {
        let Self {
            region,
            offset,
            count,
            data,
        } = self;
        if count > MAX_DATA_XFER_SIZE {
            return Err(Refusal::TransferTooLarge(count));
        }
        let region = Region::try_from(region)?;
        if offset.checked_add(count.into()).is_none() {
            return Err(Refusal::RegionRange { offset, count });
        }
        Ok(Access {
            region,
            offset,
            count,
            data,
        })
    }
}
