//! Windows and memory, composed. Pure but for its [`Mapper`].

use std::sync::Arc;

use farside_error_chain::Chain;
use farside_fabric::memory::{HostSlice, SharedMemory};
use farside_fabric::{
    AddressRange, BusAddress, FabricError, Iova, LenderPath, MemoryRange, PageCounts, PeerAddress,
    RangeTable, Usage, WindowUse,
};

/// Executes the changes of the composition: a [`Domain`](crate::Domain) and a
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

    /// Enables or disables bus mastering.
    ///
    /// # Errors
    /// Any; it may still be as before then.
    fn set_bus_master(&mut self, enabled: bool) -> Result<(), FabricError>;
}

/// A mapping of the device's domain: where a window meets memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The device's addresses.
    pub iova: AddressRange<Iova>,
    /// What the first of them reaches.
    pub peer_address: PeerAddress,
}

/// Windows, memory, and the resulting pieces.
#[derive(Debug)]
pub struct Composition<M: Mapper> {
    mapper: M,
    bus_master: bool,
    /// Windows, and their peer addresses.
    windows: RangeTable<Iova, PeerAddress>,
    memory: RangeTable<PeerAddress, Arc<SharedMemory>>,
    /// The pieces that the mapper has mapped and not unmapped. Authoritative: pieces left by a
    /// failure are unmapped by the next operation that covers them.
    pieces: RangeTable<Iova, PeerAddress>,
}

impl<M: Mapper> Composition<M> {
    /// No windows or memory, with bus mastering disabled.
    pub fn new(mapper: M) -> Self {
        Self {
            mapper,
            bus_master: false,
            windows: RangeTable::default(),
            memory: RangeTable::default(),
            pieces: RangeTable::default(),
        }
    }

    /// The mapper.
    pub fn mapper(&self) -> &M {
        &self.mapper
    }

    /// The mapper, for what it needs beside the calls.
    pub fn mapper_mut(&mut self) -> &mut M {
        &mut self.mapper
    }

    /// Whether bus mastering is enabled.
    pub fn bus_master(&self) -> bool {
        self.bus_master
    }

    /// What is mapped now, ascending.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> + '_ {
        let rows = self.pieces.rows().iter();
        rows.map(|&(iova, peer_address)| Piece { iova, peer_address })
    }

    /// See [`LocalPath::map_peer`](crate::LocalPath::map_peer).
    ///
    /// # Errors
    /// As there.
    pub fn map_peer(&mut self, at: PeerAddress, memory: MemoryRange) -> Result<(), FabricError> {
        self.memory.check(AddressRange::new(at, memory.len)?)?;
        let shared = SharedMemory::map_range(&memory).map_err(|source| FabricError::Memory {
            offset: memory.offset,
            len: memory.len,
            source,
        })?;
        self.map_shared(at, shared)
    }

    /// See [`LocalPath::map_shared`](crate::LocalPath::map_shared).
    ///
    /// # Errors
    /// As there.
    pub fn map_shared(
        &mut self,
        at: PeerAddress,
        memory: Arc<SharedMemory>,
    ) -> Result<(), FabricError> {
        let range = AddressRange::new(at, memory.len() as u64)?;
        self.memory.map(range, memory)?;
        let meet = |&(window, peer_address)| meet(window, peer_address, range);
        let pieces = self.windows.rows().iter().filter_map(meet).collect();
        self.install(pieces).inspect_err(|_| {
            // It is there: it was put there above.
            drop(self.memory.unmap(range));
        })
    }

    /// See [`LocalPath::unmap_peer`](crate::LocalPath::unmap_peer).
    ///
    /// # Errors
    /// As there.
    pub fn unmap_peer(&mut self, at: PeerAddress, len: u64) -> Result<(), FabricError> {
        let inside = self.memory.inside(AddressRange::new(at, len)?)?;
        let rows = inside.iter().map(|(row, _)| *row).collect();
        self.take_memory(rows)
    }

    /// See [`LocalPath::unmap_peer_all`](crate::LocalPath::unmap_peer_all).
    ///
    /// # Errors
    /// As there.
    pub fn unmap_peer_all(&mut self) -> Result<(), FabricError> {
        let rows = self.memory.rows().iter().map(|(row, _)| *row).collect();
        let taken = self.take_memory(rows);
        // What a failed mapping may have left behind.
        taken.and(self.remove_pieces(|_| true))
    }

    /// Unmaps rows of the borrower's memory, as many as possible.
    fn take_memory(&mut self, rows: Vec<AddressRange<PeerAddress>>) -> Result<(), FabricError> {
        let mut result = Ok(());
        for row in rows {
            let mut taken = self.remove_pieces(|piece| contains(row, piece.peer_address));
            if taken.is_ok() {
                taken = self.memory.unmap(row).map(drop);
            }
            result = result.and(taken);
        }
        result
    }

    /// Maps pieces, all or none.
    fn install(&mut self, pieces: Vec<Piece>) -> Result<(), FabricError> {
        // Windows and memory do not overlap, so a conflicting piece is left from an earlier
        // failure.
        self.remove_pieces(|old| pieces.iter().any(|new| overlap(new.iova, old.iova)))?;
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
        self.pieces.check(piece.iova)?;
        let (start, len) = (piece.iova.start(), piece.iova.len());
        let outside = FabricError::NotMapped {
            space: "peer address",
            start: piece.peer_address.get(),
            len,
        };
        let found = self.memory.find(piece.peer_address);
        let slice = found.and_then(|(row, memory)| {
            let skip = piece.peer_address.offset_from(row.start())?;
            Some((memory.slice(skip as usize, len as usize)?, memory))
        });
        let (slice, memory) = slice.ok_or(outside)?;
        self.mapper.map(start, &slice, memory.is_writable())?;
        self.pieces.map(piece.iova, piece.peer_address)
    }

    /// Unmaps as many as possible of the pieces that are meant.
    fn remove_pieces(&mut self, meant: impl Fn(&Piece) -> bool) -> Result<(), FabricError> {
        let meant: Vec<Piece> = self.pieces().filter(meant).collect();
        let mut result = Ok(());
        for piece in meant {
            let mut removed = self.mapper.unmap(piece.iova.start(), piece.iova.len());
            if removed.is_ok() {
                removed = self.pieces.unmap(piece.iova).map(drop);
            }
            result = result.and(removed);
        }
        result
    }
}

