//! BARs of a borrowed device, for the borrower's CPUs: mapped into the endpoint's domain, so that
//! the peer's window can translate to them. The other devices of its owner (peer to peer) reach them
//! without the NTB.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farside_error_chain::Chain;
use farside_fabric::{Owner, PAGE_SIZE, PeerAddress};
use farside_pci::SparseMmapArea;
use serde::{Deserialize, Serialize};

use crate::peer_space::{PeerRange, endpoint_iova};
use crate::platform::{BarOf, DomainOps, FunctionOps};
use crate::{Adapter, NtbError};

/// The peer addresses of a device's BARs: adjacent, so that one window of the borrower spans them
/// all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportedBars {
    /// Their first peer address, aligned for the borrower's NTB.
    pub peer_address: PeerAddress,
    /// Bytes from there that a window must span; 0 if no BAR can be mapped.
    pub len: u64,
    /// The BARs that can be mapped.
    pub bars: Vec<ExportedBar>,
}

/// An exported BAR.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportedBar {
    /// Its number.
    pub bar: u8,
    /// Its offset from [`ExportedBars::peer_address`], in bytes.
    pub offset: u64,
    /// Bytes of the whole BAR.
    pub size: u64,
    /// The mapped areas of the BAR. The rest traps.
    pub areas: Vec<SparseMmapArea>,
}

impl ExportedBars {
    /// The peer address of a BAR.
    pub fn peer_address_of(&self, bar: u8) -> Option<PeerAddress> {
        let found = self.bars.iter().find(|it| it.bar == bar)?;
        self.peer_address.checked_add(found.offset)
    }
}

/// The exported areas of all devices of an adapter, by peer address.
pub(crate) struct Exports<F: FunctionOps>(Mutex<BTreeMap<PeerAddress, Area<F>>>);

/// An exported area of a BAR.
struct Area<F: FunctionOps> {
    owner: Owner,
    of: Arc<F>,
    memory: Arc<BarOf<F>>,
    /// Bytes.
    len: u64,
}

impl<F: FunctionOps> Exports<F> {
    /// The area with the `len` bytes at peer address `at`, of a device of `owner` other than `except`, and their offset in it.
    pub(crate) fn find(
        &self,
        owner: &Owner,
        except: &Arc<F>,
        at: PeerAddress,
        len: u64,
    ) -> Option<(Arc<BarOf<F>>, u64)> {
        let areas = self.lock();
        let (start, area) = areas.range(..=at).next_back()?;
        let offset = at.offset_from(*start)?;
        let inside = offset.checked_add(len).is_some_and(|end| end <= area.len);
        let allowed = inside && area.owner == *owner && !Arc::ptr_eq(&area.of, except);
        allowed.then(|| (Arc::clone(&area.memory), offset))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PeerAddress, Area<F>>> {
        // Changed by one insertion or removal.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<F: FunctionOps> Default for Exports<F> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// Exported BARs; unmapped on drop.
pub(crate) struct Export<F: FunctionOps> {
    adapter: Adapter<F>,
    bars: ExportedBars,
    /// The mappings, as (peer address, bytes).
    mapped: Vec<(PeerAddress, u64)>,
    /// `None` if no BAR can be mapped.
    range: Option<PeerRange>,
}

impl<F: FunctionOps> Export<F> {
    /// Maps the areas of the BARs of `device`, which `owner` has, that can be mapped.
    pub(crate) fn new(
        adapter: &Adapter<F>,
        owner: &Owner,
        device: &Arc<F>,
    ) -> Result<Self, NtbError> {
        let description = device.description()?;
        let bars = (0u8..).zip(&description.bars).filter_map(|(bar, it)| {
            let it = it.as_ref().filter(|it| !it.mappable.is_empty())?;
            Some((bar, it.size, it.mappable.clone()))
        });
        let (bars, len) = place(bars.collect());
        let range = match len {
            0 => None,
            _ => Some(adapter.peer_space().take(len)?),
        };
        let peer_address = range.as_ref().map_or(PeerAddress::new(0), PeerRange::start);
        // From here on, dropping it rolls back.
        let mut export = Self {
            adapter: adapter.clone(),
            bars: ExportedBars {
                peer_address,
                len,
                bars,
            },
            mapped: Vec::new(),
            range,
        };
        for bar in &export.bars.bars {
            for area in &bar.areas {
                let memory = device.map_region(bar.bar, area.offset, area.len)?;
                // Inside the allocated range, so below 2^64.
                let at = peer_address.wrapping_add(bar.offset + area.offset);
                let domain = adapter.function().domain();
                domain.map_bar(endpoint_iova(at), &memory, 0, area.len)?;
                export.mapped.push((at, area.len));
                let area = Area {
                    owner: owner.clone(),
                    of: Arc::clone(device),
                    memory,
                    len: area.len,
                };
                adapter.exports().lock().insert(at, area);
            }
        }
        Ok(export)
    }

    pub(crate) fn bars(&self) -> &ExportedBars {
        &self.bars
    }

    /// Unmaps them; returns the export on failure.
    pub(crate) fn end(mut self) -> Result<(), (Box<Self>, NtbError)> {
        match self.unmap() {
            Ok(()) => Ok(()),
            Err(error) => Err((Box::new(self), error)),
        }
    }

    fn unmap(&mut self) -> Result<(), NtbError> {
        let domain = self.adapter.function().domain();
        // All, also if one cannot be unmapped: the areas keep the function open.
        let mut areas = self.adapter.exports().lock();
        self.mapped
            .iter()
            .for_each(|(at, _)| drop(areas.remove(at)));
        drop(areas);
        while let Some(&(at, len)) = self.mapped.last() {
            domain.unmap(endpoint_iova(at), len)?;
            self.mapped.pop();
        }
        Ok(())
    }
}

impl<F: FunctionOps> Drop for Export<F> {
    fn drop(&mut self) {
        if let Err(error) = self.unmap() {
            log::error!(
                "{error}; its peer addresses are not used again",
                error = Chain(&error)
            );
            std::mem::forget(self.range.take());
        }
    }
}

/// Lays out BARs, as (number, bytes, areas), each naturally aligned: the largest first, so that
/// there are no gaps. Returns them by number, and their total size.
fn place(mut bars: Vec<(u8, u64, Vec<SparseMmapArea>)>) -> (Vec<ExportedBar>, u64) {
    bars.sort_by_key(|&(bar, size, _)| (Reverse(size), bar));
    let mut len = 0;
    let mut placed: Vec<_> = bars
        .into_iter()
        .map(|(bar, size, areas)| {
            let offset = len;
            len += size.next_multiple_of(PAGE_SIZE);
            ExportedBar {
                bar,
                offset,
                size,
                areas,
            }
        })
        .collect();
    placed.sort_by_key(|it| it.bar);
    (placed, len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_side_by_side_at_multiples_of_their_sizes() {
        let (bars, len) = place(vec![
            (0, 0x4000, vec![]),
            (2, 0x100000, vec![]),
            (5, 4096, vec![]),
        ]);
        let places: Vec<_> = bars.iter().map(|it| (it.bar, it.offset)).collect();
        assert_eq!(places, [(0, 0x100000), (2, 0), (5, 0x104000)]);
        assert_eq!(len, 0x105000);
        assert_eq!(place(vec![]), (vec![], 0));
    }
}
