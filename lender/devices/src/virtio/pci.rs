//! The virtio-pci transport (virtio 1.2, 4.1), modern only: configuration-space image, registers, status
//! machine, queues and interrupts. What a device type adds is its features, its configuration and what it
//! does with requests.
//!
//! One capability of the specification is missing, that for access through configuration space (4.1.4.9):
//! a borrower answers configuration cycles by itself. Only firmware uses it, for a BAR that it cannot reach;
//! this one is below 4 GiB there.
//!
//! ```text
//!            ACKNOWLEDGE, DRIVER      FEATURES_OK          DRIVER_OK
//!   Reset ──────────────────▶ negotiating ──────▶ configured ──────▶ running
//!     ▲                                                                │ invalid ring
//!     │ nothing in flight                                              ▼
//!     └───────────────────── resetting ◀──── 0 is written ──── NEEDS_RESET
//! ```

mod common;
mod image;
mod queues;
mod saved;

pub(super) use image::description;

use farside_pci::Description;
use virtio_bindings::{
    virtio_config::{
        VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
        VIRTIO_F_ACCESS_PLATFORM, VIRTIO_F_VERSION_1,
    },
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};

use super::{
    queue::{MAX_SIZE, QueueSetup, VirtQueue},
    saved::Saved,
};
use crate::{Bus, Interrupts, state::State};

/// Vendor id of virtio devices (4.1.2).
pub const VENDOR_ID: u16 = 0x1af4;

/// Most MSI-X vectors: one for each queue, one for the configuration.
pub(super) const MAX_VECTORS: u16 = 256;
/// No vector (4.1.5.1.2).
pub(super) const NO_VECTOR: u16 = 0xffff;

/// Where the structures are in BAR 0.
pub(super) const COMMON: u64 = 0;
pub(super) const ISR: u64 = 0x1000;
pub(super) const DEVICE: u64 = 0x2000;
pub(super) const NOTIFY: u64 = 0x3000;
pub(super) const MSIX_TABLE: u64 = 0x4000;
pub(super) const MSIX_PBA: u64 = 0x5000;
pub(super) const BAR_SIZE: u64 = 0x8000;

/// Bytes of the common configuration, without what features of later versions add.
const COMMON_LEN: usize = 56;
/// Bytes between the notification registers of two queues.
const NOTIFY_MULTIPLIER: u32 = 4;

/// Bits of the ISR status (4.1.4.5).
const ISR_QUEUE: u8 = 1 << 0;
const ISR_CONFIG: u8 = 1 << 1;

const FEATURES_OK: u8 = VIRTIO_CONFIG_S_FEATURES_OK as u8;
pub(super) const DRIVER_OK: u8 = VIRTIO_CONFIG_S_DRIVER_OK as u8;
pub(super) const NEEDS_RESET: u8 = VIRTIO_CONFIG_S_NEEDS_RESET as u8;

/// Features of the transport and its queues. DMA is by IOVA, and may pass through an IOMMU of the guest.
const TRANSPORT_FEATURES: u64 = 1 << VIRTIO_F_VERSION_1
    | 1 << VIRTIO_F_ACCESS_PLATFORM
    | 1 << VIRTIO_RING_F_INDIRECT_DESC
    | 1 << VIRTIO_RING_F_EVENT_IDX;

/// Most log lines on guest errors since power-on: a guest that causes more would only fill the log.
const MAX_GUEST_ERRORS_LOGGED: u32 = 16;

/// A device type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    /// Its number (5).
    pub(super) id: u16,
    /// PCI class code.
    pub(super) class: u32,
    pub(super) name: &'static str,
    /// Bytes of its configuration.
    pub(super) config_len: u32,
}

/// The part of a register write that is left to the device type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Written {
    Nothing,
    /// A reset has begun.
    Reset,
    /// A byte of the device's configuration.
    Config {
        at: usize,
        value: u8,
    },
    /// There may be requests.
    Notified,
}

