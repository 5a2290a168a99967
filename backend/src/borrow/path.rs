//! The DMA path from a device to guest RAM and other devices' BARs: pins, mappings in the borrower's IOMMU domain, and
//! windows onto them.

mod bars;
mod pages;
mod reopen;
mod report;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use farside_fabric::{
    Iova, MemoryRange, PeerAddress,
    pin::{PinOptions, PinProgress, RoomWatch},
};
use farside_guest_layout::{Gpa, GpaRange, Plan, spans};
use farside_lender_protocol::{CallError, Client};
use farside_ntb::PeerRange;

use super::{
    error::PathError,
    page_pins::PagePins,
    peer_mapper::PeerMapper,
    vm_memory::{PeerWindows, SharedPins, VmMemory},
};
use crate::dma_table::{LOW_MEMORY, Mapping, Target};

/// The memory behind an open path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OpenReport {
    /// Bytes of guest RAM that are pinned and reachable by the device; behind a vIOMMU, only the
    /// mapped ones.
    pub(crate) bytes_pinned: u64,
    /// Of those, bytes locked in memory.
    pub(crate) bytes_locked: u64,
    pub(crate) dma_windows: u32,
    pub(crate) lut_entries: u32,
    /// Bytes of other devices' BARs, and of guest RAM that was added while the device ran, that it cannot reach.
    pub(crate) bytes_unreachable: u64,
}

/// A mapping that the device can reach.
struct Segment {
    range: GpaRange,
    memory: MemoryRange,
    /// Its mappings in the borrower's domain: one piece for each window that spans it.
    pieces: Vec<Piece>,
    is_bar: bool,
    /// `None` for a BAR, which takes no pins, and for a page behind a vIOMMU: [`PagePins`] has it pinned until the path closes.
    pins: Option<Arc<SharedPins>>,
}

impl Segment {
    /// Whether it is a page behind a vIOMMU.
    fn is_page(&self) -> bool {
        self.pins.is_none() && !self.is_bar
    }
}

#[derive(Clone, Copy)]
struct Piece {
    range: GpaRange,
    peer_address: PeerAddress,
}

impl Piece {
    /// The part of `range` in a window that is at `peer` in the borrower's domain.
    fn new(window: GpaRange, peer: &PeerRange, range: GpaRange) -> Option<Self> {
        let start = window.start().max(range.start());
        let end = window.end().min(range.end());
        let skip = start.offset_from(window.start())?;
        Some(Self {
            range: GpaRange::between(start, end).ok()?,
            peer_address: peer.start().checked_add(skip)?,
        })
    }

    /// The piece of `memory`, which is mapped from `start` on.
    fn of(&self, memory: &MemoryRange, start: Gpa) -> MemoryRange {
        MemoryRange {
            file: Arc::clone(&memory.file),
            offset: memory.offset + (self.range.start().get() - start.get()),
            len: self.range.len(),
            writable: memory.writable,
        }
    }
}

/// A window, and its place in the borrower's domain.
struct Window {
    range: GpaRange,
    peer: Arc<PeerRange>,
    lut_entries: u32,
}

/// The open DMA path of one borrow. Dropping it unmaps, then unpins.
#[derive(Default)]
pub(crate) struct OpenPath {
    peer_mapper: PeerMapper,
    vm: VmMemory,
    vm_windows: PeerWindows,
    segments: BTreeMap<Gpa, Segment>,
    page_pins: PagePins,
    windows: Vec<Window>,
    /// First addresses of the BARs that the device reaches at its lender, without a window of the NTB. Such a device has no other
    /// process in which it goes on.
    lenders_bars: BTreeSet<Gpa>,
    /// Sizes of the mappings that could not be added, by first address.
    unreachable: BTreeMap<Gpa, u64>,
    /// The part of a mapping that [`OpenPath::map`] has set up so far.
    adding: Adding,
    /// Granularity of windows for pages, once a window has shown the size of a LUT entry.
    page_window: Option<u64>,
}

/// The state to roll back if adding a mapping fails.
#[derive(Default)]
struct Adding {
    /// First addresses of its windows.
    windows: Vec<Gpa>,
    /// Its pieces that the borrower's domain maps.
    pieces: Vec<Piece>,
    pins: Option<Arc<SharedPins>>,
}

impl OpenPath {
    /// A path over `peer_mapper` without windows. `page_window` is the
    /// [`page_window`](Self::page_window) of an earlier path.
    pub(crate) fn new(
        peer_mapper: PeerMapper,
        vm: VmMemory,
        vm_windows: PeerWindows,
        page_window: Option<u64>,
    ) -> Self {
        Self {
            peer_mapper,
            vm,
            vm_windows,
            page_window,
            ..Self::default()
        }
    }

