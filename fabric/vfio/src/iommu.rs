//! The two kinds of IOMMU domain behind [`Domain`](crate::Domain).
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use farside_fabric::memory::HostSlice;
use farside_fabric::{Iova, PAGE_SIZE};
use iommufd_bindings::iommufd::{
    iommu_ioas_map, iommu_ioas_unmap, iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE,
};
use iommufd_ioctls::{IommuFd, IommufdError};
use vfio_ioctls::{VfioContainer, VfioError as VfioIoctlError, VfioIommufd, VfioOps};
use vmm_sys_util::errno::Error as SysError;

use crate::ioctl;
use crate::second_handle::IommuParts;
use crate::usable::{Capabilities, UsableIova};
use crate::{Api, RegionMemory, VfioError};

/// A container, or an I/O address space.
pub(crate) enum Iommu {
    Type1(Arc<VfioContainer>),
    Iommufd(Arc<VfioIommufd>),
}

impl Iommu {
    pub(crate) fn new(api: Api) -> Result<Self, VfioError> {
        let refused = |reason: String| VfioError::OpenDomain { api, reason };
        match api {
            Api::Type1 => VfioContainer::new(None)
                .map(|container| Self::Type1(Arc::new(container)))
                .map_err(|error| refused(format!("{error}{}", open_hint(&error)))),
            Api::Iommufd => IommuFd::new()
                .map_err(|error| refused(format!("{error} (CONFIG_IOMMUFD)")))
                .and_then(|iommufd| {
                    VfioIommufd::new(Arc::new(iommufd), None, None)
                        .map_err(|error| refused(with_causes(&error)))
                })
                .map(|ioas| Self::Iommufd(Arc::new(ioas))),
        }
    }

    pub(crate) fn api(&self) -> Api {
        match self {
            Self::Type1(_) => Api::Type1,
            Self::Iommufd(_) => Api::Iommufd,
        }
    }

    /// Its descriptor, for another process, which finds the rest in the returned parts.
    pub(crate) fn share(&self) -> io::Result<(OwnedFd, IommuParts)> {
        Ok(match self {
            Self::Type1(container) => {
                let fd = ioctl::borrow(&**container).try_clone_to_owned()?;
                (fd, IommuParts::Type1)
            }
            Self::Iommufd(ioas) => {
                let fd = ioctl::borrow(&**ioas.iommufd()).try_clone_to_owned()?;
                let ioas = ioas.ioas().id();
                (fd, IommuParts::Iommufd { ioas })
            }
        })
    }

    /// For opening functions in it.
    pub(crate) fn ops(&self) -> Arc<dyn VfioOps> {
        match self {
            Self::Type1(container) => Arc::clone(container) as _,
            Self::Iommufd(ioas) => Arc::clone(ioas) as _,
        }
    }

    /// Maps all of `memory` at `at`. The caller keeps a clone of `memory` until
    /// [`Iommu::unmap`] has taken it back.
    pub(crate) fn map(&self, at: Iova, memory: &HostSlice, writable: bool) -> io::Result<()> {
        let len = memory.len() as u64;
        // Shared memory is only ever touched by volatile and atomic accesses.
        self.map_address(at, len, memory.as_ptr(), writable)
    }

    /// Maps `len` bytes at `offset` of `region` (which has them) at `at`, for
    /// reading and writing; lifetime as for [`Iommu::map`].
    pub(crate) fn map_region(
        &self,
        at: Iova,
        region: &RegionMemory,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        match self {
            Self::Type1(_) => {
                let from = region.as_ptr().wrapping_add(offset as usize);
                self.map_address(at, len, from, true)
            }
            // The kernel pins no BAR by its address here, and needs none: a
            // dma-buf names it.
            Self::Iommufd(ioas) => {
                let buffer: File =
                    region
                        .handle()
                        .export(region.bar(), region.offset() + offset, len)?;
                ioas.ioas()
                    .map_file(buffer.as_raw_fd(), 0, len, at.get(), true)
                    .map_err(io_error)
            }
        }
    }

