//! A dummy device: regions of plain bytes, a list of DMA ranges, a record of requests.
//! It answers as a backend would.

use std::os::fd::{AsFd, OwnedFd};

use farside_irq_relay::{IrqCounts, IrqData, IrqIndex, IrqTarget, SetIrqs, SetIrqsMessage};
use farside_vfio_user::serve::{Answer, Handler};
use farside_vfio_user::{
    DeviceInfo, DmaMap, DmaUnmap, Errno, Mappable, Refusal, Region, RegionInfo, Reply, ReplyTo,
    Request, SparseArea,
};

/// Bytes of BAR 0, whose second page supports mmap.
pub const BAR0_SIZE: u64 = 0x4000;
/// Bytes of BAR 2, which supports mmap.
pub const BAR2_SIZE: u64 = 0x1000;
/// Bytes of configuration space.
pub const CONFIG_SIZE: u64 = 4096;
/// MSI-X vectors.
pub const VECTORS: u16 = 8;
/// Offset of BAR 0 in its file.
pub const BAR0_FILE_OFFSET: u64 = 0x10000;

const AREAS: &[SparseArea] = &[SparseArea {
    offset: 0x1000,
    size: 0x1000,
}];

/// The device.
pub struct TestDevice {
    pub bar0: Vec<u8>,
    bar2: Vec<u8>,
    config: Vec<u8>,
    file: OwnedFd,
    read: Vec<u8>,
    /// Mapped ranges: address, size, whether with a descriptor.
    pub dma: Vec<(u64, u64, bool)>,
    /// Eventfds of the MSI-X vectors.
    pub eventfds: Vec<Option<IrqTarget>>,
    /// Vectors that a client triggered.
    pub triggered: Vec<u16>,
    /// Number of resets.
    pub resets: u32,
    /// Whether the test answers resets, later.
    pub defer_reset: Option<Option<ReplyTo>>,
}

impl TestDevice {
    pub fn new() -> Self {
        let file = rustix::fs::memfd_create("bar", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, BAR0_FILE_OFFSET + BAR0_SIZE).unwrap();
        Self {
            bar0: vec![0; BAR0_SIZE as usize],
            bar2: vec![0; BAR2_SIZE as usize],
            config: (0..CONFIG_SIZE).map(|at| at as u8).collect(),
            file,
            read: Vec::new(),
            dma: Vec::new(),
            eventfds: (0..VECTORS).map(|_| None).collect(),
            triggered: Vec::new(),
            resets: 0,
            defer_reset: None,
        }
    }

    fn memory(&mut self, region: Region) -> &mut [u8] {
        match region {
            Region::Bar(0) => &mut self.bar0,
            Region::Bar(2) => &mut self.bar2,
            Region::Config => &mut self.config,
            _ => &mut [],
        }
    }

    fn region_info(&self, region: Region) -> RegionInfo<'_> {
        let (size, mappable) = match region {
            Region::Bar(0) => (BAR0_SIZE, Some((BAR0_FILE_OFFSET, AREAS))),
            Region::Bar(2) => (BAR2_SIZE, Some((0, &[][..]))),
            Region::Config => (CONFIG_SIZE, None),
            _ => return RegionInfo::absent(region),
        };
        let mappable = mappable.map(|(offset, areas)| Mappable {
            fd: self.file.as_fd(),
            offset,
            areas,
        });
        RegionInfo {
            region,
            size,
            readable: true,
            writable: true,
            mappable,
        }
    }

    fn write(&mut self, region: Region, offset: u64, data: &[u8]) -> Result<(), Errno> {
        let memory = self.memory(region);
        let start = usize::try_from(offset).map_err(|_| Errno::INVAL)?;
        let end = start.checked_add(data.len()).ok_or(Errno::INVAL)?;
        memory
            .get_mut(start..end)
            .ok_or(Errno::INVAL)?
            .copy_from_slice(data);
        Ok(())
    }

    fn map(&mut self, map: DmaMap) -> Result<(), Errno> {
        let last = map.address + (map.size - 1);
        let overlaps = |&(address, size, _): &(u64, u64, bool)| {
            address <= last && map.address <= address + (size - 1)
        };
        if self.dma.iter().any(overlaps) {
            return Err(Errno::EXIST);
        }
        self.dma.push((map.address, map.size, map.fd.is_some()));
        Ok(())
    }

    fn unmap(&mut self, unmap: DmaUnmap) -> Result<(), Errno> {
        match unmap {
            DmaUnmap::All => self.dma.clear(),
            DmaUnmap::Range { address, size } => {
                let at = self
                    .dma
                    .iter()
                    .position(|&(a, s, _)| (a, s) == (address, size));
                self.dma.remove(at.ok_or(Errno::NOENT)?);
            }
        }
        Ok(())
    }

    fn set_irqs(&mut self, message: SetIrqsMessage<'_>) -> Result<(), Errno> {
        let set = SetIrqs::decode(&counts(), message).map_err(|error| error.errno())?;
        let (range, _, data) = set.into_parts();
        if range.index() != IrqIndex::Msix {
            return Ok(());
        }
        match data {
            IrqData::None if range.count() == 0 => self.eventfds.fill_with(|| None),
            IrqData::None => self.triggered.extend(range.vectors()),
            IrqData::Bool(chosen) => {
                let chosen = range.vectors().zip(chosen).filter(|(_, chosen)| *chosen);
                self.triggered.extend(chosen.map(|(vector, _)| vector));
            }
            IrqData::Targets(targets) => {
                for (vector, target) in range.vectors().zip(targets) {
                    self.eventfds[usize::from(vector)] = target;
                }
            }
        }
        Ok(())
    }
}