#[derive(Debug)]
struct QueueState {
    setup: QueueSetup,
    vector: u16,
    /// While it is enabled.
    queue: Option<VirtQueue>,
    /// Requests were returned since the last interrupt.
    returned: bool,
    /// The driver has enabled or notified the queue since it was last accessed, so its rings must be
    /// reachable. A device that polls meets moments in which nothing is mapped: when firmware changes the
    /// attributes of low RAM, QEMU unmaps all of it and maps it again.
    is_demanded: bool,
}

impl QueueState {
    const RESET: Self = Self {
        setup: QueueSetup::RESET,
        vector: NO_VECTOR,
        queue: None,
        returned: false,
        is_demanded: false,
    };
}

/// The function's registers and queues.
#[derive(Debug)]
pub(super) struct Transport {
    description: Description,
    /// For log lines.
    name: String,
    offered: u64,
    accepted: u64,
    device_feature_select: u32,
    driver_feature_select: u32,
    config_vector: u16,
    status: u8,
    /// 0 was written to the status, which reads as before until nothing is in flight.
    resetting: bool,
    queue_select: u16,
    queues: Vec<QueueState>,
    /// Of the device's configuration (4.1.4.3.1).
    generation: u8,
    /// The driver is to be notified that it has changed. Not saved: each process notifies it anew.
    config_changed: bool,
    isr: u8,
    /// The level of the INTx line.
    line: bool,
    /// Message address, data and control of each vector: plain storage, interpreted by
    /// the borrower.
    msix_table: Box<[u8]>,
    guest_errors_logged: u32,
    /// The state that outlives this process.
    pub(super) state: State<Saved>,
    /// Something of the snapshot has changed since it was saved.
    pub(super) changed: bool,
}

impl Transport {
    /// A device of this kind in its power-on state, with `queues` queues and `features` beside the
    /// transport's own.
    pub(super) fn new(
        kind: Kind,
        name: String,
        queues: u16,
        features: u64,
        description: Description,
    ) -> Self {
        let vectors = description.msix_vectors;
        Self {
            description,
            name: format!("{} {name}", kind.name),
            offered: TRANSPORT_FEATURES | features,
            accepted: 0,
            device_feature_select: 0,
            driver_feature_select: 0,
            config_vector: NO_VECTOR,
            status: 0,
            resetting: false,
            queue_select: 0,
            queues: (0..queues).map(|_| QueueState::RESET).collect(),
            generation: 0,
            config_changed: false,
            isr: 0,
            line: false,
            msix_table: power_on_table(vectors),
            guest_errors_logged: 0,
            state: State::default(),
            changed: false,
        }
    }

    pub(super) fn description(&self) -> &Description {
        &self.description
    }

    /// For log lines.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Whether the driver has accepted feature `bit`.
    pub(super) fn has_feature(&self, bit: u32) -> bool {
        self.accepted >> bit & 1 != 0
    }

    /// Whether features are negotiated.
    pub(super) fn is_negotiated(&self) -> bool {
        self.status & FEATURES_OK != 0 && !self.resetting
    }

    /// Whether queues may be accessed.
    pub(super) fn is_running(&self, bus: &Bus<'_>) -> bool {
        self.status & (DRIVER_OK | NEEDS_RESET) == DRIVER_OK
            && !self.resetting
            && bus.dma.is_bus_master()
    }

    /// Whether queues are no longer used, until a reset.
    pub(super) fn needs_reset(&self) -> bool {
        self.status & NEEDS_RESET != 0
    }

    /// Whether a reset waits for what is in flight.
    pub(super) fn is_resetting(&self) -> bool {
        self.resetting
    }

    /// Nothing is in flight any more: completes the reset.
    pub(super) fn finish_reset(&mut self, irq: &mut dyn Interrupts) {
        self.set_line(irq, false);
        self.forget_session();
    }

    /// The reset of the function: also of what a reset of the device leaves (2.4, 4.1.4.3).
    pub(super) fn power_on(&mut self) {
        self.line = false;
        self.forget_session();
        self.msix_table = power_on_table(self.description.msix_vectors);
    }

