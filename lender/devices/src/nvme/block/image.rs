//! Opening an image file or block device.
#![deny(unsafe_code)]

use std::{
    fs::{File, OpenOptions},
    io::{self, Seek, SeekFrom},
    os::unix::fs::{FileTypeExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};

use super::is_read_only;

/// How long to wait for whoever has the image to exit. The kernel releases the
/// files of a process that was killed after the process is gone: an io_uring
/// holds them until a kernel worker has taken it apart, up to some 250 ms later.
const IN_USE_TIMEOUT: Duration = Duration::from_secs(2);

/// How often to look whether it has. There is no event to wait for: nothing is
/// signalled when an exclusive claim of a block device ends, and a blocking
/// flock(2) has no timeout.
const IN_USE_STEP: Duration = Duration::from_millis(10);

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// There is no such file.
    #[error("image {path}: no such {}", missing(path))]
    Missing {
        /// The image.
        path: PathBuf,
    },
    /// A directory cannot hold blocks.
    #[error("image {path} is a directory; it has to be a file or a block device")]
    Directory {
        /// The image.
        path: PathBuf,
    },
    /// Neither a regular file nor a block device.
    #[error("image {path} is neither a regular file nor a block device")]
    WrongKind {
        /// The image.
        path: PathBuf,
    },
    /// An image of no blocks.
    #[error("image {path} is empty{}", empty(path))]
    Empty {
        /// The image.
        path: PathBuf,
    },
    /// The last block would be cut off.
    #[error(
        "image {path} has {size} bytes, which is not a multiple of the block size, {block_size} bytes"
    )]
    NotMultiple {
        /// The image.
        path: PathBuf,
        /// Bytes of the image.
        size: u64,
        /// Bytes of a block.
        block_size: u32,
    },
    /// The file or device is write-protected and `read_only` is not set.
    #[error(
        "image {path} is write-protected; make it writable, or lend it read-only (lender.toml: `model.nvme = {{ image = {path:?}, read-only = true }}`; or `--nvme ID=IMAGE,read-only`)"
    )]
    WriteProtected {
        /// The image.
        path: PathBuf,
    },
    /// The file may not be opened at all.
    #[error("image {path} cannot be read: permission denied")]
    PermissionDenied {
        /// The image.
        path: PathBuf,
    },
    /// Another process, or another device, has it.
    #[error("image {path} is in use by another process or device")]
    InUse {
        /// The image.
        path: PathBuf,
    },
    /// Something else went wrong.
    #[error("cannot use image {path}")]
    Io {
        /// The image.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Whether the image may be written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageAccess {
    ReadOnly,
    ReadWrite,
}

/// An open image, locked for as long as the file is open: exclusively, or
/// shared with other readers when read-only.
#[derive(Debug)]
pub struct Image {
    pub file: File,
    /// Bytes, a multiple of the block size.
    pub size: u64,
    /// Whether a hole can be punched, and reads as zeroes.
    pub punches_holes: bool,
}

/// Whether a device is meant.
fn is_device(path: &Path) -> bool {
    path.starts_with("/dev") && !path.starts_with("/dev/shm")
}

/// What is not there, and where one comes from.
fn missing(path: &Path) -> String {
    match is_device(path) {
        true => "device; `lsblk` lists the block devices of this host".to_owned(),
        false => format!("file; create one with `truncate -s 10G {}`", path.display()),
    }
}

/// How what has no blocks gets some.
fn empty(path: &Path) -> String {
    match is_device(path) {
        true => ": the device has no medium, or none that it can read".to_owned(),
        false => format!("; give it a size with `truncate -s 10G {}`", path.display()),
    }
}

impl Image {
    /// Opens and locks it. While it is in use, waits a moment for whoever has
    /// it to exit, as a lender that is started anew does.
    pub fn open(path: &Path, access: ImageAccess, block_size: u32) -> Result<Self, ImageError> {
        let until = Instant::now() + IN_USE_TIMEOUT;
        loop {
            match Self::try_open(path, access, block_size) {
                Err(ImageError::InUse { .. }) if Instant::now() < until => {
                    std::thread::sleep(IN_USE_STEP);
                }
                opened => return opened,
            }
        }
    }

    fn try_open(path: &Path, access: ImageAccess, block_size: u32) -> Result<Self, ImageError> {
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
        let writable = access == ImageAccess::ReadWrite;
        // The superuser may write to what is write-protected; that is not a
        // reason to do it.
        if writable && metadata.permissions().readonly() {
            return Err(ImageError::WriteProtected { path: at() });
        }
        let mut options = OpenOptions::new();
        options.read(true).write(writable);
        if kind.is_block_device() && writable {
            // Refused while it is mounted or otherwise claimed.
            options.custom_flags(libc::O_EXCL);
        }
        let mut file =
            options
                .open(path)
                .map_err(|source| match (source.kind(), source.raw_os_error()) {
                    (_, Some(libc::EBUSY)) => ImageError::InUse { path: at() },
                    (io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem, _)
                        if writable =>
                    {
                        ImageError::WriteProtected { path: at() }
                    }
                    (io::ErrorKind::PermissionDenied, _) => {
                        ImageError::PermissionDenied { path: at() }
                    }
                    _ => io(source),
                })?;
        // A device that was made read-only can be opened for writing all the
        // same; then each write fails.
        if kind.is_block_device() && writable && is_read_only(&file).map_err(io)? {
            return Err(ImageError::WriteProtected { path: at() });
        }
        let lock = match access {
            ImageAccess::ReadOnly => FlockOperation::NonBlockingLockShared,
            ImageAccess::ReadWrite => FlockOperation::NonBlockingLockExclusive,
        };
        flock(&file, lock).map_err(|errno| match errno {
            rustix::io::Errno::WOULDBLOCK => ImageError::InUse { path: at() },
            _ => io(errno.into()),
        })?;
        // A block device's metadata has no size.
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

/// Tries a hole behind the end, where it changes nothing.
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
    fn a_device_is_not_to_be_made_by_truncate() {
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
