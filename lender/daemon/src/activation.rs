//! Listening sockets that the service manager created (`sd_listen_fds(3)`).
//!
//! The daemon identifies them by address, not by order or name. An unused socket is a
//! mistake in a unit file, and reported as an error.

use std::{
    fmt, io,
    net::SocketAddr,
    os::{
        fd::{OwnedFd, RawFd},
        unix::{ffi::OsStrExt, fs::MetadataExt},
    },
    path::{Path, PathBuf},
};

use listenfd::ListenFd;
use rustix::{
    io::{Errno, fcntl_dupfd_cloexec},
    net::{SocketAddrAny, SocketAddrUnix, getsockname, sockopt},
};

use crate::OwnedListener;

/// A socket's address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// A path.
    Path(PathBuf),
    /// A TCP port.
    Port(SocketAddr),
}

/// The type of a UNIX socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketKind {
    /// `SOCK_STREAM`: vfio-user, status.
    Stream,
    /// `SOCK_SEQPACKET`: a lender's socket.
    SeqPacket,
}

/// A socket from the service manager.
#[derive(Debug)]
struct Socket {
    fd: OwnedFd,
    at: Endpoint,
    kind: SocketKind,
}

/// Listening sockets from the service manager that have not been taken.
#[derive(Debug, Default)]
pub struct Activated(Vec<Socket>);

/// Why a descriptor from the service manager cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages document the fields")]
pub enum ActivationError {
    /// Not a socket, or of an unsupported type.
    #[error(
        "descriptor {number} from the service manager ($LISTEN_FDS) is not a listening UNIX or TCP socket: {why}; use only ListenStream= and ListenSequentialPacket= in a socket unit of farside, with Accept=no"
    )]
    Foreign { number: usize, why: String },
    /// Expected address, wrong type.
    #[error(
        "the service manager's socket at {path} must be {wanted}=, not {found}=: fix the socket unit, and restart it",
        path = path.display()
    )]
    Kind {
        path: PathBuf,
        wanted: SocketKind,
        found: SocketKind,
    },
    /// The path was removed.
    #[error(
        "the service manager listens at {path}, but that path was removed and is unreachable: restart the socket unit",
        path = path.display()
    )]
    Lost { path: PathBuf },
    /// The daemon has no socket at this address.
    #[error(
        "the service manager listens at {at}, which is not one of {wanted}: remove it from the socket unit (`systemctl cat` shows it), or run `systemctl daemon-reload` and restart the socket unit if the configuration has changed"
    )]
    Unwanted { at: Endpoint, wanted: String },
    /// A system call failed.
    #[error("descriptor {number} from the service manager ($LISTEN_FDS) cannot be used")]
    System { number: usize, source: io::Error },
}

