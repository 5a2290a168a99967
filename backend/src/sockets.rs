//! The sockets of a VM: those that the service manager has made are taken, the
//! others are made here.

use std::{
    io,
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
};

use farside_daemon::{Activated, Kind, SocketGroup, paths};
use farside_vfio_user::Listener;
use rustix::{
    fs::Mode,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with},
};

use crate::StartError;

/// Folders above a VM's own that members of a socket group have to pass: `vm`,
/// and the runtime folder.
const PARENTS: usize = 2;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 32;

/// Where the VM's sockets come from.
#[derive(Debug)]
pub(crate) struct Sockets {
    folder: PathBuf,
    group: Option<SocketGroup>,
    activated: Activated,
}

/// A socket for this user's commands: the one that answers `farside status`, or
/// the control socket.
#[derive(Debug)]
pub(crate) struct StatusSocket {
    pub(crate) listener: UnixListener,
    /// To be removed at the end; nothing, when it is not ours to remove.
    made: Option<PathBuf>,
}

impl Sockets {
    /// `folder` is the VM's, which the caller holds.
    pub(crate) fn new(folder: &Path, group: Option<SocketGroup>, activated: Activated) -> Self {
        Self {
            folder: folder.to_owned(),
            group,
            activated,
        }
    }

    /// The socket at which QEMU finds a device.
    pub(crate) fn device(&mut self, device: &str) -> Result<Listener, StartError> {
        let path = self.folder.join(paths::device_socket_name(device));
        if let Some(socket) = self.activated.take_path(&path, Kind::Stream)? {
            return Ok(Listener::adopt(socket, &path));
        }
        let listener = Listener::bind(&path)?;
        if let Some(group) = &self.group {
            // Not before: where the service manager made the sockets, it has seen
            // to the folder too, and this user need not be a member.
            group.admit_into(&self.folder, PARENTS)?;
            group.admit(&path)?;
        }
        Ok(listener)
    }

    /// The status socket, which is this user's alone.
    pub(crate) fn status(&mut self) -> Result<StatusSocket, StartError> {
        self.own(paths::STATUS_SOCKET_NAME)
    }

    /// The control socket, which is this user's alone too.
    pub(crate) fn control(&mut self) -> Result<StatusSocket, StartError> {
        self.own(paths::CONTROL_SOCKET_NAME)
    }

    fn own(&mut self, name: &str) -> Result<StatusSocket, StartError> {
        let path = self.folder.join(name);
        if let Some(socket) = self.activated.take_path(&path, Kind::Stream)? {
            return Ok(StatusSocket {
                listener: socket.into(),
                made: None,
            });
        }
        StatusSocket::bind(&path).map_err(|source| StartError::Path { path, source })
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

impl StatusSocket {
    /// What is at `path`, in a folder that the caller holds, is a leftover.
    fn bind(path: &Path) -> io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let address = SocketAddrUnix::new(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // Before the bind: Linux makes the path with the socket's mode, so at
        // no time can another user connect.
        rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
        bind(&socket, &address)?;
        let ours = Self {
            listener: socket.into(),
            made: Some(path.to_owned()),
        };
        // From here on a failure removes the path.
        listen(&ours.listener, BACKLOG)?;
        Ok(ours)
    }

    pub(crate) fn accept(&self) -> io::Result<UnixStream> {
        self.listener.accept().map(|(socket, _)| socket)
    }
}

impl Drop for StatusSocket {
    fn drop(&mut self) {
        if let Some(path) = &self.made {
            // Nothing is lost if it stays: the next backend removes it.
            let _ = std::fs::remove_file(path);
        }
    }
}
