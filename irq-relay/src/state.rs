//! Masks, pending bits and the INTx line: decides which interrupts are signalled,
//! without side effects.

use serde::{Deserialize, Serialize};

use crate::{IrqCounts, IrqIndex, SetIrqsError, bits::Bits};

/// An interrupt to signal now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "(IrqIndex, u16)", into = "(IrqIndex, u16)")]
#[must_use = "an interrupt that is not performed is lost"]
pub struct IrqEvent {
    index: IrqIndex,
    vector: u16,
}

impl IrqEvent {
    /// An interrupt that PCI defines: the vector is below the index's limit.
    pub fn new(index: IrqIndex, vector: u16) -> Option<Self> {
        let limit = match index {
            IrqIndex::Msi => IrqCounts::MAX_MSI,
            IrqIndex::Msix => IrqCounts::MAX_MSIX,
            IrqIndex::Intx | IrqIndex::Err | IrqIndex::Req => 1,
        };
        (vector < limit).then_some(Self { index, vector })
    }

    /// For a vector that is known to be within the limit.
    pub(crate) fn at(index: IrqIndex, vector: u16) -> Self {
        debug_assert!(Self::new(index, vector).is_some());
        Self { index, vector }
    }

    /// The index.
    pub fn index(self) -> IrqIndex {
        self.index
    }

    /// The vector; 0 for all but MSI and MSI-X.
    pub fn vector(self) -> u16 {
        self.vector
    }
}

impl TryFrom<(IrqIndex, u16)> for IrqEvent {
    type Error = String;

    fn try_from((index, vector): (IrqIndex, u16)) -> Result<Self, String> {
        Self::new(index, vector).ok_or_else(|| format!("there is no {index} vector {vector}"))
    }
}

impl From<IrqEvent> for (IrqIndex, u16) {
    fn from(event: IrqEvent) -> Self {
        (event.index, event.vector)
    }
}

/// The result of raising an interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Raised {
    /// Signal it.
    Event(IrqEvent),
    /// Pending: masked, or without an eventfd.
    Held,
    /// No IRQ target: the index is not enabled or has no such vector.
    Dropped,
}

/// The interrupt state of one function, by the rules that
/// [`Vectors`](crate::Vectors) states.
#[derive(Debug)]
pub(crate) struct State {
    counts: IrqCounts,
    enabled: Option<IrqIndex>,
    intx: Line,
    msi: VectorTable,
    msix: VectorTable,
    err: bool,
    req: bool,
}

/// The INTx pin.
#[derive(Debug, Default)]
struct Line {
    /// What the device drives.
    asserted: bool,
    /// An interrupt that another host sent and that did not fire yet.
    latched: bool,
    /// By request, or by having fired.
    masked: bool,
    /// Bit 10 of the command register.
    disabled: bool,
    trigger: bool,
}

/// Message-signalled vectors.
#[derive(Debug)]
struct VectorTable {
    count: u16,
    masked: Bits,
    pending: Bits,
    trigger: Bits,
}

impl VectorTable {
    fn new(count: u16) -> Self {
        Self {
            count,
            masked: Bits::new(count),
            pending: Bits::new(count),
            trigger: Bits::new(count),
        }
    }

    fn clear(&mut self) {
        self.masked.clear();
        self.pending.clear();
        self.trigger.clear();
    }

    fn held(&self, vector: u16) -> bool {
        self.masked.get(vector) || !self.trigger.get(vector)
    }

    /// Takes a pending vector that nothing holds back any more.
    fn release(&mut self, vector: u16) -> bool {
        !self.held(vector) && self.pending.replace(vector, false)
    }
}

impl State {
    /// The state after power-on: nothing enabled, nothing masked.
    pub(crate) fn new(counts: IrqCounts) -> Self {
        Self {
            counts,
            enabled: None,
            intx: Line::default(),
            msi: VectorTable::new(counts.count(IrqIndex::Msi)),
            msix: VectorTable::new(counts.count(IrqIndex::Msix)),
            err: false,
            req: false,
        }
    }

    /// What the function has.
    pub(crate) fn counts(&self) -> IrqCounts {
        self.counts
    }

    /// Which of INTx, MSI and MSI-X is enabled.
    pub(crate) fn enabled(&self) -> Option<IrqIndex> {
        self.enabled
    }

    /// Enables INTx, MSI or MSI-X. Enabling twice is no error.
    pub(crate) fn enable(&mut self, index: IrqIndex) -> Result<(), SetIrqsError> {
        if matches!(index, IrqIndex::Err | IrqIndex::Req) {
            return Ok(());
        }
        match self.enabled {
            Some(enabled) if enabled != index => Err(SetIrqsError::Conflict { index, enabled }),
            _ => {
                self.enabled = Some(index);
                Ok(())
            }
        }
    }

    /// Forgets triggers, masks and pending bits of `index`. The level of the
    /// INTx line is the device's and stays.
    pub(crate) fn disable(&mut self, index: IrqIndex) {
        match index {
            IrqIndex::Intx => {
                self.intx.latched = false;
                self.intx.masked = false;
                self.intx.trigger = false;
            }
            IrqIndex::Msi => self.msi.clear(),
            IrqIndex::Msix => self.msix.clear(),
            IrqIndex::Err => self.err = false,
            IrqIndex::Req => self.req = false,
        }
        if self.enabled == Some(index) {
            self.enabled = None;
        }
    }

