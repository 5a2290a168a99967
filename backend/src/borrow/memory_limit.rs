//! The limit on the guest memory that a backend populates.
//!
//! Pinning populates the files that a client shares, at the expense of this process and of the host.
//! A client can share any number of sparse files of any size. So the files whose memory is pinned
//! for a VM may not be larger together than the VM's memory, whichever of its devices they are
//! shared with.

use std::{
    collections::BTreeMap,
    fs::File,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use farside_fabric::{Size, pin::PinError};
use rustix::fs::fstat;

use super::error::PathError;

/// Memory of a VM besides its RAM: video memory, firmware, ROMs.
const DEVICE_MEMORY: u64 = 512 << 20;

/// Device and inode.
type FileId = (u64, u64);

/// The limit of one VM. Clones share it. Without a known size of the VM's memory, there is none.
#[derive(Clone, Debug, Default)]
pub(crate) struct MemoryLimit(Option<Arc<Mutex<Files>>>);

/// The pinned files and their sizes. Pure.
#[derive(Debug)]
struct Files {
    memory: u64,
    files: BTreeMap<FileId, Pinned>,
}

#[derive(Debug)]
struct Pinned {
    size: u64,
    uses: usize,
}

/// The files are larger than the VM's memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "guest memory is in files of {}, and VM memory of {} (and {} of device memory) is configured: \
     share files of that size, or set `max-memory` in the VM's configuration to all memory that \
     it can have, with that of shared memory devices such as ivshmem",
    Size(*bytes), Size(*memory), Size(DEVICE_MEMORY)
)]
pub(crate) struct TooMuchMemory {
    /// Bytes of all files.
    bytes: u64,
    /// Bytes of the VM's configured memory.
    memory: u64,
}

/// The file is counted as long as this exists.
#[derive(Debug)]
pub(crate) struct Counted {
    limit: MemoryLimit,
    file: FileId,
}

impl Files {
    fn new(memory: u64) -> Self {
        Self {
            memory,
            files: BTreeMap::new(),
        }
    }

    fn take(&mut self, file: FileId, size: u64) -> Result<(), TooMuchMemory> {
        let memory = self.memory;
        let others = self.files.iter().filter(|(id, _)| **id != file);
        let others = others.map(|(_, pinned)| pinned.size);
        let bytes = others.fold(size, u64::saturating_add);
        if bytes > memory.saturating_add(DEVICE_MEMORY) {
            return Err(TooMuchMemory { bytes, memory });
        }
        let pinned = self.files.entry(file).or_insert(Pinned { size, uses: 0 });
        // It may have grown since.
        pinned.size = pinned.size.max(size);
        pinned.uses += 1;
        Ok(())
    }

    fn give_back(&mut self, file: FileId) {
        if let Some(pinned) = self.files.get_mut(&file) {
            pinned.uses -= 1;
            if pinned.uses == 0 {
                self.files.remove(&file);
            }
        }
    }
}

impl MemoryLimit {
    /// For a VM with `memory` bytes, if known.
    pub(crate) fn new(memory: Option<u64>) -> Self {
        Self(memory.map(|memory| Arc::new(Mutex::new(Files::new(memory)))))
    }

    /// Counts `file`, whose memory is about to be pinned. `None` without a limit.
    pub(crate) fn take(&self, file: &File) -> Result<Option<Counted>, PathError> {
        let Some(mut files) = self.lock() else {
            return Ok(None);
        };
        let status = fstat(file).map_err(|error| PinError::System {
            what: "query a file of guest memory",
            source: error.into(),
        })?;
        let id = (status.st_dev, status.st_ino);
        files.take(id, u64::try_from(status.st_size).unwrap_or(0))?;
        Ok(Some(Counted {
            limit: self.clone(),
            file: id,
        }))
    }

    fn lock(&self) -> Option<MutexGuard<'_, Files>> {
        // `Files` checks before it changes anything.
        let files = self.0.as_ref()?;
        Some(files.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if let Some(mut files) = self.limit.lock() {
            files.give_back(self.file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn files_count_once_and_while_they_are_used() {
        let mut files = Files::new(4 * GIB);
        files.take((0, 1), 3 * GIB).unwrap();
        files.take((0, 2), GIB).unwrap();
        files.take((0, 1), 3 * GIB).unwrap();
        // Device memory.
        files.take((0, 3), DEVICE_MEMORY).unwrap();
        let error = files.take((0, 4), 1 << 20).unwrap_err().to_string();
        assert!(
            error.starts_with(
                "guest memory is in files of 4609 MiB, and VM memory of 4 GiB (and 512 MiB of \
                 device memory) is configured"
            ),
            "{error}"
        );
        files.give_back((0, 1));
        files.take((0, 4), 1 << 20).unwrap_err();
        files.give_back((0, 1));
        files.take((0, 4), 1 << 20).unwrap();
    }

    #[test]
    fn a_file_that_grows_counts_with_its_size() {
        let mut files = Files::new(4 * GIB);
        files.take((0, 1), GIB).unwrap();
        files.take((0, 1), 4 * GIB).unwrap();
        files.take((0, 2), GIB).unwrap_err();
        files.take((0, 1), u64::MAX).unwrap_err();
        // Smaller again: what was pinned may still be.
        files.take((0, 1), GIB).unwrap();
        files.take((0, 2), GIB).unwrap_err();
    }
}
