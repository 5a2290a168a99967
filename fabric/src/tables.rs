//! The holders of entries in an NTB adapter's two tables. Pure: the party that
//! programs the tables, software or hardware, checks here first.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{LimitError, NtbLimits, NtbUse, Owner, PeerAddress, fits, limits::Remedy, lut::Lut};

/// The LUT and the requester table of one adapter: what is taken, and whether
/// more can be.
///
/// Devices of one [`Owner`] that open the same window, to the same bytes at the same peer address,
/// share its LUT entries.
#[derive(Debug)]
pub struct NtbTables {
    limits: NtbLimits,
    lut: Lut,
    /// By first LUT entry.
    windows: BTreeMap<u32, Window>,
    /// The device that has the entry, by requester entry (those of CPUs are
    /// not in it).
    requesters: Vec<Option<Requester>>,
}

#[derive(Clone, Debug)]
struct Requester {
    device: String,
    owner: Owner,
}

#[derive(Debug)]
struct Window {
    peer_address: PeerAddress,
    bytes: u64,
    /// The owner whose devices may share it; CPUs' windows have none.
    owner: Option<Owner>,
    /// The requester entries of the devices that have opened it.
    holders: Vec<Option<usize>>,
    /// Its LUT entries are not used again.
    kept: bool,
}

/// A window's LUT entries, as [`NtbTables::take_window`] returns them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakenWindow {
    /// Free until now: to be programmed.
    New(LutRange),
    /// Of a window that another device of the owner has open.
    Shared(LutRange),
}

