//! The document that `farside volume list --json` prints.

use farside_daemon::{DeviceId, VmName};
use serde::{Deserialize, Serialize};

/// The number of the format. It grows when a key goes or changes its type or
/// meaning; new keys leave it as it is.
pub const FORMAT: u32 = 1;

/// What `farside volume list --json` prints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeList {
    /// [`FORMAT`].
    pub format: u32,
    /// The volumes of a lender, by id.
    pub volumes: Vec<VolumeEntry>,
}

/// A volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeEntry {
    /// Its id, and its device's.
    pub id: DeviceId,
    /// The device model, such as `nvme`.
    pub model: String,
    /// Bytes of its disk.
    pub size_bytes: u64,
    /// Bytes that it takes up in its file system.
    pub used_bytes: u64,
    /// Whether a running lender has a device of its id.
    pub lent: bool,
    /// The VM that has borrowed it.
    pub borrowed_by: Option<VmName>,
}

impl VolumeList {
    /// A document in this format.
    pub fn new(volumes: Vec<VolumeEntry>) -> Self {
        Self {
            format: FORMAT,
            volumes,
        }
    }
}
