//! Reading and writing the kernel's attribute files below a root directory.
//!
//! Every read is bounded and every text is checked to be text: the kernel is
//! trusted, but a driver's attribute may hold text from the device.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use farside_error_chain::Chain;
use rustix::fs::{Access, FileType, OFlags, access};

use crate::error::PciError;
use crate::nvme::admin::{self, AdminCommand};

/// An attribute has at most a page; those read here are far smaller.
const MAX_ATTRIBUTE: u64 = 64 << 10;
/// `/proc/interrupts` grows with CPUs times vectors, `mountinfo` with
/// containers: tens of megabytes on the largest hosts.
const MAX_TABLE: u64 = 64 << 20;
/// A PCI domain has at most 65,536 functions.
const MAX_ENTRIES: usize = 1 << 17;

/// Operations that a plain directory cannot emulate: writes with side effects, and kernel state
/// that is not in a file.
pub trait Kernel: Send + Sync {
    /// Writes `text` to the attribute at `path` in one call, and returns when it has taken effect.
    ///
    /// # Errors
    /// The kernel's refusal.
    fn write(&self, path: &Path, text: &str) -> io::Result<()>;

    /// Whether another process has the block device at `node` open exclusively: a
    /// file system (in any mount namespace), swap, device mapper, MD, ZFS.
    ///
    /// # Errors
    /// The device cannot be opened.
    fn is_claimed(&self, node: &Path) -> io::Result<bool>;

    /// Sends an admin command to the NVMe controller whose character device is at `node`, which fills `data`. Returns
    /// the status field of the completion: 0 for success.
    ///
    /// # Errors
    /// The device cannot be opened, or the kernel does not send the command.
    fn nvme_admin(&self, node: &Path, command: AdminCommand, data: &mut [u8]) -> io::Result<u16>;
}

/// The kernel that runs this process.
#[derive(Debug, Clone, Copy, Default)]
pub struct LinuxKernel;

impl Kernel for LinuxKernel {
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).truncate(true).open(path)?;
        file.write_all(text.as_bytes())
    }

    fn is_claimed(&self, node: &Path) -> io::Result<bool> {
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags((OFlags::EXCL | OFlags::NONBLOCK).bits() as i32)
            .open(node);
        match opened {
            // Only on a block device does O_EXCL mean this.
            Ok(file) => {
                let kind = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode);
                if kind == FileType::BlockDevice {
                    Ok(false)
                } else {
                    Err(io::Error::other("not a block device"))
                }
            }
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error()) => {
                Ok(true)
            }
            Err(error) => Err(error),
        }
    }

    fn nvme_admin(&self, node: &Path, command: AdminCommand, data: &mut [u8]) -> io::Result<u16> {
        admin::send(node, command, data)
    }
}

/// A root directory and the kernel behind it.
#[derive(Clone)]
pub(crate) struct Tree {
    root: PathBuf,
    kernel: Arc<dyn Kernel>,
}

impl Tree {
    pub(crate) fn new(root: PathBuf, kernel: Arc<dyn Kernel>) -> Self {
        Self { root, kernel }
    }

    /// The full path of `path`, which is relative to the root.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    pub(crate) fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// Whether this process may write to it.
    pub(crate) fn is_writable(&self, path: &str) -> bool {
        access(self.path(path), Access::WRITE_OK).is_ok()
    }

    /// A small attribute without leading and trailing white space, `None` if it does not exist.
    pub(crate) fn attribute(&self, path: &str) -> Result<Option<String>, PciError> {
        Ok(self
            .text(path, MAX_ATTRIBUTE)?
            .map(|text| text.trim().to_owned()))
    }

    /// The first `limit` bytes of a small attribute, `None` if it does not exist.
    pub(crate) fn bytes(&self, path: &str, limit: u64) -> Result<Option<Vec<u8>>, PciError> {
        let path = self.path(path);
        read_bounded(&path, limit).map_err(|source| PciError::Read { path, source })
    }

