//! Two hosts with the NTB model between them. Tables in memory replace VFIO; registers and
//! windows are the model's.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use farside_fabric::memory::{HostSlice, SharedMemory};
use farside_fabric::{BusAddress, FabricError, Iova, MemoryRange, Owner, VmShare};
use farside_irq_relay::IrqEventFd;
use farside_ntb::platform::{DomainOps, FunctionOps};
use farside_ntb::regs::{REGISTERS_BAR, VECTORS, WINDOW_BAR};
use farside_ntb::{Adapter, FarsideNtb, Parts, Registers};
use farside_ntb_server::model::{HostAccess, Ntb, PeerError, Port, PortConfig, Read, Target};

use crate::function::ModelFunction;

pub const MIB: u64 = 1 << 20;
/// IOVA ranges usable behind an emulated VT-d.
pub const USABLE: [(u64, u64); 2] = [(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)];

/// The owner of devices in tests with one VM.
pub fn owner() -> Owner {
    Owner::new("vm", "user 1")
}

/// The NTB, and its two hosts.
pub struct World {
    pub ntb: Mutex<Ntb>,
    pub hosts: [Host; 2],
}

/// The parts of a host that the NTB accesses.
#[derive(Default)]
pub struct Host {
    /// The domain of its endpoint.
    pub domain: Table,
    /// Its port ignores writes, as after a fault.
    pub stuck: AtomicBool,
    /// The eventfds of the endpoint's vectors.
    pub vectors: Mutex<BTreeMap<u16, IrqEventFd>>,
}

/// The mappings of a domain.
#[derive(Default)]
pub struct Table {
    pub rows: Mutex<BTreeMap<u64, Row>>,
    pub fail_map: AtomicBool,
    pub fail_unmap: AtomicBool,
}

#[derive(Clone)]
pub struct Row {
    pub len: u64,
    pub to: To,
}

#[derive(Clone)]
pub enum To {
    Memory { slice: HostSlice, writable: bool },
    Bar { bar: Arc<ModelBar>, offset: u64 },
}

/// A part of a BAR that is mapped into this process.
pub struct ModelBar {
    pub offset: u64,
    pub kind: Kind,
}

pub enum Kind {
    /// A BAR of a port.
    Port(Arc<World>, Port, u8),
    /// A BAR of a device: its registers are memory.
    Device(Arc<SharedMemory>),
}

impl World {
    pub fn new(config: [PortConfig; 2]) -> Arc<Self> {
        Arc::new(Self {
            ntb: Mutex::new(Ntb::new(config).expect("sizes are right")),
            hosts: Default::default(),
        })
    }

    /// Two ports of 64 MiB with 64 LUT entries, so 1 MiB each.
    pub fn small() -> Arc<Self> {
        let port = PortConfig {
            window_size: 64 * MIB,
            lut_entries: 64,
        };
        Self::new([port, port])
    }