/// INTx, MSI-X, error and request.
fn counts() -> IrqCounts {
    IrqCounts::new()
        .with_intx()
        .with_msix(VECTORS)
        .unwrap()
        .with_err()
        .with_req()
}

impl Handler for TestDevice {
    fn refused(&mut self, _: &Refusal) {}

    fn handle(&mut self, request: Request<'_>, to: ReplyTo) -> Answer<'_> {
        let done = |result: Result<(), Errno>, reply| match result {
            Ok(()) => Answer::Reply(reply),
            Err(errno) => Answer::Error(errno),
        };
        match request {
            Request::Version(negotiated) => Answer::Reply(Reply::Version(negotiated)),
            Request::DmaMap(map) => done(self.map(map), Reply::Done),
            Request::DmaUnmap(range) => done(self.unmap(range), Reply::DmaUnmap(range)),
            Request::DeviceGetInfo => {
                Answer::Reply(Reply::DeviceInfo(DeviceInfo { resettable: true }))
            }
            Request::DeviceGetRegionInfo { region, argsz } => Answer::Reply(Reply::RegionInfo {
                info: self.region_info(region),
                argsz,
            }),
            Request::DeviceGetIrqInfo { index } => {
                let info = counts().info(index);
                Answer::Reply(Reply::IrqInfo { index, info })
            }
            Request::DeviceSetIrqs(set) => done(self.set_irqs(set), Reply::Done),
            Request::RegionRead {
                region,
                offset,
                count,
            } => {
                let mut read = std::mem::take(&mut self.read);
                let memory = self.memory(region);
                let start = usize::try_from(offset).unwrap_or(usize::MAX);
                let end = start.saturating_add(count as usize);
                read.clear();
                let found = memory
                    .get(start..end)
                    .map(|data| read.extend_from_slice(data));
                self.read = read;
                match found {
                    Some(()) => Answer::Reply(Reply::RegionRead {
                        region,
                        offset,
                        data: &self.read,
                    }),
                    None => Answer::Error(Errno::INVAL),
                }
            }
            Request::RegionWrite(write) => {
                let count = write.data.len() as u32;
                let (region, offset) = (write.region, write.offset);
                let result = self.write(region, offset, write.data);
                done(
                    result,
                    Reply::RegionWrite {
                        region,
                        offset,
                        count,
                    },
                )
            }
            Request::RegionWriteMulti(multi) => {
                let result = multi
                    .writes()
                    .try_for_each(|w| self.write(w.region, w.offset, w.data));
                done(
                    result,
                    Reply::RegionWriteMulti {
                        done: multi.len() as u64,
                    },
                )
            }
            Request::DeviceReset => {
                self.resets += 1;
                match &mut self.defer_reset {
                    Some(deferred) => {
                        *deferred = Some(to);
                        Answer::Later
                    }
                    None => Answer::Reply(Reply::Done),
                }
            }
        }
    }
}
