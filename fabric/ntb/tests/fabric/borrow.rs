//! A borrow from end to end: device at B, guest RAM at A.

use std::sync::atomic::Ordering;

use farside_fabric::{
    BorrowerDomain, FabricError, Iova, LenderPath, LimitError, MemoryRange, Owner, PeerAddress,
};
use farside_ntb::platform::{DomainOps, FunctionOps};
use farside_ntb::regs::{WINDOW_BAR, reg};
use farside_ntb::{BorrowerNtb, NtbError};
use farside_ntb_server::model::Port;

use crate::function::ModelFunction;
use crate::world::{MIB, World, owner, ram};

const HIGH: u64 = 4 << 30;

#[test]
fn what_a_device_writes_is_in_the_guest() {
    let world = World::small();
    let [a, b] = world.start_both();
    // 4 MiB of low RAM with a hole of 1 MiB, and 2 MiB of high RAM, in one file.
    let (file, view) = ram(6 * MIB);
    let part = |offset, len| MemoryRange {
        offset,
        len,
        ..file.clone()
    };
    let [low, high] = [4 * MIB, 2 * MIB].map(|span| a.peer_space().take(span).unwrap());
    let mut guest = BorrowerNtb::new(&a);
    let peer_address = |base: PeerAddress, offset| PeerAddress::new(base.get() + offset);
    guest.map(low.start(), part(0, MIB)).unwrap();
    guest
        .map(peer_address(low.start(), 2 * MIB), part(2 * MIB, 2 * MIB))
        .unwrap();
    let read_only = MemoryRange {
        writable: false,
        ..part(4 * MIB, 2 * MIB)
    };
    guest.map(high.start(), read_only).unwrap();

    let device = ModelFunction::device(1, &[]);
    let mut path = b.attach("drive", &owner(), device.clone()).unwrap();
    b.check_windows(None, &[4 * MIB, 2 * MIB]).unwrap();
    let ranges = [(Iova::new(0), 4 * MIB), (Iova::new(HIGH), 2 * MIB)];
    device.domain().check(&ranges).unwrap();
    let window = path
        .open_window(Iova::new(0), low.start(), 4 * MIB)
        .unwrap();
    assert_eq!((window.first_lut_entry, window.lut_entries), (0, 4));
    path.open_window(Iova::new(HIGH), high.start(), 2 * MIB)
        .unwrap();
    assert_eq!(
        device.dma_write(0, b"early"),
        None,
        "it may not master the bus"
    );
    path.set_bus_master(true).unwrap();

    device.dma_write(0x1000, b"low").unwrap();
    device.dma_write(3 * MIB - 3, b"across segments").unwrap();
    let look = |offset, len| {
        let mut bytes = vec![0; len];
        view.slice(offset as usize, len).unwrap().read(&mut bytes);
        bytes
    };
    assert_eq!(look(0x1000, 3), b"low");
    assert_eq!(look(3 * MIB - 3, 15), b"across segments");
    view.slice(4 * MIB as usize, 4).unwrap().write(b"high");
    let mut bytes = [0; 4];
    device.dma_read(HIGH, &mut bytes).unwrap();
    assert_eq!(&bytes, b"high");

    // The peer's IOMMU refuses accesses to the hole, and writes to read-only ranges.
    b.take_events();
    device.dma_write(MIB, b"hole").unwrap();
    device.dma_write(HIGH, b"rom!").unwrap();
    let refused = b.take_events().refused.expect("both were refused");
    assert_eq!((refused.count, refused.write), (2, true));
    assert_eq!(refused.peer_address, high.start());
    assert_eq!(look(4 * MIB, 4), b"high");
    // Beyond the windows, the device's own IOMMU refuses.
    assert_eq!(device.dma_write(4 * MIB, b"x"), None);
    assert_eq!(device.dma_write(HIGH - 1, b"x"), None);

    let usage = path.usage();
    assert_eq!((usage.windows, usage.lut_entries), (2, 6));
    assert_eq!(usage.window_bytes, 6 * MIB);
    assert_eq!(usage.lender_pages.bytes(), 6 * MIB);
    assert_eq!(guest.usage().bytes_mapped, 5 * MIB);
    assert_eq!(guest.usage().borrower_pages.bytes(), 5 * MIB);

    path.close_window(Iova::new(0)).unwrap();
    assert_eq!(device.dma_write(0x1000, b"late"), None);
    device.dma_read(HIGH, &mut bytes).unwrap();
    drop(path);
    assert!(!device.bus_master());
    assert!(device.table().ranges().is_empty());
    assert!(b.usage().devices.is_empty());
    drop(guest);
    assert!(world.hosts[0].domain.ranges().is_empty());
}