    pub fn ntb(&self) -> MutexGuard<'_, Ntb> {
        self.ntb.lock().unwrap()
    }

    pub fn set_present(&self, port: Port, present: bool) {
        self.ntb()
            .set_present(port, present, &mut Hosts(&self.hosts));
    }

    /// A host connects to `port` and farside opens the endpoint.
    pub fn start(self: &Arc<Self>, port: Port) -> Adapter<ModelFunction> {
        self.set_present(port, true);
        let function = ModelFunction::endpoint(self, port);
        let (registers, window) = self.bars(port);
        let size = self.window_size(port);
        let driver = FarsideNtb::new(function.bdf(), registers, Arc::clone(&window) as _, size);
        Adapter::new(Parts {
            function,
            driver: Box::new(driver.expect("it is our NTB")),
            window,
            window_address: BusAddress::new(1 << 40),
            cpu_requesters: vec![0],
            per_vm: VmShare::ALL,
        })
        .expect("the endpoint is taken into use")
    }

    /// Both hosts, with the link up.
    pub fn start_both(self: &Arc<Self>) -> [Adapter<ModelFunction>; 2] {
        let both = Port::BOTH.map(|port| self.start(port));
        for adapter in &both {
            adapter.check_link().expect("the link is up");
        }
        both
    }

    pub fn bars(self: &Arc<Self>, port: Port) -> (Arc<ModelBar>, Arc<ModelBar>) {
        let bar = |bar| {
            Arc::new(ModelBar {
                offset: 0,
                kind: Kind::Port(Arc::clone(self), port, bar),
            })
        };
        (bar(REGISTERS_BAR), bar(WINDOW_BAR))
    }

    pub fn window_size(&self, port: Port) -> u64 {
        let ntb = self.ntb();
        let bar = &ntb.description(port).bars[usize::from(WINDOW_BAR)];
        bar.as_ref().expect("it has a window").size
    }

    pub fn read(&self, port: Port, bar: u8, offset: u64, data: &mut [u8]) {
        let mut hosts = Hosts(&self.hosts);
        let read = self.ntb().read(port, bar, offset, data, &mut hosts);
        assert_eq!(read, Read::Done, "nothing here takes time");
    }

    pub fn write(&self, port: Port, bar: u8, offset: u64, data: &[u8]) {
        if self.hosts[port as usize].stuck.load(Ordering::Relaxed) {
            return;
        }
        self.ntb()
            .write(port, bar, offset, data, &mut Hosts(&self.hosts));
    }

    pub fn read64(&self, port: Port, offset: u64) -> u64 {
        let mut word = [0; 8];
        self.read(port, REGISTERS_BAR, offset, &mut word);
        u64::from_le_bytes(word)
    }
}

/// The two hosts, for the model.
pub struct Hosts<'a>(pub &'a [Host; 2]);

impl Hosts<'_> {
    fn peer(&self, at: Target) -> &Host {
        &self.0[at.from.peer() as usize]
    }
}

impl HostAccess for Hosts<'_> {
    fn memory_read(&mut self, at: Target, data: &mut [u8]) -> Result<Read, PeerError> {
        let domain = &self.peer(at).domain;
        domain
            .read(at.address.get(), data)
            .ok_or(PeerError::Refused)?;
        Ok(Read::Done)
    }

    fn memory_write(&mut self, at: Target, data: &[u8]) -> Result<(), PeerError> {
        let domain = &self.peer(at).domain;
        domain
            .write(at.address.get(), data)
            .ok_or(PeerError::Refused)
    }

    fn raise(&mut self, port: Port, vector: u16) {
        assert!(vector < VECTORS);
        let vectors = self.0[port as usize].vectors.lock().unwrap();
        if let Some(to) = vectors.get(&vector) {
            to.signal().expect("an eventfd takes a signal");
        }
    }

    fn is_pending(&self, _port: Port, _vector: u16) -> bool {
        false
    }
}

impl Table {
    fn find(&self, at: u64, len: usize) -> Option<(Row, u64)> {
        let rows = self.rows.lock().unwrap();
        let (start, row) = rows.range(..=at).next_back()?;
        let before = at - start;
        (before + len as u64 <= row.len).then(|| (row.clone(), before))
    }

    /// A read by a function in the domain; `None` for a fault.
    pub fn read(&self, at: u64, data: &mut [u8]) -> Option<()> {
        let (row, before) = self.find(at, data.len())?;
        match row.to {
            To::Memory { slice, .. } => {
                slice.slice(before as usize, data.len())?.read(data);
            }
            To::Bar { bar, offset } => bar.read(offset + before, data),
        }
        Some(())
    }

    /// A write by a function in the domain; `None` for a fault.
    pub fn write(&self, at: u64, data: &[u8]) -> Option<()> {
        let (row, before) = self.find(at, data.len())?;
        match row.to {
            To::Memory { slice, writable } => {
                if !writable {
                    return None;
                }
                slice.slice(before as usize, data.len())?.write(data);
            }
            To::Bar { bar, offset } => bar.write(offset + before, data),
        }
        Some(())
    }

