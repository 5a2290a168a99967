//! The lender's NTB adapter, shared by all the devices it lends.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::{Path, lut::Lut};
use crate::{
    BusAddress, FabricError, FarAddress, LimitError, NtbLimits, WindowUse, limits::Remedy,
};

/// An NTB adapter in software, with an adapter's limits. A clone is another
/// handle on the same one.
#[derive(Clone, Debug)]
pub struct Adapter {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    limits: NtbLimits,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    lut: Lut,
    /// The device that has the entry, by requester entry (those of CPUs are
    /// not in it).
    requesters: Vec<Option<String>>,
}

/// What is taken of an adapter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterUsage {
    /// Its limits.
    pub limits: NtbLimits,
    /// Devices that have a requester entry, sorted.
    pub devices: Vec<String>,
    /// Open windows.
    pub windows: u32,
    /// LUT entries they take.
    pub lut_entries: u32,
    /// Most consecutive LUT entries that are free.
    pub largest_free_run: u32,
}

impl Adapter {
    /// Where the BAR is in the simulated lender's address space. Far from 0,
    /// so that a bus address is never taken for an IOVA, and a multiple of
    /// every BAR size that [`NtbLimits`] allows.
    const BAR: u64 = 1 << 52;

    /// An adapter with nothing taken.
    ///
    /// # Errors
    /// [`LimitError::Invalid`] when `limits` cannot be.
    pub fn new(limits: NtbLimits) -> Result<Self, LimitError> {
        limits.validate()?;
        let state = State {
            lut: Lut::new(limits.lut_entries),
            requesters: vec![None; limits.max_devices() as usize],
        };
        Ok(Self {
            shared: Arc::new(Shared {
                limits,
                state: Mutex::new(state),
            }),
        })
    }

    /// Its limits.
    pub fn limits(&self) -> &NtbLimits {
        &self.shared.limits
    }

    /// What is taken.
    pub fn usage(&self) -> AdapterUsage {
        let state = self.state();
        let mut devices: Vec<String> = state.requesters.iter().flatten().cloned().collect();
        devices.sort();
        AdapterUsage {
            limits: self.limits().clone(),
            devices,
            windows: state.lut.window_bytes().count() as u32,
            lut_entries: self.limits().lut_entries - state.lut.free(),
            largest_free_run: state.lut.largest_run(),
        }
    }

    /// Makes a path for `device`: takes a requester entry, nothing else.
    /// Dropping the path gives back all that it took.
    ///
    /// # Errors
    /// [`LimitError::Requesters`] when no entry is free.
    pub fn attach(&self, device: &str) -> Result<Path, FabricError> {
        let mut state = self.state();
        let Some(requester) = state.requesters.iter().position(Option::is_none) else {
            return Err(FabricError::Limit(LimitError::Requesters {
                device: device.to_owned(),
                limit: self.limits().requester_entries,
                reserved: self.limits().reserved_requesters,
                used: state.requesters.len() as u32,
            }));
        };
        state.requesters[requester] = Some(device.to_owned());
        drop(state);
        Ok(Path::new(
            device,
            Requester {
                adapter: self.clone(),
                entry: requester,
            },
        ))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics between two changes that belong together.
        self.shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// A device's entry in the requester table; given back on drop.
#[derive(Debug)]
pub(super) struct Requester {
    adapter: Adapter,
    entry: usize,
}

impl Requester {
    /// Takes LUT entries for a window of `bytes` to `far`.
    pub(super) fn take_window(&self, far: FarAddress, bytes: u64) -> Result<LutRun, FabricError> {
        let limits = self.adapter.limits();
        if !far.get().is_multiple_of(limits.alignment()) {
            return Err(FabricError::Limit(LimitError::Alignment {
                far: far.get(),
                alignment: limits.alignment(),
            }));
        }
        limits.check_window(bytes)?;
        let needed = limits.entries_for(bytes);
        let mut state = self.adapter.state();
        let Some(first) = state.lut.take(needed, bytes) else {
            let spans = state.lut.window_bytes().chain([bytes]);
            return Err(FabricError::Limit(LimitError::LutEntries {
                bytes,
                needed,
                limit: limits.lut_entries,
                free: state.lut.free(),
                largest_run: state.lut.largest_run(),
                segment: limits.segment(),
                remedy: Remedy(limits.larger_bar(spans)),
            }));
        };
        drop(state);
        Ok(LutRun {
            adapter: self.adapter.clone(),
            window: WindowUse {
                bus: BusAddress::new(Adapter::BAR + u64::from(first) * limits.segment()),
                bytes,
                first_lut_entry: first,
                // `take` has found that it fits in 32 bits.
                lut_entries: needed as u32,
            },
        })
    }
}

impl Drop for Requester {
    fn drop(&mut self) {
        self.adapter.state().requesters[self.entry] = None;
    }
}

/// LUT entries of one window; given back on drop.
#[derive(Debug)]
pub(super) struct LutRun {
    adapter: Adapter,
    pub(super) window: WindowUse,
}

impl Drop for LutRun {
    fn drop(&mut self) {
        let first = self.window.first_lut_entry;
        self.adapter.state().lut.give_back(first);
    }
}
