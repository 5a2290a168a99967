//! BARs of a borrowed device, for the borrower's CPUs: mapped into the
//! endpoint's domain, so that the peer's window can lead there.

use std::cmp::Reverse;
use std::sync::Arc;

use farside_error_chain::Chain;
use farside_fabric::{FarAddress, PAGE_SIZE};
use farside_pci::MappableArea;
use serde::{Deserialize, Serialize};

use crate::far_space::FarRange;
use crate::platform::{DomainOps, FunctionOps};
use crate::{Adapter, NtbError};

/// Where the BARs of a device are in peer addresses: side by side, so that one
/// window of the borrower's reaches them all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportedBars {
    /// Where they begin, aligned as the borrower's NTB needs.
    pub far: FarAddress,
    /// Bytes from there that a window must reach; 0 when the device has nothing
    /// to map.
    pub len: u64,
    /// Those BARs that have something to map.
    pub bars: Vec<ExportedBar>,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportedBar {
    /// Its number.
    pub bar: u8,
    /// Where it begins, bytes from [`ExportedBars::far`] on.
    pub offset: u64,
    /// Bytes of the whole BAR.
    pub size: u64,
    /// The areas of the BAR that are there. The rest is not, and traps.
    pub areas: Vec<MappableArea>,
}

impl ExportedBars {
    /// Where a BAR begins in peer addresses.
    pub fn far_of(&self, bar: u8) -> Option<FarAddress> {
        let found = self.bars.iter().find(|it| it.bar == bar)?;
        self.far.checked_add(found.offset)
    }
}

/// Exported BARs; taken away on drop.
pub(crate) struct Export<F: FunctionOps> {
    adapter: Adapter<F>,
    bars: ExportedBars,
    /// What is mapped, as (peer address, bytes).
    mapped: Vec<(u64, u64)>,
    /// `None` when there is nothing to map.
    range: Option<FarRange>,
}

impl<F: FunctionOps> Export<F> {
    /// Maps what can be mapped of the BARs of `device`.
    pub(crate) fn new(adapter: &Adapter<F>, device: &Arc<F>) -> Result<Self, NtbError> {
        let description = device.description()?;
        let bars = (0u8..).zip(&description.bars).filter_map(|(bar, it)| {
            let it = it.as_ref().filter(|it| !it.mappable.is_empty())?;
            Some((bar, it.size, it.mappable.clone()))
        });
        let (bars, len) = place(bars.collect());
        let range = match len {
            0 => None,
            _ => Some(adapter.far_space().take(len)?),
        };
        let far = range.as_ref().map_or(FarAddress::new(0), FarRange::start);
        // From here on, dropping it undoes what was done.
        let mut export = Self {
            adapter: adapter.clone(),
            bars: ExportedBars { far, len, bars },
            mapped: Vec::new(),
            range,
        };
        for bar in &export.bars.bars {
            for area in &bar.areas {
                let memory = device.map_region(bar.bar, area.offset, area.len)?;
                // Inside the range that was taken, so below 2^64.
                let at = far.get() + bar.offset + area.offset;
                let domain = adapter.function().domain();
                domain.map_bar(at, &memory, 0, area.len)?;
                export.mapped.push((at, area.len));
            }
        }
        Ok(export)
    }

    pub(crate) fn bars(&self) -> &ExportedBars {
        &self.bars
    }

    /// Takes them away; gives the export back when that fails.
    pub(crate) fn end(mut self) -> Result<(), (Box<Self>, NtbError)> {
        match self.unmap() {
            Ok(()) => Ok(()),
            Err(error) => Err((Box::new(self), error)),
        }
    }

    fn unmap(&mut self) -> Result<(), NtbError> {
        let domain = self.adapter.function().domain();
        while let Some(&(at, len)) = self.mapped.last() {
            domain.unmap(at, len)?;
            self.mapped.pop();
        }
        Ok(())
    }
}

impl<F: FunctionOps> Drop for Export<F> {
    fn drop(&mut self) {
        if let Err(error) = self.unmap() {
            log::error!(
                "{error}; its far addresses are not used again",
                error = Chain(&error)
            );
            std::mem::forget(self.range.take());
        }
    }
}

/// Puts BARs, as (number, bytes, areas), side by side, each at a multiple of
/// its size: the largest first, so that no gaps arise. Returns them by number,
/// and how many bytes they take.
fn place(mut bars: Vec<(u8, u64, Vec<MappableArea>)>) -> (Vec<ExportedBar>, u64) {
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