    /// The mappings, as (IOVA, bytes).
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        let rows = self.rows.lock().unwrap();
        rows.iter().map(|(&at, row)| (at, row.len)).collect()
    }

    /// The mappings of BAR ranges, as (IOVA, bytes, offset in the BAR).
    pub fn bars(&self) -> Vec<(u64, u64, u64)> {
        let rows = self.rows.lock().unwrap();
        let bars = rows.iter().filter_map(|(&at, row)| match &row.to {
            To::Bar { bar, offset } => Some((at, row.len, bar.offset + offset)),
            To::Memory { .. } => None,
        });
        bars.collect()
    }

    fn insert(&self, at: u64, len: u64, to: To) -> Result<(), FabricError> {
        if self.fail_map.load(Ordering::Relaxed) {
            return Err(refused("the test's domain maps nothing"));
        }
        let mut rows = self.rows.lock().unwrap();
        let before = rows.range(..at + len).next_back();
        let overlaps = before.is_some_and(|(start, row)| start + row.len > at);
        assert!(!overlaps, "{len:#x} bytes at {at:#x} are mapped twice");
        rows.insert(at, Row { len, to });
        Ok(())
    }

    fn remove(&self, at: u64, len: u64) -> Result<(), FabricError> {
        if self.fail_unmap.load(Ordering::Relaxed) {
            return Err(refused("the test's domain unmaps nothing"));
        }
        let row = self.rows.lock().unwrap().remove(&at);
        assert_eq!(row.map(|row| row.len), Some(len), "only what was mapped");
        Ok(())
    }
}

pub fn refused(text: &'static str) -> FabricError {
    FabricError::Other(io::Error::other(text).into())
}

impl ModelBar {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let at = self.offset + offset;
        match &self.kind {
            Kind::Port(world, port, bar) => world.read(*port, *bar, at, data),
            Kind::Device(memory) => {
                let slice = memory.slice(at as usize, data.len()).expect("inside");
                slice.read(data);
            }
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let at = self.offset + offset;
        match &self.kind {
            Kind::Port(world, port, bar) => world.write(*port, *bar, at, data),
            Kind::Device(memory) => {
                let slice = memory.slice(at as usize, data.len()).expect("inside");
                slice.write(data);
            }
        }
    }
}

impl Registers for ModelBar {
    fn read32(&self, offset: u64) -> u32 {
        let mut word = [0; 4];
        self.read(offset, &mut word);
        u32::from_le_bytes(word)
    }

    fn write32(&self, offset: u64, value: u32) {
        self.write(offset, &value.to_le_bytes());
    }

    fn read64(&self, offset: u64) -> u64 {
        let mut word = [0; 8];
        self.read(offset, &mut word);
        u64::from_le_bytes(word)
    }

    fn write64(&self, offset: u64, value: u64) {
        self.write(offset, &value.to_le_bytes());
    }
}

/// The domain of a port, or of a device.
pub enum ModelDomain {
    Endpoint(Arc<World>, Port),
    Device(Table),
}

impl ModelDomain {
    pub fn table(&self) -> &Table {
        match self {
            Self::Endpoint(world, port) => &world.hosts[*port as usize].domain,
            Self::Device(table) => table,
        }
    }
}

impl DomainOps for ModelDomain {
    type Bar = ModelBar;

    fn map(&self, at: Iova, memory: &HostSlice, writable: bool) -> Result<(), FabricError> {
        let slice = memory.clone();
        let len = slice.len() as u64;
        self.table()
            .insert(at.get(), len, To::Memory { slice, writable })
    }

    fn map_bar(
        &self,
        at: Iova,
        bar: &Arc<ModelBar>,
        offset: u64,
        len: u64,
    ) -> Result<(), FabricError> {
        let bar = Arc::clone(bar);
        self.table().insert(at.get(), len, To::Bar { bar, offset })
    }

    fn unmap(&self, at: Iova, len: u64) -> Result<(), FabricError> {
        self.table().remove(at.get(), len)
    }

    fn usable(&self) -> Result<Vec<(u64, u64)>, FabricError> {
        Ok(USABLE.to_vec())
    }

    fn check(&self, ranges: &[(Iova, u64)]) -> Result<(), FabricError> {
        Ok(farside_vfio::UsableIova::new(USABLE.to_vec()).check(ranges)?)
    }
}

/// Guest RAM: a range of a file, and the same memory mapped for the test.
pub fn ram(len: u64) -> (MemoryRange, Arc<SharedMemory>) {
    let fd = farside_fabric::memory::create_sealed("ram", len).expect("a memfd");
    let range = MemoryRange::whole(fd, len);
    let view = SharedMemory::map_range(&range).expect("it can be mapped");
    (range, view)
}
