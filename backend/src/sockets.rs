//! The sockets of a VM: those that the service manager has made are taken, the
//! others are made here.

use std::path::{Path, PathBuf};

use farside_daemon::{Activated, OwnedListener, SocketGroup, SocketKind, paths};
use farside_vfio_user::Listener;

use crate::StartError;

/// Directories above a VM's own that members of a socket group have to pass: `vm`,
/// and the runtime directory.
const PARENTS: usize = 2;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 32;

/// Where the VM's sockets come from.
#[derive(Debug)]
pub(crate) struct Sockets {
    directory: PathBuf,
    group: Option<SocketGroup>,
    activated: Activated,
}

impl Sockets {
    /// `directory` is the VM's, which the caller holds.
    pub(crate) fn new(directory: &Path, group: Option<SocketGroup>, activated: Activated) -> Self {
        Self {
            directory: directory.to_owned(),
            group,
            activated,
        }
    }

    /// The socket at which QEMU finds a device.
    pub(crate) fn device(&mut self, device: &str) -> Result<Listener, StartError> {
        let path = self.directory.join(paths::device_socket_name(device));
        if let Some(socket) = self.activated.take_path(&path, SocketKind::Stream)? {
            return Ok(socket.into());
        }
        let listener = Listener::bind(&path)?;
        if let Some(group) = &self.group {
            // Not before: where the service manager made the sockets, it has seen
            // to the directory too, and this user need not be a member.
            group.admit_into(&self.directory, PARENTS)?;
            group.admit(&path)?;
        }
        Ok(listener)
    }

    /// The status socket, which is this user's alone.
    pub(crate) fn status(&mut self) -> Result<OwnedListener, StartError> {
        self.own(paths::STATUS_SOCKET_NAME)
    }

    /// The control socket, which is this user's alone too.
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

    /// An error when the service manager has made a socket that nobody took.
    pub(crate) fn check_all_taken(&mut self, vm: &str) -> Result<(), StartError> {
        let activated = std::mem::take(&mut self.activated);
        activated.finish(&format!(
            "the sockets of VM {vm}, of its devices, its status and its control"
        ))?;
        Ok(())
    }
}