#[test]
fn the_borrowers_cpu_reaches_the_devices_bars() {
    let world = World::small();
    let [a, b] = world.start_both();
    // The page of the MSI-X table is trapped.
    let areas: &[(u64, u64)] = &[(0, 0x2000), (0x3000, 0x1000)];
    let device = ModelFunction::device(1, &[(0, 0x4000, areas), (4, MIB, &[(0, MIB)])]);
    let mut path = b.attach("drive", &owner(), device.clone()).unwrap();
    let bars = path.export_bars().unwrap().clone();
    assert_eq!(path.export_bars().unwrap(), &bars);
    assert_eq!(bars.bars.len(), 2);
    assert_eq!(world.hosts[1].domain.ranges().len(), 3);

    let window = a.open_bar_window(bars.peer_address, bars.len).unwrap();
    assert_eq!(window.lut_entries(), 2, "1 MiB and 16 KiB, side by side");
    let store = |bar: usize, offset: u64, value: u32| {
        let at = window.offset() + bars.bars[bar].offset + offset;
        world.write(Port::A, WINDOW_BAR, at, &value.to_le_bytes());
    };
    store(0, 0x1004, 1);
    store(0, 0x3ffc, 2);
    store(1, MIB - 4, 3);
    let found = (
        device.register(0, 0x1004),
        device.register(0, 0x3ffc),
        device.register(4, MIB - 4),
    );
    assert_eq!(found, (1, 2, 3));
    let refused = |adapter: &farside_ntb::Adapter<_>| {
        let events = adapter.take_events();
        events.refused.map_or(0, |refused| refused.count)
    };
    assert_eq!(refused(&a), 0);
    store(0, 0x2000, 4);
    assert_eq!(refused(&a), 1, "what traps is not there");
    assert_eq!(bars.peer_address_of(4), Some(bars.peer_address));
    assert_eq!(bars.peer_address_of(1), None);

    path.unexport_bars().unwrap();
    assert!(world.hosts[1].domain.ranges().is_empty());
    assert_eq!(b.peer_space().taken(), 0);
    store(0, 0x1004, 5);
    assert_eq!(device.register(0, 0x1004), 1);
    assert_eq!(a.usage().lut_entries, 2);
    drop(window);
    assert_eq!(a.usage().lut_entries, 0);
}

#[test]
fn a_flush_reads_through_an_open_window() {
    let world = World::small();
    let [a, b] = world.start_both();
    let (file, _view) = ram(2 * MIB);
    let range = a.peer_space().take(2 * MIB).unwrap();
    let mut guest = BorrowerNtb::new(&a);
    guest.map(range.start(), file).unwrap();
    let mut path = b
        .attach("drive", &owner(), ModelFunction::device(1, &[]))
        .unwrap();
    let flusher = path.flusher();
    let reads = || world.read64(Port::B, reg::WINDOW_READS);
    flusher.flush();
    assert_eq!(reads(), 0, "there is no window yet");
    for at in [0, HIGH] {
        path.open_window(Iova::new(at), range.start(), MIB).unwrap();
    }
    path.flush();
    assert_eq!(reads(), 1);
    path.close_window(Iova::new(0)).unwrap();
    flusher.flush();
    assert_eq!(reads(), 2);
    path.close_all().unwrap();
    flusher.flush();
    assert_eq!(reads(), 2);
    assert_eq!(b.take_events().refused, None);
}

#[test]
fn requester_entries_are_counted() {
    let world = World::small();
    let [_a, b] = world.start_both();
    let attach = |i: u8| {
        let device = ModelFunction::device(i, &[]);
        b.attach(&format!("drive{i}"), &owner(), device)
    };
    let mut paths: Vec<_> = (0..31).map(|i| attach(i).unwrap()).collect();
    let error = attach(31).unwrap_err();
    let NtbError::Limit(LimitError::Requesters {
        limit,
        reserved,
        used,
        ..
    }) = &error
    else {
        panic!("{error}");
    };
    assert_eq!((*limit, *reserved, *used), (32, 1, 31));
    paths.remove(7);
    attach(31).unwrap();
    assert_eq!(b.usage().devices.len(), 30);
}

