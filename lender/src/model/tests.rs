use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use farside_devices::dma_test::DmaTest;
use farside_fabric::{
    Access, Budget, Iova, MemoryRange, NtbLimits, SharedFiles,
    memory::{HostSlice, create_sealed},
};
use farside_pci::Description;

use super::*;

const PAGE: u64 = 4096;
const FAR: u64 = 1 << 40;

/// A device that caches the translation of the last address written to it, until it is quiesced.
struct Keeper {
    description: Description,
    kept: Option<HostSlice>,
    quiesces: Arc<AtomicU32>,
}

impl Device for Keeper {
    fn description(&self) -> &Description {
        &self.description
    }

    fn bar_read(&mut self, _bar: u8, _offset: u64, _data: &mut [u8], _bus: &mut Bus<'_>) {}

    fn bar_write(&mut self, _bar: u8, offset: u64, _data: &[u8], bus: &mut Bus<'_>) {
        self.kept = bus.dma.translate(Iova::new(offset), 8, Access::Write).ok();
    }

    fn set_bar_memory(&mut self, _bar: u8, _area: usize, _memory: Option<HostSlice>) {}

    fn poll(&mut self, _bus: &mut Bus<'_>) -> bool {
        false
    }

    fn arm(&mut self, _bus: &mut Bus<'_>) -> bool {
        true
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn quiesce(&mut self, _bus: &mut Bus<'_>) -> bool {
        self.quiesces.fetch_add(1, Ordering::Relaxed);
        self.kept = None;
        true
    }

    fn resume(&mut self, _bus: &mut Bus<'_>) {}

    fn reset(&mut self) {}
}

#[test]
fn only_memory_in_use_is_drained_before_it_is_unmapped() {
    let quiesces = Arc::new(AtomicU32::new(0));
    let mut description = DmaTest::new().description().clone();
    // Its sparse mmap area would need memory.
    description.bars[2] = None;
    let keeper = Keeper {
        description,
        kept: None,
        quiesces: Arc::clone(&quiesces),
    };
    let adapter = Adapter::new(NtbLimits::default()).unwrap();
    let model = ModelDevice::new(&"keeper".parse().unwrap(), Box::new(keeper), adapter).unwrap();
    let leased = Box::new(model).lease(Route::Memory, &"vm".parse().unwrap(), Vec::new());
    let mut model = leased.map_err(|not| not.error).unwrap().device;
    // Of one file, which is mapped once.
    let ram = MemoryRange::whole(create_sealed("pages", 2 * PAGE).unwrap(), PAGE);
    let mut files = SharedFiles::new(Budget::of_this_process().shared_by(1).into());
    for page in 0..2 {
        let part = MemoryRange {
            offset: page * PAGE,
            ..ram.clone()
        };
        let at = PeerAddress::new(FAR + page * PAGE);
        model.map_peer(at, files.map(&part).unwrap()).unwrap();
    }
    let window = model
        .path()
        .open_window(Iova::new(0), PeerAddress::new(FAR), 2 * PAGE);
    window.unwrap();
    model.path().set_bus_master(true).unwrap();
    let faults = |model: &mut dyn LeasedDevice| model.report().faults.total;

    // Both are in the IOTLB; the device caches the second.
    model.bar_write(0, 0, &[0]);
    model.bar_write(0, PAGE, &[0]);
    model.unmap_peer(PeerAddress::new(FAR), PAGE).unwrap();
    assert_eq!(quiesces.load(Ordering::Relaxed), 0, "other I/O was stopped");
    model
        .unmap_peer(PeerAddress::new(FAR + PAGE), PAGE)
        .unwrap();
    assert_eq!(quiesces.load(Ordering::Relaxed), 1, "it was in use");
    // Neither is reachable.
    assert_eq!(faults(&mut *model), 0);
    model.bar_write(0, 0, &[0]);
    model.bar_write(0, PAGE, &[0]);
    assert_eq!(faults(&mut *model), 2);
}
