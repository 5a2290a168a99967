//! Doorbells in memory that the guest writes to without a trap.

use farside_fabric::memory::SharedMemory;
use farside_pci::SparseMmapArea;

use super::world::{ADMIN_ENTRIES, DATA, Driver, OK, Sqe, pattern};
use crate::{Device, block::EngineChoice, nvme::Config};

const PAGE: usize = 0x1000;
/// The doorbells in BAR 0.
const AT: u64 = 0x1000;
const BLOCK: u64 = 512;
const INVALID_OPCODE: (u16, u16) = (0, 1);

fn configure(config: &mut Config) {
    config.mapped_doorbells = true;
}

impl Driver {
    /// A controller that is borrowed by a guest that has mapped its doorbells.
    pub fn with_mapped_doorbells(engine: EngineChoice) -> Self {
        let mut driver = Self::off(|config| {
            config.mapped_doorbells = true;
            config.engine = engine;
        });
        let memory = SharedMemory::anonymous(PAGE).unwrap();
        driver.mapped = memory.slice(0, PAGE);
        driver.nvme.set_bar_memory(0, 0, driver.mapped.clone());
        driver
    }
}

fn ready() -> Driver {
    let mut driver = Driver::with_mapped_doorbells(EngineChoice::default());
    driver.enable();
    driver.create_pair(1, 8);
    driver
}

fn read(block: u64) -> Sqe {
    Sqe::new(2).nsid(1).prp(DATA, 0).blocks(block, 1)
}

#[test]
fn the_page_of_the_doorbells_alone_can_be_mapped() {
    let areas = |driver: &Driver| driver.nvme.description().bars[0].clone().unwrap().mappable;
    let page = SparseMmapArea {
        offset: AT,
        len: PAGE as u64,
    };
    assert_eq!(areas(&Driver::off(configure)), [page]);
    assert_eq!(areas(&Driver::off(|_| {})), []);
}

#[test]
fn commands_are_executed_without_a_trap_and_as_often_as_the_rings_wrap() {
    let mut driver = ready();
    for block in 0..100 {
        let data = pattern(BLOCK as usize, block);
        driver.set_disk(block * BLOCK, &data);
        assert_eq!(driver.io(read(block)).status, OK);
        assert!(driver.memory.get(DATA, data.len()) == data, "block {block}");
    }
    assert_eq!((driver.rings, driver.stat("doorbell_traps")), (0, 0));
}

/// A completion queue whose head the guest has not moved has no room. The next move of the head comes without a notification.
#[test]
fn a_full_completion_queue_waits_for_its_head() {
    let mut driver = ready();
    let ids: Vec<_> = (0..7).map(|n| driver.submit(1, read(n))).collect();
    for id in &ids {
        driver.until("completion", |driver| {
            driver.peel(1).is_some_and(|cqe| cqe.id == *id)
        });
    }
    let last = driver.submit(1, read(7));
    for _ in 0..100 {
        driver.poll();
    }
    assert_eq!(driver.peel(1), None, "there is no room");
    driver.ring_head(1);
    assert_eq!(driver.wait(1).id, last);
}

#[test]
fn its_owner_may_not_sleep_while_it_is_ready() {
    let mut driver = Driver::with_mapped_doorbells(EngineChoice::default());
    assert!(!driver.nvme.is_polled());
    driver.enable();
    assert!(driver.nvme.is_polled());
    driver.nvme.set_bar_memory(0, 0, None);
    assert!(!driver.nvme.is_polled(), "nobody can write");
    driver.nvme.set_bar_memory(0, 0, driver.mapped.clone());
    driver.write32(0x14, 4 << 20 | 6 << 16 | 1 << 14 | 1);
    assert!(!driver.nvme.is_polled(), "it shuts down");
    driver.write32(0x14, 0);
    driver.until("disabled state", |driver| driver.read32(0x1c) & 1 == 0);
    assert!(!driver.nvme.is_polled());
    assert!(!Driver::ready_with(|_| {}).nvme.is_polled());
}

/// The head of the admin completion queue is loaded when that looks full.
#[test]
fn an_event_is_reported_wherever_the_head_of_the_admin_queue_is() {
    for before in 0..2 * ADMIN_ENTRIES {
        let mut driver = ready();
        for _ in 0..before {
            driver.feature(7, 0);
        }
        let event = driver.submit(0, Sqe::new(0x0c));
        for _ in 0..4 {
            driver.poll();
        }
        driver.doorbell(2, 8);
        assert_eq!(driver.wait(0).id, event, "after {before} commands");
    }
}

#[test]
fn a_new_queue_begins_without_what_was_written_for_an_earlier_one() {
    let mut driver = ready();
    for block in 0..5 {
        assert_eq!(driver.io(read(block)).status, OK);
    }
    for opcode in [0, 4] {
        assert_eq!(driver.admin(Sqe::new(opcode).cdw(10, 1)).status, OK);
    }
    // Anything, and for the queues of the next session, too.
    for index in 0..4 {
        driver.doorbell(index + 2, 3);
    }
    driver.pairs.truncate(1);
    let at = driver.create_pair(1, 8);
    for _ in 0..100 {
        driver.poll();
    }
    assert_eq!(driver.take(at), None);
    assert_eq!(driver.io(read(0)).status, OK);

    driver.write32(0x14, 0);
    driver.until("disabled state", |driver| driver.read32(0x1c) & 1 == 0);
    for index in 0..4 {
        driver.doorbell(index, 5);
    }
    driver.enable();
    driver.create_pair(1, 8);
    assert_eq!(driver.io(read(0)).status, OK);
}

#[test]
fn a_doorbell_out_of_range_raises_one_event_and_the_queue_goes_on() {
    const INVALID_VALUE: u32 = 1 << 8 | 1 << 16;
    let mut driver = ready();
    let event = driver.submit(0, Sqe::new(0x0c));
    driver.doorbell(2, 8);
    for _ in 0..100 {
        driver.poll();
    }
    let cqe = driver.wait(0);
    assert_eq!((cqe.id, cqe.result), (event, INVALID_VALUE));
    driver.log(1, 64);
    let next = driver.submit(0, Sqe::new(0x0c));
    for _ in 0..100 {
        driver.poll();
    }
    assert_eq!(driver.take(0), None, "reported once");
    assert_eq!(driver.io(read(0)).status, OK);
    let abort = driver.submit(0, Sqe::new(8).cdw(10, u32::from(next) << 16));
    let ends = [driver.wait(0).id, driver.wait(0).id];
    assert!(ends.contains(&next) && ends.contains(&abort));
}

/// With one, a guest would ring only if the controller asks for it.
#[test]
fn there_is_no_doorbell_buffer_beside_them() {
    const OACS: usize = 256;
    const DOORBELL_BUFFER: u8 = 0x7c;
    let offered = |driver: &mut Driver| {
        let effects = driver.log(5, 4096)[usize::from(DOORBELL_BUFFER) * 4];
        (driver.identify(1, 0)[OACS + 1] & 1, effects)
    };
    let mut driver = ready();
    assert_eq!(offered(&mut driver), (0, 0));
    let buffer = Sqe::new(DOORBELL_BUFFER).prp(DATA, DATA + 0x1000);
    assert_eq!(driver.admin(buffer).status, INVALID_OPCODE);
    assert_eq!(offered(&mut Driver::ready_with(|_| {})), (1, 1));
}
