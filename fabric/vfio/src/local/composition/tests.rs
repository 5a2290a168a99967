use std::collections::{BTreeMap, BTreeSet};

use farside_fabric::memory::create_sealed;
use proptest::prelude::*;

use super::*;

const PAGE: u64 = 4096;

/// Records mappings, and refuses as an IOMMU domain would, or on request.
#[derive(Debug, Default)]
struct Recorder {
    /// IOVA, bytes, place in the memory's file, writable.
    mapped: BTreeMap<u64, (u64, u64, bool)>,
    bus_master: bool,
    /// Calls that still succeed.
    left: Option<usize>,
}

impl Recorder {
    fn take(&mut self) -> Result<(), FabricError> {
        match &mut self.left {
            Some(0) => Err(FabricError::Other("told to fail".into())),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl Mapper for Recorder {
    fn map(&mut self, at: Iova, memory: &HostSlice, writable: bool) -> Result<(), FabricError> {
        self.take()?;
        let (at, len) = (at.get(), memory.len() as u64);
        let before = self.mapped.range(..at + len).next_back();
        if let Some((other, (other_len, ..))) = before {
            assert!(other + other_len <= at, "{at:#x} is mapped twice");
        }
        // The first word of each page holds its address.
        let mark = memory.load_u64(0, std::sync::atomic::Ordering::Relaxed);
        self.mapped.insert(at, (len, mark.unwrap(), writable));
        Ok(())
    }

    fn unmap(&mut self, at: Iova, len: u64) -> Result<(), FabricError> {
        self.take()?;
        let (mapped, ..) = self.mapped.remove(&at.get()).expect("it is not mapped");
        assert_eq!(mapped, len, "only a part is unmapped");
        Ok(())
    }

    fn set_bus_master(&mut self, enabled: bool) -> Result<(), FabricError> {
        self.bus_master = enabled;
        Ok(())
    }
}

/// Memory whose every page begins with its own peer address.
fn memory(peer_address: u64, pages: u64, writable: bool) -> MemoryRange {
    let len = pages * PAGE;
    let file = create_sealed("composition", len).unwrap();
    let mut range = MemoryRange::whole(file, len);
    let shared = SharedMemory::map_range(&range).unwrap();
    for page in 0..pages {
        let slice = shared.slice((page * PAGE) as usize, 8).unwrap();
        let order = std::sync::atomic::Ordering::Relaxed;
        slice
            .store_u64(0, peer_address + page * PAGE, order)
            .unwrap();
    }
    range.writable = writable;
    range
}

fn peer(page: u64) -> PeerAddress {
    PeerAddress::new(page * PAGE)
}

fn iova(page: u64) -> Iova {
    Iova::new(page * PAGE)
}

#[derive(Clone, Debug)]
enum Step {
    Open {
        iova: u64,
        peer_address: u64,
        pages: u64,
    },
    Close {
        iova: u64,
    },
    CloseAll,
    Map {
        peer_address: u64,
        pages: u64,
        writable: bool,
    },
    Unmap {
        peer_address: u64,
        pages: u64,
    },
    UnmapAll,
    /// From now on, so many of the mapper's calls succeed.
    Fail(Option<usize>),
}

fn steps(failures: bool) -> impl Strategy<Value = Vec<Step>> {
    let (at, pages) = (0..24u64, 1..10u64);
    let step = prop_oneof![
        4 => (at.clone(), at.clone(), pages.clone())
            .prop_map(|(iova, peer_address, pages)| Step::Open { iova, peer_address, pages }),
        4 => (at.clone(), pages.clone(), any::<bool>())
            .prop_map(|(peer_address, pages, writable)| Step::Map { peer_address, pages, writable }),
        3 => at.clone().prop_map(|iova| Step::Close { iova }),
        3 => (at, pages).prop_map(|(peer_address, pages)| Step::Unmap { peer_address, pages }),
        1 => Just(Step::CloseAll),
        1 => Just(Step::UnmapAll),
        if failures { 3 } else { 0 } =>
            proptest::option::of(0..3usize).prop_map(Step::Fail),
    ];
    proptest::collection::vec(step, 1..40)
}

fn take_step(path: &mut Composition<Recorder>, step: &Step) -> Result<(), FabricError> {
    match *step {
        Step::Open {
            iova: at,
            peer_address: to,
            pages,
        } => path.open_window(iova(at), peer(to), pages * PAGE).map(drop),
        Step::Close { iova: at } => path.close_window(iova(at)),
        Step::CloseAll => path.close_all(),
        Step::Map {
            peer_address: at,
            pages,
            writable,
        } => path.map_peer(peer(at), memory(at * PAGE, pages, writable)),
        Step::Unmap {
            peer_address: at,
            pages,
        } => path.unmap_peer(peer(at), pages * PAGE),
        Step::UnmapAll => path.unmap_peer_all(),
        Step::Fail(left) => {
            path.mapper.left = left;
            Ok(())
        }
    }
}

/// The target of each page of IOVA, by walking both tables.
fn composed(path: &Composition<Recorder>) -> BTreeSet<(u64, u64, bool)> {
    let mut pages = BTreeSet::new();
    for (window, to) in path.windows.rows() {
        for offset in (0..window.len()).step_by(PAGE as usize) {
            let peer_address = to.get() + offset;
            let row = (path.memory.rows().iter())
                .find(|(row, _)| (row.start().get()..row.end().get()).contains(&peer_address));
            if let Some((_, memory)) = row {
                pages.insert((
                    window.start().get() + offset,
                    peer_address,
                    memory.is_writable(),
                ));
            }
        }
    }
    pages
}

/// The target of each page of IOVA, according to the mapper's calls.
fn mapped(path: &Composition<Recorder>) -> BTreeSet<(u64, u64, bool)> {
    (path.mapper.mapped.iter())
        .flat_map(|(&iova, &(len, peer_address, writable))| {
            (0..len)
                .step_by(PAGE as usize)
                .map(move |offset| (iova + offset, peer_address + offset, writable))
        })
        .collect()
}

proptest! {
    #[test]
    fn the_domain_maps_the_composition(steps in steps(false)) {
        let mut path = Composition::new(Recorder::default());
        for step in &steps {
            let before = mapped(&path);
            if take_step(&mut path, step).is_err() {
                prop_assert_eq!(&mapped(&path), &before, "an error changed something");
            }
            prop_assert_eq!(mapped(&path), composed(&path));
            let usage = path.usage();
            prop_assert_eq!(usage.bytes_mapped, mapped(&path).len() as u64 * PAGE);
            prop_assert_eq!(usage.lender_pages.bytes(), usage.bytes_mapped);
        }
        path.close_all().unwrap();
        prop_assert!(path.mapper.mapped.is_empty());
        path.unmap_peer_all().unwrap();
        prop_assert_eq!(path.usage(), Usage::default());
    }

    #[test]
    fn what_fails_is_made_good_later(steps in steps(true)) {
        let mut path = Composition::new(Recorder::default());
        for step in &steps {
            let _ = take_step(&mut path, step);
            // Never more than both tables allow, and nothing forgotten.
            let pieces: BTreeSet<_> = path.pieces().map(|it| (it.iova.start().get(), it.iova.len())).collect();
            let known = path.mapper.mapped.iter().map(|(&at, &(len, ..))| (at, len));
            prop_assert_eq!(pieces, known.collect::<BTreeSet<_>>());
        }
        path.mapper.left = None;
        path.close_all().unwrap();
        prop_assert!(path.mapper.mapped.is_empty());
    }
}

#[test]
fn nothing_is_mapped_before_both_sides_are_there() {
    let mut path = Composition::new(Recorder::default());
    path.open_window(iova(0), peer(0), 8 * PAGE).unwrap();
    assert_eq!(path.pieces().count(), 0);
    path.map_peer(peer(2), memory(2 * PAGE, 2, true)).unwrap();
    path.map_peer(peer(6), memory(6 * PAGE, 4, false)).unwrap();
    let pieces: Vec<_> = (path.pieces())
        .map(|it| (it.iova.start().get(), it.iova.len(), it.peer_address.get()))
        .collect();
    let page = |iova, pages, peer_address| (iova * PAGE, pages * PAGE, peer_address * PAGE);
    assert_eq!(pieces, [page(2, 2, 2), page(6, 2, 6)]);
}

#[test]
fn errors_name_what_is_in_the_way() {
    let mut path = Composition::new(Recorder::default());
    path.open_window(iova(4), peer(0), 4 * PAGE).unwrap();
    let error = path.open_window(iova(7), peer(9), PAGE).unwrap_err();
    let overlap = matches!(
        error,
        FabricError::Overlap { space: "IOVA", other_start, .. } if other_start == 4 * PAGE
    );
    assert!(overlap, "{error}");
    path.map_peer(peer(0), memory(0, 4, true)).unwrap();
    let error = path.unmap_peer(peer(1), PAGE).unwrap_err();
    assert!(matches!(error, FabricError::SplitMapping { .. }), "{error}");
    let error = path.unmap_peer(peer(8), PAGE).unwrap_err();
    assert!(matches!(error, FabricError::NotMapped { .. }), "{error}");
    let error = path.close_window(iova(5)).unwrap_err();
    assert!(matches!(error, FabricError::NoWindow { .. }), "{error}");
}

#[test]
fn the_device_is_stopped_when_its_path_is_dropped() {
    /// A mapper whose final state can be inspected.
    struct Shared(std::rc::Rc<std::cell::RefCell<Recorder>>);
    impl Mapper for Shared {
        fn map(&mut self, at: Iova, memory: &HostSlice, writable: bool) -> Result<(), FabricError> {
            self.0.borrow_mut().map(at, memory, writable)
        }
        fn unmap(&mut self, at: Iova, len: u64) -> Result<(), FabricError> {
            assert!(!self.0.borrow().bus_master, "unmapped under a busy device");
            self.0.borrow_mut().unmap(at, len)
        }
        fn set_bus_master(&mut self, enabled: bool) -> Result<(), FabricError> {
            self.0.borrow_mut().set_bus_master(enabled)
        }
    }
    let recorder = std::rc::Rc::<std::cell::RefCell<Recorder>>::default();
    let mut path = Composition::new(Shared(std::rc::Rc::clone(&recorder)));
    path.map_peer(peer(0), memory(0, 4, true)).unwrap();
    path.open_window(iova(4), peer(0), 4 * PAGE).unwrap();
    path.set_bus_master(true).unwrap();
    assert_eq!(recorder.borrow().mapped.len(), 1);
    drop(path);
    assert!(recorder.borrow().mapped.is_empty());
    assert!(!recorder.borrow().bus_master);
}
