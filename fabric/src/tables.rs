//! The owners of entries in an NTB adapter's two tables. Pure: the party that
//! programs the tables, software or hardware, checks here first.

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
}

/// Consecutive LUT entries of one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
            limits,
        })
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
            largest_free_run: self.lut.largest_run(),
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

    /// Whether windows of `spans` bytes could all be opened now, and what they
    /// would take. Takes nothing.
    ///
    /// # Errors
    /// The errors of [`fits`] if they would not fit even in an unused adapter;
    /// [`LimitError::LutEntries`] if too few entries are free.
    pub fn check_windows(&self, spans: &[u64]) -> Result<NtbUse, LimitError> {
        let needed = fits(spans, &self.limits)?;
        let mut lut = self.lut.clone();
        for &bytes in spans {
            take(&self.limits, &mut lut, bytes)?;
        }
        Ok(needed)
    }

    /// Takes LUT entries for a window of `bytes` to `peer_address`.
    ///
    /// # Errors
    /// [`LimitError::Alignment`], [`LimitError::WindowTooLarge`] and
    /// [`LimitError::LutEntries`].
    pub fn take_window(
        &mut self,
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
        take(limits, &mut self.lut, bytes)
    }

    /// Gives back a window's LUT entries.
    pub fn give_back_window(&mut self, window: LutRange) {
        self.lut.give_back(window.first);
    }
}

/// Takes entries of `lut` for a window of `bytes`.
fn take(limits: &NtbLimits, lut: &mut Lut, bytes: u64) -> Result<LutRange, LimitError> {
    limits.check_window(bytes)?;
    let needed = limits.entries_for(bytes);
    let Some(first) = lut.take(needed, bytes) else {
        let spans = lut.window_bytes().chain([bytes]);
        return Err(LimitError::LutEntries {
            bytes,
            needed,
            limit: limits.lut_entries,
            free: lut.free(),
            largest_run: lut.largest_run(),
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
