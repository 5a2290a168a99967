//! The sockets of a VM: from the service manager if it passed them, else created here.

use std::path::{Path, PathBuf};

use farside_daemon::{Activated, DeviceId, OwnedListener, SocketGroup, SocketKind, VmName, paths};
use farside_vfio_user::Listener;

use crate::StartError;

/// Number of parent directories that members of a socket group must be able to traverse: `vm` and
/// the runtime directory.
const PARENTS: usize = 2;

/// The listen backlog.
const BACKLOG: i32 = 32;

/// Where the VM's sockets come from.
#[derive(Debug)]
pub(crate) struct Sockets {
    directory: PathBuf,
    group: Option<SocketGroup>,
    activated: Activated,
}

impl Sockets {
    /// `directory` is the VM's; the caller holds its lock.
    pub(crate) fn new(directory: &Path, group: Option<SocketGroup>, activated: Activated) -> Self {
        Self {
            directory: directory.to_owned(),
            group,
            activated,
        }
    }

    /// A device's vfio-user socket.
    pub(crate) fn device(&mut self, device: &DeviceId) -> Result<Listener, StartError> {
        let path = self.directory.join(paths::device_socket_name(device));
        if let Some(socket) = self.activated.take_path(&path, SocketKind::Stream)? {
            return Ok(socket.into());
        }
        let listener = Listener::bind(&path)?;
        if let Some(group) = &self.group {
            // Only for sockets created here: a service manager that passes sockets also sets up
            // their directory, and this user need not be a member.
            group.admit_into(&self.directory, PARENTS)?;
            group.admit(&path)?;
        }
        Ok(listener)
    }

    /// The status socket, accessible to this user only.
    pub(crate) fn status(&mut self) -> Result<OwnedListener, StartError> {
        self.own(paths::STATUS_SOCKET_NAME)
    }

    /// The control socket, accessible to this user only.
    pub(crate) fn control(&mut self) -> Result<OwnedListener, StartError> {
        self.own(paths::CONTROL_SOCKET_NAME)
    }

    fn own(&mut self, name: &str) -> Result<OwnedListener, StartError> {
        let path = self.directory.join(name);
        if let Some(socket) = self.activated.take_path(&path, SocketKind::Stream)? {
            return Ok(socket);
        }
        Ok(OwnedListener::bind(&path, SocketKind::Stream, BACKLOG)?)
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
