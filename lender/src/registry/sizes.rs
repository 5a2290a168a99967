//! The sizes of disks, and the devices that have one medium.

use std::{path::PathBuf, sync::Arc};

use super::{DeviceId, Registry, RemoteError, Slot, unknown};

/// A namespace that controllers share.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Shared {
    /// The file of its reservations.
    pub(crate) file: PathBuf,
    /// Bytes.
    pub(crate) size: u64,
}

impl Slot {
    /// Whether both are controllers of one namespace.
    fn shares_with(&self, other: &Self) -> bool {
        let file = |slot: &Self| slot.shared.as_ref().map(|it| it.file.clone());
        self.shared.is_some() && file(self) == file(other)
    }
}

impl Registry {
    /// The device shares its namespace.
    pub(crate) fn set_shared(&self, id: &DeviceId, shared: Shared) {
        if let Some(slot) = self.lock().slots.get_mut(id) {
            slot.shared = Some(shared);
        }
    }

    /// The devices of this lender that have the medium of `id`, with itself. The controllers of a shared namespace
    /// have one medium, also if the file system does not identify it.
    pub(crate) fn on_medium_of(&self, id: &DeviceId) -> Result<Vec<DeviceId>, RemoteError> {
        let records = self.lock();
        let asked = records.slots.get(id).ok_or_else(|| unknown(id))?;
        let medium = asked.medium.filter(|medium| !medium.is_empty());
        let has_it = |(other, slot): &(&DeviceId, &Slot)| {
            *other == id || medium.is_some() && slot.medium == medium || slot.shares_with(asked)
        };
        let found = records.slots.iter().filter(has_it);
        Ok(found.map(|(id, _)| id.clone()).collect())
    }

    /// Whether the controllers of the namespace that `id` shares, if it does, have different sizes.
    pub(crate) fn sizes_differ(&self, id: &DeviceId) -> bool {
        let records = self.lock();
        let Some(slot) = records.slots.get(id) else {
            return false;
        };
        let mut sharers = records.slots.values().filter(|it| it.shares_with(slot));
        sharers.any(|it| it.shared != slot.shared)
    }

    /// Sets the size of a device's disk, and its summary, which does not tell it from other devices.
    pub(crate) fn set_size(&self, id: &DeviceId, size: u64, summary: String) {
        if let Some(slot) = self.lock().slots.get_mut(id) {
            if let Some(shared) = &mut slot.shared {
                shared.size = size;
            }
            let described = Arc::make_mut(&mut slot.described);
            described.description.summary.clone_from(&summary);
            slot.summary = summary;
        }
    }
}
