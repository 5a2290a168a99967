//! The sockets of a VM: from the service manager if it passed them, else created here.

use std::{
    io,
    os::unix::{ffi::OsStrExt, fs::symlink},
    path::{Path, PathBuf},
};

use farside_daemon::{Activated, DeviceId, OwnedListener, SocketGroup, SocketKind, VmName, paths};
use farside_vfio_user::Listener;
use serde::{Deserialize, Serialize};

use crate::{StartError, helper::Helper};

/// Number of parent directories that members of a socket group must be able to traverse: `vm` and
/// the runtime directory.
const PARENTS: usize = 2;

/// The listen backlog of sockets for administrators.
const BACKLOG: i32 = 32;

/// A socket of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SocketName {
    /// The vfio-user socket of a device, which the VM's socket group may connect to.
    Device(DeviceId),
    /// The status socket, accessible to this user only.
    Status,
    /// The control socket, accessible to this user only.
    Control,
}

impl SocketName {
    fn path(&self, directory: &Path) -> PathBuf {
        match self {
            Self::Device(device) => directory.join(paths::device_socket_name(device)),
            Self::Status => directory.join(paths::STATUS_SOCKET_NAME),
            Self::Control => directory.join(paths::CONTROL_SOCKET_NAME),
        }
    }

    fn backlog(&self) -> i32 {
        match self {
            Self::Device(_) => Listener::BACKLOG,
            Self::Status | Self::Control => BACKLOG,
        }
    }
}

/// The names at which clients find the sockets of devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SocketLayout {
    /// `ID.sock`.
    #[default]
    Plain,
    /// That, and `ID.spdk/cntrl` for clients of SPDK, which are given the directory.
    Spdk,
}

/// Creates a socket in the VM's directory.
pub(crate) fn bind(
    directory: &Path,
    group: Option<&SocketGroup>,
    layout: SocketLayout,
    name: &SocketName,
) -> Result<OwnedListener, StartError> {
    let path = name.path(directory);
    let listener = OwnedListener::bind(&path, SocketKind::Stream, name.backlog())?;
    let SocketName::Device(device) = name else {
        return Ok(listener);
    };
    if let Some(group) = group {
        // Only for sockets created here: a service manager that passes sockets also sets up
        // their directory, and this user need not be a member.
        group.admit_into(directory, PARENTS)?;
        group.admit(&path)?;
    }
    if layout == SocketLayout::Spdk {
        let inner = directory.join(paths::spdk_directory_name(device));
        link(&inner, device).map_err(|source| StartError::Path {
            path: inner.clone(),
            source,
        })?;
        group.map_or(Ok(()), |group| group.admit_into(&inner, 0))?;
    }
    Ok(listener)
}

/// Has the device's socket in the directory `inner` of the VM's directory, too.
fn link(inner: &Path, device: &DeviceId) -> io::Result<()> {
    let ignoring = |kind, done: io::Result<()>| match done {
        Err(error) if error.kind() != kind => Err(error),
        _ => Ok(()),
    };
    ignoring(io::ErrorKind::AlreadyExists, std::fs::create_dir(inner))?;
    let link = inner.join(paths::SPDK_SOCKET_NAME);
    ignoring(io::ErrorKind::NotFound, std::fs::remove_file(&link))?;
    symlink(
        Path::new("..").join(paths::device_socket_name(device)),
        link,
    )
}

/// Removes the VM's directory, without its sockets. Fails if it still holds QEMU's monitor or sockets of the service manager.
pub(crate) fn remove_directory(directory: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if entry
            .file_name()
            .as_bytes()
            .ends_with(paths::SPDK_SUFFIX.as_bytes())
        {
            std::fs::remove_file(entry.path().join(paths::SPDK_SOCKET_NAME))?;
            std::fs::remove_dir(entry.path())?;
        }
    }
    std::fs::remove_dir(directory)
}

/// Where the VM's sockets come from.
#[derive(Debug)]
pub(crate) struct Sockets {
    directory: PathBuf,
    group: Option<SocketGroup>,
    layout: SocketLayout,
    activated: Activated,
    helper: Option<Helper>,
}

impl Sockets {
    /// `directory` is the VM's; the caller holds its lock.
    pub(crate) fn new(
        directory: &Path,
        group: Option<SocketGroup>,
        layout: SocketLayout,
        activated: Activated,
        helper: Option<Helper>,
    ) -> Self {
        Self {
            directory: directory.to_owned(),
            group,
            layout,
            activated,
            helper,
        }
    }

    /// Takes a socket from the service manager, else creates it.
    pub(crate) fn open(&mut self, name: &SocketName) -> Result<OwnedListener, StartError> {
        let path = name.path(&self.directory);
        if let Some(socket) = self.activated.take_path(&path, SocketKind::Stream)? {
            if self.layout == SocketLayout::Spdk && matches!(name, SocketName::Device(_)) {
                log::warn!(
                    "{} is the service manager's: where SPDK's clients look for it, its unit has to link it (Symlinks=)",
                    path.display()
                );
            }
            return Ok(socket);
        }
        let Some(helper) = &self.helper else {
            return bind(&self.directory, self.group.as_ref(), self.layout, name);
        };
        let socket = helper.bind(name).map_err(StartError::Helper)?;
        Ok(OwnedListener::take_over(socket, &path, name.backlog())?)
    }

    /// Fails if a socket from the service manager is unused.
    pub(crate) fn check_all_taken(&mut self, vm: &VmName) -> Result<(), StartError> {
        let activated = std::mem::take(&mut self.activated);
        activated.finish(&format!(
            "the sockets of VM {vm}, of its devices, its status and its control"
        ))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_for_spdk_has_the_socket_of_its_device_and_goes_with_the_vms() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("web1");
        std::fs::create_dir(&path).unwrap();
        let name = SocketName::Device("disk0".parse().unwrap());
        // Twice, as after a kill.
        for _ in 0..2 {
            let listener = bind(&path, None, SocketLayout::Spdk, &name).unwrap();
            let client = std::os::unix::net::UnixStream::connect(path.join("disk0.spdk/cntrl"));
            client.unwrap();
            assert!(listener.accept().unwrap().is_some());
            std::mem::forget(listener);
            let _ = std::fs::remove_file(path.join("disk0.sock"));
        }
        remove_directory(&path).unwrap();
        assert!(!path.exists());

        std::fs::create_dir(&path).unwrap();
        drop(bind(&path, None, SocketLayout::Plain, &name).unwrap());
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0);
    }
}
