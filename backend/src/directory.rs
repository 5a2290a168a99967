//! The directory of a VM's sockets, which belongs to one backend at a time.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use farside_daemon::{FileLock, LockError, VmName, paths, paths::SocketLayout};
use farside_error_chain::Chain;

use crate::{
    StartError,
    helper::{Helper, Removed},
    links,
};

/// The VM's directory, held by a lock on a file in it. Drop removes the file, and the directory if
/// it is then empty, by the helper of a backend that has one.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    lock: PathBuf,
    layout: SocketLayout,
    helper: Option<Helper>,
    _held: FileLock,
}

impl Directory {
    /// Creates the directory and locks it.
    pub(crate) fn hold(
        vm: &VmName,
        directory: &Path,
        layout: SocketLayout,
        helper: Option<Helper>,
    ) -> Result<Self, StartError> {
        let (path, lock) = (directory.to_owned(), directory.join("lock"));
        loop {
            paths::create_directory(&path).map_err(at(&path))?;
            match FileLock::take(&lock, Duration::ZERO) {
                Ok(_held) => {
                    return Ok(Self {
                        path,
                        lock,
                        layout,
                        helper,
                        _held,
                    });
                }
                Err(LockError::Held(_)) => {
                    return Err(StartError::Running {
                        vm: vm.to_owned(),
                        directory: path,
                    });
                }
                // Its previous owner has just removed it.
                Err(LockError::System(error)) if error.kind() == io::ErrorKind::NotFound => {}
                Err(LockError::System(error)) => return Err(at(&lock)(error)),
            }
        }
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if self.layout == SocketLayout::Spdk {
            let removed = match &self.helper {
                Some(helper) => helper.remove(Removed::Links),
                None => links::remove_all(&self.path),
            };
            if let Err(error) = removed {
                log::warn!(
                    "links in {} are left: {}",
                    self.path.display(),
                    Chain(&error)
                );
            }
        }
        if let Err(error) = std::fs::remove_file(&self.lock) {
            log::warn!("cannot remove {}: {error}", self.lock.display());
        }
        let Some(helper) = &self.helper else {
            // Fails if the directory still holds QEMU's monitor or sockets of the service manager.
            let _ = std::fs::remove_dir(&self.path);
            return;
        };
        if let Err(error) = helper.remove(Removed::Directory) {
            log::warn!("{} is left: {}", self.path.display(), Chain(&error));
        }
    }
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> StartError {
    let path = path.to_owned();
    |source| StartError::Path { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holds_it_and_leaves_nothing() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("web1");
        let held =
            Directory::hold(&"web1".parse().unwrap(), &path, SocketLayout::Plain, None).unwrap();
        let second = Directory::hold(&"web1".parse().unwrap(), &path, SocketLayout::Plain, None)
            .unwrap_err();
        assert!(matches!(second, StartError::Running { .. }), "{second}");
        drop(held);
        assert!(!path.exists());
    }

    #[test]
    fn what_others_have_in_it_stays() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("web1");
        let held =
            Directory::hold(&"web1".parse().unwrap(), &path, SocketLayout::Plain, None).unwrap();
        std::fs::File::create(path.join("qmp")).unwrap();
        drop(held);
        let left: Vec<_> = std::fs::read_dir(&path).unwrap().collect();
        assert_eq!(left.len(), 1);
        drop(Directory::hold(&"web1".parse().unwrap(), &path, SocketLayout::Plain, None).unwrap());
    }
}
