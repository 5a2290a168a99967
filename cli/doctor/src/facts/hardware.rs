//! KVM, the IOMMU, VFIO.

use std::path::Path;

use farside_error_chain::Chain;
use farside_host_pci::{HostPci, PciError};
use rustix::{
    fs::{Access as Mode, access},
    io::Errno,
};

use crate::Host;

/// Whether a file of the system can be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Access {
    #[default]
    Missing,
    /// It exists, but this user may not access it.
    Denied,
    Granted,
}

impl Access {
    fn of(path: &Path) -> Self {
        match access(path, Mode::READ_OK | Mode::WRITE_OK) {
            Ok(()) => Self::Granted,
            Err(Errno::NOENT | Errno::NOTDIR) => Self::Missing,
            Err(_) => Self::Denied,
        }
    }
}

/// Capabilities of the hardware and the kernel.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hardware {
    /// `/dev/kvm`.
    pub(crate) kvm: Access,
    /// The KVM module for this CPU.
    pub(crate) kvm_module: &'static str,
    /// The change that enables the IOMMU; `None` if it is active.
    pub(crate) iommu_advice: Option<String>,
    /// Whether the kernel command line enables Intel's IOMMU.
    pub(crate) iommu_asked: bool,
    /// Whether the CPU is Intel's, where the kernel command line must enable the IOMMU.
    pub(crate) intel: bool,
    /// `/dev/iommu`.
    pub(crate) iommufd: Access,
    /// `/dev/vfio/vfio`.
    pub(crate) vfio: Access,
    /// Why there is no vfio-pci, if there is none.
    pub(crate) no_vfio_pci: Option<String>,
}

pub(crate) fn look(host: &Host) -> Hardware {
    let pci = HostPci::at(&host.root);
    let processor = host.text("proc/cpuinfo").unwrap_or_default();
    let intel = !processor.contains("AuthenticAMD") && !processor.contains("HygonGenuine");
    let command_line = host.text("proc/cmdline").unwrap_or_default();
    let advice = match pci.require_iommu() {
        Ok(()) => None,
        Err(PciError::NoIommu { advice }) => Some(advice),
        Err(other) => Some(other.to_string()),
    };
    Hardware {
        kvm: Access::of(&host.system("dev/kvm")),
        kvm_module: if intel { "kvm_intel" } else { "kvm_amd" },
        iommu_advice: advice,
        iommu_asked: command_line.contains("intel_iommu=on"),
        intel,
        iommufd: Access::of(&host.system("dev/iommu")),
        vfio: Access::of(&host.system("dev/vfio/vfio")),
        no_vfio_pci: pci
            .require_vfio_pci()
            .err()
            .map(|error| Chain(&error).to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_of_hosts() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::at(root.path());
        let put = |path: &str, text: &str| {
            let path = host.system(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("proc/cpuinfo", "processor: 0\nvendor_id\t: GenuineIntel\n");
        put("proc/cmdline", "quiet\n");
        put("sys/firmware/acpi/tables/DMAR", "");
        let bare = look(&host);
        assert_eq!((bare.kvm, bare.vfio), (Access::Missing, Access::Missing));
        assert!(bare.iommu_advice.unwrap().contains("intel_iommu=on"));
        assert!(bare.intel && !bare.iommu_asked && bare.no_vfio_pci.is_some());

        put("dev/kvm", "");
        put("dev/iommu", "");
        put("proc/cmdline", "quiet intel_iommu=on\n");
        std::fs::create_dir_all(host.system("sys/kernel/iommu_groups/0")).unwrap();
        std::fs::create_dir_all(host.system("sys/bus/pci/drivers/vfio-pci")).unwrap();
        let whole = look(&host);
        assert_eq!(
            (whole.kvm, whole.iommufd),
            (Access::Granted, Access::Granted)
        );
        assert_eq!(whole.iommu_advice, None);
        assert!(
            whole.iommu_asked && whole.no_vfio_pci.is_none(),
            "{whole:?}"
        );

        put("proc/cpuinfo", "vendor_id\t: AuthenticAMD\n");
        assert_eq!(look(&host).kvm_module, "kvm_amd");
    }
}
