//! Whether a vIOMMU, as a command line sets it up, tells QEMU's VFIO devices
//! what the guest maps.

use crate::shared_memory::Properties;

/// vIOMMUs that keep the guest's mappings to themselves unless a property is
/// on. QEMU finds that out when the guest turns translation on, and aborts
/// ("requires caching mode", "requires dma-remap=1").
const QUIET: [(&str, &str); 2] = [("intel-iommu", "caching-mode"), ("amd-iommu", "dma-remap")];

/// A vIOMMU with which QEMU exits when the guest enables it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "-device {driver} without {property}=on: QEMU exits when the guest enables the vIOMMU, since \
     borrowed devices do not get the guest's mappings; use -device {driver},{property}=on"
)]
pub struct ViommuError {
    /// The vIOMMU.
    pub driver: &'static str,
    /// Its property that is not on.
    pub property: &'static str,
}

/// Checks QEMU's arguments. What configuration files add is not seen.
pub fn check_viommu(args: &[impl AsRef<str>]) -> Result<(), ViommuError> {
    for (driver, property) in QUIET {
        let mut present = false;
        let mut on = false;
        for pair in args.windows(2) {
            let (option, value) = (pair[0].as_ref(), pair[1].as_ref());
            // QEMU takes options with one dash or two.
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
