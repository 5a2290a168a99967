//! The owners of entries in an NTB adapter's two tables. Pure: the party that
//! programs the tables, software or hardware, checks here first.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{LimitError, NtbLimits, NtbUse, PeerAddress, fits, limits::Remedy, lut::Lut};

/// The LUT and the requester table of one adapter: what is taken, and whether
/// more can be.
#[derive(Debug)]
pub struct NtbTables {
    limits: NtbLimits,
    lut: Lut,
    /// The device that has the entry, by requester entry (those of CPUs are
    /// not in it).
    requesters: Vec<Option<String>>,
    /// The VM of each window, and its entries, by the first of them.
    owners: BTreeMap<u32, (String, u32)>,
    /// Most LUT entries of one VM. Those from this one on are for VMs that need no more than that.
    share: u32,
}

/// Fraction of the LUT entries that one VM leaves to others, once
/// [`NtbTables::reserve_for_others`] was called.
const RESERVED_FRACTION: u32 = 8;

/// Consecutive LUT entries of one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LutRange {
    /// The first of them.
    pub first: u32,
    /// How many.
    pub entries: u32,
}

/// The resources of an adapter in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterUsage {
    /// Its limits.
    pub limits: NtbLimits,
    /// Devices that have a requester entry, sorted.
    pub devices: Vec<String>,
    /// Open windows.
    pub windows: u32,
    /// Number of their LUT entries.
    pub lut_entries: u32,
    /// Most consecutive LUT entries that are free.
    pub largest_free_run: u32,
}

impl NtbTables {
    /// Empty tables.
    ///
    /// # Errors
    /// [`LimitError::Invalid`] when `limits` cannot be.
    pub fn new(limits: NtbLimits) -> Result<Self, LimitError> {
        limits.validate()?;
        Ok(Self {
            lut: Lut::new(limits.lut_entries),
            requesters: vec![None; limits.max_devices() as usize],
            owners: BTreeMap::new(),
            share: limits.lut_entries,
            limits,
        })
    }

    /// Keeps an eighth of the LUT entries, consecutive ones, for VMs that use no more than that
    /// many: a VM that takes and scatters all it can get does not keep the others from DMA. An
    /// adapter with less than 8 entries has no reserve.
    pub fn reserve_for_others(&mut self) {
        self.share = self.limits.lut_entries - self.limits.lut_entries / RESERVED_FRACTION;
    }

    /// The adapter's limits.
    pub fn limits(&self) -> &NtbLimits {
        &self.limits
    }

    /// What is taken.
    pub fn usage(&self) -> AdapterUsage {
        let mut devices: Vec<String> = self.requesters.iter().flatten().cloned().collect();
        devices.sort();
        AdapterUsage {
            limits: self.limits.clone(),
            devices,
            windows: self.lut.window_bytes().count() as u32,
            lut_entries: self.limits.lut_entries - self.lut.free(),
            largest_free_run: self.lut.largest_run(self.limits.lut_entries),
        }
    }

    /// Takes a requester entry for the device of that name; returns its number
    /// among those for devices.
    ///
    /// # Errors
    /// [`LimitError::Requesters`] when none is free.
    pub fn take_requester(&mut self, device: &str) -> Result<usize, LimitError> {
        let Some(entry) = self.requesters.iter().position(Option::is_none) else {
            return Err(LimitError::Requesters {
                device: device.to_owned(),
                limit: self.limits.requester_entries,
                reserved: self.limits.reserved_requesters,
                used: self.requesters.len() as u32,
            });
        };
        self.requesters[entry] = Some(device.to_owned());
        Ok(entry)
    }

    /// Gives back a requester entry.
    pub fn give_back_requester(&mut self, entry: usize) {
        if let Some(device) = self.requesters.get_mut(entry) {
            *device = None;
        }
    }

    /// Whether windows of `spans` bytes of one VM fit if nothing else is open, and what they would
    /// take.
    ///
    /// # Errors
    /// The errors of [`fits`]; [`LimitError::Share`].
    pub fn fits(&self, spans: &[u64]) -> Result<NtbUse, LimitError> {
        let needed = fits(spans, &self.limits)?;
        let bytes = spans.iter().copied().fold(0, u64::saturating_add);
        self.end_for(bytes, needed.lut_entries.into(), 0)?;
        Ok(needed)
    }

    /// Whether windows of `spans` bytes could all be opened now, and what they
    /// would take. Takes nothing.
    ///
    /// # Errors
    /// As [`NtbTables::fits`]; [`LimitError::LutEntries`] if too few entries are free.
    pub fn check_windows(&self, spans: &[u64]) -> Result<NtbUse, LimitError> {
        let needed = self.fits(spans)?;
        let end = self.end_for(0, needed.lut_entries.into(), 0)?;
        let mut lut = self.lut.clone();
        for &bytes in spans {
            take(&self.limits, &mut lut, end, bytes)?;
        }
        Ok(needed)
    }

