//! The lender's NTB adapter, shared by all the devices it lends.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Path;
use crate::{
    AdapterUsage, BusAddress, FabricError, LimitError, LutRange, NtbLimits, NtbTables, PeerAddress,
    WindowUse,
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
    tables: Mutex<NtbTables>,
}

impl Adapter {
    /// Where the BAR is in the simulated lender's address space. Far from 0,
    /// so that a bus address is never taken for an IOVA, and a multiple of
    /// every BAR size that [`NtbLimits`] allows.
    const BAR: u64 = 1 << 52;

    /// An unused adapter.
    ///
    /// # Errors
    /// [`LimitError::Invalid`] when `limits` cannot be.
    pub fn new(limits: NtbLimits) -> Result<Self, LimitError> {
        Ok(Self {
            shared: Arc::new(Shared {
                tables: Mutex::new(NtbTables::new(limits.clone())?),
                limits,
            }),
        })
    }

    /// Its limits.
    pub fn limits(&self) -> &NtbLimits {
        &self.shared.limits
    }

    /// The resources in use.
    pub fn usage(&self) -> AdapterUsage {
        self.tables().usage()
    }

    /// Creates a path for `device`: allocates only a requester entry. Dropping the path releases
    /// its resources.
    ///
    /// # Errors
    /// [`LimitError::Requesters`] when no entry is free.
    pub fn attach(&self, device: &str) -> Result<Path, FabricError> {
        let entry = self.tables().take_requester(device)?;
        Ok(Path::new(
            device,
            Requester {
                adapter: self.clone(),
                entry,
            },
        ))
    }

    fn tables(&self) -> MutexGuard<'_, NtbTables> {
        // No code panics between two changes that belong together.
        self.shared
            .tables
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// A device's entry in the requester table; released on drop.
#[derive(Debug)]
pub(super) struct Requester {
    adapter: Adapter,
    entry: usize,
}

impl Requester {
    /// Takes LUT entries for a window of `bytes` to `peer_address`.
    pub(super) fn take_window(
        &self,
        peer_address: PeerAddress,
        bytes: u64,
    ) -> Result<LutRun, FabricError> {
        let range = self.adapter.tables().take_window(peer_address, bytes)?;
        let offset = u64::from(range.first) * self.adapter.limits().segment();
        Ok(LutRun {
            adapter: self.adapter.clone(),
            range,
            window: WindowUse {
                bus: BusAddress::new(Adapter::BAR + offset),
                bytes,
                first_lut_entry: range.first,
                lut_entries: range.entries,
            },
        })
    }
}

impl Drop for Requester {
    fn drop(&mut self) {
        self.adapter.tables().give_back_requester(self.entry);
    }
}

/// LUT entries of one window; released on drop.
#[derive(Debug)]
pub(super) struct LutRun {
    adapter: Adapter,
    range: LutRange,
    pub(super) window: WindowUse,
}

impl Drop for LutRun {
    fn drop(&mut self) {
        self.adapter.tables().give_back_window(self.range);
    }
}
