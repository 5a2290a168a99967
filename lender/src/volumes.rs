//! Volumes: disks that a lender keeps as files in a directory of its own, made and deleted while it runs.
//!
//! A volume is a directory with the name of its device. `image` is its medium, a sparse file; `device.toml` is its table of
//! `lender.toml`, without id and image. It is renamed into place once it is complete, and out of place before it is
//! deleted, so that a process that is killed leaves either a volume or a directory whose name begins with a dot, which no
//! id does. The next process that changes a volume removes it.

use std::{
    ffi::OsString,
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, Write},
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use farside_daemon::{
    DeviceId, FileLock, LockError,
    files::{read_bounded, replace_private},
    paths::{create_directory, owners},
    user_name,
};
use farside_devices::block::LimitsError;
use farside_error_chain::Chain;
use farside_fabric::Size;
use farside_lender_protocol::MAX_DEVICES;
use rustix::{fs::statvfs, process::geteuid};
use serde::de::Error as _;
use toml::{Table, Value};

use crate::config::{Borrower, DeviceConfig, Model, Source};

const TABLE: &str = "device.toml";
const IMAGE: &str = "image";

/// Ends of the names of directories that are not volumes yet, or not any more.
const NEW: &str = ".new";
const DELETED: &str = ".deleted";

/// The file that a process locks before it changes volumes or reads them for a lender.
const LOCK: &str = ".lock";
/// The file that names the socket of the lender.
const SOCKET: &str = ".socket";
const LOCK_LIMIT: Duration = Duration::from_secs(30);

/// Most bytes of a table.
const MAX_TABLE: u64 = 64 << 10;

/// Sizes are multiples of this, bytes: a page, and a multiple of each model's block size.
const GRANULARITY: u64 = 4096;

/// The volumes of a lender.
#[derive(Clone, Debug)]
pub struct Volumes {
    directory: PathBuf,
}

/// A volume.
#[derive(Clone, Debug)]
pub struct Volume {
    /// Its id, and the device's that it is lent as.
    pub id: DeviceId,
    /// The device model, on its medium.
    pub model: Model,
    /// Who may borrow it.
    pub borrowers: Vec<Borrower>,
    /// The `[[device]]` table that says the same.
    pub table: Table,
    /// Bytes of its disk.
    pub size: u64,
    /// Bytes that it takes up in its file system.
    pub used: u64,
}

