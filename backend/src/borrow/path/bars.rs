//! The BARs of the VM's devices, as targets of DMA.

use farside_fabric::pin::PinOptions;
use farside_lender_protocol::{CallError, Client};

use super::OpenPath;
use crate::{borrow::error::PathError, dma_table::Mapping};

impl OpenPath {
    /// Maps the BARs among `mappings`, each in a window of its own. One that cannot be mapped is recorded as unreachable:
    /// a device works without it.
    pub(super) fn map_bars(
        &mut self,
        client: &mut Client,
        mappings: &[Mapping],
        pinning: &PinOptions<'_>,
    ) -> Result<(), PathError> {
        for mapping in mappings.iter().filter(|mapping| mapping.is_bar()) {
            match self.map(client, mapping, pinning) {
                Ok(()) => {}
                Err(PathError::Lender(error)) if !matches!(error, CallError::Refused(_)) => {
                    return Err(error.into());
                }
                Err(error) => {
                    log::warn!(
                        "the BAR at GPA {} is out of a device's reach: {error}",
                        mapping.range
                    );
                    self.undo_map(client, mapping)?;
                }
            }
        }
        Ok(())
    }
}
