//! LUT entries that the devices of an owner share, against a naive count of the devices.

use std::collections::BTreeMap;

use farside_fabric::{
    LimitError, LutRange, NtbLimits, NtbTables, Owner, PeerAddress, TakenWindow, VmShare,
};
use proptest::{prelude::*, sample::Index};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

fn peer(address: u64) -> PeerAddress {
    PeerAddress::new(address)
}

fn owner(vm: &str) -> Owner {
    Owner::new(vm, "user 1")
}

fn tables() -> NtbTables {
    NtbTables::new(NtbLimits::default()).expect("limits")
}

#[test]
fn a_guest_of_16_gib_takes_128_lut_entries_for_all_its_devices() {
    let mut tables = tables();
    let mut opened = Vec::new();
    for device in ["disk0", "disk1", "net0"] {
        let entry = tables.take_requester(device, &owner("web1")).expect("free");
        // Low memory, and what is above 4 GiB.
        for (at, bytes) in [(GIB, 2 * GIB), (64 * GIB, 14 * GIB)] {
            let taken = tables.take_window(Some(entry), peer(at), bytes);
            opened.push((entry, taken.expect("fits").range()));
        }
    }
    let usage = tables.usage();
    assert_eq!((usage.windows, usage.lut_entries), (2, 128));
    assert_eq!(usage.devices, ["disk0", "disk1", "net0"]);
    // Of another VM, the same peer address is another host's, or another file's.
    let other = tables
        .take_requester("disk2", &owner("web2"))
        .expect("free");
    let taken = tables.take_window(Some(other), peer(GIB), 2 * GIB);
    assert!(matches!(taken, Ok(TakenWindow::New(_))), "{taken:?}");
    assert_eq!(tables.usage().lut_entries, 144);
    // The last device returns them.
    for (entry, range) in opened.drain(2..) {
        tables.give_back_window(Some(entry), range);
        assert_eq!(tables.usage().lut_entries, 144);
    }
    for (left, (entry, range)) in [128, 16].into_iter().zip(opened) {
        tables.give_back_window(Some(entry), range);
        assert_eq!(tables.usage().lut_entries, left);
    }
}

#[test]
fn windows_are_restored_where_they_were_and_nowhere_else() {
    let mut before = tables();
    let entries = ["disk0", "disk1", "net0"].map(|device| {
        let vm = if device == "net0" { "web2" } else { "web1" };
        before.take_requester(device, &owner(vm)).expect("free")
    });
    let mut taken = |entry, at| {
        let taken = before.take_window(Some(entry), peer(at), GIB);
        taken.expect("fits").range()
    };
    let (first, second) = (taken(entries[0], GIB), taken(entries[0], 4 * GIB));
    let mut after = tables();
    let [disk0, disk1, net0] = ["disk0", "disk1", "net0"].map(|device| {
        let vm = if device == "net0" { "web2" } else { "web1" };
        after.take_requester(device, &owner(vm)).expect("free")
    });
    assert!(after.restore_window(disk0, peer(4 * GIB), GIB, second));
    assert!(after.restore_window(disk0, peer(GIB), GIB, first));
    assert_eq!(after.usage().lut_entries, before.usage().lut_entries);
    // Another device of the VM shares it; another VM does not, nor another window.
    assert!(after.restore_window(disk1, peer(GIB), GIB, first));
    assert!(!after.restore_window(net0, peer(GIB), GIB, first));
    assert!(!after.restore_window(disk1, peer(2 * GIB), GIB, first));
    assert!(!after.restore_window(disk1, peer(4 * GIB), 2 * GIB, second));
    let overlaps = LutRange {
        first: first.first + 1,
        ..first
    };
    assert!(!after.restore_window(net0, peer(GIB), GIB, overlaps));
    let beyond = LutRange {
        first: u32::MAX,
        ..first
    };
    assert!(!after.restore_window(net0, peer(GIB), GIB, beyond));
    assert!(!after.restore_window(usize::MAX, peer(GIB), GIB, first));
    // What is given out next is free.
    let next = after.take_window(Some(net0), peer(GIB), GIB).expect("fits");
    assert!(![first.first, second.first].contains(&next.range().first));
}

