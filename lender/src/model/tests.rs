use std::{
    os::{fd::AsFd, unix::fs::FileExt},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use farside_daemon::Wakeup;
use farside_devices::dma_test::DmaTest;
use farside_fabric::{
    Access, Budget, Iova, MemoryRange, NtbLimits, SharedFiles, Usage,
    memory::{HostSlice, create_sealed},
};
use farside_lender_protocol::Identity;
use farside_pci::Description;

use super::*;

const PAGE: u64 = 4096;
const FAR: u64 = 1 << 40;

/// A device that caches the translation of the last address written to it, until it is quiesced,
/// and writes there at once and whenever it is polled.
struct Keeper {
    description: Description,
    kept: Option<HostSlice>,
    quiesces: Arc<AtomicU32>,
    /// Its DMA does not stop.
    stuck: Arc<AtomicBool>,
    /// Never readable.
    wake: Wakeup,
}

impl Device for Keeper {
    fn description(&self) -> &Description {
        &self.description
    }

    fn bar_read(&mut self, _bar: u8, _offset: u64, _data: &mut [u8], _bus: &mut Bus<'_>) {}

    fn bar_write(&mut self, _bar: u8, offset: u64, _data: &[u8], bus: &mut Bus<'_>) {
        self.kept = bus.dma.translate(Iova::new(offset), 8, Access::Write).ok();
        self.write();
    }

    fn set_bar_memory(&mut self, _bar: u8, _area: usize, _memory: Option<HostSlice>) {}

    fn poll(&mut self, _bus: &mut Bus<'_>) -> bool {
        self.write();
        false
    }

    fn enable_notifications(&mut self, _bus: &mut Bus<'_>) -> bool {
        true
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake.as_fd())
    }

    fn quiesce(&mut self, _bus: &mut Bus<'_>) -> bool {
        self.quiesces.fetch_add(1, Ordering::Relaxed);
        if self.stuck.load(Ordering::Relaxed) {
            return false;
        }
        self.kept = None;
        true
    }

    fn resume(&mut self, _bus: &mut Bus<'_>) {}

    fn reset(&mut self) {}
}

impl Keeper {
    fn write(&self) {
        if let Some(kept) = &self.kept {
            kept.write(&[0xaa]);
        }
    }
}

/// A leased [`Keeper`] with two pages of a file, each mapped by itself, behind one window.
struct Stage {
    model: Box<dyn LeasedDevice>,
    ram: MemoryRange,
    files: SharedFiles,
    quiesces: Arc<AtomicU32>,
    stuck: Arc<AtomicBool>,
}

impl Stage {
    fn new() -> Self {
        let (quiesces, stuck) = (Arc::default(), Arc::default());
        let mut description = DmaTest::new().description().clone();
        // Its sparse mmap area would need memory.
        description.bars[2] = None;
        let keeper = Keeper {
            description,
            kept: None,
            quiesces: Arc::clone(&quiesces),
            stuck: Arc::clone(&stuck),
            wake: Wakeup::new().unwrap(),
        };
        let adapter = Adapter::new(NtbLimits::default()).unwrap();
        let model = ModelDevice::new(&"keeper".parse().unwrap(), Box::new(keeper), adapter);
        let leased = Box::new(model.unwrap()).lease(
            Transport::SharedMemory,
            &LeaseOwner::new(
                "vm".parse().unwrap(),
                Some(&Identity::User { uid: 1, pid: 7 }),
            ),
            BorrowerMemory::default(),
        );
        let mut stage = Self {
            model: leased.map_err(|not| not.error).unwrap().device,
            // Mapped once.
            ram: MemoryRange::whole(create_sealed("pages", 2 * PAGE).unwrap(), PAGE),
            files: SharedFiles::new(Budget::of_this_process().shared_by(1).into()),
            quiesces,
            stuck,
        };
        (0..2).for_each(|page| stage.map(page, page));
        let path = stage.model.path();
        path.open_window(Iova::new(0), PeerAddress::new(FAR), 4 * PAGE)
            .unwrap();
        path.set_bus_master(true).unwrap();
        stage
    }

    /// Maps a page of the file at a page of the window.
    fn map(&mut self, page: u64, at: u64) {
        let part = MemoryRange {
            offset: page * PAGE,
            ..self.ram.clone()
        };
        let memory = self.files.map(&part).unwrap();
        let at = PeerAddress::new(FAR + at * PAGE);
        self.model.map_peer(at, &part, memory).unwrap();
    }

    fn unmap(&mut self, at: u64) -> Result<(), RemoteError> {
        let at = PeerAddress::new(FAR + at * PAGE);
        self.model.unmap_peer(at, PAGE)
    }

    /// Has the device translate a page of the window, and write there.
    fn write(&mut self, at: u64) {
        self.model.bar_write(0, at * PAGE, &[0]);
    }

    /// The first byte of a page of the file, which is cleared.
    fn take(&self, page: u64) -> u8 {
        let mut byte = [0];
        self.ram.file.read_exact_at(&mut byte, page * PAGE).unwrap();
        self.ram.file.write_all_at(&[0], page * PAGE).unwrap();
        byte[0]
    }

    fn faults(&mut self) -> u64 {
        self.model.report().faults.total
    }
}

#[test]
fn only_memory_in_use_is_drained_before_it_is_unmapped() {
    let mut stage = Stage::new();
    // Both are in the IOTLB; the device caches the second.
    stage.write(0);
    stage.write(1);
    stage.unmap(0).unwrap();
    let quiesces = || stage.quiesces.load(Ordering::Relaxed);
    assert_eq!(quiesces(), 0, "other I/O was stopped");
    stage.unmap(1).unwrap();
    let quiesces = || stage.quiesces.load(Ordering::Relaxed);
    assert_eq!(quiesces(), 1, "it was in use");
    // Neither is reachable.
    assert_eq!(stage.faults(), 0);
    stage.write(0);
    stage.write(1);
    assert_eq!(stage.faults(), 2);
}

#[test]
fn dma_that_does_not_stop_does_not_reach_memory_after_its_unmap() {
    let mut stage = Stage::new();
    stage.stuck.store(true, Ordering::Relaxed);
    stage.write(1);
    assert_eq!(stage.take(1), 0xaa);
    stage.unmap(1).unwrap();
    // The device still has its translation.
    stage.model.poll();
    assert_eq!(stage.take(1), 0);
    // Mapped again, it is the file.
    stage.map(1, 1);
    stage.model.poll();
    assert_eq!(stage.take(1), 0);
    stage.write(1);
    assert_eq!(stage.take(1), 0xaa);
    stage.write(0);
    assert_eq!(stage.take(0), 0xaa);
    assert_eq!(stage.faults(), 0);
}

/// At the other address the device would read zeroes.
#[test]
fn memory_that_is_mapped_twice_is_not_taken_from_dma_that_does_not_stop() {
    let mut stage = Stage::new();
    stage.map(1, 2);
    stage.write(1);
    stage.stuck.store(true, Ordering::Relaxed);
    let error = stage.unmap(1).unwrap_err();
    assert!(error.message.contains("by private pages"), "{error}");
    stage.model.poll();
    assert_eq!(stage.take(1), 0xaa);
    stage.stuck.store(false, Ordering::Relaxed);
    stage.unmap(1).unwrap();
    stage.write(2);
    assert_eq!(stage.take(1), 0xaa);
}

#[test]
fn a_revoked_device_that_does_not_stop_has_no_memory() {
    let mut stage = Stage::new();
    stage.map(1, 2);
    stage.write(1);
    assert_eq!(stage.take(1), 0xaa);
    stage.stuck.store(true, Ordering::Relaxed);
    // The lease stays.
    stage.model.revoke(Duration::from_millis(10)).unwrap_err();
    assert_eq!(stage.model.path().usage(), Usage::default());
    stage.model.poll();
    assert_eq!(stage.take(1), 0);
    stage.model.revoke(Duration::ZERO).unwrap_err();
    stage.stuck.store(false, Ordering::Relaxed);
    stage.model.revoke(Duration::ZERO).unwrap();
    stage.model.end();
}
