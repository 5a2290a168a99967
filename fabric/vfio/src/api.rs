//! Detects the kernel's VFIO API: iommufd or type1.

use std::fmt;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::VfioError;

/// A kernel API for IOMMU domains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Api {
    /// `/dev/vfio/vfio` with groups: in every kernel. Maps any memory of this process, a BAR's mmap
    /// included.
    Type1,
    /// `/dev/iommu` with `/dev/vfio/devices`. Maps a BAR through a dma-buf,
    /// which needs Linux 6.19.
    Iommufd,
}

impl Api {
    /// Detects this host's API: iommufd if the kernel has it and its character devices, else type1.
    /// Opens nothing. Call it after vfio-pci is loaded, which loads its dependencies.
    ///
    /// # Errors
    /// [`VfioError::NoVfio`] names the missing module or kernel option.
    pub fn detect() -> Result<Self, VfioError> {
        Self::detect_in(Path::new("/"))
    }

    fn detect_in(root: &Path) -> Result<Self, VfioError> {
        let there = |path: &str| root.join(path).exists();
        // The directory appears with the first bound device; before that only the
        // reserved numbers show it.
        let cdev = there("dev/vfio/devices")
            || fs::read_to_string(root.join("proc/devices"))
                .is_ok_and(|text| text.lines().any(|line| line.ends_with(" vfio-cdev")));
        if there("dev/iommu") && cdev {
            return Ok(Self::Iommufd);
        }
        if !there("dev/vfio/vfio") {
            return Err(VfioError::NoVfio {
                missing: "/dev/vfio/vfio",
                remedy: "run `modprobe vfio-pci`; a kernel without that module lacks CONFIG_VFIO \
                         and CONFIG_VFIO_PCI, with CONFIG_VFIO_CONTAINER and \
                         CONFIG_VFIO_IOMMU_TYPE1, or CONFIG_IOMMUFD and CONFIG_VFIO_DEVICE_CDEV",
            });
        }
        Ok(Self::Type1)
    }
}

impl fmt::Display for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Type1 => "type1",
            Self::Iommufd => "iommufd",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn iommufd_is_taken_where_functions_have_character_devices() {
        let type1 = ("dev/vfio/vfio", "");
        let iommu = ("dev/iommu", "");
        let detect = |files: &[(&str, &str)]| Api::detect_in(root(files).path()).unwrap();
        assert_eq!(detect(&[type1]), Api::Type1);
        // iommufd without CONFIG_VFIO_DEVICE_CDEV.
        let numbers = ("proc/devices", "Character devices:\n 10 misc\n");
        assert_eq!(detect(&[type1, iommu, numbers]), Api::Type1);
        let numbers = ("proc/devices", "Character devices:\n511 vfio-cdev\n");
        assert_eq!(detect(&[iommu, numbers]), Api::Iommufd);
        let device = ("dev/vfio/devices/vfio0", "");
        assert_eq!(detect(&[type1, iommu, device]), Api::Iommufd);
    }

    #[test]
    fn a_kernel_without_vfio_is_told_what_it_lacks() {
        let error = Api::detect_in(root(&[]).path()).unwrap_err().to_string();
        for part in [
            "/dev/vfio/vfio",
            "modprobe vfio-pci",
            "CONFIG_VFIO_IOMMU_TYPE1",
        ] {
            assert!(error.contains(part), "{error}");
        }
    }
}
