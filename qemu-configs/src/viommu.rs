//! Checks that a vIOMMU on a command line notifies QEMU's VFIO devices of the guest's mappings.

use crate::shared_memory::Properties;

/// vIOMMUs that report the guest's mappings only if a property is on. QEMU detects a missing
/// property when the guest enables translation, and aborts ("requires caching mode", "requires
/// dma-remap=1").
const QUIET: [(&str, &str); 2] = [("intel-iommu", "caching-mode"), ("amd-iommu", "dma-remap")];

/// The names of vIOMMUs, or what they begin with (`virtio-iommu-pci`).
const VIOMMUS: [&str; 3] = ["intel-iommu", "amd-iommu", "virtio-iommu"];

/// A vIOMMU with which QEMU exits when the guest enables it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "-device {driver} without {property}=on: QEMU exits when the guest enables the vIOMMU, since \
     borrowed devices do not get the guest's mappings; use -device {driver},{property}=on"
)]
pub struct ViommuError {
    /// The vIOMMU.
    pub driver: &'static str,
    /// Its missing property.
    pub property: &'static str,
}

/// Whether QEMU's arguments have a vIOMMU that translates the DMA of borrowed devices.
pub fn has_viommu(args: &[impl AsRef<str>]) -> bool {
    args.windows(2).any(|pair| {
        let option = pair[0].as_ref().trim_start_matches('-');
        let device = Properties::parse(pair[1].as_ref(), "driver");
        let translates = device.switch("dma-translation") != Some(false);
        let driver = device.get("driver");
        let is_viommu = |known: &str| driver.is_some_and(|driver| driver.starts_with(known));
        option == "device" && translates && VIOMMUS.into_iter().any(is_viommu)
    })
}

/// Checks QEMU's arguments. Configuration files are not read.
pub fn check_viommu(args: &[impl AsRef<str>]) -> Result<(), ViommuError> {
    for (driver, property) in QUIET {
        let mut present = false;
        let mut on = false;
        for pair in args.windows(2) {
            let (option, value) = (pair[0].as_ref(), pair[1].as_ref());
            // QEMU accepts options with one dash or two.
            let option = option.strip_prefix("--").or(option.strip_prefix('-'));
            match option {
                Some("device") => {
                    let device = Properties::parse(value, "driver");
                    if device.get("driver") == Some(driver) {
                        // Without DMA translation it remaps interrupts only.
                        present |= device.switch("dma-translation") != Some(false);
                        on |= device.switch(property).unwrap_or(false);
                    }
                }
                Some("global") => {
                    let global = Properties::parse(value, "driver");
                    let long = global.get("driver") == Some(driver)
                        && global.get("property") == Some(property);
                    on |= global.switch(&format!("{driver}.{property}")) == Some(true)
                        || (long && global.switch("value") == Some(true));
                }
                _ => {}
            }
        }
        if present && !on {
            return Err(ViommuError { driver, property });
        }
    }
    Ok(())
}
