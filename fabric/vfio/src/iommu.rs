//! The two kinds of IOMMU domain behind [`Domain`](crate::Domain).
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use farside_fabric::memory::HostSlice;
use farside_fabric::{Iova, PAGE_SIZE};
use iommufd_bindings::iommufd::{
    iommu_ioas_map, iommu_ioas_map_file, iommu_ioas_unmap,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA,
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

/// The container or I/O address space of a domain.
pub(crate) struct Iommu {
    space: Space,
    /// For opening functions in it: only in the process that has created it.
    ops: Option<Arc<dyn VfioOps>>,
}

/// A container or I/O address space, by a descriptor that processes can share.
pub(crate) enum Space {
    Type1(File),
    Iommufd { iommufd: IommuFd, ioas: u32 },
}

impl Space {
    /// From what [`Iommu::share`] has returned.
    pub(crate) fn from_parts(fd: OwnedFd, parts: IommuParts) -> Self {
        match parts {
            IommuParts::Type1 => Self::Type1(fd.into()),
            IommuParts::Iommufd { ioas } => Self::Iommufd {
                iommufd: IommuFd::new_from_fd(fd.into()),
                ioas,
            },
        }
    }

    pub(crate) fn api(&self) -> Api {
        match self {
            Self::Type1(_) => Api::Type1,
            Self::Iommufd { .. } => Api::Iommufd,
        }
    }

    /// A duplicate of its descriptor.
    pub(crate) fn share(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Type1(container) => container.try_clone().map(OwnedFd::from),
            Self::Iommufd { iommufd, .. } => ioctl::borrow(iommufd).try_clone_to_owned(),
        }
    }

    /// Unmaps all mappings inside the `len` bytes at `at`; returns how many
    /// bytes that were.
    fn unmap(&self, at: Iova, len: u64) -> io::Result<u64> {
        match self {
            Self::Type1(container) => ioctl::unmap_dma(container.as_fd(), at, len),
            Self::Iommufd { iommufd, ioas } => {
                let mut unmap = iommu_ioas_unmap {
                    size: size_of::<iommu_ioas_unmap>() as u32,
                    ioas_id: *ioas,
                    iova: at.get(),
                    length: len,
                };
                match iommufd.unmap_iommu_ioas(&mut unmap).map_err(io_error) {
                    // Nothing is mapped there.
                    Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(0),
                    unmapped => unmapped.map(|()| unmap.length),
                }
            }
        }
    }

    /// Unmaps everything, whichever process has mapped it (type1: Linux 6.0).
    pub(crate) fn unmap_all(&self) -> io::Result<()> {
        match self {
            Self::Type1(container) => ioctl::unmap_dma_all(container.as_fd()),
            Self::Iommufd { .. } => self.unmap(Iova::new(0), u64::MAX).map(drop),
        }
    }
}

