//! Memory behind BAR areas that the guest reaches without a trap.
//!
//! The borrower brings it: each client gets files of its own, so that one that
//! keeps them mapped after its VM is gone sees nothing of the next.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use farside_devices::Description;

use farside_vfio_user::{Mappable, SparseArea};

/// A file for each BAR with mappable areas.
pub(crate) struct BarFiles {
    files: [Option<(Arc<OwnedFd>, Vec<SparseArea>)>; 6],
}

impl BarFiles {
    /// Fresh files, all zero.
    pub(crate) fn new(description: &Description) -> std::io::Result<Self> {
        let mut files = [const { None }; 6];
        for (slot, bar) in files.iter_mut().zip(&description.bars) {
            let Some(bar) = bar else { continue };
            if bar.mappable.is_empty() {
                continue;
            }
            let file = farside_fabric::memory::create_sealed("farside-bar", bar.size)?;
            let areas = bar.mappable.iter().map(|area| SparseArea {
                offset: area.offset,
                size: area.len,
            });
            *slot = Some((Arc::new(file), areas.collect()));
        }
        Ok(Self { files })
    }

    /// The files, in the order of the BARs.
    pub(crate) fn files(&self) -> Vec<Arc<OwnedFd>> {
        let files = self.files.iter().flatten();
        files.map(|(file, _)| Arc::clone(file)).collect()
    }

    /// What the client may map of a BAR.
    pub(crate) fn mappable(&self, bar: u8) -> Option<Mappable<'_>> {
        let (file, areas) = self.files.get(usize::from(bar))?.as_ref()?;
        Some(Mappable {
            fd: file.as_fd(),
            offset: 0,
            areas,
        })
    }
}
