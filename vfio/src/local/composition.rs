//! Windows and memory, composed. Pure but for its [`Mapper`].

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use farside_fabric::memory::{HostSlice, SharedMemory};
use farside_fabric::{
    AddressRange, BusAddress, FabricError, FarAddress, Iova, LenderPath, MemoryRange, PageCounts,
    Usage, WindowUse,
};

/// Most mappings of one path, windows and pieces each. It bounds what a client
/// can make us remember; a VM has some tens.
const MAX_MAPPINGS: usize = 4096;

/// Who carries out what the composition asks: a [`Domain`](crate::Domain) and a
/// [`Function`](crate::Function).
pub trait Mapper {
    /// Maps `memory` at `at`. It must keep a clone of `memory` until it has
    /// unmapped it.
    ///
    /// # Errors
    /// Any; nothing is mapped then.
    fn map(&mut self, at: Iova, memory: &HostSlice, writable: bool) -> Result<(), FabricError>;

    /// Unmaps what one [`Mapper::map`] mapped.
    ///
    /// # Errors
    /// Any; it may still be mapped then.
    fn unmap(&mut self, at: Iova, len: u64) -> Result<(), FabricError>;

    /// Lets the device master the bus, or stops it.
    ///
    /// # Errors
    /// Any; it may still be as before then.
    fn set_bus_master(&mut self, enabled: bool) -> Result<(), FabricError>;
}

/// A mapping of the device's domain: where a window meets memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First IOVA.
    pub iova: u64,
    /// Bytes.
    pub len: u64,
    /// Far address behind `iova`.
    pub far: u64,
}

impl Piece {
    fn overlaps(&self, other: &Self) -> bool {
        self.iova < other.iova + other.len && other.iova < self.iova + self.len
    }
}

/// What is open and mapped, and the pieces that follow from it.
#[derive(Debug)]
pub struct Composition<M: Mapper> {
    mapper: M,
    bus_master: bool,
    /// Windows, by first IOVA.
    windows: BTreeMap<u64, Window>,
    /// The borrower's memory, by first far address.
    memory: BTreeMap<u64, Memory>,
    /// What the mapper has mapped and not unmapped, by first IOVA. Here is the
    /// truth: whatever fails on the way, what is left is taken back by the
    /// next that would.
    pieces: BTreeMap<u64, Piece>,
}

#[derive(Debug)]
struct Window {
    len: u64,
    far: u64,
}

struct Memory {
    len: u64,
    shared: Arc<SharedMemory>,
    file_offset: u64,
    writable: bool,
}

impl<M: Mapper> Composition<M> {
    /// Nothing is open or mapped, and the device does not master the bus.
    pub fn new(mapper: M) -> Self {
        Self {
            mapper,
            bus_master: false,
            windows: BTreeMap::new(),
            memory: BTreeMap::new(),
            pieces: BTreeMap::new(),
        }
    }

    /// Who maps.
    pub fn mapper(&self) -> &M {
        &self.mapper
    }

    /// Whether the device may master the bus.
    pub fn bus_master(&self) -> bool {
        self.bus_master
    }

