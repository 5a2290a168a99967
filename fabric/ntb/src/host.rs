//! Binds this host's endpoint to vfio-pci, opens it, and returns it to its driver.

use farside_fabric::VmShare;
use farside_host_pci::{Binding, Force, HostPci};
use farside_pci::Bdf;
use farside_vfio::Api;

use crate::endpoint::check_ids;
use crate::watch::Watch;
use crate::{Adapter, EndpointOptions, NtbError};

/// An endpoint that was unbound from its driver. Its drop returns it, and waits until no process
/// has the endpoint open: drop paths and windows first.
pub struct HostEndpoint {
    // Dropped in this order.
    _watch: Watch,
    adapter: Adapter,
    _binding: Binding,
}

impl HostEndpoint {
    /// Binds the function to vfio-pci and opens it; see [`EndpointOptions::open`]. A VM gets at most
    /// the share `per_vm` of its tables.
    ///
    /// # Errors
    /// [`NtbError::WrongDevice`], before any change; [`NtbError::Pci`] if binding fails; those of
    /// [`EndpointOptions::open`].
    pub fn open(bdf: Bdf, per_vm: VmShare) -> Result<Self, NtbError> {
        Self::open_of(&HostPci::new(), bdf, per_vm)
    }

    fn open_of(host: &HostPci, bdf: Bdf, per_vm: VmShare) -> Result<Self, NtbError> {
        let info = host.function(&bdf)?;
        check_ids(bdf, info.vendor, info.device)?;
        let binding = host.bind_to_vfio(&bdf, Force::No)?;
        host.group(&bdf)?.viable(&bdf, &[bdf])?;
        let api = Api::detect().map_err(|error| NtbError::Fabric(error.into()))?;
        let options = EndpointOptions {
            per_vm,
            ..EndpointOptions::new(bdf, api)
        };
        let adapter = match options.open() {
            Ok(adapter) => adapter,
            Err(error) => {
                if error.is_busy() {
                    // Unbinding would wait for the process that has it open, and take it away from
                    // it.
                    binding.leave();
                }
                return Err(error);
            }
        };
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
        let watch = Watch::start(&adapter).map_err(|source| NtbError::Watch { bdf, source })?;
        Ok(Self {
            _watch: watch,
            adapter,
            _binding: binding,
        })
    }

    /// The adapter.
    pub fn adapter(&self) -> &Adapter {
        &self.adapter
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn another_device_keeps_its_driver() {
        let root = tempfile::tempdir().unwrap();
        let bdf: Bdf = "0000:03:00.0".parse().unwrap();
        let directory = root.path().join("sys/bus/pci/devices/0000:03:00.0");
        fs::create_dir_all(&directory).unwrap();
        for (file, text) in [("vendor", "0x8086\n"), ("device", "0x10d3\n")] {
            fs::write(directory.join(file), text).unwrap();
        }
        let opened = HostEndpoint::open_of(&HostPci::at(root.path()), bdf, VmShare::ALL);
        let error = opened.err().expect("it is a network card").to_string();
        assert!(
            error.contains("0000:03:00.0") && error.contains("8086:10d3, expected fa5d:b41d"),
            "{error}"
        );
        assert!(!directory.join("driver_override").exists());
        let nobody = "0000:04:00.0".parse().unwrap();
        let opened = HostEndpoint::open_of(&HostPci::at(root.path()), nobody, VmShare::ALL);
        assert!(matches!(opened.err(), Some(NtbError::Pci(_))));
    }
}
