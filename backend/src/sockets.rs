//! The sockets of a VM: from the service manager if it passed them, else created here.

use std::path::{Path, PathBuf};

use farside_daemon::{
    Activated, DeviceId, OwnedListener, SocketGroup, SocketKind, VmName, paths, paths::SocketLayout,
};
use farside_vfio_user::Listener;
use serde::{Deserialize, Serialize};

use crate::{StartError, helper::Helper, links};

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

/// Creates a socket in the VM's directory.
pub(crate) fn bind(
    directory: &Path,
    group: Option<&SocketGroup>,
    name: &SocketName,
) -> Result<OwnedListener, StartError> {
    let path = name.path(directory);
    let listener = OwnedListener::bind(&path, SocketKind::Stream, name.backlog())?;
    if let (Some(group), SocketName::Device(_)) = (group, name) {
        // Only for sockets created here: a service manager that passes sockets also sets up
        // their directory, and this user need not be a member.
        group.admit_into(directory, PARENTS)?;
        group.admit(&path)?;
    }
    Ok(listener)
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
        let socket = self.take_or_bind(name)?;
        if let (SocketLayout::Spdk, SocketName::Device(device)) = (self.layout, name) {
            match &self.helper {
                None => links::add(&self.directory, self.group.as_ref(), device)?,
                Some(helper) => helper.link(device).map_err(StartError::Helper)?,
            }
        }
        Ok(socket)
    }

    fn take_or_bind(&mut self, name: &SocketName) -> Result<OwnedListener, StartError> {
        let path = name.path(&self.directory);
        if let Some(socket) = self.activated.take_path(&path, SocketKind::Stream)? {
            return Ok(socket);
        }
        let Some(helper) = &self.helper else {
            return bind(&self.directory, self.group.as_ref(), name);
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
