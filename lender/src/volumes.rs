//! Volumes: disks that a lender keeps as files in a directory of its own, made and deleted while it runs.
//!
//! A volume is a directory with the name of its device. `image` is its medium, a sparse file; `device.toml` is its table of
//! `lender.toml`, without id and image. It is renamed into place once it is complete, and out of place before it is
//! deleted, so that a process that is killed leaves either a volume or a directory whose name begins with a dot, which no
//! id does. The next process that changes a volume removes it.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use farside_daemon::{DeviceId, paths::create_directory};
use farside_devices::block::LimitsError;
use farside_fabric::Size;
use rustix::{
    fs::{FlockOperation, flock, statvfs},
    io::Errno,
};
use toml::{Table, Value};

use crate::config::{Borrower, DeviceConfig, Model, Source};

const TABLE: &str = "device.toml";
const IMAGE: &str = "image";

/// Ends of the names of directories that are not volumes yet, or not any more.
const NEW: &str = ".new";
const DELETED: &str = ".deleted";

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

/// A volume that cannot be made, used or deleted. Nothing has changed unless the text says otherwise.
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
    /// A process changes volumes of the directory.
    #[error("another process changes volumes in {}: try again", directory.display())]
    Busy {
        /// The directory of volumes.
        directory: PathBuf,
    },
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
    #[error("there is a volume {id}: choose another id, or delete it first")]
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
    /// A process has opened the medium.
    #[error("volume {id} is in use by another process: end it first")]
    InUse {
        /// The volume.
        id: DeviceId,
    },
    /// A size that no disk has.
    #[error("volume {id}: a size of {size} bytes: give a multiple of 4 KiB above 0")]
    Unaligned {
        /// The volume.
        id: DeviceId,
        /// Bytes.
        size: u64,
    },
    /// A size above that of the file system.
    #[error(
        "volume {id}: {}, and the file system of {} has {} in all: choose a smaller size",
        Size(*size), directory.display(), Size(*capacity)
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

impl Volumes {
    /// The volumes in a directory, which may be missing.
    pub fn new(directory: PathBuf) -> Self {
        Self { directory }
    }

    /// Makes the directory, for its user alone, if it is missing.
    pub fn make_directory(&self) -> Result<(), VolumeError> {
        create_directory(&self.directory).map_err(failed("make directory", &self.directory))
    }

    /// All volumes, by id.
    pub fn list(&self) -> Result<Vec<Volume>, VolumeError> {
        let cannot = || failed("read", &self.directory);
        let mut volumes = Vec::new();
        for entry in fs::read_dir(&self.directory).map_err(cannot())? {
            let entry = entry.map_err(cannot())?;
            let name = entry.file_name().into_string();
            let id = name.ok().and_then(|name| name.parse().ok());
            let is_directory = entry.file_type().map_err(cannot())?.is_dir();
            match id.filter(|_| is_directory).map(|id| self.read(&id)) {
                // Deleted meanwhile.
                None | Some(Err(VolumeError::Missing { .. })) => {}
                Some(volume) => volumes.push(volume?),
            }
        }
        volumes.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(volumes)
    }