/// Why a volume cannot be created, used or deleted.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// An operation of the file system has failed.
    #[error("cannot {what} {path}", path = path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// Its file.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The directory is not given in full.
    #[error("{} names different directories for different processes: give the volumes' directory as an absolute path", directory.display())]
    Relative {
        /// The directory of volumes.
        directory: PathBuf,
    },
    /// The directory is not the lender's.
    #[error(
        "the directory of volumes, {}, belongs to user {}, and this lender runs as {}: change its owner, or name another",
        directory.display(), user_name(*owner), user_name(*user)
    )]
    Foreign {
        /// The directory of volumes.
        directory: PathBuf,
        /// The user id of its owner.
        owner: u32,
        /// That of this process.
        user: u32,
    },
    /// Another process changes volumes.
    #[error("cannot lock the volumes in {} within {LOCK_LIMIT:?}", directory.display())]
    Lock {
        /// The directory of volumes.
        directory: PathBuf,
        /// Who has locked them.
        source: LockError,
    },
    /// A file or directory that is not one of a volume is where one would be.
    #[error("{} does not belong to a volume: remove it first", path.display())]
    NotAVolume {
        /// The file.
        path: PathBuf,
    },
    /// A lender lends at most so many devices.
    #[error(
        "there are {MAX_DEVICES} volumes, as many as a lender lends: delete one, or start another lender"
    )]
    TooMany,
    /// A table is invalid.
    #[error("{path} is invalid", path = path.display())]
    Table {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: Box<toml::de::Error>,
    },
    /// The limits of a volume are too low.
    #[error("volume {id}")]
    Limits {
        /// The volume.
        id: DeviceId,
        /// The reason.
        source: LimitsError,
    },
    /// There is a volume of that name.
    #[error(
        "there is a volume {id}, with data, of another size or with other options: choose another id, or delete it first"
    )]
    Exists {
        /// The volume.
        id: DeviceId,
    },
    /// There is no volume of that name.
    #[error("there is no volume {id} in {}: `farside volume list` names those that there are", directory.display())]
    Missing {
        /// The volume.
        id: DeviceId,
        /// The directory of volumes.
        directory: PathBuf,
    },
    /// A process has locked the medium, by flock(2), as lenders do.
    #[error(
        "volume {id} is in use: a lender that does not answer here has it, or another process that has locked its image; end that first"
    )]
    InUse {
        /// The volume.
        id: DeviceId,
    },
    /// A size that is 0 or not a multiple of 4 KiB.
    #[error("volume {id}: invalid size of {size} bytes: it must be a multiple of 4 KiB, and not 0")]
    Unaligned {
        /// The volume.
        id: DeviceId,
        /// Bytes.
        size: u64,
    },
    /// A size above that of the file system.
    #[error(
        "volume {id}: {}, and the file system of {} has {} in all: choose a smaller size",
        Size(*size), directory.display(), Size(*capacity & !0xf_ffff)
    )]
    TooLarge {
        /// The volume.
        id: DeviceId,
        /// Bytes.
        size: u64,
        /// The directory of volumes.
        directory: PathBuf,
        /// Bytes of its file system, free or not.
        capacity: u64,
    },
    /// A size below the present one.
    #[error(
        "volume {id} has {}, of which {} are in use, and a disk does not shrink to {}: create another one and copy the data",
        Size(*size), Size(*used), Size(*to)
    )]
    Shrinks {
        /// The volume.
        id: DeviceId,
        /// Bytes of its disk.
        size: u64,
        /// Bytes that it takes up.
        used: u64,
        /// Bytes that were asked for.
        to: u64,
    },
}

/// A volume that cannot be read, and why.
pub type Unusable = (DeviceId, VolumeError);

/// Names the operation and its file in an I/O error.
fn failed<E: Into<io::Error>>(what: &'static str, path: &Path) -> impl FnOnce(E) -> VolumeError {
    let path = path.to_owned();
    move |error| VolumeError::Io {
        what,
        path,
        source: error.into(),
    }
}

fn sync(path: &Path) -> Result<(), VolumeError> {
    File::open(path)
        .and_then(|file| file.sync_all())
        .map_err(failed("flush", path))
}

fn is_file(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|it| it.is_file())
}

impl Volumes {
    /// The volumes in a directory, which may be missing.
    pub fn new(directory: PathBuf) -> Result<Self, VolumeError> {
        match directory.is_absolute() {
            true => Ok(Self { directory }),
            false => Err(VolumeError::Relative { directory }),
        }
    }

    /// Makes the directory, for its user alone, if it is missing. It must be this user's.
    pub fn make_directory(&self) -> Result<(), VolumeError> {
        let owner = create_directory(&self.directory).and_then(|()| owners(&self.directory));
        let (owner, _) = owner.map_err(failed("make directory", &self.directory))?;
        let user = geteuid().as_raw();
        match owner == user {
            true => Ok(()),
            false => Err(VolumeError::Foreign {
                directory: self.directory.clone(),
                owner,
                user,
            }),
        }
    }

    /// The socket of the lender that lent them last.
    pub fn socket(&self) -> Result<Option<PathBuf>, VolumeError> {
        let file = self.directory.join(SOCKET);
        let path = read_bounded(&file, MAX_TABLE).map_err(failed("use", &file))?;
        Ok(path.map(|path| OsString::from_vec(path).into()))
    }

