//! The status of a backend, which its status socket sends as JSON to each client
//! that connects, and the document that `farside status --json` prints.

use std::fmt;

use farside_daemon::{DeviceId, VmName};
use farside_irq_relay::VectorsStatus;
use farside_lender_protocol::{Address, DeviceStatus, Generation, LimitUse};
use serde::{Deserialize, Serialize};

/// The version of this format. Incremented when a field is removed or changes its
/// meaning. Readers ignore unknown fields, so new fields, which are optional, do not
/// change it.
pub const FORMAT: u32 = 1;

/// The document that `farside status --json` prints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// [`FORMAT`].
    pub format: u32,
    /// The backends of this host.
    pub backends: Vec<BackendReport>,
    /// The queried lenders.
    pub lenders: Vec<LenderReport>,
}

/// A backend's status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackendReport {
    /// [`FORMAT`]. Missing in the first format, which backends from before this field
    /// have.
    #[serde(default = "first_format")]
    pub format: u32,
    /// The VM.
    pub vm: VmName,
    /// The backend's process.
    pub pid: u32,
    /// A problem of the backend for the operator, with its remedy.
    #[serde(default)]
    pub problem: Option<String>,
    /// How often its keeper has started it again. `None` without a keeper.
    #[serde(default)]
    pub restarts: Option<u64>,
    /// Its version of farside. `None` before there were the next two.
    #[serde(default)]
    pub farside: Option<String>,
    /// The version of the records that the next backend goes on from; `None` without a keeper.
    #[serde(default)]
    pub records_version: Option<u32>,
    /// The version of the lender protocol that it speaks.
    #[serde(default)]
    pub protocol_version: Option<u32>,
    /// How often its keeper has ended and another process has taken its place. `None` without a keeper.
    #[serde(default)]
    pub keeper_restarts: Option<u64>,
    /// The devices that it serves.
    pub devices: Vec<DeviceReport>,
}

/// One device's status at its backend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// Device id.
    pub device: DeviceId,
    /// Model name and size.
    pub summary: String,
    /// Address of its lender.
    pub lender: Address,
    /// Added by `farside attach`, after the backend's start.
    pub attached: bool,
    /// The state of the borrow.
    pub state: BorrowState,
    /// The generation of the last lease; zero before the first. Format 1 calls it `epoch`.
    #[serde(rename = "epoch")]
    pub generation: Generation,
    /// Bytes of guest RAM that are pinned for the device's DMA; behind a vIOMMU, only
    /// mapped bytes.
    pub bytes_pinned: u64,
    /// Bytes thereof that are locked.
    pub bytes_locked: u64,
    /// Open DMA windows.
    pub dma_windows: u32,
    /// LUT entries of the windows.
    pub lut_entries: u32,
    /// Bytes of guest RAM that were added while the device was running and are not
    /// reachable for its DMA.
    pub bytes_unreachable: u64,
    /// Bytes of guest RAM found at the last bus-master enable.
    pub guest_ram_bytes: u64,
    /// Addresses probed for RAM at the last bus-master enable.
    pub layout_probes: u32,
    /// Duration of the last bus-master enable, in microseconds.
    pub bme_to_ready_us: u64,
    /// Bytes that were already pinned at the last bus-master enable.
    pub bytes_pinned_before_bme: u64,
    /// The BARs that the function decodes.
    pub bars: Vec<BarAddress>,
    /// Interrupts that pass through the backend.
    pub interrupts: VectorsStatus,
    /// The last error, unless a borrow has succeeded since.
    pub last_error: Option<String>,
    /// Time limit of a bus-master enable, in milliseconds.
    pub open_timeout_ms: u64,
    /// The connection to the medium, of a device that is borrowed over the network; to the device's process, of one
    /// within the host whose lease goes on in another.
    #[serde(default)]
    pub connection: Option<Connection>,
    /// The status of the controller of such a device, which is in the backend.
    #[serde(default)]
    pub controller: Option<DeviceStatus>,
    /// The version of the state from which another process at the lender goes on; `None` if there is none.
    #[serde(default)]
    pub state_version: Option<u32>,
}

