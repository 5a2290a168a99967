//! The controller memory buffer.

use farside_fabric::memory::SharedMemory;
use farside_pci::BarKind;

use super::{
    crash,
    world::{DATA, Driver, OK, Sqe, pattern},
};
use crate::{Device, nvme::cmb};

const CAP: u64 = 0x00;
const CMBLOC: u64 = 0x38;
const CMBSZ: u64 = 0x3c;
const CMBMSC: u64 = 0x50;
const CMBSTS: u64 = 0x58;

const SIZE: usize = 4 << 20;
/// Where the guest has it. No memory is mapped there on the bus.
const PLACE: u64 = 0x38_0000_0000;

fn with_buffer() -> Driver {
    Driver::ready_with(|config| config.cmb = Some(SIZE as u64))
}

#[test]
fn a_controller_without_one_has_none() {
    let mut driver = Driver::ready_with(|_| {});
    assert_eq!(driver.nvme.description().bars[2], None);
    assert_eq!(driver.read64(CAP) >> 57 & 1, 0, "CMBS");
    driver.write32(CMBMSC, 3);
    for at in [CMBLOC, CMBSZ, CMBMSC, CMBSTS] {
        assert_eq!(driver.read32(at), 0, "{at:#x}");
    }
}

#[test]
fn its_registers_say_where_and_how_large_it_is_once_they_are_enabled() {
    let mut driver = with_buffer();
    let bar = driver.nvme.description().bars[2].clone().unwrap();
    assert_eq!(bar.kind, BarKind::Memory64 { prefetchable: true });
    let [area] = bar.mappable[..] else {
        panic!("{bar:?}");
    };
    assert_eq!((bar.size, area.offset, area.len), (4 << 20, 0, 4 << 20));
    assert_eq!(driver.read64(CAP) >> 57 & 1, 1, "CMBS");
    assert_eq!((driver.read32(CMBLOC), driver.read32(CMBSZ)), (0, 0));
    driver.write64(CMBMSC, PLACE | 3);
    assert_eq!(driver.read64(CMBMSC), PLACE | 3);
    assert_eq!(driver.read32(CMBLOC) & 7, 2, "BIR");
    assert_eq!(driver.read32(CMBLOC) >> 12, 0, "OFST");
    let size = driver.read32(CMBSZ);
    assert_eq!(u64::from(size >> 12) << 12, 4 << 20);
    assert_eq!(size >> 8 & 0xf, 0, "units of 4 KiB");
    assert_eq!(size & 0x1f, 0b1_1100, "data and lists, no queues");
    assert_eq!(driver.read32(CMBSTS), 0);
    // CC.EN = 0 changes nothing; a reset of the function does.
    driver.write32(0x14, 0);
    assert_eq!(driver.read64(CMBMSC), PLACE | 3);
    driver.nvme.reset();
    assert_eq!((driver.read64(CMBMSC), driver.read32(CMBSZ)), (0, 0));
}

#[test]
fn commands_transfer_to_and_from_it_once_the_guest_has_given_it_addresses() {
    let mut driver = with_buffer();
    let memory = SharedMemory::anonymous(SIZE).unwrap();
    driver.nvme.set_bar_memory(2, 0, memory.slice(0, SIZE));
    let data = pattern(8192, 1);
    driver.set_disk(0, &data);
    let last = PLACE + SIZE as u64 - 4096;
    let read = |prp1, prp2| Sqe::new(2).nsid(1).prp(prp1, prp2).blocks(0, 16);
    let copy = Sqe::new(1).nsid(1).prp(DATA, last).blocks(100, 16);
    driver.write64(CMBMSC, PLACE | 1);
    assert_ne!(driver.io(read(DATA, last)).status, OK, "CMSE is clear");
    driver.write64(CMBMSC, PLACE | 3);
    // One page in RAM, one in the buffer, and both to the disk.
    assert_eq!(driver.io(read(DATA, last)).status, OK);
    assert!(driver.memory.get(DATA, 4096) == data[..4096]);
    let mut found = vec![0; 4096];
    memory.slice(SIZE - 4096, 4096).unwrap().read(&mut found);
    assert!(found == data[4096..]);
    assert_eq!(driver.io(copy).status, OK);
    assert!(driver.disk(100 * 512, 8192) == data);
    // It ends where it ends.
    assert_ne!(driver.io(read(last, last + 4096)).status, OK);
}

#[test]
fn the_next_process_of_a_killed_one_has_it_where_the_guest_has_set_it() {
    let mut driver = with_buffer();
    driver.keep_state();
    driver.write64(CMBMSC, PLACE | 3);
    crash::after(Some(0));
    driver.restart();
    assert_eq!(driver.read64(CMBMSC), PLACE | 3);
    assert_ne!(driver.read32(CMBSZ), 0);
}

#[test]
fn sizes_out_of_range_are_named() {
    for size in [0, 1 << 20, 3 << 20, 2 << 30] {
        let error = cmb::check_size(size).unwrap_err().to_string();
        assert!(error.contains(&format!("cmb = {size}: ")), "{error}");
        assert!(error.contains("2 MiB to 1 GiB"), "{error}");
    }
    for size in [2 << 20, 1 << 30] {
        cmb::check_size(size).unwrap();
    }
}