    /// The size of the lender's LUT entries, once a window has shown it.
    pub(crate) fn page_window(&self) -> Option<u64> {
        self.page_window
    }

    /// Opens the plan's windows, then pins the shared memory of `mappings` and maps it in them. On
    /// error the path may be partly open; the caller closes it.
    ///
    /// Windows come first, so that a guest that does not fit is refused before the slow pinning of
    /// its RAM. Other devices of the VM wait while this one pins, but not for its lender.
    ///
    /// The plan covers guest RAM. Behind a vIOMMU there are only pages, such as those of queues
    /// that outlive a controller reset; they are mapped one by one.
    pub(crate) fn open(
        &mut self,
        client: &mut Client,
        plan: &Plan,
        mappings: &[Mapping],
        pinning: &PinOptions<'_>,
    ) -> Result<(), PathError> {
        let shared = || mappings.iter().filter(|mapping| mapping.is_ram());
        let has_ram = shared().any(|mapping| {
            mapping.range.start() <= LOW_MEMORY || !PagePins::fits(mapping.range.len())
        });
        // Behind a vIOMMU, where each device has addresses of its own, a guest maps no RAM there.
        let is_guest_ram = shared().any(|mapping| mapping.range.contains(LOW_MEMORY));
        for window in plan.windows.iter().filter(|_| has_ram) {
            match is_guest_ram {
                true => self.open_shared_window(client, window.range, mappings)?,
                false => self.open_own_window(client, window.range)?,
            }
        }
        let vm = self.vm.clone();
        // All of it first, so that none of too much is populated.
        let all: Vec<_> = shared().filter_map(Mapping::memory).collect();
        let mut memory = vm.lock();
        let absent = memory.check(&all, pinning.policy)?;
        let watch = RoomWatch::new(&absent);
        let room = || watch.check();
        let pinning = &PinOptions {
            room: Some(&room),
            ..*pinning
        };
        if !has_ram {
            drop(memory);
            return shared().try_for_each(|mapping| self.map(client, mapping, pinning));
        }
        let counted = memory.count(all.iter())?;
        let total = plan.ram_bytes();
        let mut before = 0;
        let mut pinned = Vec::new();
        for mapping in shared() {
            // `at` counts one mapping; report the progress of all guest RAM.
            let show = |at: PinProgress| {
                if let Some(progress) = pinning.progress {
                    let done = before + at.done;
                    progress(PinProgress { done, total });
                }
            };
            let pinning = PinOptions {
                progress: Some(&show),
                ..*pinning
            };
            if let Some(range) = self.reachable(mapping) {
                pinned.push((mapping, memory.pin(&range, &pinning)?));
            }
            before += mapping.range.len();
        }
        drop((memory, counted));
        for (mapping, pins) in pinned {
            self.add(client, mapping, Some(pins))?;
        }
        Ok(())
    }

    /// Adds a mapping, and opens windows for the parts that no open window spans. On error, call
    /// [`OpenPath::undo_map`] to restore the previous state.
    ///
    /// Behind a vIOMMU, mappings are pages that come and go with each I/O. There a window spans a
    /// whole LUT entry, so that later pages find it open, and stays open when it is empty: the
    /// borrower's domain refuses access to unmapped addresses.
    pub(crate) fn map(
        &mut self,
        client: &mut Client,
        mapping: &Mapping,
        pinning: &PinOptions<'_>,
    ) -> Result<(), PathError> {
        self.adding = Adding::default();
        if let Target::LendersBar(exported) = mapping.target {
            let iova = window_iova(mapping.range.start());
            client.reach_bar(iova, exported, mapping.range.len())?;
            self.lenders_bars.insert(mapping.range.start());
            return Ok(());
        }
        let paged = !mapping.is_bar() && self.is_page(mapping.range);
        if mapping.is_ram() || mapping.is_bar() {
            while let Some(&gap) = self.without_window(mapping.range).first() {
                match paged && self.keeps_windows() {
                    true => self.open_page_windows(client, gap)?,
                    false => self.open_new_window(client, gap, mapping, paged)?,
                }
            }
        }
        let Some(memory) = self.reachable(mapping) else {
            return Ok(());
        };
        let pins = if mapping.is_bar() {
            None
        } else if paged && PagePins::fits(memory.len) {
            self.page_pins.pin(&memory, pinning, &self.vm)?;
            None
        } else {
            Some(self.vm.lock().pin(&memory, pinning)?)
        };
        self.add(client, mapping, pins)
    }

    /// Closes the windows without mappings.
    fn close_empty(&mut self, client: &mut Client) -> Result<(), CallError> {
        while let Some(at) = self.windows.iter().position(|it| self.is_empty(it)) {
            client.close_window(window_iova(self.windows[at].range.start()))?;
            self.windows.swap_remove(at);
        }
        Ok(())
    }