#[test]
fn a_check_counts_the_windows_that_the_vm_has_open() {
    let mut tables = tables();
    let first = tables
        .take_requester("disk0", &owner("web1"))
        .expect("free");
    for at in [GIB, 64 * GIB] {
        tables
            .take_window(Some(first), peer(at), 15 * GIB)
            .expect("fits");
    }
    let check =
        |vm: Option<&str>, spans: &[u64]| tables.check_windows(vm.map(owner).as_ref(), spans);
    // Of 256 entries 16 are free.
    let both = [15 * GIB, 15 * GIB];
    assert_eq!(
        check(Some("web1"), &both).map(|used| used.lut_entries),
        Ok(240)
    );
    check(Some("web1"), &[15 * GIB, 15 * GIB, 2 * GIB]).expect("one more fits");
    for (vm, spans) in [
        (Some("web1"), &[15 * GIB, 14 * GIB][..]),
        (Some("web2"), &[15 * GIB]),
        (None, &[15 * GIB]),
    ] {
        let refused = check(vm, spans);
        assert!(
            matches!(refused, Err(LimitError::LutEntries { free: 16, .. })),
            "{vm:?}: {refused:?}"
        );
    }
}

/// The name of a VM is what its borrower states.
#[test]
fn vms_of_one_name_and_two_borrowers_share_nothing() {
    let limits = NtbLimits {
        per_vm: VmShare {
            lut_entries: Some(8),
            requester_entries: Some(2),
        },
        ..NtbLimits::default()
    };
    let mut tables = NtbTables::new(limits).expect("limits");
    let owners = ["user 1", "user 2", "host user 1"].map(|by| Owner::new("web1", by));
    let mut opened = Vec::new();
    for owner in &owners {
        // None counts for another.
        let entries = ["disk0", "disk1"].map(|device| {
            let entry = tables.take_requester(device, owner);
            entry.expect("two of two")
        });
        let refused = tables.take_requester("disk2", owner);
        assert!(
            matches!(refused, Err(LimitError::VmRequesters { limit: 2, .. })),
            "{refused:?}"
        );
        let taken = tables.take_window(Some(entries[0]), peer(GIB), GIB);
        let Ok(TakenWindow::New(range)) = taken else {
            panic!("{owner:?}: {taken:?}");
        };
        let same = tables.take_window(Some(entries[1]), peer(GIB), GIB);
        assert_eq!(same, Ok(TakenWindow::Shared(range)), "{owner:?}");
        tables
            .check_windows(Some(owner), &[GIB])
            .expect("it is open");
        opened.push((entries, range));
    }
    assert_eq!(tables.usage().lut_entries, 3 * 8);
    // Nor after a restart of the lender.
    let mut after = self::tables();
    let (_, range) = opened[0];
    let [first, second] = [0, 1].map(|n| after.take_requester("disk0", &owners[n]).expect("free"));
    assert!(after.restore_window(first, peer(GIB), GIB, range));
    assert!(!after.restore_window(second, peer(GIB), GIB, range));
}

#[test]
fn a_vm_has_no_more_than_its_share() {
    let limits = NtbLimits {
        per_vm: VmShare {
            lut_entries: Some(128),
            requester_entries: Some(2),
        },
        ..NtbLimits::default()
    };
    let mut tables = NtbTables::new(limits).expect("limits");
    let first = tables
        .take_requester("disk0", &owner("web1"))
        .expect("free");
    let second = tables
        .take_requester("disk1", &owner("web1"))
        .expect("free");
    let refused = tables.take_requester("disk2", &owner("web1"));
    assert!(
        matches!(refused, Err(LimitError::VmRequesters { limit: 2, .. })),
        "{refused:?}"
    );
    let mut open = |entry, at, bytes| tables.take_window(Some(entry), peer(at), bytes);
    let low = open(first, GIB, 2 * GIB).expect("16 of 128").range();
    let high = open(first, 64 * GIB, 13 * GIB).expect("120 of 128").range();
    // What the VM's devices share counts once.
    open(second, GIB, 2 * GIB).expect("shared");
    let refused = open(second, 128 * GIB, GIB + 1);
    assert_eq!(
        refused,
        Err(LimitError::VmLutEntries {
            used: 120,
            needed: 9,
            limit: 128
        })
    );
    open(second, 128 * GIB, GIB).expect("128 of 128");
    // Others have theirs, and see that before they boot.
    let other = tables
        .take_requester("disk2", &owner("web2"))
        .expect("free");
    let check =
        |tables: &NtbTables, vm, spans: &[u64]| tables.check_windows(Some(&owner(vm)), spans);
    check(&tables, "web2", &[2 * GIB, 14 * GIB]).expect("128 of 128");
    let refused = check(&tables, "web2", &[2 * GIB, 15 * GIB]);
    assert!(
        matches!(refused, Err(LimitError::VmLutEntries { needed: 136, .. })),
        "{refused:?}"
    );
    check(&tables, "web1", &[GIB, 2 * GIB, 13 * GIB]).expect("what it has");
    tables.give_back_window(Some(first), low);
    tables.give_back_window(Some(first), high);
    // The second device has the low window still.
    check(&tables, "web1", &[2 * GIB, 13 * GIB, GIB]).expect("it had that");
    tables
        .take_window(Some(other), peer(0), 16 * GIB)
        .expect("128 of 128");
    let none = NtbLimits {
        per_vm: VmShare {
            lut_entries: Some(0),
            requester_entries: None,
        },
        ..NtbLimits::default()
    };
    assert!(none.validate().is_err());
}

