//! The device's interfaces to the fabric and to its interrupts.

use std::{os::fd::OwnedFd, sync::Arc};

use farside_devices::{Dma, Interrupts};
use farside_fabric::{Access, Fault, Iova, memory::HostSlice, soft::Path};
use farside_irq_relay::{IrqCounts, IrqIndex, Relay, VectorCount, Vectors};
use farside_lender_protocol::{IrqUpdate, LimitUse, RemoteError, Resource};

use crate::{refusals::invalid_irqs, source::Irqs};

/// DMA through the fabric.
pub(super) struct DmaPort<'a>(pub(super) &'a mut Path);

impl Dma for DmaPort<'_> {
    fn is_bus_master(&self) -> bool {
        self.0.bus_master()
    }

    fn translate(&mut self, iova: Iova, len: usize, access: Access) -> Result<HostSlice, Fault> {
        self.0.translate(iova, len, access)
    }

    fn reaches(&mut self, iova: Iova, len: usize, access: Access) -> bool {
        self.0.reaches(iova, len, access)
    }
}

/// Interrupts to the borrower: through its VMM's eventfds, or the relay.
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

    /// The function is reset; triggers and masks stay.
    pub(super) fn reset(&mut self) {
        self.vectors.reset();
    }

    /// The eventfds in use.
    pub(super) fn eventfds(&self) -> LimitUse {
        let (used, limit) = self.vectors.eventfds();
        LimitUse::new(Resource::Eventfds, used as u64, limit as u64)
    }

    /// (index, vector, count) of each raised vector.
    pub(super) fn raised(&self) -> Vec<VectorCount> {
        self.vectors.status().fired
    }
}

impl Irqs for IrqPort {
    fn set(&mut self, update: IrqUpdate, fds: Vec<OwnedFd>) -> Result<(), RemoteError> {
        update
            .into_request(&self.counts, fds, &self.relay)
            .and_then(|request| self.vectors.apply(request))
            .map_err(invalid_irqs)
    }

    fn set_intx_disable(&mut self, disabled: bool) -> Result<(), RemoteError> {
        self.vectors.set_intx_disabled(disabled);
        Ok(())
    }

    fn intx_status(&mut self) -> bool {
        self.vectors.intx_asserted()
    }

    fn relay(&self) -> &Relay {
        &self.relay
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
