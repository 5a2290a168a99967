//! The listening UNIX sockets of this network namespace, without connecting to any.
//!
//! By netlink (`sock_diag(7)`), which names the file; where the kernel has none of
//! that, by `/proc/net/unix`, which has paths, and those of other mount
//! namespaces and `chroot`s among them.

use std::{collections::HashSet, os::unix::fs::MetadataExt, path::Path};

use rustix::{
    fs::{major, minor},
    net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send,
        socket_with, sockopt,
    },
};

use crate::Host;

/// A listening socket's flag in `/proc/net/unix` (`__SO_ACCEPTCON`).
const LISTENS: u64 = 1 << 16;

// `linux/netlink.h`, `linux/sock_diag.h`, `linux/unix_diag.h`.
const HEADER: usize = 16;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST_DUMP: u16 = 0x301;
const AF_UNIX: u8 = 1;
/// A bit for each state; `TCP_LISTEN` is 10.
const LISTENING: u32 = 1 << 10;
const UDIAG_SHOW_VFS: u32 = 2;
const UNIX_DIAG_VFS: u16 = 1;
/// `struct unix_diag_msg`, before its attributes.
const MESSAGE: usize = 16;

/// The listening sockets.
pub(super) enum Listeners {
    /// The low half of the file's inode number, and the kernel's device number.
    Files(HashSet<(u32, u32)>),
    /// Paths as they were bound.
    Paths(HashSet<String>),
}

impl Listeners {
    pub(super) fn look(host: &Host) -> Self {
        let asked = (host.root == Path::new("/")).then(ask).flatten();
        asked.map_or_else(
            || Self::Paths(paths(&host.text("proc/net/unix").unwrap_or_default())),
            Self::Files,
        )
    }

    /// Whether the socket at `path` has a listener.
    pub(super) fn at(&self, path: &Path) -> bool {
        match self {
            Self::Paths(paths) => path.to_str().is_some_and(|path| paths.contains(path)),
            Self::Files(files) => std::fs::symlink_metadata(path).is_ok_and(|meta| {
                let device = major(meta.dev()) << 20 | minor(meta.dev());
                // The kernel reports the low half only.
                files.contains(&(meta.ino() as u32, device))
            }),
        }
    }
}

/// `None` if the kernel does not report it.
fn ask() -> Option<HashSet<(u32, u32)>> {
    let flags = SocketFlags::CLOEXEC;
    let kind = SocketType::DGRAM;
    let socket = socket_with(
        AddressFamily::NETLINK,
        kind,
        flags,
        Some(netlink::SOCK_DIAG),
    )
    .ok()?;
    // The kernel answers at once, or not at all.
    let patience = Some(std::time::Duration::from_secs(1));
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, patience).ok()?;
    send(&socket, &request(), SendFlags::empty()).ok()?;
    let mut files = HashSet::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        let (len, _) = recv(&socket, &mut buffer[..], RecvFlags::empty()).ok()?;
        if len == 0 {
            return None;
        }
        if take(buffer.get(..len)?, &mut files)? {
            return Some(files);
        }
    }
}

fn request() -> Vec<u8> {
    let mut request = Vec::new();
    request.extend(40u32.to_ne_bytes());
    request.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    request.extend(NLM_F_REQUEST_DUMP.to_ne_bytes());
    // Number and sender.
    request.extend([0; 8]);
    request.extend([AF_UNIX, 0, 0, 0]);
    request.extend(LISTENING.to_ne_bytes());
    // Any inode, and at the end any cookie.
    request.extend([0; 4]);
    request.extend(UDIAG_SHOW_VFS.to_ne_bytes());
    request.extend([0; 8]);
    request
}

/// Takes what is in one answer. Returns whether it was the last; `None` when it is
/// an error, or malformed.
fn take(mut answer: &[u8], files: &mut HashSet<(u32, u32)>) -> Option<bool> {
    while answer.len() >= HEADER {
        let len = usize::try_from(u32_at(answer, 0)?).ok()?;
        let message = answer.get(HEADER..len)?;
        match u16_at(answer, 4)? {
            NLMSG_DONE => return Some(true),
            NLMSG_ERROR => return None,
            _ => files.extend(file(message)),
        }
        answer = answer.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(false)
}

/// The file of one socket. Abstract ones have none.
fn file(message: &[u8]) -> Option<(u32, u32)> {
    let mut attributes = message.get(MESSAGE..)?;
    while attributes.len() >= 4 {
        let len = usize::from(u16_at(attributes, 0)?);
        let value = attributes.get(4..len)?;
        if u16_at(attributes, 2)? == UNIX_DIAG_VFS {
            return Some((u32_at(value, 0)?, u32_at(value, 4)?));
        }
        attributes = attributes.get(len.next_multiple_of(4)..)?;
    }
    None
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// The paths of listening sockets in `/proc/net/unix`.
fn paths(text: &str) -> HashSet<String> {
    let paths = text.lines().filter_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let flags = u64::from_str_radix(fields.nth(3)?, 16).ok()?;
        let path = fields.nth(3)?;
        // A path with a space is truncated: the caller connects to it instead.
        (flags & LISTENS != 0).then(|| path.to_owned())
    });
    paths.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn the_kernels_list_of_paths() {
        let text = "Num       RefCount Protocol Flags    Type St Inode Path\n\
            ffff8: 00000002 00000000 00010000 0001 01 20051 /run/a\n\
            ffff9: 00000003 00000000 00000000 0001 03 20052 /run/b\n\
            ffffa: 00000002 00000000 00010000 0005 01 20053\n";
        assert_eq!(paths(text), HashSet::from(["/run/a".to_owned()]));
    }

    #[test]
    fn a_path_that_somebody_else_listens_at_elsewhere() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        // As in another chroot: the same path, and not the same file.
        let _elsewhere = UnixListener::bind(&path).unwrap();
        std::fs::rename(&path, directory.path().join("moved")).unwrap();
        drop(UnixListener::bind(&path).unwrap());
        let listeners = Listeners::look(&Host::this());
        if let Listeners::Paths(paths) = &listeners {
            // Indistinguishable without netlink's answer.
            assert!(paths.contains(path.to_str().unwrap()));
            return;
        }
        assert!(listeners.at(&directory.path().join("moved")));
        assert!(!listeners.at(&path) && !listeners.at(Path::new("/no/such")));
    }

    #[test]
    fn answers_that_make_no_sense() {
        let mut files = HashSet::new();
        assert_eq!(take(&[], &mut files), Some(false));
        assert_eq!(take(&[0; 16], &mut files), None);
        assert_eq!(take(&[255; 40], &mut files), None);
        let mut done = [0; 16];
        done[0] = 16;
        done[4] = 3;
        assert_eq!(take(&done, &mut files), Some(true));
        assert_eq!(file(&[255; 30]), None);
        assert!(files.is_empty());
    }
}
