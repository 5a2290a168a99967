//! The driver vfio-pci: checks that it is available, with remedies.

use crate::error::PciError;
use crate::function::HostPci;
use crate::sysfs::Tree;

/// The driver through which userspace uses a function.
pub(crate) const VFIO_PCI: &str = "vfio-pci";
/// Contains the drivers' directories.
pub(crate) const DRIVERS: &str = "sys/bus/pci/drivers";

/// Whether a driver exposes functions to userspace drivers: vfio-pci and its variants for single
/// device families, such as `mlx5_vfio_pci`.
pub(crate) fn is_for_users(driver: &str) -> bool {
    driver == VFIO_PCI || driver.ends_with("-vfio-pci") || driver.ends_with("_vfio_pci")
}

impl HostPci {
    /// Checks that the driver vfio-pci is loaded.
    ///
    /// # Errors
    /// [`PciError::VfioPciMissing`], with the module to load or the missing kernel option.
    pub fn require_vfio_pci(&self) -> Result<(), PciError> {
        if self.tree.exists(&format!("{DRIVERS}/{VFIO_PCI}")) {
            return Ok(());
        }
        Err(PciError::VfioPciMissing {
            advice: advice(&self.tree),
        })
    }
}

fn advice(tree: &Tree) -> String {
    const BUILD: &str = "CONFIG_VFIO_PCI, CONFIG_VFIO and CONFIG_VFIO_IOMMU_TYPE1 (or CONFIG_IOMMUFD with \
                         CONFIG_VFIO_DEVICE_CDEV)";
    if tree.exists("sys/module/vfio_pci") {
        return "module vfio_pci is loaded but has registered no driver; see `dmesg`, and load it anew with \
                `modprobe -r vfio-pci && modprobe vfio-pci`"
            .into();
    }
    let release = tree
        .attribute("proc/sys/kernel/osrelease")
        .ok()
        .flatten()
        // It becomes part of a path.
        .filter(|release| !release.is_empty() && !release.contains('/') && !release.contains(".."));
    let modules = release.as_deref().and_then(|release| {
        tree.table(&format!("lib/modules/{release}/modules.dep"))
            .ok()
            .flatten()
    });
    let release = release.as_deref().unwrap_or("(of unknown release)");
    match modules {
        Some(modules) if lists_vfio_pci(&modules) => {
            "its module is installed but not loaded; run `modprobe vfio-pci`, and to have it at every boot, \
             `echo vfio-pci > /etc/modules-load.d/vfio-pci.conf`"
                .into()
        }
        Some(_) => format!(
            "kernel {release} has no such module: it was built without CONFIG_VFIO_PCI, or the module is in a \
             package that is not installed. A kernel for this needs {BUILD}"
        ),
        None => format!(
            "run `modprobe vfio-pci`; if it finds no module, kernel {release} was built without \
             CONFIG_VFIO_PCI (it needs {BUILD})"
        ),
    }
}

/// Whether `modules.dep` has a line for the module, compressed or not.
fn lists_vfio_pci(modules: &str) -> bool {
    modules.lines().any(|line| {
        let module = line.split(':').next().unwrap_or_default();
        let file = module.rsplit('/').next().unwrap_or_default();
        file.starts_with("vfio-pci.ko") || file.starts_with("vfio_pci.ko")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knows_the_drivers_for_user_programs() {
        for driver in ["vfio-pci", "mlx5_vfio_pci", "nvgrace-gpu-vfio-pci"] {
            assert!(is_for_users(driver), "{driver}");
        }
        for driver in ["nvme", "pci-stub", "vfio-pci-not", "vfio_pci_core", ""] {
            assert!(!is_for_users(driver), "{driver}");
        }
    }

    #[test]
    fn finds_the_module_not_its_dependants() {
        let installed = "kernel/drivers/vfio/pci/vfio-pci.ko.xz: kernel/drivers/vfio/vfio.ko.xz\n";
        let dependant = "kernel/x/other.ko: kernel/drivers/vfio/pci/vfio-pci.ko\n\
                         kernel/drivers/vfio/pci/vfio-pci-core.ko: kernel/y.ko\n";
        assert!(lists_vfio_pci(installed));
        assert!(!lists_vfio_pci(dependant));
        assert!(!lists_vfio_pci(""));
    }
}
