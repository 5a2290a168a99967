//! What `farside status` says of a device at the borrower.

use farside_irq_relay::VectorsStatus;
use farside_lender_protocol::{Address, Epoch};
use farside_pci::Description;
use serde::Serialize;

use crate::borrow::{
    State,
    path::OpenReport,
    worker::{LayoutReport, Settings},
};

/// One device of a backend.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DeviceReport {
    pub(crate) device: String,
    pub(crate) summary: String,
    pub(crate) lender: Address,
    /// It came after the backend's start.
    pub(crate) attached: bool,
    pub(crate) state: State,
    /// Of the last lease; zero before the first.
    pub(crate) epoch: Epoch,
    /// What is open now; zeros when nothing is.
    #[serde(flatten)]
    pub(crate) open: OpenReport,
    /// What the last bus-master enable found.
    #[serde(flatten)]
    pub(crate) layout: LayoutReport,
    /// Guest-physical addresses of the BARs, while they decode.
    pub(crate) bars: Vec<BarAddress>,
    pub(crate) interrupts: VectorsStatus,
    pub(crate) last_error: Option<String>,
    /// Longest time that a bus-master enable may take.
    pub(crate) open_timeout_ms: u64,
}

/// Where the guest put a BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct BarAddress {
    pub(crate) bar: u8,
    pub(crate) gpa: u64,
    pub(crate) size: u64,
}

impl DeviceReport {
    pub(crate) fn new(settings: &Settings, description: &Description) -> Self {
        Self {
            device: settings.device.clone(),
            summary: description.summary.clone(),
            lender: settings.lender.clone(),
            attached: false,
            state: State::default(),
            epoch: Epoch::default(),
            open: OpenReport::default(),
            layout: LayoutReport::default(),
            bars: Vec::new(),
            interrupts: VectorsStatus::default(),
            last_error: None,
            open_timeout_ms: settings.open_limit().as_millis() as u64,
        }
    }
}
