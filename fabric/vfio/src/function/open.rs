//! Opens a function.

use std::ffi::CString;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use farside_irq_relay::{IrqCounts, IrqIndex, IrqInfo};
use farside_pci::Bdf;
use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FLAGS_RESET, VFIO_PCI_BAR0_REGION_INDEX, VFIO_PCI_CONFIG_REGION_INDEX,
    VFIO_REGION_INFO_FLAG_MMAP,
};
use vfio_ioctls::{VfioDevice, VfioError as Refusal, VfioRegionInfoCap};

use crate::description::Region;
use crate::iommu::{Iommu, with_causes};
use crate::second_handle::FunctionInfo;
use crate::{Api, VfioError, ioctl};

/// The shared open descriptor of a function.
pub(crate) struct Handle {
    // Closed before `device`, which takes the group out of its container.
    file: File,
    device: Device,
}

/// The device of `vfio-ioctls`, whose drop may panic.
struct Device {
    bdf: Bdf,
    /// Of the process that has opened it, until the drop.
    inner: Option<VfioDevice>,
}

impl Handle {
    pub(crate) fn open(iommu: &Iommu, bdf: Bdf) -> Result<(Self, FunctionInfo), VfioError> {
        let directory = sysfs(bdf);
        if !directory.exists() {
            return Err(VfioError::NoFunction { bdf });
        }
        let node = match iommu.api() {
            Api::Type1 => group_node(bdf)?,
            Api::Iommufd => device_node(bdf)?,
        };
        let device = VfioDevice::new(&directory, iommu.ops()?, true)
            .map_err(|error| explain(bdf, &node, error))?;
        let step = |step| move |source| VfioError::Open { bdf, step, source };
        let file = ioctl::borrow(&device).try_clone_to_owned();
        let file = file.map_err(step("duplicating its descriptor"))?;
        let flags = ioctl::device_flags(file.as_fd());
        let info = FunctionInfo {
            regions: regions(&device),
            irqs: irqs(&device),
            can_reset: flags.map_err(step("VFIO_DEVICE_GET_INFO"))? & VFIO_DEVICE_FLAGS_RESET != 0,
        };
        let handle = Self {
            file: file.into(),
            device: Device {
                bdf,
                inner: Some(device),
            },
        };
        Ok((handle, info))
    }

    /// That of another process, by its descriptor.
    pub(crate) fn adopt(bdf: Bdf, device: OwnedFd) -> Self {
        Self {
            file: device.into(),
            device: Device { bdf, inner: None },
        }
    }

    pub(crate) fn bdf(&self) -> Bdf {
        self.device.bdf
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }
}

/// BARs 0 to 5, the expansion ROM and configuration space, by index.
fn regions(device: &VfioDevice) -> Vec<Region> {
    (VFIO_PCI_BAR0_REGION_INDEX..=VFIO_PCI_CONFIG_REGION_INDEX)
        .map(|index| Region {
            can_map: device.get_region_flags(index) & VFIO_REGION_INFO_FLAG_MMAP != 0,
            size: device.get_region_size(index),
            file_offset: device.get_region_offset(index),
            sparse: device
                .get_region_caps(index)
                .into_iter()
                .find_map(|cap| match cap {
                    VfioRegionInfoCap::SparseMmap(sparse) => Some(sparse.areas),
                    _ => None,
                })
                .map(|areas| areas.iter().map(|area| (area.offset, area.size)).collect()),
        })
        .collect()
}

/// What the kernel reports of each interrupt index.
fn irqs(device: &VfioDevice) -> [IrqInfo; 5] {
    IrqIndex::ALL.map(|index| {
        let irq = device.get_irq_info(index as u32);
        IrqInfo {
            flags: irq.map_or(0, |irq| irq.flags),
            count: irq.map_or(0, |irq| irq.count),
        }
    })
}

/// The number of vectors at each interrupt index.
pub(crate) fn irq_counts(bdf: Bdf, infos: &[IrqInfo; 5]) -> Result<IrqCounts, VfioError> {
    let counts = IrqCounts::of(infos.map(|info| info.count));
    counts.map_err(|error| VfioError::Unsupported {
        bdf,
        problem: error.to_string(),
    })
}

impl Drop for Device {
    fn drop(&mut self) {
        let Some(device) = self.inner.take() else {
            return;
        };
        // It reads the function's group from sysfs once more, and panics when
        // the function is gone by then. Its descriptor is closed before that,
        // and the rest of it on unwinding.
        if catch_unwind(AssertUnwindSafe(|| drop(device))).is_err() {
            log::warn!("{} vanished while it was closed", self.bdf);
        }
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Handle").field(&self.bdf()).finish()
    }
}

