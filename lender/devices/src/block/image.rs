//! Opening an image file or block device.
#![deny(unsafe_code)]

use std::{
    fs::{File, OpenOptions},
    io::{self, Seek, SeekFrom},
    os::unix::fs::{FileTypeExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, StatxFlags, fallocate, flock, statx};
use serde::{Deserialize, Serialize};

use super::{GrowError, check_growth, disk_sequence, is_read_only};

/// How long to wait while the image is in use. The kernel closes the files of a killed
/// process only after its exit: an io_uring holds them until a kernel worker has
/// destroyed it, up to some 250 ms later.
pub(super) const IN_USE_TIMEOUT: Duration = Duration::from_secs(2);

/// Interval of retries. There is no event to wait for: the end of an exclusive claim of
/// a block device is not signalled, and a blocking flock(2) has no timeout.
pub(super) const IN_USE_STEP: Duration = Duration::from_millis(10);

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum ImageError {
    /// The file does not exist.
    #[error("image {path}: no such {}", missing(path))]
    Missing { path: PathBuf },
    /// A directory.
    #[error("image {path} is a directory; it must be a file or a block device")]
    Directory { path: PathBuf },
    /// Neither a regular file nor a block device.
    #[error("image {path} is neither a regular file nor a block device")]
    WrongKind { path: PathBuf },
    /// The image has no blocks.
    #[error("image {path} is empty{}", empty(path))]
    Empty { path: PathBuf },
    /// The last block would be incomplete.
    #[error(
        "image {path} has {size} bytes, which is not a multiple of the block size, {block_size} bytes"
    )]
    NotMultiple {
        path: PathBuf,
        size: u64,
        block_size: u32,
    },
    /// The file or device is write-protected and `read_only` is not set.
    #[error(
        "image {path} is write-protected; make it writable, or lend it read-only (lender.toml: `model.{model} = {{ image = {path:?}, read-only = true }}`; or `--{model} ID=IMAGE,read-only`)"
    )]
    WriteProtected { path: PathBuf, model: &'static str },
    /// The file may not be opened for reading.
    #[error("image {path} cannot be read: permission denied")]
    PermissionDenied { path: PathBuf },
    /// Another process or device has claimed it.
    #[error("image {path} is in use by another process or device")]
    InUse { path: PathBuf },
    /// Any other error.
    #[error("cannot use image {path}")]
    Io { path: PathBuf, source: io::Error },
}

/// Whether the image may be written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageAccess {
    /// Not.
    ReadOnly,
    /// It may.
    ReadWrite,
    /// It may, by several.
    Shared,
}

/// An open image, locked while the file is open: exclusively, shared with other readers if read-only, or with
/// others that share it.
#[derive(Debug)]
pub struct Image {
    /// The file or device.
    pub file: File,
    /// Bytes, a multiple of the block size.
    pub size: u64,
    /// Whether holes can be punched, which read as zeroes.
    pub punches_holes: bool,
}

/// Identifies an open image: another one, even at the same path, has another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub enum ImageId {
    /// A file.
    File {
        /// Major and minor number of its file system's device.
        device: (u32, u32),
        /// Its inode.
        inode: u64,
        /// When that was created, in seconds and nanoseconds since 1970; the inode may be used again.
        born: (i64, u32),
    },
    /// A disk.
    Disk {
        /// Its major and minor number.
        device: (u32, u32),
        /// Its number since the system has started.
        sequence: u64,
    },
    /// The medium of a model that has none: of 0 bytes, with nothing to change or to lose.
    None,
    /// A tap interface, of whose frames none is kept.
    Tap,
}

impl ImageId {
    /// Whether there is nothing on the medium that could be changed or lost.
    pub fn is_empty(self) -> bool {
        matches!(self, Self::None | Self::Tap)
    }
}

/// Whether the path is a device's.
fn is_device(path: &Path) -> bool {
    path.starts_with("/dev") && !path.starts_with("/dev/shm")
}

/// The kind of the missing file, with a remedy.
fn missing(path: &Path) -> String {
    match is_device(path) {
        true => "device; `lsblk` lists the block devices of this host".to_owned(),
        false => format!("file; create one with `truncate -s 10G {}`", path.display()),
    }
}

/// The remedy for an empty image.
fn empty(path: &Path) -> String {
    match is_device(path) {
        true => ": the device has no medium, or an unreadable one".to_owned(),
        false => format!("; give it a size with `truncate -s 10G {}`", path.display()),
    }
}

impl Image {
    /// Identifies the image.
    ///
    /// # Errors
    /// Those of statx(2), and of a kernel before 5.15, which does not number its disks; a file system
    /// that does not note when a file was created, as its inode numbers are used again.
    pub fn id(&self) -> io::Result<ImageId> {
        let flags = AtFlags::EMPTY_PATH;
        let fields = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        let status = statx(&self.file, c"", flags, fields)?;
        let is_device = self.file.metadata()?.file_type().is_block_device();
        Ok(match is_device {
            true => ImageId::Disk {
                device: (status.stx_rdev_major, status.stx_rdev_minor),
                sequence: disk_sequence(&self.file)?,
            },
            false if status.stx_mask & StatxFlags::BTIME.bits() == 0 => {
                let text = "its file system has no creation times, which tell files apart";
                return Err(io::Error::new(io::ErrorKind::Unsupported, text));
            }
            false => ImageId::File {
                device: (status.stx_dev_major, status.stx_dev_minor),
                inode: status.stx_ino,
                born: (status.stx_btime.tv_sec, status.stx_btime.tv_nsec),
            },
        })
    }