#[test]
fn a_device_reaches_the_bars_of_its_owners_other_devices_without_the_ntb() {
    let world = World::small();
    let [_a, b] = world.start_both();
    let areas = [(0, 0x2000), (0x3000, 0x1000)];
    let target = ModelFunction::device(1, &[(2, 0x4000, &areas)]);
    let others = ModelFunction::device(2, &[(0, 0x1000, &[(0, 0x1000)])]);
    let namesakes = ModelFunction::device(4, &[(0, 0x1000, &[(0, 0x1000)])]);
    let device = ModelFunction::device(3, &[(0, 0x1000, &[(0, 0x1000)])]);
    let mut target_path = b.attach("target", &owner(), target.clone()).unwrap();
    let mut others_path = b
        .attach("others", &Owner::new("other", "user 1"), others)
        .unwrap();
    // The VM's name is what its borrower states.
    let namesake = Owner::new("vm", "user 2");
    let mut namesakes_path = b.attach("namesakes", &namesake, namesakes).unwrap();
    let mut path = b.attach("drive", &owner(), device.clone()).unwrap();
    let at = target_path.export_bars().unwrap().peer_address_of(2);
    let at = at.unwrap();
    let others_bar = others_path.export_bars().unwrap().peer_address;
    let namesakes_bar = namesakes_path.export_bars().unwrap().peer_address;
    let own_bar = path.export_bars().unwrap().peer_address;
    path.set_bus_master(true).unwrap();

    path.reach_bar(Iova::new(HIGH), at.wrapping_add(0x1000), 0x1000)
        .unwrap();
    device.dma_write(HIGH + 0x10, &7u32.to_le_bytes()).unwrap();
    assert_eq!(target.register(2, 0x1010), 7);
    assert_eq!((path.usage().windows, path.usage().lut_entries), (1, 0));
    assert_eq!(b.usage().lut_entries, 0);
    // The NTB is not on the way, so there is nothing to read through it.
    path.flush();

    let free = Iova::new(0);
    let error = namesakes_path.reach_bar(free, at, 0x1000).unwrap_err();
    assert!(matches!(error, NtbError::NotExported { .. }), "{error}");
    for (exported, len) in [
        (own_bar, 0x1000),
        (others_bar, 0x1000),
        (namesakes_bar, 0x1000),
        (at, 0x3000),
        (at.wrapping_add(0x2000), 0x1000),
        (at.wrapping_add(0x4000), 0x1000),
        (PeerAddress::new(0), 0x1000),
    ] {
        let error = path.reach_bar(free, exported, len).unwrap_err();
        assert!(matches!(error, NtbError::NotExported { .. }), "{error}");
    }
    for (iova, exported, len) in [
        (HIGH, at, 0x1000),
        (0, at, 0),
        (0, at, 0x800),
        (0, at.wrapping_add(0x800), 0x1000),
        (0x1000, at, u64::MAX - 0xfff),
        (0x1000, at, u64::MAX - 0x1fff),
    ] {
        let error = path.reach_bar(Iova::new(iova), exported, len).unwrap_err();
        assert!(matches!(error, NtbError::Fabric(_)), "{error}");
    }

    path.close_window(Iova::new(HIGH)).unwrap();
    assert_eq!(device.dma_write(HIGH, b"late"), None);
    path.reach_bar(free, at, 0x2000).unwrap();
    path.close_all().unwrap();
    assert!(device.table().ranges().is_empty());
    target_path.unexport_bars().unwrap();
    let error = path.reach_bar(free, at, 0x1000).unwrap_err();
    assert!(matches!(error, NtbError::NotExported { .. }), "{error}");
}

