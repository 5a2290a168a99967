//! This host's endpoint, from its driver into use and back.

use farside_host_pci::{Bdf, Binding, Force, HostPci};
use farside_vfio::Api;

use crate::{Adapter, EndpointOptions, NtbError};

/// An endpoint that was taken from its driver. Its drop gives it back, and
/// waits until nobody has the adapter any more: drop paths and windows first.
pub struct HostEndpoint {
    // Dropped in this order.
    adapter: Adapter,
    _binding: Binding,
}

impl HostEndpoint {
    /// Binds the function to vfio-pci and takes it into use; see
    /// [`EndpointOptions::open`].
    ///
    /// # Errors
    /// What binding it refuses, [`NtbError::Pci`], and what opening it does.
    pub fn open(bdf: Bdf) -> Result<Self, NtbError> {
        let host = HostPci::new();
        let binding = host.bind_to_vfio(&bdf, Force::No)?;
        host.group(&bdf)?.viable(&bdf, &[bdf])?;
        let api = Api::detect().map_err(|error| NtbError::Fabric(error.into()))?;
        let adapter = EndpointOptions::new(bdf, api).open()?;
        log::info!(
            "NTB endpoint {bdf}: window BAR of {}, {} LUT entries; link {}",
            farside_fabric::Size(adapter.limits().bar_size),
            adapter.limits().lut_entries,
            if adapter.link().usable() {
                "up"
            } else {
                "down"
            }
        );
        Ok(Self {
            adapter,
            _binding: binding,
        })
    }

    /// The adapter.
    pub fn adapter(&self) -> &Adapter {
        &self.adapter
    }
}