    fn forget_session(&mut self) {
        self.accepted = 0;
        self.device_feature_select = 0;
        self.driver_feature_select = 0;
        self.config_vector = NO_VECTOR;
        self.status = 0;
        self.resetting = false;
        self.queue_select = 0;
        self.queues.fill_with(|| QueueState::RESET);
        // A driver reads the configuration after a reset.
        self.config_changed = false;
        self.isr = 0;
        self.state.new_session();
        self.changed = true;
    }

    /// Reads `data.len()` bytes at `at` of BAR 0. `config` is the device's configuration.
    pub(super) fn read(&mut self, at: u64, data: &mut [u8], config: &[u8], bus: &mut Bus<'_>) {
        data.fill(0);
        match at {
            ..ISR => copy(&self.common(), at - COMMON, data),
            ISR..DEVICE => {
                if at == ISR {
                    data[0] = std::mem::take(&mut self.isr);
                    self.set_line(bus.irq, false);
                }
            }
            DEVICE..NOTIFY => copy(config, at - DEVICE, data),
            // Write-only.
            NOTIFY..MSIX_TABLE => {}
            MSIX_TABLE..MSIX_PBA => copy(&self.msix_table, at - MSIX_TABLE, data),
            _ => {
                let mut pending = [0; MAX_VECTORS as usize / 8];
                for vector in 0..self.description.msix_vectors {
                    if bus.irq.is_pending(vector) {
                        pending[usize::from(vector / 8)] |= 1 << (vector % 8);
                    }
                }
                copy(&pending, at - MSIX_PBA, data);
            }
        }
    }

    fn common(&self) -> [u8; COMMON_LEN] {
        let mut bytes = [0; COMMON_LEN];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        let half = |features: u64, select: u32| match select {
            0 => features as u32,
            1 => (features >> 32) as u32,
            _ => 0,
        };
        let (of_device, of_driver) = (self.device_feature_select, self.driver_feature_select);
        put(common::DEVICE_FEATURE_SELECT, &of_device.to_le_bytes());
        let offered = half(self.offered, of_device);
        put(common::DEVICE_FEATURE, &offered.to_le_bytes());
        put(common::DRIVER_FEATURE_SELECT, &of_driver.to_le_bytes());
        let accepted = half(self.accepted, of_driver);
        put(common::DRIVER_FEATURE, &accepted.to_le_bytes());
        let vector = self.config_vector.to_le_bytes();
        put(common::CONFIG_MSIX_VECTOR, &vector);
        let count = self.queues.len() as u16;
        put(common::NUM_QUEUES, &count.to_le_bytes());
        put(common::DEVICE_STATUS, &[self.status]);
        put(common::CONFIG_GENERATION, &[self.generation]);
        put(common::QUEUE_SELECT, &self.queue_select.to_le_bytes());
        // Of a queue that does not exist, the size is 0.
        if let Some(queue) = self.queues.get(usize::from(self.queue_select)) {
            let enabled = u16::from(queue.queue.is_some());
            put(common::QUEUE_SIZE, &queue.setup.size.to_le_bytes());
            put(common::QUEUE_MSIX_VECTOR, &queue.vector.to_le_bytes());
            put(common::QUEUE_ENABLE, &enabled.to_le_bytes());
            let offset = self.queue_select;
            put(common::QUEUE_NOTIFY_OFF, &offset.to_le_bytes());
            put(common::QUEUE_DESC, &queue.setup.descriptors.to_le_bytes());
            put(common::QUEUE_DRIVER, &queue.setup.available.to_le_bytes());
            put(common::QUEUE_DEVICE, &queue.setup.used.to_le_bytes());
        }
        bytes
    }

