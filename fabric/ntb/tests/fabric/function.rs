//! PCI functions of the two hosts: the NTB's ports, and devices to lend.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use farside_fabric::FabricError;
use farside_fabric::memory::SharedMemory;
use farside_irq_relay::IrqEventFd;
use farside_ntb::platform::FunctionOps;
use farside_ntb::regs::WINDOW_BAR;
use farside_ntb_server::model::Port;
use farside_pci::{Bar, BarKind, Bdf, Description, SparseMmapArea};

use crate::world::{Hosts, Kind, ModelBar, ModelDomain, Table, World, refused};

/// A BAR: number, bytes, sparse mmap areas as (offset, bytes).
pub type DeviceBar<'a> = (u8, u64, &'a [(u64, u64)]);

/// A port's function, or a device.
pub struct ModelFunction {
    bdf: Bdf,
    domain: ModelDomain,
    bus_master: AtomicBool,
    bars: Vec<(u8, Arc<SharedMemory>, Vec<SparseMmapArea>)>,
}

impl ModelFunction {
    /// The function of a port.
    pub fn endpoint(world: &Arc<World>, port: Port) -> Arc<Self> {
        Arc::new(Self {
            bdf: Bdf::new(0, 0x40, 0, 0).unwrap(),
            domain: ModelDomain::Endpoint(Arc::clone(world), port),
            bus_master: AtomicBool::new(false),
            bars: Vec::new(),
        })
    }

    /// A device with these BARs.
    pub fn device(number: u8, bars: &[DeviceBar<'_>]) -> Arc<Self> {
        let bars = bars.iter().map(|&(bar, size, areas)| {
            let memory = SharedMemory::anonymous(size as usize).expect("memory");
            let area = |&(offset, len): &(u64, u64)| SparseMmapArea { offset, len };
            (bar, memory, areas.iter().map(area).collect())
        });
        Arc::new(Self {
            bdf: Bdf::new(0, 1, number, 0).unwrap(),
            domain: ModelDomain::Device(Table::default()),
            bus_master: AtomicBool::new(false),
            bars: bars.collect(),
        })
    }

    pub fn table(&self) -> &Table {
        self.domain.table()
    }

    pub fn bus_master(&self) -> bool {
        self.bus_master.load(Ordering::Relaxed)
    }

    /// The device writes; `None` for a fault.
    pub fn dma_write(&self, iova: u64, data: &[u8]) -> Option<()> {
        self.bus_master().then_some(())?;
        self.table().write(iova, data)
    }

    /// The device reads; `None` for a fault.
    pub fn dma_read(&self, iova: u64, data: &mut [u8]) -> Option<()> {
        self.bus_master().then_some(())?;
        self.table().read(iova, data)
    }

    /// A register of the device, in its own BAR.
    pub fn register(&self, bar: u8, offset: u64) -> u32 {
        let found = self.bars.iter().find(|it| it.0 == bar).expect("it has it");
        let slice = found.1.slice(offset as usize, 4).expect("inside");
        slice.load_u32(0, Ordering::SeqCst).expect("aligned")
    }
}

impl FunctionOps for ModelFunction {
    type Domain = ModelDomain;

    fn bdf(&self) -> Bdf {
        self.bdf
    }

    fn domain(&self) -> &ModelDomain {
        &self.domain
    }

    fn set_bus_master(&self, enabled: bool) -> Result<(), FabricError> {
        self.bus_master.store(enabled, Ordering::Relaxed);
        if let ModelDomain::Endpoint(world, port) = &self.domain {
            let mut hosts = Hosts(&world.hosts);
            world.ntb().set_bus_master(*port, enabled, &mut hosts);
        }
        Ok(())
    }

    fn description(&self) -> Result<Description, FabricError> {
        let mut bars = [const { None }; 6];
        for (bar, memory, mappable) in &self.bars {
            bars[usize::from(*bar)] = Some(Bar {
                size: memory.len() as u64,
                kind: BarKind::Memory64 {
                    prefetchable: false,
                },
                mappable: mappable.clone(),
            });
        }
        Ok(Description {
            config: vec![0; 256],
            bars,
            intx: false,
            msi_vectors: 0,
            msix_vectors: 0,
            summary: String::new(),
        })
    }

    fn map_region(&self, bar: u8, offset: u64, len: u64) -> Result<Arc<ModelBar>, FabricError> {
        let found = self.bars.iter().find(|it| it.0 == bar);
        let (_, memory, areas) = found.expect("only BARs that it has");
        let area = SparseMmapArea { offset, len };
        assert!(areas.contains(&area), "only areas that can be mapped");
        let kind = Kind::Device(Arc::clone(memory));
        Ok(Arc::new(ModelBar { offset, kind }))
    }

    fn bar_file(&self, bar: u8) -> Result<(OwnedFd, u64), FabricError> {
        assert_eq!(bar, WINDOW_BAR);
        Err(refused("the model has no descriptor"))
    }

    fn signal(&self, vector: u16, to: IrqEventFd) -> Result<(), FabricError> {
        let ModelDomain::Endpoint(world, port) = &self.domain else {
            panic!("only an endpoint's vectors are asked for");
        };
        let vectors = &world.hosts[*port as usize].vectors;
        vectors.lock().unwrap().insert(vector, to);
        Ok(())
    }
}