#[test]
fn a_refused_window_takes_nothing() {
    let world = World::small();
    let [_a, b] = world.start_both();
    let device = ModelFunction::device(1, &[]);
    let mut path = b.attach("drive", &owner(), device.clone()).unwrap();
    let peer_address = PeerAddress::new(MIB);
    let mut open = |at, peer_address, len| {
        path.open_window(Iova::new(at), peer_address, len)
            .unwrap_err()
    };
    let error = open(0, peer_address, 65 * MIB);
    assert!(
        matches!(error, FabricError::Limit(LimitError::LutEntries { .. })),
        "{error}"
    );
    let error = open(0, PeerAddress::new(0x800), MIB);
    assert!(matches!(error, FabricError::Unaligned { .. }), "{error}");
    let error = open(0, peer_address, 0);
    assert!(matches!(error, FabricError::BadRange { .. }), "{error}");
    device.table().fail_map.store(true, Ordering::Relaxed);
    let error = open(0, peer_address, MIB);
    assert!(error.to_string().contains("maps nothing"), "{error}");
    device.table().fail_map.store(false, Ordering::Relaxed);
    assert_eq!(b.usage().lut_entries, 0);
    path.open_window(Iova::new(0), peer_address, 64 * MIB)
        .unwrap();
    let error = path
        .open_window(Iova::new(MIB), peer_address, MIB)
        .unwrap_err();
    assert!(matches!(error, FabricError::Overlap { .. }), "{error}");
    let error = path.close_window(Iova::new(MIB)).unwrap_err();
    assert!(matches!(error, FabricError::NoWindow { .. }), "{error}");
}

#[test]
fn what_the_device_cannot_address_is_told_before_the_vm_boots() {
    let world = World::small();
    let [_a, b] = world.start_both();
    let device = ModelFunction::device(1, &[]);
    let _path = b.attach("drive", &owner(), device.clone()).unwrap();
    let range = (Iova::new(0xfe00_0000), 32 * MIB);
    let error = device.domain().check(&[range]).unwrap_err();
    assert!(error.to_string().contains("0xfee00000"), "{error}");
    b.check_windows(None, &[65 * MIB]).unwrap_err();
}

#[test]
fn peer_mappings_are_unmapped_whole() {
    let world = World::small();
    let [a, _b] = world.start_both();
    let (file, _view) = ram(4 * MIB);
    let range = a.peer_space().take(4 * MIB).unwrap();
    let at = |offset| PeerAddress::new(range.start().get() + offset);
    let mut guest = BorrowerNtb::new(&a);
    for offset in [0, 2 * MIB] {
        let len = 2 * MIB;
        guest
            .map(
                at(offset),
                MemoryRange {
                    offset,
                    len,
                    ..file.clone()
                },
            )
            .unwrap();
    }
    let error = guest.unmap(at(MIB), 2 * MIB).unwrap_err();
    assert!(matches!(error, FabricError::SplitMapping { .. }), "{error}");
    let error = guest
        .map(
            at(MIB),
            MemoryRange {
                len: MIB,
                ..file.clone()
            },
        )
        .unwrap_err();
    assert!(matches!(error, FabricError::Overlap { .. }), "{error}");
    let short = MemoryRange {
        offset: 4 * MIB,
        len: MIB,
        ..file
    };
    let error = guest.map(at(8 * MIB), short).unwrap_err();
    assert!(matches!(error, FabricError::Memory { .. }), "{error}");
    let domain = &world.hosts[0].domain;
    domain.fail_unmap.store(true, Ordering::Relaxed);
    guest.unmap(at(0), 4 * MIB).unwrap_err();
    assert_eq!(guest.usage().bytes_mapped, 4 * MIB, "it is still there");
    domain.fail_unmap.store(false, Ordering::Relaxed);
    guest.unmap(at(0), 4 * MIB).unwrap();
    assert!(domain.ranges().is_empty());
    let error = guest.unmap(at(0), 4 * MIB).unwrap_err();
    assert!(matches!(error, FabricError::NotMapped { .. }), "{error}");
}

#[test]
fn peer_addresses_that_could_not_be_unmapped_are_not_used_again() {
    let world = World::small();
    let [a, _b] = world.start_both();
    let (file, _view) = ram(4 * MIB);
    let range = a.peer_space().take(8 * MIB).unwrap();
    let at = PeerAddress::new(range.start().get() + 4 * MIB);
    let domain = &world.hosts[0].domain;
    let mut ended = BorrowerNtb::new(&a);
    ended.map(at, file).unwrap();
    domain.fail_unmap.store(true, Ordering::Relaxed);
    drop(ended);
    domain.fail_unmap.store(false, Ordering::Relaxed);
    assert_eq!(domain.ranges(), [(at.get(), 4 * MIB)], "it is still there");

    // A window of the next borrow would reach all of it.
    let start = range.start();
    drop(range);
    assert_eq!(a.peer_space().taken(), 8 * MIB);
    let next = a.peer_space().take(8 * MIB).unwrap();
    assert!(next.start() >= start.checked_add(8 * MIB).unwrap());
}