impl Activated {
    /// Takes the sockets that the service manager passed to this process, if any. Call
    /// once, before other threads exist: it removes the variables from the environment.
    pub fn from_env() -> Result<Self, ActivationError> {
        let mut given = ListenFd::from_env();
        (0..given.len())
            .map(|index| take(&mut given, index))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// Gives the sockets' descriptors numbers above `number`, for others to have theirs.
    ///
    /// # Errors
    /// Those of fcntl(2).
    pub fn move_above(&mut self, number: RawFd) -> io::Result<()> {
        for socket in &mut self.0 {
            socket.fd = fcntl_dupfd_cloexec(&socket.fd, number.saturating_add(1))?;
        }
        Ok(())
    }

    /// Takes the socket that listens at `path`, if there is one.
    pub fn take_path(
        &mut self,
        path: &Path,
        kind: SocketKind,
    ) -> Result<Option<OwnedListener>, ActivationError> {
        let here = |socket: &Socket| matches!(&socket.at, Endpoint::Path(at) if same(at, path));
        let Some(index) = self.0.iter().position(here) else {
            return Ok(None);
        };
        let found = self.0.swap_remove(index);
        if let Err(error) = std::fs::symlink_metadata(path)
            && error.kind() == io::ErrorKind::NotFound
        {
            return Err(ActivationError::Lost {
                path: path.to_owned(),
            });
        }
        match found.kind == kind {
            true => Ok(Some(OwnedListener::adopt(found.fd, path))),
            false => Err(ActivationError::Kind {
                path: path.to_owned(),
                wanted: kind,
                found: found.kind,
            }),
        }
    }

    /// Takes all sockets that listen at TCP ports.
    pub fn take_ports(&mut self) -> Vec<(OwnedFd, SocketAddr)> {
        let mut ports = Vec::new();
        for socket in std::mem::take(&mut self.0) {
            match socket.at {
                Endpoint::Port(at) => ports.push((socket.fd, at)),
                Endpoint::Path(_) => self.0.push(socket),
            }
        }
        ports
    }

    /// Fails if a socket has not been taken. `wanted` describes the daemon's sockets, such
    /// as "the sockets of VM web1".
    pub fn finish(self, wanted: &str) -> Result<(), ActivationError> {
        match self.0.into_iter().next() {
            None => Ok(()),
            Some(socket) => Err(ActivationError::Unwanted {
                at: socket.at,
                wanted: wanted.to_owned(),
            }),
        }
    }
}

/// Takes the descriptor at `index` and checks it.
fn take(given: &mut ListenFd, index: usize) -> Result<Socket, ActivationError> {
    // SD_LISTEN_FDS_START is 3.
    let number = index + 3;
    let foreign = |why: String| ActivationError::Foreign { number, why };
    let system = |errno: Errno| ActivationError::System {
        number,
        source: errno.into(),
    };
    let mut last = String::new();
    for (family, kind) in [
        (libc::AF_UNIX, SocketKind::Stream),
        (libc::AF_UNIX, SocketKind::SeqPacket),
        (libc::AF_INET, SocketKind::Stream),
    ] {
        let fd = match given.take_custom::<OwnedFd>(index, family, kind.raw(), kind.unit_key()) {
            Ok(Some(fd)) => fd,
            Ok(None) => break,
            Err(error) => {
                last = error.to_string();
                continue;
            }
        };
        if !sockopt::socket_acceptconn(&fd).map_err(system)? {
            return Err(foreign("it does not listen".into()));
        }
        let address = getsockname(&fd).map_err(system)?;
        let at = endpoint(&address).map_err(foreign)?;
        // Another process may accept a connection between poll(2) and accept(2).
        rustix::io::ioctl_fionbio(&fd, true).map_err(system)?;
        return Ok(Socket { fd, at, kind });
    }
    Err(foreign(last))
}

fn endpoint(address: &SocketAddrAny) -> Result<Endpoint, String> {
    if let Ok(at) = SocketAddr::try_from(address.clone()) {
        return Ok(Endpoint::Port(at));
    }
    match SocketAddrUnix::try_from(address.clone()) {
        Ok(unix) => match unix.path_bytes() {
            Some(path) => Ok(Endpoint::Path(std::ffi::OsStr::from_bytes(path).into())),
            None => Err("it has no path in the file system".into()),
        },
        Err(errno) => Err(format!("unsupported address family ({errno})")),
    }
}

/// Whether two paths name the same file, for example through /var/run and /run.
fn same(a: &Path, b: &Path) -> bool {
    let identity = |path| {
        let meta = std::fs::symlink_metadata(path).ok()?;
        Some((meta.dev(), meta.ino()))
    };
    a == b || identity(a).is_some_and(|a| identity(b) == Some(a))
}

impl SocketKind {
    fn raw(self) -> libc::c_int {
        match self {
            Self::Stream => libc::SOCK_STREAM,
            Self::SeqPacket => libc::SOCK_SEQPACKET,
        }
    }

    fn unit_key(self) -> &'static str {
        match self {
            Self::Stream => "ListenStream",
            Self::SeqPacket => "ListenSequentialPacket",
        }
    }
}

impl fmt::Display for SocketKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.unit_key())
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Port(at) => write!(f, "tcp:{at}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn listening(at: &Path) -> Activated {
        let fd = UnixListener::bind(at).unwrap().into();
        let address = getsockname(&fd).unwrap();
        Activated(vec![Socket {
            at: endpoint(&address).unwrap(),
            fd,
            kind: SocketKind::Stream,
        }])
    }

    #[test]
    fn a_socket_is_found_by_any_path_to_it() {
        let directory = tempfile::tempdir().unwrap();
        let (path, link) = (
            directory.path().join("run/s"),
            directory.path().join("link"),
        );
        std::fs::create_dir(directory.path().join("run")).unwrap();
        std::os::unix::fs::symlink("run", &link).unwrap();
        let mut activated = listening(&path);
        let other = directory.path().join("t");
        assert!(
            activated
                .take_path(&other, SocketKind::Stream)
                .unwrap()
                .is_none()
        );
        let found = activated
            .take_path(&link.join("s"), SocketKind::Stream)
            .unwrap();
        assert!(found.is_some());
        activated.finish("the sockets of a test").unwrap();
    }

    #[test]
    fn an_unused_socket_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let error = listening(&path)
            .finish("the sockets of VM web1")
            .unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains(path.to_str().unwrap()) && text.contains("VM web1"),
            "{text}"
        );
    }

    #[test]
    fn the_wrong_type_and_a_removed_path_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let wrong = listening(&path)
            .take_path(&path, SocketKind::SeqPacket)
            .unwrap_err();
        assert!(
            wrong.to_string().contains("ListenSequentialPacket="),
            "{wrong}"
        );
        std::fs::remove_file(&path).unwrap();
        let mut activated = listening(&path);
        std::fs::remove_file(&path).unwrap();
        let gone = activated.take_path(&path, SocketKind::Stream).unwrap_err();
        assert!(matches!(gone, ActivationError::Lost { .. }), "{gone}");
    }

    #[test]
    fn ports_are_taken_together() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let fd = OwnedFd::from(listener);
        let address = getsockname(&fd).unwrap();
        assert_eq!(endpoint(&address), Ok(Endpoint::Port(at)));
        let mut activated = Activated(vec![Socket {
            at: Endpoint::Port(at),
            fd,
            kind: SocketKind::Stream,
        }]);
        assert_eq!(activated.take_ports()[0].1, at);
        activated.finish("nothing").unwrap();
    }
}
