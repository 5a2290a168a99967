//! The device as seen by the VMM: a connection to a backend, and its BARs.
//!
//! A BAR access is a load or store where the backend offers mmap, and a message elsewhere.
//! Both are counted.
//!
//! The client (0.1.7) ignores errors in replies to `DMA_MAP`, `SET_IRQS` and
//! `DEVICE_RESET`; QEMU only prints them. A refusal shows later: bus-master enable reads as
//! clear.

use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use vfio_user::{Client, Error};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

use crate::ram::{Block, PAGE, Ram};
use crate::report::Area;
use crate::vectors::Vectors;

/// Region number of configuration space; BARs have the numbers 0 to 5.
pub const CONFIG: u32 = 7;

const BARS: u32 = 6;
/// `VFIO_REGION_INFO_FLAG_MMAP`.
const CAN_MAP: u32 = 1 << 2;
/// `VFIO_PCI_INTX_IRQ_INDEX`.
const INTX: u32 = 0;
/// `VFIO_PCI_MSIX_IRQ_INDEX`.
const MSIX: u32 = 2;
const DATA_NONE: u32 = 1 << 0;
const DATA_EVENTFD: u32 = 1 << 2;
const TRIGGER: u32 = 1 << 5;
/// Delay between attempts to connect.
const RETRY: Duration = Duration::from_millis(10);
/// Most descriptors that one message carries.
const CHUNK: usize = 16;

/// Part of a BAR that is accessed without a message.
struct Mapped {
    bar: u32,
    offset: u64,
    memory: MmapRegion,
}

/// A connection to a device.
pub struct Device {
    /// None once the connection is closed.
    client: Option<Client>,
    mapped: Vec<Mapped>,
    vectors: u32,
    accesses: Accesses,
}

/// Register accesses by kind.
#[derive(Clone, Copy, Debug, Default)]
pub struct Accesses {
    /// Loads and stores.
    pub mapped: u64,
    /// Messages.
    pub trapped: u64,
}

impl Device {
    /// Connects, retrying for `patience` until the socket is served; negotiates, and
    /// queries regions and interrupts.
    ///
    /// # Errors
    /// If the socket is not served, or the device is unusable: the backend's log has the
    /// reason.
    pub fn connect(socket: &Path, patience: Duration) -> Result<Self> {
        let until = Instant::now() + patience;
        let mut client = loop {
            match Client::new(socket) {
                // There is no event for a new socket.
                Err(Error::Connect(_)) if Instant::now() < until => std::thread::sleep(RETRY),
                client => break client,
            }
        }
        .with_context(|| format!("connecting to the device socket {}", socket.display()))?;
        let mapped = map_bars(&client)?;
        let msix = client.get_irq_info(MSIX).context("asking for MSI-X")?;
        Ok(Self {
            client: Some(client),
            mapped,
            vectors: msix.count,
            accesses: Accesses::default(),
        })
    }

    /// MSI-X vectors.
    pub fn vectors(&self) -> u32 {
        self.vectors
    }

    /// Register accesses so far.
    pub fn accesses(&self) -> Accesses {
        self.accesses
    }

    /// All areas of all BARs, mapped and trapped.
    pub fn areas(&self) -> Vec<Area> {
        let mut areas = Vec::new();
        for bar in 0..BARS {
            let region = self.client.as_ref().and_then(|client| client.region(bar));
            let size = region.map_or(0, |region| region.size);
            let mut mapped: Vec<_> = self
                .mapped
                .iter()
                .filter(|mapped| mapped.bar == bar)
                .map(|mapped| (mapped.offset, mapped.memory.size() as u64))
                .collect();
            mapped.sort_unstable();
            areas.extend(split(bar, size, &mapped));
        }
        areas
    }

    /// Closes the connection and unmaps the BARs, as an exiting VMM does. The device is not
    /// lent again while a process has a BAR mapped.
    pub fn close(&mut self) {
        self.client = None;
        self.mapped.clear();
    }

    fn client(&mut self) -> Result<&mut Client> {
        self.client.as_mut().context("the connection is closed")
    }

    /// Maps a block of RAM for the device (`DMA_MAP`).
    ///
    /// # Errors
    /// If the connection is lost; a refusal is not reported.
    pub fn map(&mut self, ram: &Ram, block: Block) -> Result<()> {
        let fd = ram.file().as_raw_fd();
        self.client()?
            .dma_map(block.offset, block.gpa, block.len, fd)
            .with_context(|| format!("DMA_MAP of {:#x} bytes at {:#x}", block.len, block.gpa))
    }

    /// Unmaps a block of RAM (`DMA_UNMAP`).
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn unmap(&mut self, block: Block) -> Result<()> {
        self.client()?
            .dma_unmap(block.gpa, block.len)
            .with_context(|| format!("DMA_UNMAP of {:#x} bytes at {:#x}", block.len, block.gpa))
    }

    /// `DEVICE_RESET`.
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn reset(&mut self) -> Result<()> {
        self.client()?.reset().context("DEVICE_RESET")
    }

    /// Assigns these eventfds to the MSI-X vectors.
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn enable_vectors(&mut self, vectors: &Vectors) -> Result<()> {
        let fds = vectors.fds();
        for (n, chunk) in fds.chunks(CHUNK).enumerate() {
            let (start, count) = ((n * CHUNK) as u32, chunk.len() as u32);
            self.client()?
                .set_irqs(MSIX, DATA_EVENTFD | TRIGGER, start, count, chunk)
                .with_context(|| format!("SET_IRQS of {count} vectors from {start} on"))?;
        }
        Ok(())
    }

