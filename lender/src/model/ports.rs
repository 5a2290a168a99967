//! The device's side of the fabric and of its interrupts.

use std::{os::fd::OwnedFd, sync::Arc};

use farside_devices::{Dma, Interrupts};
use farside_fabric::{Access, Fault, Iova, memory::HostSlice, soft::Path};
use farside_irq_relay::{Fire, IrqCounts, IrqIndex, Relay, Vectors};
use farside_lender_protocol::{IrqUpdate, RemoteError};

use crate::refusals::invalid_irqs;

/// DMA through the fabric.
pub(super) struct DmaPort<'a>(pub(super) &'a mut Path);

impl Dma for DmaPort<'_> {
    fn is_bus_master(&self) -> bool {
        self.0.bus_master()
    }

    fn translate(&mut self, iova: u64, len: usize, access: Access) -> Result<HostSlice, Fault> {
        self.0.translate(Iova::new(iova), len, access)
    }
}

/// Interrupts to the borrower: to its VMM's eventfds, or by the relay.
pub(super) struct IrqPort {
    counts: IrqCounts,
    vectors: Vectors,
    relay: Arc<Relay>,
}

impl IrqPort {
    pub(super) fn new(counts: IrqCounts) -> Self {
        Self {
            counts,
            vectors: Vectors::new(counts),
            relay: Arc::new(Relay::new()),
        }
    }

    /// Does what the borrower asks.
    pub(super) fn apply(
        &mut self,
        update: IrqUpdate,
        fds: Vec<OwnedFd>,
    ) -> Result<(), RemoteError> {
        update
            .into_request(&self.counts, fds, &self.relay)
            .and_then(|request| self.vectors.apply(request))
            .map_err(invalid_irqs)
    }

    /// The function is reset; triggers and masks stay.
    pub(super) fn reset(&mut self) {
        self.vectors.reset();
    }

    pub(super) fn set_intx_disable(&mut self, disabled: bool) {
        self.vectors.set_intx_disabled(disabled);
    }

    /// Whether the device drives its INTx line.
    pub(super) fn intx_asserted(&self) -> bool {
        self.vectors.intx_asserted()
    }

    /// Whether relayed interrupts wait to be sent.
    pub(super) fn relay_waits(&self) -> bool {
        !self.relay.is_empty()
    }

    /// Sends what waits, for as long as `send` finds room.
    pub(super) fn drain_relay(&self, send: &mut dyn FnMut(Fire) -> bool) {
        let mut room = true;
        self.relay.drain(|fire| {
            room = room && send(fire);
            if !room {
                // Back for the next time; posting to a bit set cannot fail.
                let _ = self.relay.post(fire);
            }
        });
    }

    /// (index, vector, count) of each vector that fired.
    pub(super) fn fired(&self) -> Vec<(u8, u16, u64)> {
        self.vectors
            .status()
            .fired
            .iter()
            .map(|count| (count.index as u8, count.vector, count.fired))
            .collect()
    }
}

impl Interrupts for IrqPort {
    fn raise(&mut self, vector: u16) {
        self.vectors.raise(vector);
    }

    fn set_intx(&mut self, asserted: bool) {
        self.vectors.set_intx(asserted);
    }

    fn is_pending(&self, vector: u16) -> bool {
        self.vectors.is_pending(vector)
    }

    fn intx_in_use(&self) -> bool {
        !matches!(self.vectors.enabled(), Some(IrqIndex::Msi | IrqIndex::Msix))
    }
}