    /// Writes `data` at `at` of BAR 0.
    pub(super) fn write(&mut self, at: u64, data: &[u8], bus: &mut Bus<'_>) -> Written {
        match at {
            ..ISR => return self.write_common(at as usize, data, bus.irq),
            // Read-only.
            ISR..DEVICE => {}
            DEVICE..NOTIFY => {
                // Only single bytes are writable in any device's configuration.
                if let [value] = data
                    && self.is_negotiated()
                {
                    let at = (at - DEVICE) as usize;
                    return Written::Config { at, value: *value };
                }
            }
            NOTIFY..MSIX_TABLE => {
                let index = (at - NOTIFY) / u64::from(NOTIFY_MULTIPLIER);
                if let Some(queue) = self.queues.get_mut(index as usize) {
                    queue.is_demanded = true;
                }
                return Written::Notified;
            }
            MSIX_TABLE..MSIX_PBA => {
                let at = (at - MSIX_TABLE) as usize;
                // Of doublewords (PCIe 7.7.2).
                if data.len() >= 4
                    && let Some(bytes) = self.msix_table.get_mut(at..at + data.len())
                {
                    bytes.copy_from_slice(data);
                    self.changed = true;
                }
            }
            _ => {}
        }
        Written::Nothing
    }

    /// Drivers access each field by its width, fields of 64 bits by halves (4.1.3.1). Other accesses have no
    /// effect.
    fn write_common(&mut self, at: usize, data: &[u8], irq: &mut dyn Interrupts) -> Written {
        let mut word = [0; 8];
        word[..data.len()].copy_from_slice(data);
        let value = u64::from_le_bytes(word);
        if self.resetting {
            return Written::Nothing;
        }
        self.changed = true;
        let negotiating = !self.is_negotiated();
        let vectors = self.description.msix_vectors;
        let vector = |value: u64| match value as u16 {
            vector if vector < vectors => vector,
            _ => NO_VECTOR,
        };
        match (at, data.len()) {
            (common::DEVICE_FEATURE_SELECT, 4) => self.device_feature_select = value as u32,
            (common::DRIVER_FEATURE_SELECT, 4) => self.driver_feature_select = value as u32,
            (common::DRIVER_FEATURE, 4) if negotiating => match self.driver_feature_select {
                0 => self.accepted = self.accepted & !0xffff_ffff | value,
                1 => self.accepted = self.accepted & 0xffff_ffff | value << 32,
                // The driver would accept what is not offered.
                _ if value != 0 => self.accepted = !0,
                _ => {}
            },
            (common::CONFIG_MSIX_VECTOR, 2) => self.config_vector = vector(value),
            (common::DEVICE_STATUS, 1) => return self.write_status(value as u8),
            (common::QUEUE_SELECT, 2) => self.queue_select = value as u16,
            (common::QUEUE_MSIX_VECTOR, 2) => {
                if let Some(queue) = self.queues.get_mut(usize::from(self.queue_select)) {
                    queue.vector = vector(value);
                }
            }
            (common::QUEUE_ENABLE, 2) if value == 1 => self.enable_queue(irq),
            (common::QUEUE_SIZE, 2) => {
                if let Some(setup) = self.setup() {
                    setup.size = value as u16;
                }
            }
            (common::QUEUE_DESC..COMMON_LEN, 4 | 8) => {
                if let Some(setup) = self.setup() {
                    let (field, half) = match at & !7 {
                        common::QUEUE_DESC => (&mut setup.descriptors, at & 4),
                        common::QUEUE_DRIVER => (&mut setup.available, at & 4),
                        _ => (&mut setup.used, at & 4),
                    };
                    *field = match (data.len(), half) {
                        (8, _) => value,
                        (_, 0) => *field & !0xffff_ffff | value,
                        _ => *field & 0xffff_ffff | value << 32,
                    };
                }
            }
            _ => {}
        }
        Written::Nothing
    }

    /// The selected queue's configuration, while it is not enabled.
    fn setup(&mut self) -> Option<&mut QueueSetup> {
        let queue = self.queues.get_mut(usize::from(self.queue_select))?;
        queue.queue.is_none().then_some(&mut queue.setup)
    }

    fn write_status(&mut self, value: u8) -> Written {
        if value == 0 {
            self.resetting = true;
            return Written::Reset;
        }
        // A driver clears no bit but by a reset (2.1.1).
        let new = value & !NEEDS_RESET & !self.status;
        self.status |= new;
        let required = 1 << VIRTIO_F_VERSION_1;
        if new & FEATURES_OK != 0
            && (self.accepted & !self.offered != 0 || self.accepted & required == 0)
        {
            // The driver reads that back (3.1.1).
            self.status &= !FEATURES_OK;
        }
        if self.status & FEATURES_OK == 0 {
            // Nothing runs without.
            self.status &= !DRIVER_OK;
        }
        let event_idx = self.has_feature(VIRTIO_RING_F_EVENT_IDX);
        for queue in self.queues.iter_mut().filter_map(|it| it.queue.as_mut()) {
            queue.set_event_idx(event_idx);
        }
        // Requests may be there already.
        Written::Notified
    }