    fn is_empty(&self, window: &Window) -> bool {
        let below = self.segments.range(..window.range.end()).next_back();
        !below.is_some_and(|(_, segment)| segment.range.overlaps(window.range))
    }

    /// Rolls back a failed [`OpenPath::map`], and records the mapping as unreachable.
    pub(crate) fn undo_map(
        &mut self,
        client: &mut Client,
        mapping: &Mapping,
    ) -> Result<(), PathError> {
        // Unpin last, also after an error.
        while let Some(piece) = self.adding.pieces.last() {
            self.peer_mapper
                .unmap(client, piece.peer_address, piece.range.len())?;
            self.adding.pieces.pop();
        }
        while let Some(&start) = self.adding.windows.last() {
            client.close_window(window_iova(start))?;
            self.windows.retain(|window| window.range.start() != start);
            self.adding.windows.pop();
        }
        self.adding.pins = None;
        let start = mapping.range.start();
        self.unreachable.insert(start, mapping.range.len());
        Ok(())
    }

    /// Opens a window for `ram` that spans as much of its memory region as there is room for.
    fn open_new_window(
        &mut self,
        client: &mut Client,
        ram: GpaRange,
        mapping: &Mapping,
        paged: bool,
    ) -> Result<(), PathError> {
        // An IOVA does not correspond to an offset in the file.
        let region = mapping.region().filter(|_| !paged);
        let open: Vec<_> = self.windows.iter().map(|window| window.range).collect();
        let mut refused = None;
        for span in spans(ram, region, &open) {
            // A VMM may add and remove this memory device by device.
            match self.open_own_window(client, span) {
                Ok(()) => {
                    self.adding.windows.push(span.start());
                    return Ok(());
                }
                // A smaller window may fit.
                Err(error) if error.is_limit() => refused = Some(error),
                Err(error) => return Err(error),
            }
        }
        refused.map_or(Ok(()), Err)
    }

    /// Makes a mapping unreachable, then unpins it. Closes windows that become empty, except behind
    /// a vIOMMU (see [`map`](Self::map)).
    pub(crate) fn unmap(
        &mut self,
        client: &mut Client,
        mapping: &Mapping,
    ) -> Result<(), PathError> {
        let start = mapping.range.start();
        self.unreachable.remove(&start);
        if self.lenders_bars.contains(&start) {
            client.close_window(window_iova(start))?;
            self.lenders_bars.remove(&start);
        }
        let Some(segment) = self.segments.get(&start) else {
            return Ok(());
        };
        for piece in &segment.pieces {
            self.peer_mapper
                .unmap(client, piece.peer_address, piece.range.len())?;
        }
        let paged = segment.is_page();
        self.segments.remove(&start);
        if !(paged && self.keeps_windows()) {
            self.close_empty(client)?;
        }
        Ok(())
    }

    /// The memory of a mapping, unless that is outside all windows: beyond the addresses that any
    /// device can use.
    fn reachable(&self, mapping: &Mapping) -> Option<MemoryRange> {
        let memory = mapping.memory();
        memory.filter(|_| !self.pieces(mapping.range).is_empty())
    }

    /// Maps a pinned mapping in its windows.
    fn add(
        &mut self,
        client: &mut Client,
        mapping: &Mapping,
        pins: Option<Arc<SharedPins>>,
    ) -> Result<(), PathError> {
        self.adding.pins = pins;
        let pieces = self.pieces(mapping.range);
        let Some(memory) = mapping.memory() else {
            return Ok(());
        };
        let start = mapping.range.start();
        for piece in &pieces {
            let part = piece.of(&memory, start);
            let mut done = 0;
            let mapped = self
                .peer_mapper
                .map(client, piece.peer_address, part, &mut done);
            if let Ok(range) = GpaRange::new(piece.range.start(), done) {
                self.adding.pieces.push(Piece { range, ..*piece });
            }
            mapped?;
        }
        let Adding { pins, .. } = std::mem::take(&mut self.adding);
        let segment = Segment {
            range: mapping.range,
            memory,
            pieces,
            is_bar: mapping.is_bar(),
            pins,
        };
        self.segments.insert(start, segment);
        Ok(())
    }

    /// Opens a window over guest RAM, of which the device maps `mappings`, at the peer addresses of
    /// another device's window if this one may use those.
    fn open_shared_window(
        &mut self,
        client: &mut Client,
        range: GpaRange,
        mappings: &[Mapping],
    ) -> Result<(), PathError> {
        let peer = self.vm_windows.share(range, |open| {
            let wanted = mappings.iter().filter_map(|mapping| {
                let piece = Piece::new(range, open, mapping.range)?;
                let memory = piece.of(&mapping.memory()?, mapping.range.start());
                Some((piece.peer_address, memory))
            });
            let wanted: Vec<_> = wanted.collect();
            self.peer_mapper.fits(open, &wanted)
        })?;
        self.open_window(client, range, peer)
    }