    /// Disables MSI-X signalling.
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn disable_vectors(&mut self) -> Result<()> {
        self.client()?
            .set_irqs(MSIX, DATA_NONE | TRIGGER, 0, 0, &[])
            .context("SET_IRQS without vectors")
    }

    /// Assigns the one eventfd to INTx.
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn enable_intx(&mut self, line: &Vectors) -> Result<()> {
        self.client()?
            .set_irqs(INTX, DATA_EVENTFD | TRIGGER, 0, line.len(), &line.fds())
            .context("SET_IRQS of INTx")
    }

    /// Reads a region by message.
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<()> {
        self.accesses.trapped += 1;
        self.client()?
            .region_read(region, offset, data)
            .with_context(|| format!("reading region {region} at {offset:#x}"))
    }

    /// Writes a region by message.
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<()> {
        self.accesses.trapped += 1;
        self.client()?
            .region_write(region, offset, data)
            .with_context(|| format!("writing region {region} at {offset:#x}"))
    }

    /// Reads an aligned register of a BAR.
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn load(&mut self, bar: u32, offset: u64) -> Result<u32> {
        if let Some((memory, at)) = self.memory(bar, offset) {
            let value: u32 = memory
                .as_volatile_slice()
                .load(at, Ordering::Acquire)
                .with_context(|| format!("loading from BAR {bar} at {offset:#x}"))?;
            self.accesses.mapped += 1;
            return Ok(u32::from_le(value));
        }
        let mut data = [0; 4];
        self.read(bar, offset, &mut data)?;
        Ok(u32::from_le_bytes(data))
    }

    /// Writes an aligned register of a BAR, ordered after all earlier writes.
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn store(&mut self, bar: u32, offset: u64, value: u32) -> Result<()> {
        if let Some((memory, at)) = self.memory(bar, offset) {
            memory
                .as_volatile_slice()
                // A stronger store would be a locked exchange, which also reads the
                // register.
                .store(value.to_le(), at, Ordering::Release)
                .with_context(|| format!("storing to BAR {bar} at {offset:#x}"))?;
            self.accesses.mapped += 1;
            return Ok(());
        }
        self.write(bar, offset, &value.to_le_bytes())
    }

    /// The mapping that contains the word, and the offset in it.
    fn memory(&self, bar: u32, offset: u64) -> Option<(&MmapRegion, usize)> {
        self.mapped.iter().find_map(|mapped| {
            let at = offset.checked_sub(mapped.offset)?;
            let inside = mapped.bar == bar && at + 4 <= mapped.memory.size() as u64;
            inside.then_some((&mapped.memory, at as usize))
        })
    }
}

fn map_bars(client: &Client) -> Result<Vec<Mapped>> {
    let mut all = Vec::new();
    for bar in 0..BARS {
        let Some(region) = client.region(bar) else {
            continue;
        };
        let Some(file) = region.file_offset.as_ref() else {
            continue;
        };
        if region.flags & CAN_MAP == 0 {
            continue;
        }
        let sparse = region.sparse_areas.iter();
        let mut areas: Vec<_> = sparse.map(|area| (area.offset, area.size)).collect();
        if areas.is_empty() {
            areas.push((0, region.size));
        }
        for (offset, size) in areas {
            let end = offset.checked_add(size);
            ensure!(
                end.is_some_and(|end| end <= region.size)
                    && offset.is_multiple_of(PAGE)
                    && size.is_multiple_of(PAGE),
                "BAR {bar} of {:#x} bytes cannot have {size:#x} to map at {offset:#x}",
                region.size
            );
            if size == 0 {
                continue;
            }
            let part = FileOffset::from_arc(file.arc().clone(), file.start() + offset);
            let memory = MmapRegion::from_file(part, size as usize)
                .with_context(|| format!("mapping {size:#x} bytes of BAR {bar} at {offset:#x}"))?;
            all.push(Mapped {
                bar,
                offset,
                memory,
            });
        }
    }
    Ok(all)
}

/// Splits a BAR into areas in order, given its mapped ranges (sorted).
fn split(bar: u32, size: u64, mapped: &[(u64, u64)]) -> Vec<Area> {
    let mut areas = Vec::new();
    let mut next = 0;
    let mut push = |from: u64, to: u64, mapped: bool| {
        if from < to {
            areas.push(Area {
                bar,
                offset: from,
                size: to - from,
                mapped,
            });
        }
    };
    for &(offset, len) in mapped {
        push(next, offset, false);
        push(offset, offset + len, true);
        next = offset + len;
    }
    push(next, size, false);
    areas
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_split_into_mapped_and_trapped() {
        let found: Vec<_> = split(0, 0x4000, &[(0x1000, 0x1000)])
            .iter()
            .map(|area| (area.offset, area.size, area.mapped))
            .collect();
        let expected = [
            (0, 0x1000, false),
            (0x1000, 0x1000, true),
            (0x2000, 0x2000, false),
        ];
        assert_eq!(found, expected);
        assert_eq!(split(2, 0x1000, &[(0, 0x1000)]).len(), 1);
        assert_eq!(split(1, 0, &[]), []);
    }
}