impl Iommu {
    pub(crate) fn new(api: Api) -> Result<Self, VfioError> {
        let refused = |reason: String| VfioError::OpenDomain { api, reason };
        let shared = |fd: BorrowedFd<'_>| {
            let fd = fd.try_clone_to_owned();
            fd.map_err(|error| refused(error.to_string()))
        };
        match api {
            Api::Type1 => {
                let container = VfioContainer::new(None)
                    .map_err(|error| refused(format!("{error}{}", open_hint(&error))))?;
                let space =
                    Space::from_parts(shared(ioctl::borrow(&container))?, IommuParts::Type1);
                let ops: Arc<dyn VfioOps> = Arc::new(container);
                Ok(Self {
                    space,
                    ops: Some(ops),
                })
            }
            Api::Iommufd => {
                let iommufd =
                    IommuFd::new().map_err(|error| refused(format!("{error} (CONFIG_IOMMUFD)")))?;
                let ioas = VfioIommufd::new(Arc::new(iommufd), None, None)
                    .map_err(|error| refused(with_causes(&error)))?;
                let parts = IommuParts::Iommufd {
                    ioas: ioas.ioas().id(),
                };
                let space = Space::from_parts(shared(ioctl::borrow(&**ioas.iommufd()))?, parts);
                let ops: Arc<dyn VfioOps> = Arc::new(ioas);
                Ok(Self {
                    space,
                    ops: Some(ops),
                })
            }
        }
    }

    /// That of another process, with its mappings.
    pub(crate) fn adopt(space: Space) -> Self {
        Self { space, ops: None }
    }

    pub(crate) fn api(&self) -> Api {
        self.space.api()
    }

    /// Its descriptor, for another process, which finds the rest in the returned parts.
    pub(crate) fn share(&self) -> io::Result<(OwnedFd, IommuParts)> {
        let parts = match &self.space {
            Space::Type1(_) => IommuParts::Type1,
            Space::Iommufd { ioas, .. } => IommuParts::Iommufd { ioas: *ioas },
        };
        Ok((self.space.share()?, parts))
    }

    /// For opening functions in it.
    ///
    /// # Errors
    /// It is that of another process.
    pub(crate) fn ops(&self) -> Result<Arc<dyn VfioOps>, VfioError> {
        self.ops.clone().ok_or_else(|| VfioError::OpenDomain {
            api: self.api(),
            reason: "it is another process's".to_owned(),
        })
    }

    /// Maps all of `memory` at `at`. The caller keeps a clone of `memory` until
    /// [`Iommu::unmap`] has taken it back.
    pub(crate) fn map(&self, at: Iova, memory: &HostSlice, writable: bool) -> io::Result<()> {
        let len = memory.len() as u64;
        match memory.function() {
            Some((device, offset)) => {
                self.map_bar(at, len, (&device, offset), memory.as_ptr(), writable)
            }
            // Shared memory is only ever touched by volatile and atomic accesses.
            None => self.map_address(at, len, memory.as_ptr(), writable),
        }
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
        let from = region.as_ptr().wrapping_add(offset as usize);
        let of = (region.handle().file(), region.file_offset() + offset);
        self.map_bar(at, len, of, from, true)
    }

    /// Maps a part of a function's BAR, which is mapped into this process at `from`, and is at that offset of the function's
    /// descriptor.
    fn map_bar(
        &self,
        at: Iova,
        len: u64,
        (function, offset): (&File, u64),
        from: *mut u8,
        writable: bool,
    ) -> io::Result<()> {
        match &self.space {
            Space::Type1(_) => self.map_address(at, len, from, writable),
            // The kernel pins no BAR by its address here, and needs none: a
            // dma-buf names it.
            Space::Iommufd { iommufd, ioas } => {
                let buffer = ioctl::export(function.as_fd(), offset, len)?;
                let map = iommu_ioas_map_file {
                    size: size_of::<iommu_ioas_map_file>() as u32,
                    flags: map_flags(writable),
                    ioas_id: *ioas,
                    fd: buffer.as_raw_fd(),
                    start: 0,
                    length: len,
                    iova: at.get(),
                };
                iommufd.map_iommu_ioas_file(&map).map_err(io_error)
            }
        }
    }

    fn map_address(&self, at: Iova, len: u64, from: *mut u8, writable: bool) -> io::Result<()> {
        match &self.space {
            Space::Type1(container) => {
                // SAFETY: `from` is in a `SharedMemory` or a `RegionMemory`, both
                // mappings without references into them, and the caller keeps them
                // until it is unmapped.
                unsafe { ioctl::map_dma(container.as_fd(), at, len, from, writable) }
            }
            Space::Iommufd { iommufd, ioas } => {
                let map = iommu_ioas_map {
                    size: size_of::<iommu_ioas_map>() as u32,
                    flags: map_flags(writable),
                    ioas_id: *ioas,
                    user_va: from as u64,
                    length: len,
                    iova: at.get(),
                    ..Default::default()
                };
                iommufd.map_iommu_ioas(&map).map_err(io_error)
            }
        }
    }

    /// Unmaps all mappings inside the `len` bytes at `at`; returns how many
    /// bytes that were.
    pub(crate) fn unmap(&self, at: Iova, len: u64) -> io::Result<u64> {
        self.space.unmap(at, len)
    }

    /// See [`Space::unmap_all`].
    pub(crate) fn unmap_all(&self) -> io::Result<()> {
        self.space.unmap_all()
    }

    /// Its capabilities, with its current functions.
    pub(crate) fn capabilities(&self) -> Result<Capabilities, VfioError> {
        match &self.space {
            Space::Type1(container) => {
                let answer = ioctl::iommu_info(container.as_fd()).map_err(VfioError::Info)?;
                Capabilities::from_type1(&answer).ok_or_else(|| {
                    VfioError::Info(io::Error::new(
                        io::ErrorKind::InvalidData,
                        "VFIO_IOMMU_GET_INFO gave an answer that contradicts itself",
                    ))
                })
            }
            Space::Iommufd { iommufd, ioas } => {
                let iommufd = ioctl::borrow(iommufd);
                let (ranges, alignment) =
                    ioctl::ioas_ranges(iommufd, *ioas).map_err(VfioError::Info)?;
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

/// iommufd's flags of a mapping.
fn map_flags(writable: bool) -> u32 {
    let write = match writable {
        true => iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE,
        false => 0,
    };
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA
        | iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE
        | write
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