#[derive(Clone, Debug)]
enum Step {
    Attach {
        owner: u8,
    },
    Open {
        device: Index,
        at: u64,
        entries: u64,
    },
    Close {
        window: Index,
    },
    Keep {
        window: Index,
    },
}

fn step() -> impl Strategy<Value = Step> {
    // Few addresses and sizes, so that many windows are the same.
    prop_oneof![
        1 => (0u8..3).prop_map(|owner| Step::Attach { owner }),
        6 => (any::<Index>(), 1u64..4, 1u64..4)
            .prop_map(|(device, at, entries)| Step::Open { device, at, entries }),
        4 => any::<Index>().prop_map(|window| Step::Close { window }),
        1 => any::<Index>().prop_map(|window| Step::Keep { window }),
    ]
}

/// A window of one device.
#[derive(Clone, Copy, Debug)]
struct Open {
    device: usize,
    owner: u8,
    at: u64,
    bytes: u64,
    range: LutRange,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]
    #[test]
    fn entries_are_taken_by_the_first_device_and_free_after_the_last(
        steps in prop::collection::vec(step(), 1..120)
    ) {
        const SEGMENT: u64 = MIB;
        const ENTRIES: u32 = 16;
        let limits = NtbLimits {
            bar_size: u64::from(ENTRIES) * SEGMENT,
            lut_entries: ENTRIES,
            ..NtbLimits::default()
        };
        let mut tables = NtbTables::new(limits).expect("limits");
        let mut devices: Vec<(usize, u8)> = Vec::new();
        let mut open: Vec<Open> = Vec::new();
        // First entry and size of those that are not used again.
        let mut kept: BTreeMap<u32, u32> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Attach { owner } if devices.len() < 30 => {
                    // Two of a name, and two of a borrower.
                    let (vm, by) = [("a", "user 1"), ("b", "user 1"), ("a", "user 2")][usize::from(owner)];
                    let entry = tables.take_requester("device", &Owner::new(vm, by));
                    devices.push((entry.expect("free"), owner));
                }
                Step::Open { device, at, entries } if !devices.is_empty() => {
                    let (device, owner) = devices[device.index(devices.len())];
                    let (at, bytes) = (at * SEGMENT, entries * SEGMENT);
                    let same = |it: &&Open| (it.owner, it.at, it.bytes) == (owner, at, bytes);
                    let held = |first| open.iter().any(|it| (it.device, it.range.first) == (device, first));
                    let others: Vec<LutRange> = open
                        .iter()
                        .filter(same)
                        .map(|it| it.range)
                        .filter(|range| !held(range.first) && !kept.contains_key(&range.first))
                        .collect();
                    let run = tables.usage().largest_free_run;
                    match tables.take_window(Some(device), peer(at), bytes) {
                        Ok(TakenWindow::Shared(range)) => {
                            prop_assert!(others.contains(&range));
                            open.push(Open { device, owner, at, bytes, range });
                        }
                        Ok(TakenWindow::New(range)) => {
                            prop_assert!(others.is_empty(), "{:?} could be shared", others);
                            open.push(Open { device, owner, at, bytes, range });
                        }
                        Err(_) => prop_assert!(others.is_empty() && u64::from(run) < entries),
                    }
                }
                Step::Close { window } if !open.is_empty() => {
                    let Open { device, range, .. } = open.swap_remove(window.index(open.len()));
                    tables.give_back_window(Some(device), range);
                }
                Step::Keep { window } if !open.is_empty() => {
                    let range = open[window.index(open.len())].range;
                    tables.keep_window(range);
                    kept.insert(range.first, range.entries);
                }
                _ => {}
            }
            let windows: BTreeMap<u32, u32> = open
                .iter()
                .map(|it| (it.range.first, it.range.entries))
                .chain(kept.clone())
                .collect();
            let mut taken = [false; ENTRIES as usize];
            for (&first, &entries) in &windows {
                let run = &mut taken[first as usize..(first + entries) as usize];
                prop_assert!(run.iter().all(|taken| !taken), "two windows in one entry");
                run.fill(true);
            }
            let usage = tables.usage();
            prop_assert_eq!(usage.windows as usize, windows.len());
            prop_assert_eq!(usage.lut_entries as usize, taken.iter().filter(|it| **it).count());
            for window in &open {
                let holders = open.iter().filter(|it| it.range.first == window.range.first);
                prop_assert_eq!(tables.has_one_holder(window.range), holders.count() == 1);
            }
        }
    }
}
