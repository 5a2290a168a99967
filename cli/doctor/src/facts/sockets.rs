//! farside's runtime directory, and its listening sockets.

use std::{
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Access, access},
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with},
};

use super::listeners::Listeners;
use crate::Host;

/// Maximum depth of sockets below the runtime directory: `vm/NAME/`.
const DEPTH: usize = 2;

/// The runtime directory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Runtime {
    pub(crate) path: PathBuf,
    /// Its owner; `None` where it is not there yet.
    pub(crate) owner: Option<u32>,
    /// Whether every user may replace its entries.
    pub(crate) open: bool,
    /// Whether this user may create it, or sockets in it.
    pub(crate) writable: bool,
    pub(crate) sockets: Vec<Socket>,
}

/// A socket in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Socket {
    pub(crate) path: PathBuf,
    pub(crate) state: State,
}

/// Whether the socket has a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Live,
    /// Nobody does.
    Stale,
    /// We may not connect.
    Denied,
    /// Unknown: connecting failed with another error.
    Unknown,
}

pub(crate) fn look(host: &Host) -> Runtime {
    let listening = Listeners::look(host);
    let mut sockets = Vec::new();
    collect(&host.runtime, DEPTH, &listening, &mut sockets);
    sockets.sort_by(|a, b| a.path.cmp(&b.path));
    let meta = std::fs::metadata(&host.runtime).ok();
    let existing = host.runtime.ancestors().find(|path| path.exists());
    Runtime {
        owner: meta.as_ref().map(|meta| meta.uid()),
        // Writable by others, and not sticky.
        open: meta.is_some_and(|meta| meta.mode() & 0o1002 == 0o002),
        writable: existing
            .is_some_and(|path| access(path, Access::WRITE_OK | Access::EXEC_OK).is_ok()),
        path: host.runtime.clone(),
        sockets,
    }
}

fn collect(directory: &Path, depth: usize, listening: &Listeners, found: &mut Vec<Socket>) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        match entry.file_type() {
            Ok(kind) if kind.is_socket() => {
                // Connecting would start a backend that systemd listens for,
                // and disturb a monitor, so it is the last resort: for
                // sockets of other network namespaces, and stale ones.
                let state = if listening.at(&path) {
                    State::Live
                } else {
                    knock(&path)
                };
                found.push(Socket { path, state });
            }
            Ok(kind) if kind.is_dir() && depth > 0 => collect(&path, depth - 1, listening, found),
            _ => {}
        }
    }
}

fn knock(path: &Path) -> State {
    let Ok(address) = SocketAddrUnix::new(path) else {
        return State::Unknown;
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    for kind in [SocketType::STREAM, SocketType::SEQPACKET] {
        let Ok(socket) = socket_with(AddressFamily::UNIX, kind, flags, None) else {
            return State::Unknown;
        };
        match connect(&socket, &address) {
            Err(Errno::PROTOTYPE) => {}
            // AGAIN: the backlog is full, so there is a listener.
            Ok(()) | Err(Errno::AGAIN) => return State::Live,
            Err(Errno::CONNREFUSED) => return State::Stale,
            Err(Errno::ACCESS | Errno::PERM) => return State::Denied,
            Err(_) => return State::Unknown,
        }
    }
    State::Unknown
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::{UnixDatagram, UnixListener};

    #[test]
    fn a_socket_is_stale_when_nobody_listens() {
        let root = tempfile::tempdir().unwrap();
        let mut host = Host::at(root.path());
        let vm = host.runtime.join("vm/web1");
        std::fs::create_dir_all(&vm).unwrap();
        let live = UnixListener::bind(vm.join("disk0.sock")).unwrap();
        drop(UnixListener::bind(vm.join("status")).unwrap());
        let _other = UnixDatagram::bind(host.runtime.join("other")).unwrap();
        std::fs::write(vm.join("qemu.pid"), "1").unwrap();
        let states = |host: &Host| -> Vec<_> {
            let sockets = look(host).sockets.into_iter();
            sockets
                .map(|socket| {
                    let name = socket
                        .path
                        .file_name()
                        .unwrap()
                        .to_str()
                        .unwrap()
                        .to_owned();
                    (name, socket.state)
                })
                .collect()
        };
        let expected = |disk0| {
            [
                ("other".to_owned(), State::Unknown),
                ("disk0.sock".to_owned(), disk0),
                ("status".to_owned(), State::Stale),
            ]
        };
        // By knocking.
        assert_eq!(states(&host), expected(State::Live));
        // With the kernel's list no connection is attempted: none is pending.
        drop(live.accept().unwrap());
        host.root = "/".into();
        assert_eq!(states(&host), expected(State::Live));
        live.set_nonblocking(true).unwrap();
        assert_eq!(
            live.accept().unwrap_err().kind(),
            std::io::ErrorKind::WouldBlock
        );
        drop(live);
        assert_eq!(states(&host), expected(State::Stale));
        assert_eq!(look(&host).owner, Some(rustix::process::geteuid().as_raw()));
    }
}