    /// All volumes, by id, and those that are not usable.
    pub fn list(&self) -> Result<(Vec<Volume>, Vec<Unusable>), VolumeError> {
        let cannot = || failed("read", &self.directory);
        let (mut volumes, mut errors) = (Vec::new(), Vec::new());
        for entry in fs::read_dir(&self.directory).map_err(cannot())? {
            let name = entry.map_err(cannot())?.file_name().into_string();
            let id = name.ok().and_then(|name| name.parse().ok());
            let is_volume = |id: &DeviceId| self.check_exists(id).is_ok();
            let Some(id) = id.filter(is_volume) else {
                continue;
            };
            match self.read(&id) {
                Ok(volume) => volumes.push(volume),
                // Deleted meanwhile.
                Err(VolumeError::Missing { .. }) => {}
                Err(error) => errors.push((id, error)),
            }
        }
        volumes.sort_by(|a, b| a.id.cmp(&b.id));
        Ok((volumes, errors))
    }

    /// Keeps other processes from changing volumes, and lenders from reading them, until the result is dropped.
    /// Removes what killed processes have left.
    pub fn lock(&self) -> Result<LockedVolumes, VolumeError> {
        let lock = FileLock::take(&self.directory.join(LOCK), LOCK_LIMIT);
        let lock = lock.map_err(|source| VolumeError::Lock {
            directory: self.directory.clone(),
            source,
        })?;
        let cannot = || failed("read", &self.directory);
        for entry in fs::read_dir(&self.directory).map_err(cannot())? {
            let entry = entry.map_err(cannot())?;
            let name = entry.file_name();
            let left = name.to_str().and_then(|name| name.strip_prefix('.'));
            let id =
                left.and_then(|left| [NEW, DELETED].iter().find_map(|end| left.strip_suffix(end)));
            let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if is_directory
                && id.is_some_and(|id| id.parse::<DeviceId>().is_ok())
                && let Err(error) = remove(&entry.path())
            {
                log::warn!("{}", Chain(&error));
            }
        }
        Ok(LockedVolumes {
            volumes: self.clone(),
            _lock: lock,
        })
    }

    fn path(&self, id: &DeviceId) -> PathBuf {
        self.directory.join(id.as_str())
    }

    fn beside(&self, id: &DeviceId, end: &str) -> PathBuf {
        self.directory.join(format!(".{id}{end}"))
    }

    /// Refuses an id that no volume has: a directory with a table.
    fn check_exists(&self, id: &DeviceId) -> Result<(), VolumeError> {
        let path = self.path(id);
        let is_directory = fs::symlink_metadata(&path).is_ok_and(|it| it.is_dir());
        match is_directory && is_file(&path.join(TABLE)) {
            true => Ok(()),
            false => Err(self.missing(id)),
        }
    }

    fn has_image(&self, id: &DeviceId) -> bool {
        is_file(&self.path(id).join(IMAGE))
    }

    /// Opens the medium of a volume, which is a regular file.
    fn open(&self, id: &DeviceId, options: &mut OpenOptions) -> Result<File, VolumeError> {
        self.check_exists(id)?;
        let image = self.path(id).join(IMAGE);
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let opened = options.custom_flags(flags).open(&image);
        let file = opened.map_err(failed("open", &image))?;
        match file
            .metadata()
            .map_err(failed("examine", &image))?
            .is_file()
        {
            true => Ok(file),
            false => Err(VolumeError::NotAVolume { path: image }),
        }
    }

    fn missing(&self, id: &DeviceId) -> VolumeError {
        VolumeError::Missing {
            id: id.clone(),
            directory: self.directory.clone(),
        }
    }

    fn read(&self, id: &DeviceId) -> Result<Volume, VolumeError> {
        let file = self.path(id).join(TABLE);
        let text = read_bounded(&file, MAX_TABLE).map_err(failed("use", &file))?;
        let text = text.ok_or_else(|| self.missing(id))?;
        let wrong = |source| VolumeError::Table {
            path: file.clone(),
            source: Box::new(source),
        };
        let table: Table = toml::from_slice(&text).map_err(wrong)?;
        let (table, model, borrowers) = self.complete(id, table).map_err(wrong)?;
        let image = self.open(id, OpenOptions::new().read(true))?;
        let metadata = image
            .metadata()
            .map_err(failed("examine the image beside", &file))?;
        Ok(Volume {
            id: id.clone(),
            model,
            borrowers,
            table,
            size: metadata.len(),
            // stat(2): of 512 bytes, whatever the file system's are.
            used: metadata.blocks() * 512,
        })
    }