    /// Takes LUT entries for a window of `bytes` to `peer_address`, for the VM `owner`.
    ///
    /// # Errors
    /// [`LimitError::Alignment`], [`LimitError::WindowTooLarge`], [`LimitError::LutEntries`] and
    /// [`LimitError::Share`].
    pub fn take_window(
        &mut self,
        owner: &str,
        peer_address: PeerAddress,
        bytes: u64,
    ) -> Result<LutRange, LimitError> {
        let limits = &self.limits;
        if !peer_address.get().is_multiple_of(limits.alignment()) {
            return Err(LimitError::Alignment {
                peer_address,
                alignment: limits.alignment(),
            });
        }
        let owned = self.owners.values().filter(|(vm, _)| vm == owner);
        let used = owned.map(|(_, entries)| entries).sum();
        let end = self.end_for(bytes, limits.entries_for(bytes), used);
        if end.is_err() {
            // A refusal for want of entries names what would fit.
            take(limits, &mut self.lut.clone(), limits.lut_entries, bytes)?;
        }
        let range = take(limits, &mut self.lut, end?, bytes)?;
        self.owners
            .insert(range.first, (owner.to_owned(), range.entries));
        Ok(range)
    }

    /// Gives back a window's LUT entries.
    pub fn give_back_window(&mut self, window: LutRange) {
        self.lut.give_back(window.first);
        self.owners.remove(&window.first);
    }

    /// The end of the entries of which a VM that uses `used` may take `needed` more.
    fn end_for(&self, bytes: u64, needed: u64, used: u32) -> Result<u32, LimitError> {
        let entries = self.limits.lut_entries;
        let total = needed.saturating_add(used.into());
        match total {
            _ if self.share == entries => Ok(entries),
            _ if total <= u64::from(entries - self.share) => Ok(entries),
            _ if total <= u64::from(self.share) => Ok(self.share),
            _ => Err(LimitError::Share {
                bytes,
                needed,
                used,
                limit: self.share,
                entries,
            }),
        }
    }
}

/// Takes entries of `lut` for a window of `bytes`.
fn take(limits: &NtbLimits, lut: &mut Lut, end: u32, bytes: u64) -> Result<LutRange, LimitError> {
    limits.check_window(bytes)?;
    let needed = limits.entries_for(bytes);
    let Some(first) = lut.take(needed, end, bytes) else {
        let spans = lut.window_bytes().chain([bytes]);
        return Err(LimitError::LutEntries {
            bytes,
            needed,
            limit: limits.lut_entries,
            free: lut.free(),
            largest_run: lut.largest_run(end),
            segment: limits.segment(),
            remedy: Remedy(limits.larger_bar(spans)),
        });
    };
    Ok(LutRange {
        first,
        // `take` has found that it fits in 32 bits.
        entries: needed as u32,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SEGMENT: u64 = 128 << 20;

    fn reserved() -> NtbTables {
        let mut tables = NtbTables::new(NtbLimits::default()).unwrap();
        tables.reserve_for_others();
        tables
    }

    fn take(tables: &mut NtbTables, vm: &str, entries: u64) -> Result<LutRange, LimitError> {
        tables.take_window(vm, PeerAddress::new(0), entries * SEGMENT)
    }

    #[test]
    fn one_vm_leaves_an_eighth_to_others() {
        let mut tables = reserved();
        let first = take(&mut tables, "a", 200).unwrap();
        let error = take(&mut tables, "a", 25).unwrap_err();
        assert_eq!(
            error.to_string(),
            "no room for 3200 MiB of windows: they need 25 LUT entries, and the VM uses 200 of the \
             224 that one VM may have (256 less an eighth for other VMs); give the VM less RAM, \
             return one of its devices, or raise bar-size"
        );
        take(&mut tables, "a", 24).unwrap();
        take(&mut tables, "b", 32).unwrap();
        tables.give_back_window(first);
        take(&mut tables, "a", 200).unwrap();
        assert!(reserved().fits(&[224 * SEGMENT]).is_ok());
        let error = reserved().fits(&[225 * SEGMENT]).unwrap_err();
        assert!(matches!(error, LimitError::Share { .. }), "{error}");
    }

    #[test]
    fn an_adapter_with_a_window_for_each_of_low_and_high_memory_has_no_reserve() {
        let limits = NtbLimits {
            bar_size: 2 << 30,
            lut_entries: 2,
            ..NtbLimits::default()
        };
        let mut tables = NtbTables::new(limits).unwrap();
        tables.reserve_for_others();
        tables.fits(&[1 << 30, 1 << 30]).unwrap();
    }

    proptest! {
        /// Whatever one VM takes and gives back, another one can have its eighth.
        #[test]
        fn a_vm_cannot_take_or_scatter_the_eighth_of_the_others(
            requests in prop::collection::vec((1u64..300, any::<bool>(), any::<prop::sample::Index>()), 0..200),
        ) {
            let mut tables = reserved();
            let mut held = Vec::new();
            for (entries, give_back, which) in requests {
                match give_back && !held.is_empty() {
                    true => tables.give_back_window(held.swap_remove(which.index(held.len()))),
                    // Small windows scatter.
                    false => held.extend(take(&mut tables, "evil", entries % 40 + 1)),
                }
                let used: u32 = held.iter().map(|range: &LutRange| range.entries).sum();
                prop_assert!(used <= 224);
                prop_assert_eq!(tables.usage().lut_entries, used);
            }
            prop_assert!(take(&mut tables, "other", 32).is_ok());
        }
    }
}
