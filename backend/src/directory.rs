//! The directory of a VM's sockets, which belongs to one backend at a time.

use std::{
    fs::{File, TryLockError},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use farside_daemon::paths;

use crate::StartError;

/// The VM's directory, held by a lock on a file in it. Dropped, the file goes, and
/// the directory if nothing else is in it.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    lock: PathBuf,
    _file: File,
}

impl Directory {
    /// Makes the directory, and makes it ours.
    pub(crate) fn hold(vm: &str, directory: &Path) -> Result<Self, StartError> {
        let lock = directory.join("lock");
        loop {
            paths::create_directory(directory).map_err(at(directory))?;
            let file = match File::create(&lock) {
                // Its last owner has just removed it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                file => file.map_err(at(&lock))?,
            };
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    return Err(StartError::Running {
                        vm: vm.to_owned(),
                        directory: directory.to_owned(),
                    });
                }
                Err(TryLockError::Error(error)) => return Err(at(&lock)(error)),
            }
            // Its last owner may have removed the file between our opening it
            // and our locking it.
            if is_at(&file, &lock).map_err(at(&lock))? {
                return Ok(Self {
                    path: directory.to_owned(),
                    lock,
                    _file: file,
                });
            }
        }
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.lock) {
            log::warn!("cannot remove {}: {error}", self.lock.display());
        }
        // QEMU's monitor may be in it, or sockets that the service manager made.
        let _ = std::fs::remove_dir(&self.path);
    }
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> StartError {
    let path = path.to_owned();
    |source| StartError::Path { path, source }
}

fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let ours = file.metadata()?;
    match std::fs::symlink_metadata(path) {
        Ok(there) => Ok((there.dev(), there.ino()) == (ours.dev(), ours.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holds_it_and_leaves_nothing() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("web1");
        let held = Directory::hold("web1", &path).unwrap();
        let second = Directory::hold("web1", &path).unwrap_err();
        assert!(matches!(second, StartError::Running { .. }), "{second}");
        drop(held);
        assert!(!path.exists());
    }

    #[test]
    fn what_others_have_in_it_stays() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("web1");
        let held = Directory::hold("web1", &path).unwrap();
        File::create(path.join("qmp")).unwrap();
        drop(held);
        let left: Vec<_> = std::fs::read_dir(&path).unwrap().collect();
        assert_eq!(left.len(), 1);
        drop(Directory::hold("web1", &path).unwrap());
    }
}