impl TakenWindow {
    /// The LUT entries.
    pub fn range(self) -> LutRange {
        match self {
            Self::New(range) | Self::Shared(range) => range,
        }
    }
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
            windows: BTreeMap::new(),
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
        let devices = self.requesters.iter().flatten();
        let mut devices: Vec<String> = devices.map(|it| it.device.clone()).collect();
        devices.sort();
        AdapterUsage {
            limits: self.limits.clone(),
            devices,
            windows: self.lut.window_bytes().count() as u32,
            lut_entries: self.limits.lut_entries - self.lut.free(),
            largest_free_run: self.lut.largest_run(),
        }
    }

    /// Takes a requester entry for a device of `owner`; returns its number among those for devices.
    ///
    /// # Errors
    /// [`LimitError::Requesters`] when none is free; [`LimitError::VmRequesters`].
    pub fn take_requester(&mut self, device: &str, owner: &Owner) -> Result<usize, LimitError> {
        let requesters = self.requesters.iter().flatten();
        let used = requesters.filter(|it| it.owner == *owner).count();
        self.limits.per_vm.check_requester(device, used)?;
        let Some(entry) = self.requesters.iter().position(Option::is_none) else {
            return Err(LimitError::Requesters {
                device: device.to_owned(),
                limit: self.limits.requester_entries,
                reserved: self.limits.reserved_requesters,
                used: self.requesters.len() as u32,
            });
        };
        self.requesters[entry] = Some(Requester {
            device: device.to_owned(),
            owner: owner.clone(),
        });
        Ok(entry)
    }

    /// Gives back a requester entry, whose windows are closed.
    pub fn give_back_requester(&mut self, entry: usize) {
        if let Some(device) = self.requesters.get_mut(entry) {
            *device = None;
        }
    }

    /// Whether a device of `owner` could open windows of `spans` bytes now, and what they take. Takes
    /// nothing. A window as large as one that `owner` has open is that one.
    ///
    /// # Errors
    /// The errors of [`fits`] if they would not fit even in an unused adapter;
    /// [`LimitError::LutEntries`] if too few entries are free; [`LimitError::VmLutEntries`].
    pub fn check_windows(
        &self,
        owner: Option<&Owner>,
        spans: &[u64],
    ) -> Result<NtbUse, LimitError> {
        let needed = fits(spans, &self.limits)?;
        let is_owners =
            |window: &&Window| owner.is_some() && window.owner.as_ref() == owner && !window.kept;
        let open = self.windows.values().filter(is_owners);
        let mut open: Vec<u64> = open.map(|window| window.bytes).collect();
        let mut lut = self.lut.clone();
        let mut more = 0;
        for &bytes in spans {
            match open.iter().position(|&other| other == bytes) {
                Some(found) => drop(open.swap_remove(found)),
                None => more += u64::from(take(&self.limits, &mut lut, bytes)?.entries),
            }
        }
        if let Some(owner) = owner {
            let share = self.limits.per_vm;
            share.check_lut_entries(self.entries_of(owner), more)?;
        }
        Ok(needed)
    }

    /// LUT entries that an owner has.
    fn entries_of(&self, owner: &Owner) -> u64 {
        let windows = self.windows.values();
        let windows = windows.filter(|window| window.owner.as_ref() == Some(owner));
        windows
            .map(|window| self.limits.entries_for(window.bytes))
            .sum()
    }

    /// Opens a window of `bytes` to `peer_address` for the device with that requester entry: it gets
    /// the LUT entries of the same window of another device of its owner, else free ones. `None` is a
    /// CPU, which shares with nobody.
    ///
    /// # Errors
    /// [`LimitError::Alignment`], [`LimitError::WindowTooLarge`],
    /// [`LimitError::LutEntries`] and [`LimitError::VmLutEntries`].
    pub fn take_window(
        &mut self,
        requester: Option<usize>,
        peer_address: PeerAddress,
        bytes: u64,
    ) -> Result<TakenWindow, LimitError> {
        let limits = &self.limits;
        if !peer_address.get().is_multiple_of(limits.alignment()) {
            return Err(LimitError::Alignment {
                peer_address,
                alignment: limits.alignment(),
            });
        }
        let device = requester.and_then(|entry| self.requesters.get(entry)?.as_ref());
        let owner = device.map(|device| device.owner.clone());
        let shared = self.windows.iter_mut().find(|(_, window)| {
            let same = (window.peer_address, window.bytes) == (peer_address, bytes);
            let usable = !window.kept && !window.holders.contains(&requester);
            owner.is_some() && window.owner == owner && same && usable
        });
        if let Some((&first, window)) = shared {
            window.holders.push(requester);
            let entries = limits.entries_for(bytes) as u32; // as when it was new
            return Ok(TakenWindow::Shared(LutRange { first, entries }));
        }
        if let Some(owner) = &owner {
            let used = self.entries_of(owner);
            let needed = limits.entries_for(bytes);
            limits.per_vm.check_lut_entries(used, needed)?;
        }
        let range = take(limits, &mut self.lut, bytes)?;
        let window = Window {
            peer_address,
            bytes,
            owner,
            holders: vec![requester],
            kept: false,
        };
        self.windows.insert(range.first, window);
        Ok(TakenWindow::New(range))
    }

    /// Records a window that a device has had open since before these tables were made. Returns false
    /// if its LUT entries are not those of such a window, or belong to another one.
    pub fn restore_window(
        &mut self,
        requester: usize,
        peer_address: PeerAddress,
        bytes: u64,
        range: LutRange,
    ) -> bool {
        let device = self.requesters.get(requester).and_then(Option::as_ref);
        let Some(owner) = device.map(|device| device.owner.clone()) else {
            return false;
        };
        if self.limits.entries_for(bytes) != u64::from(range.entries) {
            return false;
        }
        if let Some(window) = self.windows.get_mut(&range.first) {
            let same = (window.peer_address, window.bytes) == (peer_address, bytes);
            let shared = same && window.owner.as_ref() == Some(&owner);
            if shared {
                window.holders.push(Some(requester));
            }
            return shared;
        }
        let taken = self.lut.take_at(range.first, range.entries, bytes);
        if taken {
            let window = Window {
                peer_address,
                bytes,
                owner: Some(owner),
                holders: vec![Some(requester)],
                kept: false,
            };
            self.windows.insert(range.first, window);
        }
        taken
    }

    /// Whether one device (or CPU) alone has this window open.
    pub fn has_one_holder(&self, window: LutRange) -> bool {
        let found = self.windows.get(&window.first);
        found.is_some_and(|window| window.holders.len() == 1)
    }

    /// Closes a window of the device with that requester entry. Its LUT entries are free again when
    /// no device has it open.
    pub fn give_back_window(&mut self, requester: Option<usize>, range: LutRange) {
        let Some(window) = self.windows.get_mut(&range.first) else {
            return;
        };
        let holder = window.holders.iter().position(|it| *it == requester);
        if let Some(holder) = holder {
            window.holders.swap_remove(holder);
        }
        if window.holders.is_empty() && !window.kept {
            self.windows.remove(&range.first);
            self.lut.give_back(range.first);
        }
    }

    /// Keeps a window's LUT entries from being used again, or shared from now on: something may
    /// still lead to them.
    pub fn keep_window(&mut self, range: LutRange) {
        if let Some(window) = self.windows.get_mut(&range.first) {
            window.kept = true;
        }
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