/// The connection to a medium in another host, or to the process of a device in this one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// Whether I/O goes on.
    pub state: ConnectionState,
    /// Seconds in this state.
    pub seconds: u64,
    /// Failed attempts to connect since the device was borrowed.
    pub retries: u64,
    /// How often the device has gone on in another process at the lender, of a device that is borrowed within the host.
    #[serde(default)]
    pub restarts: u64,
    /// The last failure.
    pub last_error: Option<String>,
}

/// The state of a [`Connection`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ConnectionState {
    /// I/O goes to the lender.
    Connected,
    /// The connection was cut: I/O waits.
    Waiting,
    /// The time for that is over: I/O fails, and the guest is asked to release the device.
    GivenUp,
}

impl fmt::Display for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            state,
            seconds,
            retries,
            restarts,
            last_error,
        } = self;
        match state {
            ConnectionState::Connected => write!(f, "connected for {seconds} s")?,
            ConnectionState::Waiting => write!(f, "lost: I/O waits for {seconds} s")?,
            ConnectionState::GivenUp => write!(f, "given up {seconds} s ago: I/O fails")?,
        }
        if *retries > 0 {
            write!(f, ", {retries} retries")?;
        }
        if *restarts > 0 {
            write!(f, ", {restarts} restarts")?;
        }
        match last_error {
            Some(error) => write!(f, " (last: {error})"),
            None => Ok(()),
        }
    }
}

/// The state of a borrow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BorrowState {
    /// Available, not leased. Format 1 calls it `described`.
    #[default]
    #[serde(rename = "described")]
    Unleased,
    /// Leased; guest RAM is not mapped for DMA.
    Leased,
    /// Leased; guest RAM is mapped for DMA.
    Ready,
    /// Leased; the lender has yet to confirm that DMA has stopped.
    Closing,
    /// The connection to the lender is lost.
    Lost,
}

/// A BAR's address in guest-physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BarAddress {
    /// BAR number.
    pub bar: u8,
    /// Guest-physical address of its first byte.
    pub gpa: u64,
    /// Bytes.
    pub size: u64,
}

/// A lender's status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LenderReport {
    /// The lender's name.
    pub lender: String,
    /// The address at which it listens.
    pub address: Address,
    /// The status of its devices.
    pub devices: Vec<DeviceStatus>,
    /// What it uses of its limits, if this user operates it.
    #[serde(default)]
    pub limits: Vec<LimitUse>,
}

/// Why a status cannot be parsed.
#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    /// Not JSON, or a field is missing.
    #[error("malformed status")]
    Malformed(#[from] serde_json::Error),
    /// From another version of farside.
    #[error(
        "status has format {0}, but this farside supports {FORMAT}: use the version that wrote it"
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

    /// Parses the document.
    pub fn from_json(json: &[u8]) -> Result<Self, StatusError> {
        check_format(json)?;
        Ok(serde_json::from_slice(json)?)
    }

    /// The backend of a VM.
    pub fn backend(&self, vm: &str) -> Option<&BackendReport> {
        self.backends.iter().find(|backend| backend.vm == vm)
    }

    /// A device's status at its lender.
    pub fn lent(&self, device: &str) -> Option<&DeviceStatus> {
        let mut devices = self.lenders.iter().flat_map(|lender| &lender.devices);
        devices.find(|lent| lent.entry.id == device)
    }
}

impl BackendReport {
    /// Parses the document that a status socket has sent.
    pub fn from_json(json: &[u8]) -> Result<Self, StatusError> {
        check_format(json)?;
        Ok(serde_json::from_slice(json)?)
    }

    /// The device with this id.
    pub fn device(&self, id: &str) -> Option<&DeviceReport> {
        self.devices.iter().find(|device| device.device == id)
    }
}

impl DeviceReport {
    /// A device that is not borrowed yet.
    pub fn new(device: &DeviceId, summary: &str, lender: Address) -> Self {
        Self {
            device: device.to_owned(),
            summary: summary.to_owned(),
            lender,
            attached: false,
            state: BorrowState::default(),
            generation: Generation::default(),
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
            connection: None,
            controller: None,
            state_version: None,
        }
    }

    /// Whether no guest RAM is mapped or pinned for the device.
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

/// Checks the format before the fields, which another format may lack.
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
