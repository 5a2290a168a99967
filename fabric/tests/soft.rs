//! The software fabric: each table refuses independently, limits are enforced, and all
//! resources are released.

use std::sync::{Arc, Mutex};

use farside_fabric::{
    Access, BorrowerDomain, FabricError, Fault, FaultReason, Iova, LenderPath, LimitError,
    MemoryRange, NtbLimits, NtbTables, Owner, PeerAddress,
    memory::create_sealed,
    soft::{Adapter, MAX_MAPPINGS, Path},
};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn adapter() -> Adapter {
    adapter_with_tables().0
}

fn adapter_with_tables() -> (Adapter, Arc<Mutex<NtbTables>>) {
    let limits = NtbLimits::default();
    let tables = Arc::new(Mutex::new(NtbTables::new(limits.clone()).expect("limits")));
    (Adapter::with_tables(limits, tables.clone()), tables)
}

fn owner() -> Owner {
    Owner::new("vm", "user 1")
}

fn ram(len: u64) -> MemoryRange {
    MemoryRange::whole(create_sealed("ram", len).expect("memfd"), len)
}

fn peer(address: u64) -> PeerAddress {
    PeerAddress::new(address)
}

fn iova(address: u64) -> Iova {
    Iova::new(address)
}

/// 16 MiB of RAM at IOVA 0 with a hole from 4 to 8 MiB; bus master on.
fn small_vm(adapter: &Adapter) -> Path {
    let mut path = adapter.attach("nvme0", &owner()).expect("attach");
    path.map_peer(peer(GIB), ram(4 * MIB)).expect("map");
    path.map_peer(peer(GIB + 8 * MIB), ram(8 * MIB))
        .expect("map");
    path.open_window(iova(0), peer(GIB), 16 * MIB)
        .expect("open");
    path.set_bus_master(true).expect("bus master");
    path
}

fn refused(path: &mut Path, at: u64, access: Access) -> FaultReason {
    let fault: Fault = path
        .translate(iova(at), 8, access)
        .expect_err("must be refused");
    assert_eq!((fault.iova, fault.len, fault.access), (iova(at), 8, access));
    fault.reason
}

#[test]
fn a_dma_goes_through_all_three_tables() {
    let mut path = small_vm(&adapter());
    let slice = path.translate(iova(MIB), 4096, Access::Write).expect("RAM");
    assert_eq!(slice.write(&[7; 4096]), 4096);
    let again = path
        .translate(iova(MIB + 10), 10, Access::Read)
        .expect("RAM");
    let mut buf = [0; 10];
    again.read(&mut buf);
    assert_eq!(buf, [7; 10]);
    assert_eq!(path.faults().total(), 0);
}

#[test]
fn a_run_ends_where_the_memory_does() {
    let mut path = small_vm(&adapter());
    let at = iova(4 * MIB - 100);
    let slice = path.translate(at, 4096, Access::Read).expect("RAM");
    assert_eq!(slice.len(), 100);
}

#[test]
fn each_table_refuses_with_its_own_reason() {
    let mut path = small_vm(&adapter());
    // Into a hole; outside every window; at the end of the address space.
    assert_eq!(
        refused(&mut path, 4 * MIB, Access::Write),
        FaultReason::BorrowerDomain
    );
    assert_eq!(
        refused(&mut path, 16 * MIB, Access::Write),
        FaultReason::LenderDomain
    );
    assert_eq!(
        refused(&mut path, u64::MAX - 7, Access::Read),
        FaultReason::LenderDomain
    );

    let rom = MemoryRange {
        writable: false,
        ..ram(4 * MIB)
    };
    path.map_peer(peer(GIB + 4 * MIB), rom).expect("map");
    assert_eq!(
        refused(&mut path, 4 * MIB, Access::Write),
        FaultReason::Permission
    );
    assert!(path.translate(iova(4 * MIB), 8, Access::Read).is_ok());
    assert_eq!(
        refused(&mut path, 4 * MIB, Access::Write),
        FaultReason::Permission
    );

    path.set_bus_master(false).expect("bus master");
    assert_eq!(
        refused(&mut path, 0, Access::Read),
        FaultReason::BusMasterDisabled
    );

    let summary = path.faults().summary();
    assert_eq!(summary.total, 6);
    assert_eq!(summary.by_reason.lender_domain, 2);
    assert_eq!(summary.by_reason.permission, 2);
    assert_eq!(summary.recent[1].fault.iova, iova(16 * MIB));
}