    /// The `[[device]]` table of a volume, from its file's, as it is and as it is read.
    fn complete(
        &self,
        id: &DeviceId,
        mut table: Table,
    ) -> Result<(Table, Model, Vec<Borrower>), toml::de::Error> {
        let image = self.path(id).join(IMAGE);
        let image = image.to_str().ok_or_else(|| {
            let text = format!("its path is not UTF-8: {}", image.display());
            toml::de::Error::custom(text)
        })?;
        let model = table.get_mut("model").and_then(Value::as_table_mut);
        for (_, options) in model.into_iter().flatten() {
            if let Some(options) = options.as_table_mut() {
                options.insert("image".into(), image.into());
            }
        }
        table.insert("id".into(), id.to_string().into());
        let device: DeviceConfig = Value::Table(table.clone()).try_into()?;
        match device.source {
            Source::Model(model) => Ok((table, model, device.borrowers)),
            Source::Vfio(_) | Source::VfioUser(_) => {
                Err(toml::de::Error::custom("a volume is a `model`"))
            }
        }
    }

    /// Refuses sizes that no disk in this directory can have.
    fn check_size(&self, id: &DeviceId, size: u64) -> Result<(), VolumeError> {
        if size == 0 || !size.is_multiple_of(GRANULARITY) {
            let id = id.clone();
            return Err(VolumeError::Unaligned { id, size });
        }
        let system = statvfs(&self.directory).map_err(failed("examine", &self.directory))?;
        let capacity = system.f_blocks.saturating_mul(system.f_frsize);
        if size > capacity {
            return Err(VolumeError::TooLarge {
                id: id.clone(),
                size,
                directory: self.directory.clone(),
                capacity,
            });
        }
        Ok(())
    }
}

/// Removes a volume's directory, and nothing but what a volume has.
fn remove(path: &Path) -> Result<(), VolumeError> {
    for name in [IMAGE, TABLE] {
        let file = path.join(name);
        match fs::remove_file(&file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("remove", &file)(error));
            }
            _ => {}
        }
    }
    fs::remove_dir(path).map_err(failed("remove", path))
}

/// Volumes that no other process changes.
#[derive(Debug)]
pub struct LockedVolumes {
    volumes: Volumes,
    _lock: FileLock,
}