    /// What is mapped now, ascending.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> + '_ {
        self.pieces.values().copied()
    }

    /// See [`LocalPath::far_map`](crate::LocalPath::far_map).
    ///
    /// # Errors
    /// As there.
    pub fn far_map(&mut self, at: FarAddress, memory: MemoryRange) -> Result<(), FabricError> {
        let range = AddressRange::new(at, memory.len)?;
        let far = range.start().get()..range.end().get();
        check_free(&self.memory, &far, "far address", |it| it.len)?;
        let shared = SharedMemory::map_range(&memory).map_err(|source| FabricError::Memory {
            offset: memory.offset,
            len: memory.len,
            source,
        })?;
        let row = Memory {
            len: memory.len,
            shared,
            file_offset: memory.offset,
            writable: memory.writable,
        };
        let pieces: Vec<_> = (self.windows.iter())
            .filter_map(|(&iova, window)| meet(iova, window.len, window.far, far.start, memory.len))
            .collect();
        self.memory.insert(far.start, row);
        self.install(&pieces).inspect_err(|_| {
            self.memory.remove(&far.start);
        })
    }

    /// See [`LocalPath::far_unmap`](crate::LocalPath::far_unmap).
    ///
    /// # Errors
    /// As there.
    pub fn far_unmap(&mut self, at: FarAddress, len: u64) -> Result<(), FabricError> {
        let range = AddressRange::new(at, len)?;
        let far = range.start().get()..range.end().get();
        let rows = whole_rows(&self.memory, &far)?;
        self.take_memory(&rows)
    }

    /// See [`LocalPath::far_unmap_all`](crate::LocalPath::far_unmap_all).
    ///
    /// # Errors
    /// As there.
    pub fn far_unmap_all(&mut self) -> Result<(), FabricError> {
        let rows: Vec<u64> = self.memory.keys().copied().collect();
        let taken = self.take_memory(&rows);
        // What a failed mapping may have left behind.
        taken.and(self.remove_pieces(|_| true))
    }

    /// Unmaps the borrower's memory that begins at these far addresses.
    fn take_memory(&mut self, rows: &[u64]) -> Result<(), FabricError> {
        let mut result = Ok(());
        for row in rows {
            let Some(memory) = self.memory.get(row) else {
                continue;
            };
            let far = *row..*row + memory.len;
            let removed = self.remove_pieces(|piece| far.contains(&piece.far));
            if removed.is_ok() {
                self.memory.remove(row);
            }
            result = result.and(removed);
        }
        result
    }

    /// Maps pieces, all or none.
    fn install(&mut self, pieces: &[Piece]) -> Result<(), FabricError> {
        if self.pieces.len() + pieces.len() > MAX_MAPPINGS {
            return Err(FabricError::TooManyMappings {
                space: "IOVA",
                limit: MAX_MAPPINGS,
            });
        }
        // Windows and memory overlap no others, so what is in the way is what
        // an earlier failure left behind.
        self.remove_pieces(|old| pieces.iter().any(|new| new.overlaps(old)))?;
        for (done, piece) in pieces.iter().enumerate() {
            if let Err(error) = self.install_one(piece) {
                let mapped = &pieces[..done];
                if let Err(left) = self.remove_pieces(|piece| mapped.contains(piece)) {
                    log::error!("a mapping that is not wanted stays: {left}");
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn install_one(&mut self, piece: &Piece) -> Result<(), FabricError> {
        let outside = || FabricError::NotMapped {
            space: "far address",
            start: piece.far,
            len: piece.len,
        };
        let (start, memory) = self
            .memory
            .range(..=piece.far)
            .next_back()
            .ok_or_else(outside)?;
        let slice = memory
            .shared
            .slice((piece.far - start) as usize, piece.len as usize)
            .ok_or_else(outside)?;
        self.mapper
            .map(Iova::new(piece.iova), &slice, memory.writable)?;
        self.pieces.insert(piece.iova, *piece);
        Ok(())
    }

    /// Unmaps as many as possible of the pieces that are meant.
    fn remove_pieces(&mut self, meant: impl Fn(&Piece) -> bool) -> Result<(), FabricError> {
        let meant: Vec<Piece> = self.pieces().filter(meant).collect();
        let mut result = Ok(());
        for piece in meant {
            match self.mapper.unmap(Iova::new(piece.iova), piece.len) {
                Ok(()) => {
                    self.pieces.remove(&piece.iova);
                }
                Err(error) => result = result.and(Err(error)),
            }
        }
        result
    }
}

impl<M: Mapper> LenderPath for Composition<M> {
    fn open_window(
        &mut self,
        iova: Iova,
        far: FarAddress,
        len: u64,
    ) -> Result<WindowUse, FabricError> {
        let range = AddressRange::new(iova, len)?;
        AddressRange::new(far, len)?;
        let (iova, far) = (iova.get(), far.get());
        check_free(&self.windows, &(iova..range.end().get()), "IOVA", |it| {
            it.len
        })?;
        let pieces: Vec<_> = (self.memory.iter())
            .filter_map(|(&start, memory)| meet(iova, len, far, start, memory.len))
            .collect();
        self.install(&pieces)?;
        self.windows.insert(iova, Window { len, far });
        Ok(WindowUse {
            // Nothing is between IOVA and memory.
            bus: BusAddress::new(iova),
            bytes: len,
            first_lut_entry: 0,
            lut_entries: 0,
        })
    }

    fn close_window(&mut self, iova: Iova) -> Result<(), FabricError> {
        let start = iova.get();
        let window = self.windows.get(&start);
        let end = start + window.ok_or(FabricError::NoWindow { iova })?.len;
        self.remove_pieces(|piece| (start..end).contains(&piece.iova))?;
        self.windows.remove(&start);
        Ok(())
    }

    fn close_all(&mut self) -> Result<(), FabricError> {
        let windows: Vec<u64> = self.windows.keys().copied().collect();
        let mut result = Ok(());
        for iova in windows {
            result = result.and(self.close_window(Iova::new(iova)));
        }
        // What a failed opening may have left behind.
        result.and(self.remove_pieces(|_| true))
    }

    fn usage(&self) -> Usage {
        let mut usage = Usage {
            windows: self.windows.len() as u32, // bounded by MAX_MAPPINGS
            window_bytes: self.windows.values().map(|window| window.len).sum(),
            ..Usage::default()
        };
        for piece in self.pieces() {
            usage.bytes_mapped += piece.len;
            let Some((start, memory)) = self.memory.range(..=piece.far).next_back() else {
                continue;
            };
            let to = memory.file_offset + (piece.far - start);
            let largest = memory.shared.page_size();
            usage.lender_pages += PageCounts::of(piece.iova, to, piece.len, largest);
        }
        usage
    }

    fn set_bus_master(&mut self, enabled: bool) -> Result<(), FabricError> {
        self.mapper.set_bus_master(enabled)?;
        self.bus_master = enabled;
        Ok(())
    }
}

impl<M: Mapper> Composition<M> {
    /// Ends all of it, the device's DMA first.
    fn end(&mut self) {
        for result in [self.set_bus_master(false), self.close_all()] {
            if let Err(error) = result {
                log::error!("a path is not taken down: {error}");
            }
        }
    }
}

impl<M: Mapper> Drop for Composition<M> {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory")
            .field("len", &self.len)
            .field("file_offset", &self.file_offset)
            .field("writable", &self.writable)
            .finish_non_exhaustive()
    }
}

/// Where a window meets memory: the part of both. All of them are ranges that
/// end within 64 bits.
fn meet(iova: u64, len: u64, far: u64, memory: u64, memory_len: u64) -> Option<Piece> {
    let start = far.max(memory);
    let end = (far + len).min(memory + memory_len);
    (start < end).then(|| Piece {
        iova: iova + (start - far),
        len: end - start,
        far: start,
    })
}

/// Checks that a range overlaps no row and that there is room for one more.
fn check_free<T>(
    rows: &BTreeMap<u64, T>,
    range: &Range<u64>,
    space: &'static str,
    len_of: impl Fn(&T) -> u64,
) -> Result<(), FabricError> {
    if let Some((&other_start, row)) = rows.range(..range.end).next_back()
        && other_start + len_of(row) > range.start
    {
        return Err(FabricError::Overlap {
            space,
            start: range.start,
            len: range.end - range.start,
            other_start,
            other_len: len_of(row),
        });
    }
    if rows.len() >= MAX_MAPPINGS {
        let limit = MAX_MAPPINGS;
        return Err(FabricError::TooManyMappings { space, limit });
    }
    Ok(())
}

/// The rows inside a range, which may cut none and must cover one.
fn whole_rows(rows: &BTreeMap<u64, Memory>, range: &Range<u64>) -> Result<Vec<u64>, FabricError> {
    let (space, start, len) = ("far address", range.start, range.end - range.start);
    let before = rows
        .range(..range.start)
        .next_back()
        .filter(|(at, row)| *at + row.len > range.start);
    let touched: Vec<_> = before
        .into_iter()
        .chain(rows.range(range.clone()))
        .collect();
    if let Some(&(&mapping_start, row)) = touched
        .iter()
        .find(|(at, row)| **at < range.start || **at + row.len > range.end)
    {
        return Err(FabricError::SplitMapping {
            space,
            start,
            len,
            mapping_start,
            mapping_len: row.len,
        });
    }
    if touched.is_empty() {
        return Err(FabricError::NotMapped { space, start, len });
    }
    Ok(touched.into_iter().map(|(&at, _)| at).collect())
}

#[cfg(test)]
mod tests;
