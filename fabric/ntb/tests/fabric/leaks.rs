//! After any sequence of opening, closing, attaching and dropping, the LUT holds exactly
//! the open windows, and the devices' domains match it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use farside_fabric::{Iova, LenderPath, Owner, PeerAddress};
use farside_ntb::regs::{lut, lut_entry, requester, requester_entry};
use farside_ntb::{Adapter, BarWindow, LenderNtb};
use farside_ntb_server::model::{Port, PortConfig};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::function::ModelFunction;
use crate::world::{MIB, World};

const ENTRIES: u32 = 16;
const SEGMENT: u64 = MIB;

#[derive(Clone, Debug)]
enum Step {
    Attach {
        device: u8,
    },
    Detach {
        path: Index,
    },
    Open {
        path: Index,
        at: u64,
        peer_address: u64,
        pages: u64,
        fails: bool,
    },
    Close {
        path: Index,
        at: u64,
        fails: bool,
    },
    CloseAll {
        path: Index,
    },
    OpenBar {
        peer_address: u64,
        pages: u64,
    },
    CloseBar {
        window: Index,
    },
}

fn step() -> impl Strategy<Value = Step> {
    // Few addresses, so that windows overlap; up to five segments, also partial ones.
    let at = || (0u64..12).prop_map(|at| at * MIB);
    // Some windows are the same, which devices of one VM share.
    let peer_address = || {
        prop_oneof![
            2 => (1u64..1 << 20).prop_map(|page| page * 4096),
            1 => Just(MIB),
        ]
    };
    let pages = || prop_oneof![2 => 1u64..5 * 256, 1 => Just(3 * 256)];
    prop_oneof![
        2 => (0u8..4).prop_map(|device| Step::Attach { device }),
        1 => any::<Index>().prop_map(|path| Step::Detach { path }),
        6 => (any::<Index>(), at(), peer_address(), pages(), prop::bool::weighted(0.1)).prop_map(
            |(path, at, peer_address, pages, fails)| Step::Open { path, at, peer_address, pages, fails }
        ),
        3 => (any::<Index>(), at(), prop::bool::weighted(0.1))
            .prop_map(|(path, at, fails)| Step::Close { path, at, fails }),
        1 => any::<Index>().prop_map(|path| Step::CloseAll { path }),
        2 => (peer_address(), pages()).prop_map(|(peer_address, pages)| Step::OpenBar { peer_address, pages }),
        2 => any::<Index>().prop_map(|window| Step::CloseBar { window }),
    ]
}

/// The open borrow in the test's model.
struct Borrow {
    device: Arc<ModelFunction>,
    owner: Owner,
    path: LenderNtb<ModelFunction>,
    /// By IOVA: first LUT entry, peer address, bytes.
    windows: BTreeMap<u64, (u32, u64, u64)>,
}

/// The LUT entries of a set of windows; no entry occurs twice, but for windows that are shared.
fn expected(windows: impl Iterator<Item = (u32, u64, u64)>) -> BTreeMap<u32, u64> {
    let mut windows: Vec<_> = windows.collect();
    windows.sort_unstable();
    windows.dedup();
    let mut entries = BTreeMap::new();
    for (first, peer_address, len) in windows {
        for (index, i) in (first..).zip(0..len.div_ceil(SEGMENT)) {
            let before = entries.insert(index, (peer_address + i * SEGMENT) | lut::VALID);
            assert_eq!(before, None, "LUT entry {index} is shared");
        }
    }
    entries
}

