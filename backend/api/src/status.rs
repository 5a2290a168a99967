//! The status of a backend, which its status socket sends as JSON to each client
//! that connects, and the document that `farside status --json` prints.

use std::fmt;

use farside_irq_relay::VectorsStatus;
use farside_lender_protocol::{Address, DeviceStatus, Epoch};
use serde::{Deserialize, Serialize};

/// The number of the format described here. It grows when a field goes or changes
/// its meaning. Readers ignore fields that they do not know, so new ones, which
/// are optional, leave it as it is.
pub const FORMAT: u32 = 1;

/// What `farside status --json` prints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// [`FORMAT`].
    pub format: u32,
    /// The backends of this host.
    pub backends: Vec<BackendReport>,
    /// The lenders that were asked.
    pub lenders: Vec<LenderReport>,
}

/// What a backend sends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackendReport {
    /// [`FORMAT`]. Backends that were started before it was numbered have the
    /// first.
    #[serde(default = "first_format")]
    pub format: u32,
    /// The VM.
    pub vm: String,
    /// The backend's process.
    pub pid: u32,
    /// The devices that it serves.
    pub devices: Vec<DeviceReport>,
}

/// One device, as its backend has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// Its id.
    pub device: String,
    /// Model name and size.
    pub summary: String,
    /// Its lender.
    pub lender: Address,
    /// It came by `farside attach`, after the backend's start.
    pub attached: bool,
    /// The state of the borrow.
    pub state: BorrowState,
    /// The epoch of the last lease; zero before the first.
    pub epoch: Epoch,
    /// Bytes of guest RAM kept in memory for the device, which reaches them;
    /// behind a vIOMMU, those of them that are mapped.
    pub bytes_pinned: u64,
    /// Bytes of those that are locked.
    pub bytes_locked: u64,
    /// Open DMA windows.
    pub dma_windows: u32,
    /// LUT entries that the windows take.
    pub lut_entries: u32,
    /// Bytes of guest RAM that were added while the device ran and that it does
    /// not reach.
    pub bytes_unreachable: u64,
    /// Bytes of guest RAM that the last bus-master enable found.
    pub guest_ram_bytes: u64,
    /// Addresses that the last bus-master enable probed for RAM.
    pub layout_probes: u32,
    /// How long the last bus-master enable took, in microseconds.
    pub bme_to_ready_us: u64,
    /// Bytes that were pinned when bus-master enable came.
    pub bytes_pinned_before_bme: u64,
    /// The BARs that the guest decodes.
    pub bars: Vec<BarAddress>,
    /// Its interrupts, as far as they pass through the backend.
    pub interrupts: VectorsStatus,
    /// The last error, unless a borrow has succeeded since.
    pub last_error: Option<String>,
    /// The longest time that a bus-master enable may take, in milliseconds.
    pub open_timeout_ms: u64,
}

/// The state of a borrow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BorrowState {
    /// Available, not leased. Format 1 calls it `described`.
    #[default]
    #[serde(rename = "described")]
    Unleased,
    /// Leased; the device reaches no guest RAM.
    Leased,
    /// Leased; the device reaches guest RAM.
    Ready,
    /// Leased; the lender has yet to confirm that DMA has stopped.
    Closing,
    /// The lender is gone.
    Lost,
}

/// The place of a BAR in guest-physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BarAddress {
    /// Its number.
    pub bar: u8,
    /// Guest-physical address of its first byte.
    pub gpa: u64,
    /// Bytes.
    pub size: u64,
}

/// A lender, and its devices as it has them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LenderReport {
    /// Its name.
    pub lender: String,
    /// Where it listens.
    pub address: Address,
    /// The devices that it lends.
    pub devices: Vec<DeviceStatus>,
}

/// Why a status cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    /// It is not JSON, or lacks a field.
    #[error("malformed status")]
    Malformed(#[from] serde_json::Error),
    /// It comes from another version of farside.
    #[error(
        "status has format {0}, and this farside reads {FORMAT}: use the version that wrote it"
    )]
    Format(u32),
}

impl Status {
    /// A document in this format.
    pub fn new(backends: Vec<BackendReport>, lenders: Vec<LenderReport>) -> Self {
        Self {
            format: FORMAT,
            backends,
            lenders,
        }
    }

    /// Reads the document.
    pub fn from_json(json: &[u8]) -> Result<Self, StatusError> {
        check_format(json)?;
        Ok(serde_json::from_slice(json)?)
    }

    /// The backend of a VM.
    pub fn backend(&self, vm: &str) -> Option<&BackendReport> {
        self.backends.iter().find(|backend| backend.vm == vm)
    }

    /// A device, as its lender has it.
    pub fn lent(&self, device: &str) -> Option<&DeviceStatus> {
        let mut devices = self.lenders.iter().flat_map(|lender| &lender.devices);
        devices.find(|lent| lent.entry.id == device)
    }
}

impl BackendReport {
    /// Reads what a status socket has sent.
    pub fn from_json(json: &[u8]) -> Result<Self, StatusError> {
        check_format(json)?;
        Ok(serde_json::from_slice(json)?)
    }

    /// A device that it serves.
    pub fn device(&self, id: &str) -> Option<&DeviceReport> {
        self.devices.iter().find(|device| device.device == id)
    }
}

impl DeviceReport {
    /// A device that is not borrowed yet.
    pub fn new(device: &str, summary: &str, lender: Address) -> Self {
        Self {
            device: device.to_owned(),
            summary: summary.to_owned(),
            lender,
            attached: false,
            state: BorrowState::default(),
            epoch: Epoch::default(),
            bytes_pinned: 0,
            bytes_locked: 0,
            dma_windows: 0,
            lut_entries: 0,
            bytes_unreachable: 0,
            guest_ram_bytes: 0,
            layout_probes: 0,
            bme_to_ready_us: 0,
            bytes_pinned_before_bme: 0,
            bars: Vec::new(),
            interrupts: VectorsStatus::default(),
            last_error: None,
            open_timeout_ms: 0,
        }
    }

    /// Whether the device reaches no guest RAM, and none is pinned.
    pub fn is_closed(&self) -> bool {
        self.state != BorrowState::Ready && self.bytes_pinned == 0 && self.dma_windows == 0
    }
}

impl fmt::Display for BorrowState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unleased => "described",
            Self::Leased => "leased",
            Self::Ready => "ready",
            Self::Closing => "closing",
            Self::Lost => "lost",
        })
    }
}

fn first_format() -> u32 {
    1
}

/// Checks the number before the fields, which another format may lack.
fn check_format(json: &[u8]) -> Result<(), StatusError> {
    #[derive(Deserialize)]
    struct Numbered {
        #[serde(default = "first_format")]
        format: u32,
    }

    match serde_json::from_slice(json)? {
        Numbered { format: FORMAT } => Ok(()),
        Numbered { format } => Err(StatusError::Format(format)),
    }
}

#[cfg(test)]
mod tests;