    /// Notes whether `vector` has a trigger. The index must be enabled.
    pub(crate) fn set_trigger(
        &mut self,
        index: IrqIndex,
        vector: u16,
        present: bool,
    ) -> Option<IrqEvent> {
        match index {
            IrqIndex::Intx => {
                self.intx.trigger = present;
                self.settle_intx()
            }
            IrqIndex::Msi | IrqIndex::Msix => {
                let table = self.table_mut(index);
                table.trigger.replace(vector, present);
                table.release(vector).then_some(IrqEvent::at(index, vector))
            }
            IrqIndex::Err => {
                self.err = present;
                None
            }
            IrqIndex::Req => {
                self.req = present;
                None
            }
        }
    }

    /// Masks or unmasks `vector` of INTx, MSI or MSI-X.
    pub(crate) fn set_masked(
        &mut self,
        index: IrqIndex,
        vector: u16,
        masked: bool,
    ) -> Option<IrqEvent> {
        match index {
            IrqIndex::Intx => {
                self.intx.masked = masked;
                self.settle_intx()
            }
            IrqIndex::Msi | IrqIndex::Msix => {
                let table = self.table_mut(index);
                table.masked.replace(vector, masked);
                table.release(vector).then_some(IrqEvent::at(index, vector))
            }
            IrqIndex::Err | IrqIndex::Req => None,
        }
    }

    /// The device sends the message of `vector`.
    pub(crate) fn raise(&mut self, vector: u16) -> Raised {
        match self.enabled {
            Some(index @ (IrqIndex::Msi | IrqIndex::Msix)) => self.raise_message(index, vector),
            _ => Raised::Dropped,
        }
    }

    /// The device drives its INTx line.
    pub(crate) fn set_intx(&mut self, asserted: bool) -> Option<IrqEvent> {
        self.intx.asserted = asserted;
        self.settle_intx()
    }

    /// The guest sets or clears INTx disable, bit 10 of the command register.
    pub(crate) fn set_intx_disabled(&mut self, disabled: bool) -> Option<IrqEvent> {
        self.intx.disabled = disabled;
        self.settle_intx()
    }

    /// An interrupt comes from elsewhere: from another host, or from a client
    /// that tests the loop.
    pub(crate) fn deliver(&mut self, event: IrqEvent) -> Raised {
        match event.index {
            IrqIndex::Intx => {
                if self.enabled != Some(IrqIndex::Intx) {
                    return Raised::Dropped;
                }
                self.intx.latched = true;
                self.settle_intx().map_or(Raised::Held, Raised::Event)
            }
            IrqIndex::Msi | IrqIndex::Msix if self.enabled == Some(event.index) => {
                self.raise_message(event.index, event.vector)
            }
            IrqIndex::Err if self.err => Raised::Event(event),
            IrqIndex::Req if self.req => Raised::Event(event),
            _ => Raised::Dropped,
        }
    }

    /// Whether the device drives its INTx line, whatever holds that back.
    pub(crate) fn intx_asserted(&self) -> bool {
        self.intx.asserted
    }

    /// The function is reset: nothing is pending, the line is low, the command
    /// register is 0. Triggers and masks are the client's and stay, as they do
    /// at `VFIO_DEVICE_RESET`.
    pub(crate) fn reset(&mut self) {
        self.msi.pending.clear();
        self.msix.pending.clear();
        self.intx.asserted = false;
        self.intx.latched = false;
        self.intx.disabled = false;
    }

    /// Whether `vector` of the enabled MSI or MSI-X is held back.
    pub(crate) fn is_pending(&self, vector: u16) -> bool {
        match self.enabled {
            Some(IrqIndex::Msi) => self.msi.pending.get(vector),
            Some(IrqIndex::Msix) => self.msix.pending.get(vector),
            _ => false,
        }
    }

    /// How many vectors are held back, INTx included.
    pub(crate) fn pending(&self) -> u32 {
        match self.enabled {
            Some(IrqIndex::Msi) => self.msi.pending.count(),
            Some(IrqIndex::Msix) => self.msix.pending.count(),
            Some(IrqIndex::Intx) => (self.intx.asserted || self.intx.latched).into(),
            _ => 0,
        }
    }

    /// Which vectors of `index` are masked, up to the last such.
    pub(crate) fn masks(&self, index: IrqIndex) -> Vec<bool> {
        match index {
            IrqIndex::Intx if self.intx.masked => vec![true],
            IrqIndex::Msi => self.msi.masked.to_bools(0..self.msi.masked.end()),
            IrqIndex::Msix => self.msix.masked.to_bools(0..self.msix.masked.end()),
            IrqIndex::Intx | IrqIndex::Err | IrqIndex::Req => Vec::new(),
        }
    }

    fn raise_message(&mut self, index: IrqIndex, vector: u16) -> Raised {
        let table = self.table_mut(index);
        if vector >= table.count {
            return Raised::Dropped;
        }
        if table.held(vector) {
            table.pending.replace(vector, true);
            return Raised::Held;
        }
        Raised::Event(IrqEvent::at(index, vector))
    }

    fn settle_intx(&mut self) -> Option<IrqEvent> {
        let line = &mut self.intx;
        let held = line.masked || line.disabled || !line.trigger;
        if self.enabled != Some(IrqIndex::Intx) || held || !(line.asserted || line.latched) {
            return None;
        }
        line.latched = false;
        line.masked = true;
        Some(IrqEvent::at(IrqIndex::Intx, 0))
    }

    fn table_mut(&mut self, index: IrqIndex) -> &mut VectorTable {
        match index {
            IrqIndex::Msi => &mut self.msi,
            _ => &mut self.msix,
        }
    }
}