/// Checks that no process has the function open, by a node that only one process can open.
///
/// # Errors
/// [`VfioError::Busy`], else why it cannot be opened.
pub fn check_free(bdf: Bdf, api: Api) -> Result<(), VfioError> {
    match api {
        Api::Type1 => {
            // The descriptor of a function holds its group's.
            let node = group_node(bdf)?;
            match OpenOptions::new().read(true).write(true).open(&node) {
                Ok(_) => Ok(()),
                Err(error) => Err(explain(
                    bdf,
                    &node,
                    Refusal::OpenGroup(error, String::new()),
                )),
            }
        }
        // Any number may open the node, but only one may bind it to an iommufd.
        Api::Iommufd => Handle::open(&Iommu::new(api)?, bdf).map(drop),
    }
}

/// Resets all functions on a function's bus, none of which is open: by their slot, or their bus. Takes 100 ms and more.
///
/// # Errors
/// [`VfioError::Busy`] if one of its group is open (with iommufd [`VfioError::NoInterruptRemapping`], if another one than
/// `bdf`), [`VfioError::ResetBus`] if there are functions on its bus that are not on
/// vfio-pci, or are in other groups; else why it cannot be opened.
pub fn reset_bus(bdf: Bdf, api: Api) -> Result<(), VfioError> {
    let reset = match api {
        Api::Type1 => {
            let node = group_node(bdf)?;
            let open = |path: &str| OpenOptions::new().read(true).write(true).open(path);
            let group = open(&node)
                .map_err(|error| explain(bdf, &node, Refusal::OpenGroup(error, String::new())))?;
            let step = |step| move |source| VfioError::Open { bdf, step, source };
            let container = open("/dev/vfio/vfio").map_err(step("opening a container"))?;
            ioctl::set_container(group.as_fd(), container.as_fd())
                .map_err(step("VFIO_GROUP_SET_CONTAINER"))?;
            let address = CString::new(bdf.to_string()).unwrap_or_default();
            let device = ioctl::device_of_group(group.as_fd(), &address)
                .map_err(step("VFIO_GROUP_GET_DEVICE_FD"))?;
            ioctl::hot_reset(device.as_fd(), &[group.as_fd()])
        }
        Api::Iommufd => {
            let iommu = Iommu::new(api)?;
            let (handle, _) = Handle::open(&iommu, bdf)?;
            ioctl::hot_reset(handle.file().as_fd(), &[])
        }
    };
    reset.map_err(|source| match source.raw_os_error() {
        // Something of the kernel's has a function of the bus locked.
        Some(libc::EAGAIN) => VfioError::Busy {
            bdf,
            node: sysfs(bdf).display().to_string(),
        },
        _ => VfioError::ResetBus { bdf, source },
    })
}

fn sysfs(bdf: Bdf) -> PathBuf {
    Path::new("/sys/bus/pci/devices").join(bdf.to_string())
}

/// The device nodes with which a process opens a function through `api`, besides those that every
/// user can open.
///
/// # Errors
/// [`VfioError::NoIommu`], [`VfioError::NotBound`].
pub fn nodes(bdf: Bdf, api: Api) -> Result<Vec<String>, VfioError> {
    Ok(match api {
        Api::Type1 => vec![group_node(bdf)?],
        Api::Iommufd => vec!["/dev/iommu".to_owned(), device_node(bdf)?],
    })
}

/// `/dev/vfio/<group>`.
fn group_node(bdf: Bdf) -> Result<String, VfioError> {
    let link = fs::read_link(sysfs(bdf).join("iommu_group"));
    let group = link.map_err(|_| VfioError::NoIommu { bdf })?;
    let group = group.file_name().unwrap_or_default().to_string_lossy();
    Ok(format!("/dev/vfio/{group}"))
}

/// `/dev/vfio/devices/<name>`.
fn device_node(bdf: Bdf) -> Result<String, VfioError> {
    group_node(bdf)?;
    let not_bound = || VfioError::NotBound {
        bdf,
        node: format!("{}/vfio-dev", sysfs(bdf).display()),
    };
    let mut names = fs::read_dir(sysfs(bdf).join("vfio-dev")).map_err(|_| not_bound())?;
    let name = names.next().and_then(Result::ok).ok_or_else(not_bound)?;
    let name = name.file_name();
    Ok(format!("/dev/vfio/devices/{}", name.to_string_lossy()))
}

