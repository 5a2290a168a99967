//! The document that `farside devices --json` prints.

use farside_lender_protocol::{Address, DeviceEntry, Transport};
use serde::{Deserialize, Serialize};

/// The number of the format. It grows when a key goes or changes its type or
/// meaning; new keys leave it as it is.
pub const FORMAT: u32 = 1;

/// What `farside devices --json` prints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceList {
    /// [`FORMAT`].
    pub format: u32,
    /// The devices of all lenders, in the order of the lenders.
    pub devices: Vec<ListedDevice>,
}

/// A device and its lender.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedDevice {
    /// Name of the lender.
    pub lender: String,
    /// Its address.
    pub address: Address,
    /// How the device would reach a VM of this host.
    pub transport: Transport,
    /// The device; its keys are beside `lender`.
    #[serde(flatten)]
    pub device: DeviceEntry,
}

impl DeviceList {
    /// A document in this format.
    pub fn new(devices: Vec<ListedDevice>) -> Self {
        Self {
            format: FORMAT,
            devices,
        }
    }
}