#[test]
fn entries_that_a_device_may_still_reach_are_not_reused() {
    let world = World::small();
    let [_a, b] = world.start_both();
    let device = ModelFunction::device(1, &[]);
    let mut path = b.attach("drive", &owner(), device.clone()).unwrap();
    path.open_window(Iova::new(0), PeerAddress::new(MIB), 4 * MIB)
        .unwrap();
    device.table().fail_unmap.store(true, Ordering::Relaxed);
    path.close_window(Iova::new(0)).unwrap_err();
    assert_eq!(path.usage().windows, 1, "it is as it was");
    drop(path);
    assert_eq!(b.usage().lut_entries, 4);
    let lut = |index| world.read64(Port::B, farside_ntb::regs::lut_entry(index));
    assert!(
        (0..64).all(|index| lut(index) == 0),
        "but they lead nowhere"
    );
    let mut next = b
        .attach("other", &owner(), ModelFunction::device(2, &[]))
        .unwrap();
    let window = next
        .open_window(Iova::new(0), PeerAddress::new(MIB), MIB)
        .unwrap();
    assert_eq!(window.first_lut_entry, 4);
}

#[test]
fn bars_that_cannot_be_exported_leave_nothing_behind() {
    let world = World::small();
    let [_a, b] = world.start_both();
    let device = ModelFunction::device(1, &[(0, 0x4000, &[(0, 0x4000)])]);
    let mut path = b.attach("drive", &owner(), device).unwrap();
    let domain = &world.hosts[1].domain;
    domain.fail_map.store(true, Ordering::Relaxed);
    path.export_bars().unwrap_err();
    assert_eq!(b.peer_space().taken(), 0);
    domain.fail_map.store(false, Ordering::Relaxed);
    let bars = path.export_bars().unwrap().clone();
    domain.fail_unmap.store(true, Ordering::Relaxed);
    path.unexport_bars().unwrap_err();
    domain.fail_unmap.store(false, Ordering::Relaxed);
    assert_eq!(path.export_bars().unwrap(), &bars, "they are still there");
    drop(path);
    assert!(domain.ranges().is_empty());
    let nothing = ModelFunction::device(2, &[(0, 256, &[])]);
    let mut path = b.attach("other", &owner(), nothing).unwrap();
    let bars = path.export_bars().unwrap();
    assert_eq!((bars.len, bars.bars.len()), (0, 0));
}

#[test]
fn a_port_that_takes_no_writes_is_an_error_and_loses_nothing() {
    let world = World::small();
    let [_a, b] = world.start_both();
    let device = ModelFunction::device(1, &[]);
    let mut path = b.attach("drive", &owner(), device.clone()).unwrap();
    let peer_address = PeerAddress::new(MIB);
    let stuck = &world.hosts[1].stuck;
    stuck.store(true, Ordering::Relaxed);
    let error = path
        .open_window(Iova::new(0), peer_address, 2 * MIB)
        .unwrap_err();
    assert!(
        error.to_string().contains("LUT entry 0 reads 0x0"),
        "{error}"
    );
    assert_eq!(b.usage().lut_entries, 0);
    assert!(device.table().ranges().is_empty());
    let error = b
        .attach("other", &owner(), ModelFunction::device(2, &[]))
        .unwrap_err();
    assert!(error.to_string().contains("requester entry"), "{error}");
    assert_eq!(b.usage().devices, ["drive"]);
    stuck.store(false, Ordering::Relaxed);
    path.open_window(Iova::new(0), peer_address, 2 * MIB)
        .unwrap();
    // Entries that cannot be cleared are not allocated again.
    stuck.store(true, Ordering::Relaxed);
    path.close_window(Iova::new(0)).unwrap();
    assert!(device.table().ranges().is_empty());
    stuck.store(false, Ordering::Relaxed);
    let window = path.open_window(Iova::new(0), peer_address, MIB).unwrap();
    assert_eq!(window.first_lut_entry, 2);
}