/// Explains a failure of vfio-ioctls to open a function.
fn explain(bdf: Bdf, node: &str, error: Refusal) -> VfioError {
    let node = || node.to_owned();
    let os = |errno: i32| io::Error::from_raw_os_error(errno);
    let open = |step, source: io::Error| match source.raw_os_error() {
        Some(libc::ENOENT) => VfioError::NotBound { bdf, node: node() },
        Some(libc::EBUSY) => VfioError::Busy { bdf, node: node() },
        Some(libc::EACCES | libc::EPERM) => VfioError::Permission { bdf, node: node() },
        _ => VfioError::Open { bdf, step, source },
    };
    match error {
        Refusal::OpenGroup(source, _) => open("opening its group", source),
        Refusal::OpenDeviceCdev(source) => open("opening its device node", source),
        Refusal::GroupViable => VfioError::NotViable {
            bdf,
            group: node().rsplit('/').next().unwrap_or_default().to_owned(),
        },
        Refusal::ContainerSetIOMMU(error) => match error.errno() {
            libc::EPERM => VfioError::NoInterruptRemapping { bdf },
            errno => VfioError::Open {
                bdf,
                step: "VFIO_SET_IOMMU (is vfio_iommu_type1 loaded?)",
                source: os(errno),
            },
        },
        Refusal::GroupGetDeviceFD(error) => match error.errno() {
            // The group exists, but this member of it is not bound to vfio-pci.
            libc::ENODEV | libc::EINVAL => VfioError::NotBound { bdf, node: node() },
            libc::EBUSY => VfioError::Busy { bdf, node: node() },
            errno => VfioError::Open {
                bdf,
                step: "VFIO_GROUP_GET_DEVICE_FD",
                source: os(errno),
            },
        },
        Refusal::VfioDeviceBindIommufd(error) => match error.errno() {
            // "Open already" is EINVAL here.
            libc::EBUSY | libc::EINVAL => VfioError::Busy { bdf, node: node() },
            libc::EPERM => VfioError::NoInterruptRemapping { bdf },
            errno => VfioError::Open {
                bdf,
                step: "VFIO_DEVICE_BIND_IOMMUFD",
                source: os(errno),
            },
        },
        Refusal::VfioDeviceAttachIommufdPt(error) => VfioError::Open {
            bdf,
            step: "VFIO_DEVICE_ATTACH_IOMMUFD_PT",
            source: os(error.errno()),
        },
        other => VfioError::Open {
            bdf,
            step: "vfio-ioctls",
            source: io::Error::other(with_causes(&other)),
        },
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::errno::Error as SysError;

    use super::*;

    fn explained(error: Refusal) -> VfioError {
        explain("0000:01:00.0".parse().unwrap(), "/dev/vfio/17", error)
    }

    #[test]
    fn who_holds_a_group_is_told_from_who_must_be_bound() {
        let open = |errno| {
            explained(Refusal::OpenGroup(
                io::Error::from_raw_os_error(errno),
                "17".into(),
            ))
        };
        assert!(matches!(open(libc::EBUSY), VfioError::Busy { .. }));
        assert!(matches!(open(libc::ENOENT), VfioError::NotBound { .. }));
        assert!(matches!(open(libc::EPERM), VfioError::Permission { .. }));
        assert!(matches!(open(libc::EIO), VfioError::Open { .. }));
        let error = explained(Refusal::GroupViable).to_string();
        assert!(error.contains("IOMMU group 17 of 0000:01:00.0"), "{error}");
    }

    #[test]
    fn a_machine_without_interrupt_remapping_is_told_so() {
        let error = explained(Refusal::ContainerSetIOMMU(SysError::new(libc::EPERM)));
        assert!(error.to_string().contains("intremap=on"), "{error}");
        let error = explained(Refusal::ContainerSetIOMMU(SysError::new(libc::ENODEV)));
        assert!(error.to_string().contains("vfio_iommu_type1"), "{error}");
    }

    #[test]
    fn a_function_that_does_not_exist_is_named() {
        // No machine has bus ff with a device 1f on domain ffff.
        let bdf: Bdf = "ffff:ff:1f.7".parse().unwrap();
        let error = check_free(bdf, Api::Type1).unwrap_err();
        assert!(matches!(error, VfioError::NoIommu { .. }), "{error}");
    }
}
