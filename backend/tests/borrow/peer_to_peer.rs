//! Devices of one VM reach each other's BARs at the addresses that the guest gives them.

use farside_devices::dma_test::{Command, SRAM_SIZE};
use farside_fabric::NtbLimits;

use crate::{
    guest::{
        CONFIG, INTX_DISABLE, Job, MEMORY, Port, Ram, SMALL, capability, command, enable, fill,
        run, set_command, small,
    },
    host::{DMA, Host, Served, dma_test},
    vmm::Vmm,
};

const OTHER: &str = "dma1";
/// The register of BAR 2, of 64 KiB, which is memory.
const BAR: u64 = 0x18;
/// Where a guest has it, above all RAM.
const PLACE: u64 = 0x38_0000_0000;

fn host(limits: NtbLimits) -> Host {
    Host::lending(limits, |_| vec![dma_test(DMA), dma_test(OTHER)])
}

/// Has the guest place BAR 2, and enable memory.
fn place(device: &mut Vmm, address: u64) {
    device.write(CONFIG, BAR, &(address as u32).to_le_bytes());
    device.write(CONFIG, BAR + 4, &((address >> 32) as u32).to_le_bytes());
    set_command(device, MEMORY);
}

/// As a VMM does for a BAR that appears: without a descriptor.
fn map_bar(device: &mut Vmm, address: u64) {
    device.map(address, SRAM_SIZE, None).unwrap();
}

#[track_caller]
fn assert_bar_filled(device: &mut Vmm, byte: u8) {
    let mut found = vec![0; SRAM_SIZE as usize];
    for (at, piece) in (0..).step_by(8).zip(found.chunks_mut(8)) {
        device.read(2, at, piece);
    }
    assert_eq!(found.iter().position(|it| *it != byte), None, "{byte:#x}");
}

/// Two devices of VM a.
fn devices(served: &Served) -> (Vmm, Vmm, [Ram; 2]) {
    let mut first = served.client(DMA);
    let mut second = served.client(OTHER);
    let ram = [small(&mut first), small(&mut second)];
    first.reset().unwrap();
    second.reset().unwrap();
    (first, second, ram)
}

#[test]
fn a_device_writes_and_reads_the_bar_of_another_where_the_guest_has_it() {
    let host = host(NtbLimits::default());
    let served = Served::start(host.config("a", &[DMA, OTHER]));
    let (mut first, mut second, [_, ram]) = devices(&served);
    place(&mut second, PLACE);
    place(&mut first, 2 * PLACE);
    // Before bus-master enable. QEMU maps a device's own BAR for it, too.
    map_bar(&mut second, PLACE);
    map_bar(&mut second, 2 * PLACE);
    assert!(enable(&mut second));
    let size = SRAM_SIZE as u32;
    assert!(!fill(&mut second, 2 * PLACE, size, 0xa1).faulted());
    assert_bar_filled(&mut first, 0xa1);
    let copy = |src, dst| Job {
        src,
        dst,
        length: size,
        ..Job::default()
    };
    let ended = run(&mut second, Command::Copy, copy(2 * PLACE, 0x1_0000));
    assert!(!ended.faulted(), "{ended:x?}");
    assert!(fill(&mut second, PLACE, 0x1000, 2).faulted());
    ram.assert_filled(0x1_0000, SRAM_SIZE as usize, 0xa1);
    // The device whose BAR it is has no part in it: it may not even do DMA.
    assert!(fill(&mut first, 0, 0x1000, 1).faulted());
    ram.assert_filled(0, 0x1000, 0);
}

#[test]
fn a_bar_that_moves_is_reached_at_its_new_address_only() {
    let host = host(NtbLimits::default());
    let served = Served::start(host.config("a", &[DMA, OTHER]));
    let (mut first, mut second, _ram) = devices(&served);
    place(&mut first, PLACE);
    assert!(enable(&mut second));
    map_bar(&mut second, PLACE);
    assert!(!fill(&mut second, PLACE, 0x1000, 1).faulted());
    second.unmap(PLACE, SRAM_SIZE).unwrap();
    assert!(fill(&mut second, PLACE, 0x1000, 2).faulted());

    place(&mut first, 4 * PLACE);
    map_bar(&mut second, 4 * PLACE);
    assert!(!fill(&mut second, 4 * PLACE, SRAM_SIZE as u32, 3).faulted());
    assert!(fill(&mut second, PLACE, 0x1000, 4).faulted());
    // Bus mastering off and on again: the mapping is opened anew.
    set_command(&mut second, MEMORY);
    assert!(fill(&mut second, 4 * PLACE, 0x1000, 5).faulted());
    assert!(enable(&mut second));
    assert_bar_filled(&mut first, 3);
    assert!(!fill(&mut second, 4 * PLACE, SRAM_SIZE as u32, 6).faulted());
    assert_bar_filled(&mut first, 6);
}

