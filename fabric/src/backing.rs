//! What kind of file somebody shares as memory.

use std::{fs::File, io};

use rustix::fs;

use crate::{PAGE_SIZE, Size};

/// A file that may be mapped as memory.
pub(crate) struct Backing {
    /// Bytes of its pages: 4096, or those of its huge pages.
    pub(crate) page_size: u64,
    /// Whether it is in hugetlbfs, whose pages are never swapped.
    pub(crate) hugetlb: bool,
}

const FUSE_SUPER_MAGIC: u64 = 0x6573_5546;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

impl Backing {
    /// Checks that the `len` bytes at `offset` of `file` can be mapped now.
    /// The file may still shrink later.
    pub(crate) fn check(file: &File, offset: u64, len: u64) -> io::Result<Self> {
        let invalid = |text: String| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        let status = fs::fstat(file)?;
        if fs::FileType::from_raw_mode(status.st_mode) != fs::FileType::RegularFile {
            return invalid("it is no regular file; share memory as a memfd".into());
        }
        let system = fs::fstatfs(file)?;
        let kind = system.f_type as u64;
        if kind == FUSE_SUPER_MAGIC {
            // Its owner answers page faults, or does not.
            return invalid("it is in a FUSE file system, which could stall a device".into());
        }
        let hugetlb = kind == HUGETLBFS_MAGIC;
        let page_size = match hugetlb {
            true => system.f_bsize as u64,
            false => PAGE_SIZE,
        };
        if !page_size.is_power_of_two() || page_size < PAGE_SIZE {
            return invalid(format!("its pages of {page_size} bytes are not supported"));
        }
        if len == 0 || !offset.is_multiple_of(page_size) {
            return invalid(format!(
                "{len:#x} bytes at offset {offset:#x}: the length must not be 0 and the offset a \
                 multiple of {}",
                Size(page_size)
            ));
        }
        let size = u64::try_from(status.st_size).unwrap_or(0);
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return invalid(format!(
                "{len:#x} bytes at offset {offset:#x} are not all in the file, which has {size:#x}"
            ));
        }
        Ok(Self { page_size, hugetlb })
    }
}