#[test]
fn nothing_is_reachable_before_and_after() {
    let adapter = adapter();
    let mut path = adapter.attach("nvme0", &owner()).expect("attach");
    path.set_bus_master(true).expect("bus master");
    assert_eq!(
        refused(&mut path, 0, Access::Read),
        FaultReason::LenderDomain
    );
    assert_eq!(path.usage(), Default::default());

    let mut path = small_vm(&adapter);
    assert!(path.translate(iova(0), 8, Access::Write).is_ok());
    path.unmap_peer(peer(GIB), 4 * MIB).expect("unmap");
    assert_eq!(
        refused(&mut path, 0, Access::Write),
        FaultReason::BorrowerDomain
    );
    assert!(path.translate(iova(8 * MIB), 8, Access::Write).is_ok());
    path.close_window(iova(0)).expect("close");
    assert_eq!(
        refused(&mut path, 8 * MIB, Access::Write),
        FaultReason::LenderDomain
    );
    path.unmap_peer_all();
    assert_eq!(path.usage(), Default::default());
}

#[test]
fn memory_in_use_is_draining_until_it_is_not() {
    let mut path = small_vm(&adapter());
    let slice = path.translate(iova(0), 8, Access::Write).expect("RAM");
    path.unmap_peer(peer(GIB), 16 * MIB).expect("unmap");
    assert!(path.draining());
    // An I/O in flight may still finish.
    assert_eq!(slice.write(&[1; 8]), 8);
    drop(slice);
    assert!(!path.draining());
}

#[test]
fn memory_is_in_use_while_somebody_has_a_slice_of_it() {
    let mut path = small_vm(&adapter());
    assert!(!path.in_use(peer(GIB), 16 * MIB));
    // The translation is in the IOTLB, which does not count.
    let slice = path.translate(iova(0), 8, Access::Write).expect("RAM");
    assert!(path.in_use(peer(GIB), 16 * MIB) && path.in_use(peer(GIB), 4 * MIB));
    assert!(!path.in_use(peer(GIB + 8 * MIB), 8 * MIB));
    let part = slice.slice(4, 4).expect("a part");
    drop(slice);
    assert!(path.in_use(peer(GIB), 4 * MIB));
    drop(part);
    assert!(!path.in_use(peer(GIB), 4 * MIB));
    path.unmap_peer(peer(GIB), 4 * MIB).expect("unmap");
    assert!(!path.draining());
}

#[test]
fn mappings_are_unmapped_whole_and_do_not_overlap() {
    let mut path = small_vm(&adapter());
    let split = path.unmap_peer(peer(GIB), 4096).expect_err("a part");
    assert!(
        matches!(split, FabricError::SplitMapping { mapping_len, .. } if mapping_len == 4 * MIB)
    );
    let split = path.unmap_peer(peer(GIB + 4096), GIB).expect_err("a part");
    assert!(matches!(split, FabricError::SplitMapping { .. }));
    let none = path
        .unmap_peer(peer(GIB + 4 * MIB), 4 * MIB)
        .expect_err("a hole");
    assert!(matches!(none, FabricError::NotMapped { .. }));
    let overlap = path
        .map_peer(peer(GIB + 3 * MIB), ram(2 * MIB))
        .expect_err("overlap");
    assert!(matches!(overlap, FabricError::Overlap { other_start, .. } if other_start == GIB));
    let unaligned = path
        .map_peer(peer(GIB + 1), ram(4096))
        .expect_err("unaligned");
    assert!(matches!(unaligned, FabricError::Unaligned { .. }));
    let bad = path
        .unmap_peer(peer(!0xfff), 8192)
        .expect_err("past the end");
    assert!(matches!(bad, FabricError::BadRange { .. }));
    // The trait's methods are equivalent, and a range may contain a hole.
    BorrowerDomain::unmap(&mut path, peer(GIB), 16 * MIB).expect("unmap");
    BorrowerDomain::map(&mut path, peer(GIB), ram(4096)).expect("map");
    assert_eq!(path.usage().bytes_mapped, 4096);
}

#[test]
fn a_file_too_short_is_refused() {
    let mut path = adapter().attach("nvme0", &owner()).expect("attach");
    let range = MemoryRange {
        len: 8192,
        ..ram(4096)
    };
    let error = path.map_peer(peer(0), range).expect_err("too short");
    assert!(matches!(error, FabricError::Memory { .. }), "{error}");
    assert_eq!(path.usage().bytes_mapped, 0);
}

#[test]
fn mappings_of_a_domain_are_bounded() {
    let mut path = adapter().attach("nvme0", &owner()).expect("attach");
    let page = ram(4096);
    for n in 0..MAX_MAPPINGS as u64 {
        path.map_peer(peer(n * 8192), page.clone()).expect("map");
    }
    let error = path
        .map_peer(peer(1 << 40), page)
        .expect_err("one too many");
    let limit = format!("{MAX_MAPPINGS} mappings");
    assert!(error.to_string().contains(&limit), "{error}");
}