    /// Opens a window that no other device uses, as behind a vIOMMU, where each device has addresses
    /// of its own.
    fn open_own_window(&mut self, client: &mut Client, range: GpaRange) -> Result<(), PathError> {
        let peer = self.vm_windows.take(range)?;
        self.open_window(client, range, peer)
    }

    fn open_window(
        &mut self,
        client: &mut Client,
        range: GpaRange,
        peer: Arc<PeerRange>,
    ) -> Result<(), PathError> {
        let iova = window_iova(range.start());
        let opened = client.open_window(iova, peer.start(), range.len());
        let (lut_entries, late) = match opened {
            Ok(lut_entries) => (lut_entries, Ok(())),
            // The lender may have opened it: its peer addresses stay reserved until the path
            // closes.
            Err(error @ CallError::Late(_)) => (0, Err(error)),
            Err(error) => return Err(error.into()),
        };
        self.windows.push(Window {
            range,
            peer,
            lut_entries,
        });
        Ok(late?)
    }

    /// Splits `range` at window boundaries and returns the parts with their peer addresses.
    fn pieces(&self, range: GpaRange) -> Vec<Piece> {
        let windows = self.windows.iter();
        windows
            .filter_map(|window| Piece::new(window.range, &window.peer, range))
            .collect()
    }

    /// The parts of `range` that no window spans.
    fn without_window(&self, range: GpaRange) -> Vec<GpaRange> {
        let mut spanned: Vec<_> = self.pieces(range);
        spanned.sort_by_key(|piece| piece.range.start());
        let mut gaps = Vec::new();
        let mut at = range.start();
        for piece in spanned {
            gaps.extend(GpaRange::between(at, piece.range.start()));
            at = piece.range.end();
        }
        gaps.extend(GpaRange::between(at, range.end()));
        gaps
    }
}

/// The IOVA at which a window maps `gpa`: the same address. Behind a vIOMMU, where the client maps
/// the guest's IOVAs, `gpa` is one of those.
pub(crate) fn window_iova(gpa: Gpa) -> Iova {
    Iova::new(gpa.get())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::borrow::vm_memory::PEER_STEP;

    pub(super) fn range(start: u64, end: u64) -> GpaRange {
        GpaRange::between(Gpa::new(start), Gpa::new(end)).unwrap()
    }

    pub(super) fn open(windows: &[(u64, u64)]) -> OpenPath {
        let mut path = OpenPath::default();
        for &(start, end) in windows {
            let range = range(start, end);
            let peer = path.vm_windows.take(range).unwrap();
            path.windows.push(Window {
                range,
                peer,
                lut_entries: 1,
            });
        }
        path
    }

    #[test]
    fn a_mapping_is_cut_where_windows_end() {
        let path = open(&[(0, 0x8000), (0xa000, 0xc000)]);
        let pieces = path.pieces(range(0x6000, 0xe000));
        let found: Vec<_> = pieces
            .iter()
            .map(|piece| (piece.range, piece.peer_address.get()))
            .collect();
        let expected = [
            (range(0x6000, 0x8000), PEER_STEP + 0x6000),
            (range(0xa000, 0xc000), 2 * PEER_STEP),
        ];
        assert_eq!(found, expected);
        let gaps = path.without_window(range(0x6000, 0xe000));
        assert_eq!(gaps, [range(0x8000, 0xa000), range(0xc000, 0xe000)]);
        assert_eq!(path.without_window(range(0x1000, 0x8000)), []);
        assert_eq!(
            path.without_window(range(0x10000, 0x11000)),
            [range(0x10000, 0x11000)]
        );
    }

    #[test]
    fn pages_are_told_from_ram() {
        let mut path = OpenPath::default();
        let page = range(0xffff_f000, 0x1_0000_0000);
        let insert = |path: &mut OpenPath, range: GpaRange| {
            let segment = Segment {
                range,
                memory: MemoryRange::whole(std::fs::File::open("/dev/null").unwrap(), range.len()),
                pieces: Vec::new(),
                is_bar: false,
                pins: None,
            };
            path.segments.insert(range.start(), segment);
        };
        assert!(path.is_page(page));
        insert(&mut path, range(0x8000_0000, 0x8000_1000));
        insert(&mut path, range(0, 0xa_0000));
        assert!(path.is_page(page));
        // Below 1 MiB the firmware remaps RAM piecewise.
        assert!(!path.is_page(range(0xc_0000, 0xc_4000)));
        insert(&mut path, range(0x10_0000, 0x4000_0000));
        assert!(!path.is_page(page));
    }
}