impl LockedVolumes {
    /// Creates a volume of `size` bytes, which reads as zeroes, and which `table` describes, a `[[device]]` table
    /// without id and image. One that is as it would be, and that has never been written to, is taken.
    pub fn create(&self, id: &DeviceId, size: u64, table: Table) -> Result<Volume, VolumeError> {
        let (volumes, path) = (&self.volumes, self.volumes.path(id));
        let text = table.to_string();
        let completed = volumes.complete(id, table);
        let (table, model, _) = completed.map_err(|source| VolumeError::Table {
            path: path.join(TABLE),
            source: Box::new(source),
        })?;
        if volumes.check_exists(id).is_ok() {
            let there = volumes.read(id)?;
            return match there.table == table && (there.size, there.used) == (size, 0) {
                true => Ok(there),
                false => Err(VolumeError::Exists { id: id.clone() }),
            };
        }
        if fs::symlink_metadata(&path).is_ok() {
            return Err(VolumeError::NotAVolume { path });
        }
        volumes.check_size(id, size)?;
        let (_, limits, _) = model.medium();
        limits.validate().map_err(|source| VolumeError::Limits {
            id: id.clone(),
            source,
        })?;
        if volumes.list()?.0.len() >= MAX_DEVICES {
            return Err(VolumeError::TooMany);
        }
        let new = volumes.beside(id, NEW);
        DirBuilder::new()
            .mode(0o700)
            .create(&new)
            .map_err(failed("make directory", &new))?;
        let file = |name: &str, fill: &dyn Fn(&mut File) -> io::Result<()>| {
            let path = new.join(name);
            OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&path)
                .and_then(|mut file| fill(&mut file).and_then(|()| file.sync_all()))
                .map_err(failed("write", &path))
        };
        let written = file(TABLE, &|file| file.write_all(text.as_bytes()))
            .and_then(|()| file(IMAGE, &|file| file.set_len(size)))
            .and_then(|()| sync(&new))
            .and_then(|()| fs::rename(&new, &path).map_err(failed("rename", &new)));
        if let Err(error) = written {
            // If this fails, the next process that locks the volumes does it.
            let _ = remove(&new);
            return Err(error);
        }
        sync(&volumes.directory)?;
        volumes.read(id)
    }

    /// Has [`Volumes::socket`] name this lender.
    pub fn set_socket(&self, socket: &Path) -> Result<(), VolumeError> {
        let file = self.volumes.directory.join(SOCKET);
        std::path::absolute(socket)
            .and_then(|socket| replace_private(&file, socket.as_os_str().as_bytes()))
            .map_err(failed("write", &file))
    }

    /// Whether a lender, or another process, has locked the medium of a volume.
    pub fn is_in_use(&self, id: &DeviceId) -> Result<bool, VolumeError> {
        self.volumes.check_exists(id)?;
        match self.volumes.has_image(id) {
            true => Ok(self.lock_image(id)?.is_none()),
            false => Ok(false),
        }
    }

    /// Locks the medium as models do. `None` if a process has locked it.
    fn lock_image(&self, id: &DeviceId) -> Result<Option<File>, VolumeError> {
        let image = self.volumes.open(id, OpenOptions::new().read(true))?;
        match image.try_lock() {
            Ok(()) => Ok(Some(image)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => {
                Err(failed("lock", &self.volumes.path(id).join(IMAGE))(error))
            }
        }
    }

    /// Has the medium of a volume grow to `size` bytes, which lenders and guests do not see yet.
    pub fn grow(&self, id: &DeviceId, size: u64) -> Result<(), VolumeError> {
        let volume = self.volumes.read(id)?;
        if size < volume.size {
            return Err(VolumeError::Shrinks {
                id: id.clone(),
                size: volume.size,
                used: volume.used,
                to: size,
            });
        }
        self.volumes.check_size(id, size)?;
        let image = self.volumes.open(id, OpenOptions::new().write(true))?;
        image
            .set_len(size)
            .and_then(|()| image.sync_all())
            .map_err(failed("resize", &self.volumes.path(id).join(IMAGE)))
    }

    /// Refuses volumes that cannot be deleted, but for those in use.
    pub fn check_deletable(&self, id: &DeviceId) -> Result<(), VolumeError> {
        let path = self.volumes.path(id);
        self.volumes.check_exists(id)?;
        let cannot = || failed("read", &path);
        for entry in fs::read_dir(&path).map_err(cannot())? {
            let entry = entry.map_err(cannot())?;
            if ![IMAGE, TABLE].iter().any(|name| entry.file_name() == *name) {
                return Err(VolumeError::NotAVolume { path: entry.path() });
            }
        }
        let deleted = self.volumes.beside(id, DELETED);
        match fs::symlink_metadata(&deleted).is_ok() {
            true => Err(VolumeError::NotAVolume { path: deleted }),
            false => Ok(()),
        }
    }

    /// Deletes a volume, which is not in use, with its data. A volume without a medium can be deleted, too.
    pub fn delete(&self, id: &DeviceId) -> Result<(), VolumeError> {
        let (volumes, path) = (&self.volumes, self.volumes.path(id));
        self.check_deletable(id)?;
        let _lock = match volumes.has_image(id) {
            true => Some(
                self.lock_image(id)?
                    .ok_or_else(|| VolumeError::InUse { id: id.clone() })?,
            ),
            false => None,
        };
        let deleted = volumes.beside(id, DELETED);
        fs::rename(&path, &deleted).map_err(failed("rename", &path))?;
        sync(&volumes.directory)?;
        remove(&deleted)
    }
}

#[cfg(test)]
mod tests;