    fn enable_queue(&mut self, irq: &mut dyn Interrupts) {
        let event_idx = self.has_feature(VIRTIO_RING_F_EVENT_IDX);
        let index = self.queue_select;
        let Some(state) = self.queues.get_mut(usize::from(index)) else {
            return;
        };
        if state.queue.is_some() {
            return;
        }
        match VirtQueue::new(&state.setup) {
            Ok(mut queue) => {
                queue.set_event_idx(event_idx);
                state.queue = Some(queue);
                state.is_demanded = true;
                self.state.fetched(index, 0);
                self.state.posted(index, 0);
            }
            Err(error) => {
                let size = state.setup.size;
                self.fail(
                    format_args!(
                        "cannot enable queue {index} of {size} entries, of {MAX_SIZE} at most: {error}"
                    ),
                    irq,
                );
            }
        }
    }

    /// Has the driver reset the device, which does nothing until then (2.1.2).
    pub(super) fn fail(&mut self, reason: std::fmt::Arguments<'_>, irq: &mut dyn Interrupts) {
        if self.status & NEEDS_RESET != 0 {
            return;
        }
        self.log_error(format_args!("needs a reset: {reason}"));
        self.status |= NEEDS_RESET;
        self.changed = true;
        self.interrupt_failure(irq);
    }

    /// The device has changed its configuration.
    pub(super) fn config_changed(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        self.config_changed = true;
        self.changed = true;
    }

    /// Has the driver notified again of a configuration that has changed before.
    pub(super) fn repeat_config_change(&mut self) {
        self.config_changed = true;
    }

    /// Notifies the driver of a changed configuration (2.5.3), of a device that [is running](Self::is_running).
    pub(super) fn notify_config_change(&mut self, irq: &mut dyn Interrupts) {
        if std::mem::take(&mut self.config_changed) {
            self.interrupt(ISR_CONFIG, self.config_vector, irq);
        }
    }

    /// Logs an error that a peer can cause, up to [`MAX_GUEST_ERRORS_LOGGED`].
    pub(super) fn log_error(&mut self, error: std::fmt::Arguments<'_>) {
        if self.guest_errors_logged < MAX_GUEST_ERRORS_LOGGED {
            self.guest_errors_logged += 1;
            log::warn!("{}: {error}", self.name);
        }
    }

    fn interrupt_failure(&mut self, irq: &mut dyn Interrupts) {
        if self.status & DRIVER_OK != 0 {
            self.interrupt(ISR_CONFIG, self.config_vector, irq);
        }
    }

    fn interrupt(&mut self, cause: u8, vector: u16, irq: &mut dyn Interrupts) {
        if irq.intx_in_use() {
            self.isr |= cause;
            self.set_line(irq, true);
        }
        // Without effect while MSI-X is off.
        if vector != NO_VECTOR {
            irq.raise(vector);
        }
    }

    fn set_line(&mut self, irq: &mut dyn Interrupts, level: bool) {
        if self.line != level {
            self.line = level;
            irq.set_intx(level);
        }
    }
}

/// Copies what `source` has at `at`.
fn copy(source: &[u8], at: u64, data: &mut [u8]) {
    let source = usize::try_from(at).ok().and_then(|at| source.get(at..));
    for (to, from) in data.iter_mut().zip(source.unwrap_or_default()) {
        *to = *from;
    }
}

/// An MSI-X table with every vector masked (PCI 3.0, 6.8.2.9).
fn power_on_table(vectors: u16) -> Box<[u8]> {
    let mut table = vec![0; usize::from(vectors) * 16].into_boxed_slice();
    for entry in table.chunks_exact_mut(16) {
        entry[12] = 1;
    }
    table
}
