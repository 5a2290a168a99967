//! The snapshot: the part of a device's state that registers change. See [`Snapshot`] before changing it.

use serde::{Deserialize, Serialize};

use super::{pci::NO_VECTOR, queue::QueueSetup};
use crate::state::{Kind, Snapshot};

/// The state of a virtio device; the number is that of the first type.
pub(crate) const STATE_KIND: Kind = Kind::new(*b"FARSVBLK", "a virtio device");

/// Since version 2.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Saved {
    pub(crate) session: u32,
    /// Features that the driver has accepted.
    pub(crate) accepted: u64,
    pub(crate) device_feature_select: u32,
    pub(crate) driver_feature_select: u32,
    pub(crate) config_vector: u16,
    pub(crate) status: u8,
    /// The device is being reset.
    pub(crate) resetting: bool,
    pub(crate) queue_select: u16,
    /// Those that are not as after a reset.
    pub(crate) queues: Vec<SavedQueue>,
    pub(crate) msix_table: Vec<u8>,
    /// The cache mode in the configuration of a disk.
    pub(crate) writeback: u8,
    /// A flush has failed, which the kernel reports once.
    pub(crate) flush_failed: bool,
    /// Queue pairs of a network device that are in use.
    pub(crate) pairs: u16,
    /// Bytes of a disk.
    pub(crate) size: u64,
    /// The generation of the configuration.
    pub(crate) generation: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedQueue {
    pub(crate) index: u16,
    pub(crate) size: u16,
    pub(crate) descriptors: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
    pub(crate) vector: u16,
    pub(crate) enabled: bool,
}

impl SavedQueue {
    /// Queue `index` after a reset.
    pub(crate) fn reset(index: u16) -> Self {
        let setup = QueueSetup::RESET;
        Self {
            index,
            size: setup.size,
            descriptors: setup.descriptors,
            available: setup.available,
            used: setup.used,
            vector: NO_VECTOR,
            enabled: false,
        }
    }
}

impl Snapshot for Saved {
    const KIND: Kind = STATE_KIND;

    fn session(&mut self) -> &mut u32 {
        &mut self.session
    }
}