#[test]
fn the_devices_of_a_vm_share_mappings_and_lut_entries() {
    let world = World::small();
    let [a, b] = world.start_both();
    let (memory, view) = ram(4 * MIB);
    let range = a.peer_space().take(4 * MIB).unwrap();
    let devices = [1, 2].map(|bus| ModelFunction::device(bus, &[]));
    let mut guests = [0, 1].map(|_| BorrowerNtb::new(&a));
    let mut paths = [("one", 0), ("two", 1)]
        .map(|(name, device)| b.attach(name, &owner(), devices[device].clone()).unwrap());
    for (guest, path) in guests.iter_mut().zip(&mut paths) {
        assert!(guest.maps_only(&range, &[(range.start(), memory.clone())]));
        guest.map(range.start(), memory.clone()).unwrap();
        path.open_window(Iova::new(0), range.start(), 4 * MIB)
            .unwrap();
    }
    let domain = &world.hosts[0].domain;
    assert_eq!(domain.ranges(), [(range.start().get(), 4 * MIB)]);
    let usage = b.usage();
    assert_eq!((usage.windows, usage.lut_entries), (1, 4));
    assert_eq!(
        paths.each_ref().map(|path| path.usage().lut_entries),
        [4, 4]
    );
    for (device, byte) in devices.iter().zip([0x5a, 0xa5]) {
        device.table().write(MIB, &[byte; 8]).unwrap();
        let mut found = [0; 8];
        view.slice(MIB as usize, 8).unwrap().read(&mut found);
        assert_eq!(found, [byte; 8]);
    }

    // The first device goes: the second reaches the memory as before.
    let [first, second] = paths;
    let [first_guest, second_guest] = guests;
    drop((first, first_guest));
    assert_eq!(devices[0].table().write(MIB, &[1; 8]), None);
    devices[1].table().write(MIB, &[1; 8]).unwrap();
    assert_eq!(b.usage().lut_entries, 4);
    drop((second, second_guest));
    assert_eq!((b.usage().lut_entries, domain.ranges()), (0, vec![]));
}

#[test]
fn other_memory_or_rights_at_shared_addresses_are_refused() {
    let world = World::small();
    let [a, _b] = world.start_both();
    let (memory, _view) = ram(4 * MIB);
    let range = a.peer_space().take(8 * MIB).unwrap();
    let at = range.start();
    let mut first = BorrowerNtb::new(&a);
    first.map(at, memory.clone()).unwrap();
    let read_only = MemoryRange {
        writable: false,
        ..memory.clone()
    };
    let half = MemoryRange {
        len: 2 * MIB,
        ..memory.clone()
    };
    let mut second = BorrowerNtb::new(&a);
    for other in [read_only, half, ram(4 * MIB).0] {
        assert!(!second.maps_only(&range, &[(at, other.clone())]));
        let error = second.map(at, other).unwrap_err();
        assert!(matches!(error, FabricError::Overlap { .. }), "{error}");
    }
    assert!(!second.maps_only(&range, &[]));
    // It may map more than the other: that one's device can reach it, as in one container of VFIO.
    let above = at.checked_add(4 * MIB).unwrap();
    let wanted = [(at, memory.clone()), (above, ram(4 * MIB).0)];
    assert!(second.maps_only(&range, &wanted));
    let elsewhere = a.peer_space().take(MIB).unwrap();
    assert!(second.maps_only(&elsewhere, &[]));
}

#[test]
fn memory_is_unmapped_with_the_last_device_that_maps_it() {
    let world = World::small();
    let [a, _b] = world.start_both();
    let (memory, _view) = ram(4 * MIB);
    let range = a.peer_space().take(4 * MIB).unwrap();
    let at = range.start();
    let domain = &world.hosts[0].domain;
    let mut guests = [0, 1, 2].map(|_| BorrowerNtb::new(&a));
    for guest in &mut guests {
        guest.map(at, memory.clone()).unwrap();
    }
    let [first, second, third] = &mut guests;
    // A VMM may unmap it for the next device only after the answer for this one.
    first.unmap(at, 4 * MIB).unwrap();
    second.unmap(at, 4 * MIB).unwrap();
    assert_eq!(domain.ranges(), [(at.get(), 4 * MIB)]);
    // Closing a path counts as unmapping.
    third.unmap_all().unwrap();
    assert!(domain.ranges().is_empty());
    // It can be mapped again, with other rights.
    let read_only = MemoryRange {
        writable: false,
        ..memory
    };
    first.map(at, read_only.clone()).unwrap();
    second.map(at, read_only).unwrap();
    first.unmap(at, 4 * MIB).unwrap();
    assert_eq!(domain.ranges(), [(at.get(), 4 * MIB)]);
    second.unmap(at, 4 * MIB).unwrap();
    assert!(domain.ranges().is_empty());
}
