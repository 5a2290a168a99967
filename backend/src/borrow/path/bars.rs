//! The BARs of the VM's devices, as targets of DMA.

use farside_fabric::pin::{PinOptions, PinPolicy};
use farside_guest_layout::GpaRange;
use farside_lender_protocol::{CallError, Client};

use super::OpenPath;
use crate::{borrow::error::PathError, dma_table::Mapping};

impl OpenPath {
    /// Maps the BARs among `mappings`, each in a window of its own. Returns those for which there is no room, or which the
    /// device's IOMMU does not map: a device works without them.
    pub(crate) fn map_bars(
        &mut self,
        client: &mut Client,
        mappings: &[Mapping],
    ) -> Result<Vec<(GpaRange, PathError)>, PathError> {
        // Their memory is pinned by what needs it to be, as an IOMMU does.
        let pinning = PinOptions::new(PinPolicy::Prefer);
        let mut left_out = Vec::new();
        for mapping in mappings.iter().filter(|mapping| mapping.is_bar()) {
            match self.map(client, mapping, &pinning) {
                Ok(()) => {}
                Err(PathError::Lender(error)) if !matches!(error, CallError::Refused(_)) => {
                    return Err(error.into());
                }
                Err(error) => {
                    self.undo_map(client, mapping)?;
                    left_out.push((mapping.range, error));
                }
            }
        }
        Ok(left_out)
    }
}
