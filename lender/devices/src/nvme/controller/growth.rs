//! The namespace grows.

use super::Nvme;
use crate::{
    block::{SizeError, check_growth},
    nvme::events::Event,
};

impl Nvme {
    /// The medium has grown to `size` bytes.
    pub(super) fn grow(&mut self, size: u64) -> Result<(), SizeError> {
        let from = self.namespace.size();
        check_growth(from, size, 1 << self.namespace.block_shift)?;
        if size > from {
            self.namespace.blocks = size >> self.namespace.block_shift;
            self.medium.grow(size);
            self.note_change();
        }
        Ok(())
    }

    /// The namespace has changed: the guest is to identify it anew.
    pub(in crate::nvme) fn note_change(&mut self) {
        self.logs.namespace_changed = true;
        self.changed = true;
        self.raise_change();
    }

    pub(in crate::nvme) fn raise_change(&mut self) {
        if self.features.notices_namespaces() {
            self.events.raise(Event::NamespaceChanged);
        }
    }

    /// Takes the size that [`BlockQueue::take_size`](crate::block::BlockQueue::take_size) returns. Logs a size that the disk
    /// cannot have, which has no effect.
    pub(super) fn take_growth(&mut self) {
        if let Some(Err(error)) = self.block.take_size().map(|size| self.grow(size)) {
            self.log_guest_error(format_args!(
                "ignored a size that the lender has reported: {error}"
            ));
        }
    }
}