    /// Takes the size that the medium has now, if a disk may grow to that. Returns the former one. Only seeks: other queries
    /// may block while the medium hangs.
    ///
    /// # Errors
    /// A [`GrowError`]: nothing has changed.
    pub fn grow(&mut self, block_size: u32) -> Result<u64, GrowError> {
        let from = self.size;
        let to = (&self.file).seek(SeekFrom::End(0)).map_err(GrowError::Io)?;
        check_growth(from, to, block_size)?;
        self.size = to;
        Ok(from)
    }

    /// Opens and locks an image. If it is in use, retries for [`IN_USE_TIMEOUT`], for
    /// example for the previous process of a lender that restarts. `model` is what errors suggest
    /// to configure.
    pub fn open(
        path: &Path,
        access: ImageAccess,
        block_size: u32,
        model: &'static str,
    ) -> Result<Self, ImageError> {
        let until = Instant::now() + IN_USE_TIMEOUT;
        loop {
            match Self::try_open(path, access, block_size, model) {
                Err(ImageError::InUse { .. }) if Instant::now() < until => {
                    std::thread::sleep(IN_USE_STEP);
                }
                opened => return opened,
            }
        }
    }

    fn try_open(
        path: &Path,
        access: ImageAccess,
        block_size: u32,
        model: &'static str,
    ) -> Result<Self, ImageError> {
        let at = || path.to_owned();
        let io = |source| ImageError::Io { path: at(), source };
        let metadata = std::fs::metadata(path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => ImageError::Missing { path: at() },
            io::ErrorKind::PermissionDenied => ImageError::PermissionDenied { path: at() },
            _ => io(source),
        })?;
        let kind = metadata.file_type();
        if kind.is_dir() {
            return Err(ImageError::Directory { path: at() });
        }
        if !kind.is_file() && !kind.is_block_device() {
            return Err(ImageError::WrongKind { path: at() });
        }
        let writable = access != ImageAccess::ReadOnly;
        // The kernel ignores write protection for root; respect it.
        if writable && metadata.permissions().readonly() {
            return Err(ImageError::WriteProtected { path: at(), model });
        }
        let mut options = OpenOptions::new();
        options.read(true).write(writable);
        let mut claiming = options.clone();
        // Fails while the device is mounted or otherwise claimed.
        claiming.custom_flags(libc::O_EXCL);
        let opened = match access {
            ImageAccess::ReadWrite if kind.is_block_device() => claiming.open(path),
            // Several open it: it is not claimed for longer than this.
            ImageAccess::Shared if kind.is_block_device() => {
                claiming.open(path).and_then(|_| options.open(path))
            }
            _ => options.open(path),
        };
        let mut file = opened.map_err(|source| match (source.kind(), source.raw_os_error()) {
            (_, Some(libc::EBUSY)) => ImageError::InUse { path: at() },
            (io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem, _)
                if writable =>
            {
                ImageError::WriteProtected { path: at(), model }
            }
            (io::ErrorKind::PermissionDenied, _) => ImageError::PermissionDenied { path: at() },
            _ => io(source),
        })?;
        // A read-only device can be opened for writing, but each write fails.
        if kind.is_block_device() && writable && is_read_only(&file).map_err(io)? {
            return Err(ImageError::WriteProtected { path: at(), model });
        }
        let lock = match access {
            ImageAccess::ReadOnly | ImageAccess::Shared => FlockOperation::NonBlockingLockShared,
            ImageAccess::ReadWrite => FlockOperation::NonBlockingLockExclusive,
        };
        flock(&file, lock).map_err(|errno| match errno {
            rustix::io::Errno::WOULDBLOCK => ImageError::InUse { path: at() },
            _ => io(errno.into()),
        })?;
        // The metadata of a block device has no size.
        let size = file.seek(SeekFrom::End(0)).map_err(io)?;
        if size == 0 {
            return Err(ImageError::Empty { path: at() });
        }
        if !size.is_multiple_of(u64::from(block_size)) {
            return Err(ImageError::NotMultiple {
                path: at(),
                size,
                block_size,
            });
        }
        let punches_holes = writable && kind.is_file() && can_punch(&file, size, block_size);
        Ok(Self {
            file,
            size,
            punches_holes,
        })
    }
}

/// Punches a hole past the end, which changes no data.
fn can_punch(file: &File, size: u64, block_size: u32) -> bool {
    fallocate(
        file,
        FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        size,
        block_size.into(),
    )
    .is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_at_the_same_path_is_another_image() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk0.img");
        let make = || {
            std::fs::write(&path, [0; 4096]).unwrap();
            let image = Image::open(&path, ImageAccess::ReadWrite, 512, "nvme").unwrap();
            image.id()
        };
        let first = match make() {
            Ok(first) => first,
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                println!("skipped: a_file_at_the_same_path_is_another_image: {error}");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        // Written, it is the same; so it is under another name.
        assert_eq!(make().unwrap(), first);
        let renamed = directory.path().join("renamed.img");
        std::fs::rename(&path, &renamed).unwrap();
        let image = Image::open(&renamed, ImageAccess::ReadOnly, 512, "nvme").unwrap();
        assert_eq!(image.id().unwrap(), first);
        // The inode of a removed file is free.
        drop(image);
        std::fs::remove_file(&renamed).unwrap();
        assert_ne!(make().unwrap(), first);
    }

    #[test]
    fn truncate_is_not_suggested_for_a_device() {
        for (path, is_file) in [
            ("/srv/disk0.img", true),
            ("/dev/shm/disk0.img", true),
            ("/dev/nvme9n1", false),
        ] {
            let path = PathBuf::from(path);
            for error in [
                ImageError::Missing { path: path.clone() },
                ImageError::Empty { path },
            ] {
                let said = error.to_string();
                assert_eq!(said.contains("truncate"), is_file, "{said}");
            }
        }
    }
}