fn check(
    world: &World,
    adapter: &Adapter<ModelFunction>,
    borrows: &[Borrow],
    bars: &[BarWindow<ModelFunction>],
) {
    let open = borrows.iter().flat_map(|it| it.windows.values().copied());
    let mut owners = BTreeMap::new();
    for borrow in borrows {
        let mut own = BTreeSet::new();
        for &(first, _, _) in borrow.windows.values() {
            assert!(own.insert(first), "a device shares with itself");
            let owner = owners.entry(first).or_insert(&borrow.owner);
            assert_eq!(*owner, &borrow.owner, "two owners share LUT entry {first}");
        }
    }
    let cpu = bars.iter().map(|it| {
        let first = (it.offset() / SEGMENT) as u32;
        (first, it.peer_address().get(), it.len())
    });
    let expected = expected(open.chain(cpu));
    let found: BTreeMap<u32, u64> = (0..ENTRIES)
        .map(|index| (index, world.read64(Port::B, lut_entry(index))))
        .filter(|(_, entry)| *entry != 0)
        .collect();
    assert_eq!(found, expected);
    assert_eq!(adapter.usage().lut_entries as usize, expected.len());

    for borrow in borrows {
        let mapped: Vec<_> = borrow
            .windows
            .iter()
            .map(|(&at, &(first, _, len))| (at, len, u64::from(first) * SEGMENT))
            .collect();
        assert_eq!(borrow.device.table().bars(), mapped);
        let usage = borrow.path.usage();
        assert_eq!(usage.windows as usize, mapped.len());
        let bytes: u64 = mapped.iter().map(|it| it.1).sum();
        assert_eq!(usage.window_bytes, bytes);
    }
    let valid = (0..32).filter(|&i| {
        let word = world.read64(Port::B, requester_entry(i) & !7) >> (32 * (i & 1));
        word as u32 & requester::VALID != 0
    });
    assert_eq!(
        valid.count(),
        1 + borrows.len(),
        "the CPU's, and the devices'"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn the_lut_is_the_union_of_the_open_windows(steps in prop::collection::vec(step(), 1..80)) {
        let port = PortConfig { window_size: u64::from(ENTRIES) * SEGMENT, lut_entries: ENTRIES };
        let world = World::new([port, port]);
        let [_a, b] = world.start_both();
        let mut borrows: Vec<Borrow> = Vec::new();
        let mut bars: Vec<BarWindow<ModelFunction>> = Vec::new();
        for step in steps {
            let free = ENTRIES - b.usage().lut_entries;
            let run = b.usage().largest_free_run;
            match step {
                Step::Attach { device } => {
                    // Two of a name, and two of a borrower.
                    let (vm, by) = [("one", "user 1"), ("two", "user 1"), ("one", "user 2")]
                        [usize::from(device % 3)];
                    let owner = Owner::new(vm, by);
                    let device = ModelFunction::device(device, &[]);
                    let path = b.attach("drive", &owner, Arc::clone(&device)).unwrap();
                    borrows.push(Borrow { device, owner, path, windows: BTreeMap::new() });
                }
                Step::Detach { path } if !borrows.is_empty() => {
                    let borrow = borrows.swap_remove(path.index(borrows.len()));
                    drop(borrow.path);
                    prop_assert!(borrow.device.table().ranges().is_empty());
                }
                Step::Open { path, at, peer_address, pages, fails } if !borrows.is_empty() => {
                    let which = path.index(borrows.len());
                    let len = pages * 4096;
                    let own: Vec<u32> = borrows[which].windows.values().map(|it| it.0).collect();
                    let of_owner = borrows.iter().filter(|it| it.owner == borrows[which].owner);
                    let shared = of_owner.flat_map(|it| it.windows.values()).any(|window| {
                        (window.1, window.2) == (peer_address, len) && !own.contains(&window.0)
                    });
                    let it = &mut borrows[which];
                    let overlaps = it.windows.iter().any(|(&other, w)| other < at + len && at < other + w.2);
                    let fits = shared || len.div_ceil(SEGMENT) <= u64::from(run);
                    it.device.table().fail_map.store(fails, Ordering::Relaxed);
                    let opened = it.path.open_window(Iova::new(at), PeerAddress::new(peer_address), len);
                    it.device.table().fail_map.store(false, Ordering::Relaxed);
                    prop_assert_eq!(opened.is_ok(), !overlaps && fits && !fails);
                    if let Ok(window) = opened {
                        it.windows.insert(at, (window.first_lut_entry, peer_address, len));
                    }
                }
                Step::Close { path, at, fails } if !borrows.is_empty() => {
                    let which = path.index(borrows.len());
                    let it = &mut borrows[which];
                    it.device.table().fail_unmap.store(fails, Ordering::Relaxed);
                    let closed = it.path.close_window(Iova::new(at));
                    it.device.table().fail_unmap.store(false, Ordering::Relaxed);
                    prop_assert_eq!(closed.is_ok(), it.windows.contains_key(&at) && !fails);
                    if closed.is_ok() {
                        it.windows.remove(&at);
                    }
                }
                Step::CloseAll { path } if !borrows.is_empty() => {
                    let which = path.index(borrows.len());
                    borrows[which].path.close_all().unwrap();
                    borrows[which].windows.clear();
                }
                Step::OpenBar { peer_address, pages } => {
                    let len = pages * 4096;
                    let opened = b.open_bar_window(PeerAddress::new(peer_address), len);
                    prop_assert_eq!(opened.is_ok(), len.div_ceil(SEGMENT) <= u64::from(run));
                    bars.extend(opened);
                }
                Step::CloseBar { window } if !bars.is_empty() => {
                    bars.swap_remove(window.index(bars.len()));
                }
                // There is no borrow to do it with.
                _ => {}
            }
            prop_assert!(run <= free);
            check(&world, &b, &borrows, &bars);
        }
        borrows.clear();
        bars.clear();
        check(&world, &b, &borrows, &bars);
    }
}