    /// A table such as `/proc/interrupts`, `None` where it does not exist.
    pub(crate) fn table(&self, path: &str) -> Result<Option<String>, PciError> {
        self.text(path, MAX_TABLE)
    }

    fn text(&self, path: &str, limit: u64) -> Result<Option<String>, PciError> {
        let Some(bytes) = self.bytes(path, limit + 1)? else {
            return Ok(None);
        };
        if bytes.len() as u64 > limit {
            return Err(PciError::Malformed {
                path: self.path(path),
                text: String::new(),
                why: format!("it is longer than {limit} bytes"),
            });
        }
        // A mount point's name may contain any bytes; the parsed parts are ASCII.
        Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// The last component of the target of the link at `path`, `None` if there is no link: sysfs
    /// names a device's driver or group this way.
    pub(crate) fn link_name(&self, path: &str) -> Result<Option<String>, PciError> {
        let path = self.path(path);
        match fs::read_link(&path) {
            Ok(target) => Ok(target
                .file_name()
                .map(|name| name.to_string_lossy().into_owned())),
            Err(error) if is_absent(&error) => Ok(None),
            Err(source) => Err(PciError::Read { path, source }),
        }
    }

    /// The names in a directory, sorted; empty where there is no such directory.
    pub(crate) fn names(&self, path: &str) -> Result<Vec<String>, PciError> {
        let path = self.path(path);
        let entries = match fs::read_dir(&path) {
            Ok(entries) => entries,
            Err(error) if is_absent(&error) => return Ok(Vec::new()),
            Err(source) => return Err(PciError::Read { path, source }),
        };
        let mut names = Vec::new();
        for entry in entries.take(MAX_ENTRIES) {
            match entry {
                Ok(entry) => names.push(entry.file_name().to_string_lossy().into_owned()),
                Err(source) => return Err(PciError::Read { path, source }),
            }
        }
        names.sort();
        Ok(names)
    }

    /// The canonical path of `path`; `None` if it does not exist.
    pub(crate) fn real(&self, path: &str) -> Result<Option<PathBuf>, PciError> {
        let path = self.path(path);
        match fs::canonicalize(&path) {
            Ok(real) => Ok(Some(real)),
            Err(error) if is_absent(&error) => Ok(None),
            Err(source) => Err(PciError::Read { path, source }),
        }
    }

    /// Writes an attribute through the kernel.
    pub(crate) fn write(&self, path: &str, text: &str) -> Result<(), PciError> {
        let path = self.path(path);
        self.kernel
            .write(&path, text)
            .map_err(|source| PciError::Write {
                path,
                text: text.trim_end().to_owned(),
                source,
            })
    }

    /// Sends an NVMe admin command: see [`Kernel::nvme_admin`].
    pub(crate) fn nvme_admin(
        &self,
        node: &Path,
        command: AdminCommand,
        data: &mut [u8],
    ) -> io::Result<u16> {
        self.kernel.nvme_admin(node, command, data)
    }

    /// Whether the block device of that name has an exclusive holder; `None` if unknown.
    pub(crate) fn is_claimed(&self, block: &str) -> Option<bool> {
        let node = self.path("dev").join(block.replace('!', "/"));
        match self.kernel.is_claimed(&node) {
            Ok(claimed) => Some(claimed),
            Err(error) => {
                log::debug!(
                    "whether {} is in use is unknown: {error}",
                    node.display(),
                    error = Chain(&error)
                );
                None
            }
        }
    }
}

/// A device that is unplugged while it is read answers ENODEV or ENXIO.
fn is_absent(error: &io::Error) -> bool {
    use rustix::io::Errno;
    error.kind() == io::ErrorKind::NotFound
        || [Errno::NODEV, Errno::NXIO, Errno::NOTDIR]
            .iter()
            .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

fn read_bounded(path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if is_absent(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    match file.take(limit).read_to_end(&mut bytes) {
        Ok(_) => Ok(Some(bytes)),
        Err(error) if is_absent(&error) => Ok(None),
        Err(error) => Err(error),
    }
}
