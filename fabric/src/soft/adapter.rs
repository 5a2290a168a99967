//! The lender's NTB adapter, shared by all the devices it lends.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::Path;
use crate::{
    AdapterUsage, BusAddress, FabricError, LimitError, LutRange, NtbLimits, NtbTables, Owner,
    PeerAddress, WindowUse,
};

/// The owner of an adapter's tables: this process, or another one that is asked.
pub trait AdapterTables: Send + Sync + fmt::Debug {
    /// See [`NtbTables::take_requester`].
    fn take_requester(&self, device: &str, owner: &Owner) -> Result<usize, FabricError>;

    /// See [`NtbTables::give_back_requester`].
    fn give_back_requester(&self, entry: usize);

    /// See [`NtbTables::take_window`].
    fn take_window(
        &self,
        requester: usize,
        peer_address: PeerAddress,
        bytes: u64,
    ) -> Result<LutRange, FabricError>;

    /// See [`NtbTables::give_back_window`].
    fn give_back_window(&self, requester: usize, window: LutRange);

    /// See [`NtbTables::restore_window`].
    fn restore_window(
        &self,
        _requester: usize,
        _peer_address: PeerAddress,
        _bytes: u64,
        _window: LutRange,
    ) -> bool {
        false
    }

    /// See [`NtbTables::usage`]; `None` where another process has the tables.
    fn usage(&self) -> Option<AdapterUsage> {
        None
    }
}

/// The tables of this process.
fn lock(tables: &Mutex<NtbTables>) -> MutexGuard<'_, NtbTables> {
    // No code panics between two changes that belong together.
    tables.lock().unwrap_or_else(PoisonError::into_inner)
}

impl AdapterTables for Mutex<NtbTables> {
    fn take_requester(&self, device: &str, owner: &Owner) -> Result<usize, FabricError> {
        Ok(lock(self).take_requester(device, owner)?)
    }

    fn give_back_requester(&self, entry: usize) {
        lock(self).give_back_requester(entry);
    }

    fn take_window(
        &self,
        requester: usize,
        peer_address: PeerAddress,
        bytes: u64,
    ) -> Result<LutRange, FabricError> {
        let taken = lock(self).take_window(Some(requester), peer_address, bytes)?;
        Ok(taken.range())
    }

    fn give_back_window(&self, requester: usize, window: LutRange) {
        lock(self).give_back_window(Some(requester), window);
    }

    fn restore_window(
        &self,
        requester: usize,
        peer_address: PeerAddress,
        bytes: u64,
        window: LutRange,
    ) -> bool {
        lock(self).restore_window(requester, peer_address, bytes, window)
    }

    fn usage(&self) -> Option<AdapterUsage> {
        Some(lock(self).usage())
    }
}

/// An NTB adapter in software, with an adapter's limits. A clone is another
/// handle on the same one.
#[derive(Clone, Debug)]
pub struct Adapter {
    limits: Arc<NtbLimits>,
    tables: Arc<dyn AdapterTables>,
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
        let tables = Arc::new(Mutex::new(NtbTables::new(limits.clone())?));
        Ok(Self::with_tables(limits, tables))
    }

    /// A handle on the adapter whose tables `tables` owns.
    pub fn with_tables(limits: NtbLimits, tables: Arc<dyn AdapterTables>) -> Self {
        Self {
            limits: Arc::new(limits),
            tables,
        }
    }

    /// Its limits.
    pub fn limits(&self) -> &NtbLimits {
        &self.limits
    }

    /// Its tables.
    pub fn tables(&self) -> &dyn AdapterTables {
        &*self.tables
    }

    /// Creates a path for `device` of `owner`: allocates only a requester entry. Dropping the path
    /// releases its resources.
    ///
    /// # Errors
    /// [`LimitError::Requesters`] when no entry is free.
    pub fn attach(&self, device: &str, owner: &Owner) -> Result<Path, FabricError> {
        let entry = self.tables.take_requester(device, owner)?;
        Ok(Path::new(
            device,
            Arc::new(Requester {
                adapter: self.clone(),
                entry,
            }),
        ))
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
        self: &Arc<Self>,
        peer_address: PeerAddress,
        bytes: u64,
    ) -> Result<LutRun, FabricError> {
        let tables = &self.adapter.tables;
        let range = tables.take_window(self.entry, peer_address, bytes)?;
        let offset = u64::from(range.first) * self.adapter.limits().segment();
        Ok(LutRun {
            requester: Arc::clone(self),
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
        self.adapter.tables.give_back_requester(self.entry);
    }
}

/// LUT entries of one window; given back on drop.
#[derive(Debug)]
pub(super) struct LutRun {
    requester: Arc<Requester>,
    range: LutRange,
    pub(super) window: WindowUse,
}

impl Drop for LutRun {
    fn drop(&mut self) {
        let Requester { adapter, entry } = &*self.requester;
        adapter.tables.give_back_window(*entry, self.range);
    }
}