#[test]
fn windows_are_counted_and_given_back() {
    let (adapter, tables) = adapter_with_tables();
    let mut path = adapter.attach("nvme0", &owner()).expect("attach");
    let low = path.open_window(iova(0), peer(0), 2 * GIB).expect("open");
    let high = path
        .open_window(iova(4 * GIB), peer(2 * GIB), 3 * GIB + 4096)
        .expect("open");
    assert_eq!((low.first_lut_entry, low.lut_entries), (0, 16));
    assert_eq!((high.first_lut_entry, high.lut_entries), (16, 25));
    assert_eq!(high.bus.get() - low.bus.get(), 2 * GIB);
    let usage = path.usage();
    assert_eq!((usage.windows, usage.lut_entries), (2, 41));
    assert_eq!(usage.window_bytes, 5 * GIB + 4096);
    assert_eq!(
        (usage.lender_pages.pages_1g, usage.lender_pages.pages_4k),
        (5, 1)
    );
    assert_eq!(tables.lock().unwrap().usage().lut_entries, 41);

    let overlap = path
        .open_window(iova(GIB), peer(8 * GIB), GIB)
        .expect_err("overlap");
    assert!(matches!(overlap, FabricError::Overlap { .. }));
    assert_eq!(tables.lock().unwrap().usage().lut_entries, 41);
    let missing = path
        .close_window(iova(GIB))
        .expect_err("no window begins there");
    assert!(matches!(missing, FabricError::NoWindow { .. }));

    path.close_window(iova(0)).expect("close");
    assert_eq!(tables.lock().unwrap().usage().lut_entries, 25);
    path.close_all().expect("close");
    assert_eq!(tables.lock().unwrap().usage().lut_entries, 0);
    path.open_window(iova(0), peer(0), GIB).expect("open");
    drop(path);
    let usage = tables.lock().unwrap().usage();
    assert_eq!(
        (usage.windows, usage.lut_entries, usage.devices.len()),
        (0, 0, 0)
    );
}

#[test]
fn devices_share_the_windows_of_an_adapter() {
    let adapter = adapter();
    let mut first = adapter.attach("nvme0", &owner()).expect("attach");
    let mut second = adapter
        .attach("nvme1", &Owner::new("other", "user 1"))
        .expect("attach");
    first.open_window(iova(0), peer(0), 20 * GIB).expect("open");
    let error = second
        .open_window(iova(0), peer(0), 16 * GIB)
        .expect_err("too large");
    assert_eq!(
        error.to_string(),
        "no room for a window of 16 GiB in the NTB's BAR: it needs 128 consecutive LUT entries of \
         128 MiB; of 256, 96 are free, at most 96 of them consecutive; a window of at most 12 GiB \
         fits; raise bar-size to 64 GiB"
    );
    second
        .open_window(iova(0), peer(0), 12 * GIB)
        .expect("what was said to fit");
    drop(first);
    second
        .open_window(iova(1 << 40), peer(0), 20 * GIB)
        .expect("given back");
}

#[test]
fn peer_addresses_are_aligned_as_the_adapter_needs() {
    let mut path = adapter().attach("nvme0", &owner()).expect("attach");
    let error = path
        .open_window(iova(0), peer(MIB), GIB)
        .expect_err("unaligned");
    assert_eq!(
        error.to_string(),
        "peer address 0x100000 is not a multiple of 128 MiB, the alignment of the NTB's translation"
    );
    let amd = NtbLimits {
        alignment: Some(4096),
        ..NtbLimits::default()
    };
    let mut path = Adapter::new(amd)
        .expect("limits")
        .attach("nvme0", &owner())
        .expect("attach");
    path.open_window(iova(0), peer(MIB), GIB)
        .expect("aligned enough");
}

#[test]
fn thirty_devices_a_pair() {
    let (adapter, tables) = adapter_with_tables();
    let mut paths: Vec<Path> = (0..30)
        .map(|n| {
            adapter
                .attach(&format!("nvme{n}"), &owner())
                .expect("attach")
        })
        .collect();
    match adapter.attach("nvme30", &owner()) {
        Err(FabricError::Limit(
            error @ LimitError::Requesters {
                limit: 32,
                reserved: 2,
                ..
            },
        )) => {
            let text = error.to_string();
            assert!(
                text.contains("nvme30") && text.contains("requester-entries = 32"),
                "{text}"
            );
        }
        other => panic!("{other:?}"),
    }
    paths.pop();
    let path = adapter
        .attach("nvme30", &owner())
        .expect("one was given back");
    assert!(
        tables
            .lock()
            .unwrap()
            .usage()
            .devices
            .contains(&"nvme30".to_owned())
    );
    drop(path);
}

#[test]
fn a_path_moves_to_the_thread_of_its_device() {
    let mut path = small_vm(&adapter());
    let faults = path.faults().clone();
    std::thread::spawn(move || {
        path.translate(iova(0), 8, Access::Read).expect("RAM");
        path.translate(iova(5 * MIB), 8, Access::Read)
            .expect_err("hole");
    })
    .join()
    .expect("no panic");
    assert_eq!(faults.total(), 1);
}