impl<M: Mapper> LenderPath for Composition<M> {
    fn open_window(
        &mut self,
        iova: Iova,
        peer_address: PeerAddress,
        len: u64,
    ) -> Result<WindowUse, FabricError> {
        let range = AddressRange::new(iova, len)?;
        AddressRange::new(peer_address, len)?;
        self.windows.check(range)?;
        let meet = |(memory, _): &(_, _)| meet(range, peer_address, *memory);
        let pieces = self.memory.rows().iter().filter_map(meet).collect();
        self.install(pieces)?;
        self.windows.map(range, peer_address)?;
        Ok(WindowUse {
            // Nothing is between IOVA and memory.
            bus: BusAddress::new(iova.get()),
            bytes: len,
            first_lut_entry: 0,
            lut_entries: 0,
        })
    }

    fn close_window(&mut self, iova: Iova) -> Result<(), FabricError> {
        let found = self.windows.find(iova).map(|(range, _)| *range);
        let window = found.filter(|range| range.start() == iova);
        let window = window.ok_or(FabricError::NoWindow { iova })?;
        self.remove_pieces(|piece| overlap(piece.iova, window))?;
        self.windows.unmap(window).map(drop)
    }

    fn close_all(&mut self) -> Result<(), FabricError> {
        let windows = self.windows.rows().iter();
        let windows: Vec<Iova> = windows.map(|(range, _)| range.start()).collect();
        let mut result = Ok(());
        for iova in windows {
            result = result.and(self.close_window(iova));
        }
        // What a failed opening may have left behind.
        result.and(self.remove_pieces(|_| true))
    }

    fn usage(&self) -> Usage {
        let windows = self.windows.rows();
        let mut usage = Usage {
            windows: windows.len() as u32,
            window_bytes: windows.iter().map(|(range, _)| range.len()).sum(),
            ..Usage::default()
        };
        for Piece { iova, peer_address } in self.pieces() {
            usage.bytes_mapped += iova.len();
            if let Some((row, memory)) = self.memory.find(peer_address) {
                let to = memory.file_offset() + (peer_address.get() - row.start().get());
                let largest = memory.page_size();
                usage.lender_pages += PageCounts::of(iova.start().get(), to, iova.len(), largest);
            }
        }
        usage
    }

    fn set_bus_master(&mut self, enabled: bool) -> Result<(), FabricError> {
        self.mapper.set_bus_master(enabled)?;
        self.bus_master = enabled;
        Ok(())
    }
}

impl<M: Mapper> Drop for Composition<M> {
    fn drop(&mut self) {
        // The device's DMA first.
        for result in [self.set_bus_master(false), self.close_all()] {
            if let Err(error) = result {
                log::error!("a path is not taken down: {error}", error = Chain(&error));
            }
        }
    }
}

/// Where a window to `peer_address` meets memory: the part of both.
fn meet(
    window: AddressRange<Iova>,
    peer_address: PeerAddress,
    memory: AddressRange<PeerAddress>,
) -> Option<Piece> {
    let start = peer_address.max(memory.start());
    let end = peer_address.checked_add(window.len())?.min(memory.end());
    let len = end.offset_from(start)?;
    let iova = window
        .start()
        .checked_add(start.offset_from(peer_address)?)?;
    // Whole pages, as both are; not empty.
    let iova = AddressRange::new(iova, len).ok()?;
    Some(Piece {
        iova,
        peer_address: start,
    })
}

fn contains(range: AddressRange<PeerAddress>, at: PeerAddress) -> bool {
    (range.start()..range.end()).contains(&at)
}

fn overlap(one: AddressRange<Iova>, other: AddressRange<Iova>) -> bool {
    one.start() < other.end() && other.start() < one.end()
}

#[cfg(test)]
mod tests;
