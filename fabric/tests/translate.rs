//! Random set-ups, changes and translations against a naive model, page by page: a
//! translation is never stale, and never exceeds its permissions.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use farside_fabric::{
    Access, FabricError, FaultReason, Iova, LenderPath, MemoryRange, NtbLimits, NtbTables, Owner,
    PeerAddress,
    memory::{SharedMemory, create_sealed},
    soft::{Adapter, Path},
};
use proptest::prelude::*;

const PAGE: u64 = 4096;
/// IOVA and peer addresses in use: pages 0 to this.
const SPACE: u64 = 48;
/// Pages of the file of memory.
const FILE: u64 = 64;
/// Pages of a LUT entry.
const SEGMENT: u64 = 4;
const ENTRIES: u32 = 8;

fn limits() -> NtbLimits {
    NtbLimits {
        bar_size: SEGMENT * PAGE * u64::from(ENTRIES),
        lut_entries: ENTRIES,
        alignment: Some(PAGE),
        ..NtbLimits::default()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Open {
        iova: u64,
        peer_address: u64,
        len: u64,
    },
    Close {
        iova: u64,
    },
    CloseAll,
    Map {
        peer_address: u64,
        len: u64,
        file: u64,
        writable: bool,
    },
    Unmap {
        peer_address: u64,
        len: u64,
    },
    UnmapAll,
    BusMaster(bool),
    /// Byte addresses.
    Translate {
        iova: u64,
        len: usize,
        access: Access,
    },
}

fn steps() -> impl Strategy<Value = Step> {
    let page = 0..SPACE;
    let len = 1u64..16;
    let access = prop_oneof![Just(Access::Read), Just(Access::Write)];
    prop_oneof![
        3 => (page.clone(), page.clone(), len.clone())
            .prop_map(|(iova, peer_address, len)| Step::Open { iova, peer_address, len }),
        1 => page.clone().prop_map(|iova| Step::Close { iova }),
        1 => Just(Step::CloseAll),
        4 => (page.clone(), len.clone(), 0..FILE - 16, prop::bool::weighted(0.7))
            .prop_map(|(peer_address, len, file, writable)| Step::Map { peer_address, len, file, writable }),
        2 => (page.clone(), 1..SPACE).prop_map(|(peer_address, len)| Step::Unmap { peer_address, len }),
        1 => Just(Step::UnmapAll),
        1 => prop::bool::weighted(0.9).prop_map(Step::BusMaster),
        8 => (0..SPACE * PAGE, 1usize..40_000, access)
            .prop_map(|(iova, len, access)| Step::Translate { iova, len, access }),
    ]
}

/// The mapping of each page. Two pages with equal `id` belong to one mapping.
#[derive(Default)]
struct Model {
    bus_master: bool,
    /// IOVA page to (id, peer page).
    windows: BTreeMap<u64, (u64, u64)>,
    /// Peer page to (id, file page, writable).
    memory: BTreeMap<u64, (u64, u64, bool)>,
    next_id: u64,
}

impl Model {
    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// The translation of a page: (window id, mapping id, file page, writable).
    fn page(&self, iova: u64) -> Result<(u64, u64, u64, bool), FaultReason> {
        if !self.bus_master {
            return Err(FaultReason::BusMasterDisabled);
        }
        let (window, peer_address) = *self.windows.get(&iova).ok_or(FaultReason::LenderDomain)?;
        let found = self
            .memory
            .get(&peer_address)
            .ok_or(FaultReason::BorrowerDomain)?;
        Ok((window, found.0, found.1, found.2))
    }

    /// File byte and length of the longest run, or the fault reason.
    fn translate(&self, iova: u64, len: u64, access: Access) -> Result<(u64, u64), FaultReason> {
        let first = self.page(iova / PAGE)?;
        if access == Access::Write && !first.3 {
            return Err(FaultReason::Permission);
        }
        let mut run = PAGE - iova % PAGE;
        for (pages, page) in (iova / PAGE + 1..).enumerate() {
            let same = self.page(page).is_ok_and(|next| {
                next.0 == first.0 && next.1 == first.1 && next.2 == first.2 + pages as u64 + 1
            });
            if !same {
                break;
            }
            run += PAGE;
        }
        Ok((first.2 * PAGE + iova % PAGE, run.min(len)))
    }
}

/// A file in which every word is its own offset.
fn stamped() -> (MemoryRange, Arc<SharedMemory>) {
    let fd = create_sealed("stamped", FILE * PAGE).expect("memfd");
    let range = MemoryRange::whole(fd, FILE * PAGE);
    let memory = SharedMemory::map_range(&range).expect("map");
    let stamps: Vec<u8> = (0..FILE * PAGE / 8)
        .flat_map(|word| (word * 8).to_le_bytes())
        .collect();
    memory
        .slice(0, stamps.len())
        .expect("inside")
        .write(&stamps);
    (range, memory)
}

fn check(
    path: &mut Path,
    model: &Model,
    stamps: &Arc<SharedMemory>,
    (iova, len, access): (u64, usize, Access),
) -> Result<(), TestCaseError> {
    let expected = model.translate(iova, len as u64, access);
    match path.translate(Iova::new(iova), len, access) {
        Ok(slice) => {
            let (from, run) = expected.map_err(|reason| {
                TestCaseError::fail(format!("{iova:#x} must be refused: {reason:?}"))
            })?;
            prop_assert_eq!(slice.len() as u64, run);
            let mut got = vec![0; slice.len()];
            slice.read(&mut got);
            let mut wanted = vec![0; slice.len()];
            stamps
                .slice(from as usize, run as usize)
                .expect("inside")
                .read(&mut wanted);
            prop_assert!(got == wanted, "wrong memory behind {:#x}", iova);
        }
        Err(fault) => prop_assert_eq!(Some(fault.reason), expected.err()),
    }
    Ok(())
}

/// Applies `step` to both and compares the results.
fn apply(
    path: &mut Path,
    model: &mut Model,
    file: &MemoryRange,
    stamps: &Arc<SharedMemory>,
    step: Step,
) -> Result<(), TestCaseError> {
    match step {
        Step::Open {
            iova,
            peer_address,
            len,
        } => {
            let free = (iova..iova + len).all(|page| !model.windows.contains_key(&page));
            let used = path.usage().lut_entries;
            let to = PeerAddress::new(peer_address * PAGE);
            match path.open_window(Iova::new(iova * PAGE), to, len * PAGE) {
                Ok(window) => {
                    prop_assert!(free);
                    prop_assert_eq!(u64::from(window.lut_entries), len.div_ceil(SEGMENT));
                    prop_assert_eq!(path.usage().lut_entries, used + window.lut_entries);
                    prop_assert!(path.usage().lut_entries <= ENTRIES);
                    let id = model.id();
                    for n in 0..len {
                        model.windows.insert(iova + n, (id, peer_address + n));
                    }
                }
                Err(FabricError::Overlap { .. }) => prop_assert!(!free),
                Err(FabricError::Limit(_)) => prop_assert_eq!(path.usage().lut_entries, used),
                Err(error) => return Err(TestCaseError::fail(error.to_string())),
            }
        }
        Step::Close { iova } => {
            let begins = model.windows.get(&iova).copied().filter(|window| {
                let before = iova
                    .checked_sub(1)
                    .and_then(|page| model.windows.get(&page));
                before.is_none_or(|before| before.0 != window.0)
            });
            let closed = path.close_window(Iova::new(iova * PAGE));
            prop_assert_eq!(closed.is_ok(), begins.is_some());
            if let Some((id, _)) = begins {
                model.windows.retain(|_, window| window.0 != id);
            }
        }
        Step::CloseAll => {
            path.close_all()?;
            model.windows.clear();
            prop_assert_eq!(path.usage().lut_entries, 0);
        }
        Step::Map {
            peer_address,
            len,
            file: at,
            writable,
        } => {
            let free =
                (peer_address..peer_address + len).all(|page| !model.memory.contains_key(&page));
            let memory = MemoryRange {
                offset: at * PAGE,
                len: len * PAGE,
                writable,
                ..file.clone()
            };
            let mapped = path.map_peer(PeerAddress::new(peer_address * PAGE), memory);
            prop_assert_eq!(mapped.is_ok(), free);
            if free {
                let id = model.id();
                for n in 0..len {
                    model
                        .memory
                        .insert(peer_address + n, (id, at + n, writable));
                }
            }
        }
        Step::Unmap { peer_address, len } => {
            let inside: Vec<u64> = model
                .memory
                .range(peer_address..peer_address + len)
                .map(|(_, page)| page.0)
                .collect();
            let whole = model.memory.iter().all(|(page, (id, ..))| {
                !inside.contains(id) || (peer_address..peer_address + len).contains(page)
            });
            let unmapped = path.unmap_peer(PeerAddress::new(peer_address * PAGE), len * PAGE);
            prop_assert_eq!(unmapped.is_ok(), whole && !inside.is_empty());
            if unmapped.is_ok() {
                model.memory.retain(|_, page| !inside.contains(&page.0));
            }
        }
        Step::UnmapAll => {
            path.unmap_peer_all();
            model.memory.clear();
        }
        Step::BusMaster(enabled) => {
            path.set_bus_master(enabled)?;
            model.bus_master = enabled;
        }
        Step::Translate { iova, len, access } => {
            check(path, model, stamps, (iova, len, access))?;
        }
    }
    prop_assert!(!path.draining());
    prop_assert_eq!(path.usage().bytes_mapped, model.memory.len() as u64 * PAGE);
    prop_assert_eq!(path.usage().window_bytes, model.windows.len() as u64 * PAGE);
    // Every page, so that the IOTLB holds all translations that the next step changes.
    for page in 0..SPACE + 16 {
        let access = if page % 2 == 0 {
            Access::Read
        } else {
            Access::Write
        };
        check(path, model, stamps, (page * PAGE + 8, 100, access))?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn translations_are_never_stale(steps in prop::collection::vec(steps(), 1..60)) {
        let tables = Arc::new(Mutex::new(NtbTables::new(limits()).expect("limits")));
        let adapter = Adapter::with_tables(limits(), tables.clone());
        let mut path = adapter.attach("nvme0", &Owner::new("vm", "user 1")).expect("attach");
        let mut model = Model::default();
        let (file, stamps) = stamped();
        apply(&mut path, &mut model, &file, &stamps, Step::BusMaster(true))?;
        for step in steps {
            apply(&mut path, &mut model, &file, &stamps, step)?;
        }
        drop(path);
        prop_assert_eq!(tables.lock().unwrap().usage().lut_entries, 0);
    }
}