    fn map_address(&self, at: Iova, len: u64, from: *mut u8, writable: bool) -> io::Result<()> {
        match self {
            Self::Type1(container) => {
                // SAFETY: `from` is in a `SharedMemory` or a `RegionMemory`, both
                // mappings without references into them, and the caller keeps them
                // until it is unmapped.
                unsafe { ioctl::map_dma(ioctl::borrow(&**container), at, len, from, writable) }
            }
            Self::Iommufd(ioas) => {
                let write = match writable {
                    true => iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE,
                    false => 0,
                };
                let map = iommu_ioas_map {
                    size: size_of::<iommu_ioas_map>() as u32,
                    flags: iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA
                        | iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE
                        | write,
                    ioas_id: ioas.ioas().id(),
                    user_va: from as u64,
                    length: len,
                    iova: at.get(),
                    ..Default::default()
                };
                ioas.iommufd().map_iommu_ioas(&map).map_err(io_error)
            }
        }
    }

    /// Unmaps all mappings inside the `len` bytes at `at`; returns how many
    /// bytes that were.
    pub(crate) fn unmap(&self, at: Iova, len: u64) -> io::Result<u64> {
        match self {
            Self::Type1(container) => ioctl::unmap_dma(ioctl::borrow(&**container), at, len),
            Self::Iommufd(ioas) => {
                let mut unmap = iommu_ioas_unmap {
                    size: size_of::<iommu_ioas_unmap>() as u32,
                    ioas_id: ioas.ioas().id(),
                    iova: at.get(),
                    length: len,
                };
                ioas.iommufd()
                    .unmap_iommu_ioas(&mut unmap)
                    .map_err(io_error)?;
                Ok(unmap.length)
            }
        }
    }

    /// Its capabilities, with its current functions.
    pub(crate) fn capabilities(&self) -> Result<Capabilities, VfioError> {
        match self {
            Self::Type1(container) => {
                let answer =
                    ioctl::iommu_info(ioctl::borrow(&**container)).map_err(VfioError::Info)?;
                Capabilities::from_type1(&answer).ok_or_else(|| {
                    VfioError::Info(io::Error::new(
                        io::ErrorKind::InvalidData,
                        "VFIO_IOMMU_GET_INFO gave an answer that contradicts itself",
                    ))
                })
            }
            Self::Iommufd(ioas) => {
                let iommufd = ioctl::borrow(&**ioas.iommufd());
                let (ranges, alignment) =
                    ioctl::ioas_ranges(iommufd, ioas.ioas().id()).map_err(VfioError::Info)?;
                Ok(Capabilities {
                    // It reports the smallest only; it uses larger ones where it
                    // can.
                    page_sizes: alignment.max(PAGE_SIZE),
                    usable: UsableIova::new(ranges),
                    mappings_left: None,
                })
            }
        }
    }
}

/// The kernel's errno.
pub(crate) fn io_error(error: IommufdError) -> io::Error {
    let errno = |error: SysError| io::Error::from_raw_os_error(error.errno());
    match error {
        IommufdError::IommuIoasMap(error)
        | IommufdError::IommuIoasMapFile(error)
        | IommufdError::IommuIoasUnmap(error) => errno(error),
        other => io::Error::other(other),
    }
}

/// The remedy if a container cannot be created.
fn open_hint(error: &VfioIoctlError) -> &'static str {
    const MODULE: &str = "; run `modprobe vfio_iommu_type1` (CONFIG_VFIO_IOMMU_TYPE1)";
    match error {
        VfioIoctlError::OpenContainer(source) => match source.kind() {
            io::ErrorKind::NotFound => MODULE,
            io::ErrorKind::PermissionDenied => {
                "; run this as root, or as a user who may open /dev/vfio/vfio"
            }
            _ => "",
        },
        VfioIoctlError::VfioExtension | VfioIoctlError::VfioType1V2 => MODULE,
        _ => "",
    }
}

/// A message with its cause; these errors do not include their sources.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let part = error.to_string();
        if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
        cause = error.source();
    }
    text
}