    /// Keeps other processes from changing volumes until the result is dropped. Removes what killed ones have left.
    pub fn lock(&self) -> Result<LockedVolumes<'_>, VolumeError> {
        let cannot = || failed("open", &self.directory);
        let lock = File::open(&self.directory).map_err(cannot())?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|errno| match errno {
            Errno::WOULDBLOCK => VolumeError::Busy {
                directory: self.directory.clone(),
            },
            _ => failed("lock", &self.directory)(errno),
        })?;
        for entry in fs::read_dir(&self.directory).map_err(cannot())? {
            let path = entry.map_err(cannot())?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with('.') && [NEW, DELETED].iter().any(|end| name.ends_with(end)) {
                fs::remove_dir_all(&path).map_err(failed("remove", &path))?;
            }
        }
        Ok(LockedVolumes {
            volumes: self,
            _lock: lock,
        })
    }

    fn path(&self, id: &DeviceId) -> PathBuf {
        self.directory.join(id.as_str())
    }

    fn beside(&self, id: &DeviceId, end: &str) -> PathBuf {
        self.directory.join(format!(".{id}{end}"))
    }

    fn missing(&self, id: &DeviceId) -> VolumeError {
        VolumeError::Missing {
            id: id.clone(),
            directory: self.directory.clone(),
        }
    }

    fn read(&self, id: &DeviceId) -> Result<Volume, VolumeError> {
        let path = self.path(id);
        let file = path.join(TABLE);
        let cannot = |file: &Path, error: io::Error| match path.exists() {
            true => failed("read", file)(error),
            false => self.missing(id),
        };
        let text = fs::read_to_string(&file).map_err(|error| cannot(&file, error))?;
        let wrong = |source| VolumeError::Table {
            path: file.clone(),
            source: Box::new(source),
        };
        let table: Table = toml::from_str(&text).map_err(wrong)?;
        let image = path.join(IMAGE);
        let (table, model, borrowers) = self.complete(id, table).map_err(wrong)?;
        let metadata = fs::metadata(&image).map_err(|error| cannot(&image, error))?;
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
        let image = self.path(id).join(IMAGE).display().to_string();
        let model = table.get_mut("model").and_then(Value::as_table_mut);
        for (_, options) in model.into_iter().flatten() {
            if let Some(options) = options.as_table_mut() {
                options.insert("image".into(), image.clone().into());
            }
        }
        table.insert("id".into(), id.to_string().into());
        let device: DeviceConfig = Value::Table(table.clone()).try_into()?;
        match device.source {
            Source::Model(model) => Ok((table, model, device.borrowers)),
            Source::Vfio(_) | Source::VfioUser(_) => {
                Err(serde::de::Error::custom("a volume is a `model`"))
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

/// Volumes that no other process changes.
#[derive(Debug)]
pub struct LockedVolumes<'a> {
    volumes: &'a Volumes,
    _lock: File,
}

impl LockedVolumes<'_> {
    /// Refuses an id that no volume has.
    pub fn check_exists(&self, id: &DeviceId) -> Result<(), VolumeError> {
        match self.volumes.path(id).exists() {
            true => Ok(()),
            false => Err(self.volumes.missing(id)),
        }
    }

    /// Creates a volume of `size` bytes, which reads as zeroes, and which `table` describes, a `[[device]]` table
    /// without id and image.
    pub fn create(&self, id: &DeviceId, size: u64, table: Table) -> Result<Volume, VolumeError> {
        let (volumes, path) = (self.volumes, self.volumes.path(id));
        if path.exists() {
            return Err(VolumeError::Exists { id: id.clone() });
        }
        volumes.check_size(id, size)?;
        let text = table.to_string();
        let (_, model, _) = volumes
            .complete(id, table)
            .map_err(|source| VolumeError::Table {
                path: path.join(TABLE),
                source: Box::new(source),
            })?;
        let (_, limits, _) = model.medium();
        limits.validate().map_err(|source| VolumeError::Limits {
            id: id.clone(),
            source,
        })?;
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
            .and_then(|()| fs::rename(&new, &path).map_err(failed("name", &path)));
        if let Err(error) = written {
            // Best effort: the next process does it else.
            let _ = fs::remove_dir_all(&new);
            return Err(error);
        }
        sync(&volumes.directory)?;
        volumes.read(id)
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
        let image = self.volumes.path(id).join(IMAGE);
        OpenOptions::new()
            .write(true)
            .open(&image)
            .and_then(|file| file.set_len(size).and_then(|()| file.sync_all()))
            .map_err(failed("resize", &image))
    }

    /// Deletes a volume, which no process has opened, with its data.
    pub fn delete(&self, id: &DeviceId) -> Result<(), VolumeError> {
        let (volumes, path) = (self.volumes, self.volumes.path(id));
        self.check_exists(id)?;
        // As models lock it. A volume whose image was removed can be deleted, too.
        let image = path.join(IMAGE);
        let _lock = match File::open(&image) {
            Ok(file) => {
                flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(
                    |errno| match errno {
                        Errno::WOULDBLOCK => VolumeError::InUse { id: id.clone() },
                        _ => failed("lock", &image)(errno),
                    },
                )?;
                Some(file)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed("open", &image)(error)),
        };
        let deleted = volumes.beside(id, DELETED);
        fs::rename(&path, &deleted).map_err(failed("rename", &path))?;
        sync(&volumes.directory)?;
        fs::remove_dir_all(&deleted).map_err(failed("remove", &deleted))
    }
}

#[cfg(test)]
mod tests;
