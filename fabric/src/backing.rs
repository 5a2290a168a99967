//! The kind of file that a client shares as memory.

use std::{
    fs::File,
    io,
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::fs;

use crate::{PAGE_SIZE, Size, vfio_device};

/// A file that may be mapped as memory.
pub(crate) struct Backing {
    /// Bytes of its pages: 4096, or those of its huge pages.
    pub(crate) page_size: u64,
    /// Whether it is in hugetlbfs, whose pages are never swapped.
    pub(crate) hugetlb: bool,
    /// What to map: the range, rounded out to whole pages of the file. (With
    /// huge pages, RAM that begins at 1 MiB begins inside a page.)
    pub(crate) offset: u64,
    /// Bytes to map.
    pub(crate) len: usize,
    /// Offset of the range in the mapping.
    pub(crate) skip: usize,
    /// File system and inode number: equal for two descriptors of one file. A function has another one with each check.
    pub(crate) identity: (u64, u64),
    /// Whether it is a function, and the range in one of its BARs.
    pub(crate) is_function: bool,
    /// Bytes of the file.
    pub(crate) file_size: u64,
}

const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Number of the next function: those of a VFIO group share an inode.
static FUNCTIONS: AtomicU64 = AtomicU64::new(0);

impl Backing {
    /// Checks that the `len` bytes at `offset` of `file` can be mapped now.
    /// The file may still shrink later.
    pub(crate) fn check(file: &File, offset: u64, len: u64) -> io::Result<Self> {
        let invalid = |text: String| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        let status = fs::fstat(file)?;
        if fs::FileType::from_raw_mode(status.st_mode) != fs::FileType::RegularFile {
            if vfio_device::is_function(file, &status) {
                return Self::of_function(offset, len);
            }
            return invalid("it is no regular file; share memory as a memfd".into());
        }
        let system = fs::fstatfs(file)?;
        let kind = system.f_type as u64;
        let hugetlb = kind == HUGETLBFS_MAGIC;
        if !hugetlb && kind != TMPFS_MAGIC {
            // Of another file system's pages, a server or a disk answers the faults, or does not.
            return invalid(
                "it is not in memory (tmpfs or hugetlbfs), so that a page fault could stall a \
                 device; share memory as a memfd"
                    .into(),
            );
        }
        let page_size = match hugetlb {
            true => system.f_bsize as u64,
            false => PAGE_SIZE,
        };
        if !page_size.is_power_of_two() || page_size < PAGE_SIZE {
            return invalid(format!("its pages of {page_size} bytes are not supported"));
        }
        if len == 0 || !offset.is_multiple_of(PAGE_SIZE) {
            return invalid(format!(
                "{len:#x} bytes at offset {offset:#x}: the length must not be 0 and the offset a \
                 multiple of {}",
                Size(PAGE_SIZE)
            ));
        }
        let size = u64::try_from(status.st_size).unwrap_or(0);
        let Some(end) = offset.checked_add(len).filter(|&end| end <= size) else {
            return invalid(format!(
                "{len:#x} bytes at offset {offset:#x} are not all in the file, which has {size:#x}"
            ));
        };
        let skip = offset % page_size;
        let rounded = (end - (offset - skip)).checked_next_multiple_of(page_size);
        let Some(rounded) = rounded.and_then(|len| usize::try_from(len).ok()) else {
            return invalid(format!("{len:#x} bytes are more than can be mapped"));
        };
        Ok(Self {
            page_size,
            hugetlb,
            offset: offset - skip,
            // Other files have any length; a last part of a page is theirs.
            len: if hugetlb { rounded } else { len as usize },
            skip: skip as usize,
            identity: (status.st_dev, status.st_ino),
            is_function: false,
            file_size: size,
        })
    }

    /// A part of a function's BAR, whose place in the descriptor the kernel checks when it is mapped.
    fn of_function(offset: u64, len: u64) -> io::Result<Self> {
        let is_whole = len != 0 && (offset | len).is_multiple_of(PAGE_SIZE);
        match (usize::try_from(len), offset.checked_add(len)) {
            (Ok(bytes), Some(end)) if is_whole => Ok(Self {
                page_size: PAGE_SIZE,
                hugetlb: false,
                offset,
                len: bytes,
                skip: 0,
                identity: (u64::MAX, FUNCTIONS.fetch_add(1, Ordering::Relaxed)),
                is_function: true,
                file_size: end,
            }),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "{len:#x} bytes at offset {offset:#x} of a function: both must be multiples of {}",
                    Size(PAGE_SIZE)
                ),
            )),
        }
    }
}