/// A VMM has BAR registers of its own, which a function-level reset does not clear.
#[test]
fn a_bar_stays_where_it_is_when_the_guest_resets_its_function() {
    let host = host(NtbLimits::default());
    let served = Served::start(host.config("a", &[DMA, OTHER]));
    let (mut first, mut second, _ram) = devices(&served);
    place(&mut first, PLACE);
    let control = capability(&mut first, 0x10) + 8;
    // As Linux does: it saves the registers and turns memory off, and then writes what reads differently.
    set_command(&mut first, INTX_DISABLE);
    first.write(CONFIG, control, &0x8000_u16.to_le_bytes());
    assert_eq!(command(&mut first), 0);
    set_command(&mut first, MEMORY);
    assert!(enable(&mut second));
    map_bar(&mut second, PLACE);
    assert!(!fill(&mut second, PLACE, SRAM_SIZE as u32, 1).faulted());
    assert_bar_filled(&mut first, 1);
}

#[test]
fn what_is_no_bar_of_the_vm_is_not_reached() {
    let host = host(NtbLimits::default());
    let served = Served::start(host.config("a", &[DMA, OTHER]));
    let (mut first, mut second, _ram) = devices(&served);
    assert!(enable(&mut second));
    let refused = |second: &mut Vmm, first: &mut Vmm, at: u64, len: u64| {
        second.map(at, len, None).unwrap();
        assert!(fill(second, at, 0x1000, 0xbb).faulted());
        second.unmap(at, len).unwrap();
        assert_bar_filled(first, 0);
    };
    // Not placed, then beside it and larger than it, then with memory disabled.
    refused(&mut second, &mut first, PLACE, SRAM_SIZE);
    place(&mut first, PLACE);
    refused(&mut second, &mut first, PLACE + SRAM_SIZE, SRAM_SIZE);
    refused(&mut second, &mut first, PLACE, 2 * SRAM_SIZE);
    set_command(&mut first, 0);
    refused(&mut second, &mut first, PLACE, SRAM_SIZE);
    // BAR 0, whose registers are not memory.
    first.write(CONFIG, 0x10, &0xf000_0000_u32.to_le_bytes());
    set_command(&mut first, MEMORY);
    refused(&mut second, &mut first, 0xf000_0000, 0x1000);
    // Reset by the guest: it has no address.
    place(&mut first, PLACE);
    first.reset().unwrap();
    refused(&mut second, &mut first, PLACE, SRAM_SIZE);
}

#[test]
fn the_bars_of_another_vm_are_not_reached() {
    let host = host(NtbLimits::default());
    let [a, b] = [("a", DMA), ("b", OTHER)].map(|(vm, device)| {
        let served = Served::start(host.config(vm, &[device]));
        let mut client = served.client(device);
        let ram = small(&mut client);
        client.reset().unwrap();
        (served, client, ram)
    });
    let (_served, mut first, _ram) = a;
    let (_other, mut second, _other_ram) = b;
    place(&mut first, PLACE);
    assert!(enable(&mut second));
    map_bar(&mut second, PLACE);
    assert!(fill(&mut second, PLACE, 0x1000, 1).faulted());
    assert_bar_filled(&mut first, 0);
}

/// There an address is an IOVA, and QEMU's mapping of a BAR says nothing of which BAR it is.
#[test]
fn behind_a_viommu_no_bar_is_reached() {
    let host = host(NtbLimits::default());
    let served = Served::start(host.config("a", &[DMA, OTHER]));
    let mut first = served.client(DMA);
    let mut second = served.client(OTHER);
    for device in [&mut first, &mut second] {
        device.reset().unwrap();
    }
    place(&mut first, PLACE);
    let page = Ram::new(0x1000);
    second.map(0x8000_0000, 0x1000, page.fd(0)).unwrap();
    map_bar(&mut second, PLACE);
    assert!(enable(&mut second));
    assert!(fill(&mut second, PLACE, 0x1000, 1).faulted());
    assert!(!fill(&mut second, 0x8000_0000, 0x1000, 2).faulted());
    assert_bar_filled(&mut first, 0);
}

/// RAM takes all entries of the adapter.
#[test]
fn a_device_works_without_the_bars_for_which_there_is_no_window() {
    let host = host(NtbLimits {
        bar_size: SMALL,
        lut_entries: 4,
        ..NtbLimits::default()
    });
    let served = Served::start(host.config("a", &[DMA, OTHER]));
    let (mut first, mut second, [_, ram]) = devices(&served);
    place(&mut first, PLACE);
    map_bar(&mut second, PLACE);
    assert!(enable(&mut second));
    assert!(fill(&mut second, PLACE, 0x1000, 1).faulted());
    assert!(!fill(&mut second, 0x1000, 0x1000, 2).faulted());
    ram.assert_filled(0x1000, 0x1000, 2);
    assert_bar_filled(&mut first, 0);
    let report = served.full_status().devices;
    let unreachable = report.iter().map(|device| device.bytes_unreachable);
    assert_eq!(unreachable.collect::<Vec<_>>(), [0, SRAM_SIZE]);
}
