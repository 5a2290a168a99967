//! What a worker may do: use the descriptors that it has, and memory.
//!
//! A worker has no file system and no network (Landlock, and no system call that opens or connects
//! anything), cannot start programs, threads or processes, and gains no privileges by any means.
//! Started by root, it has a user of its own.

use std::io;

use farside_daemon::confine::{
    self, Argument, COMMON, ConfineError, Filter, SeccompAction, SystemCalls,
};
use nix::{
    sys::prctl::set_keepcaps,
    unistd::{Gid, Uid, geteuid, getpid, setgroups, setresgid, setresuid},
};
use rustix::thread::CapabilitySet;

/// The uid of a worker is its process id plus this: no other process has it. The range from
/// 1,879,048,192 to 2,147,352,575 is assigned to nobody (systemd, "Users, Groups, UIDs and GIDs").
const FIRST_UID: u32 = 2_000_000_000;

/// `IORING_UNREGISTER_FILES`, with which a ring ends (`linux/io_uring.h`).
const UNREGISTER_FILES: u64 = 3;

/// Whether a block device is read-only (`linux/fs.h`).
const BLKROGET: u64 = 0x125e;

/// What the receiver of a tap interface's frames can do (`linux/if_tun.h`).
const TUNSETOFFLOAD: u64 = libc::TUNSETOFFLOAD;

/// Whether a file that a borrower shares is a function, whose BAR the device is to reach.
const VFIO_INFO: u64 = farside_fabric::GET_DEVICE_INFO as u64;

/// `statx` on a descriptor only: with a path, it would reveal whether that exists.
const EMPTY_PATH: u64 = libc::AT_EMPTY_PATH as u64;

/// What a worker serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A software model.
    Model,
    /// An open function of this host.
    Function,
    /// The device of a vfio-user server.
    Server,
}

impl Kind {
    /// Its requests of ioctl(2).
    fn ioctls(self) -> Vec<u64> {
        match self {
            Self::Model => vec![BLKROGET, TUNSETOFFLOAD, VFIO_INFO],
            Self::Server => vec![VFIO_INFO],
            Self::Function => farside_vfio::requests().to_vec(),
        }
    }

    /// Its system calls, beside those of all workers.
    fn calls(self) -> &'static [i64] {
        match self {
            // The timer of a device with limits.
            Self::Model => &[libc::SYS_timerfd_settime],
            // The eventfds of interrupts that are relayed.
            Self::Function | Self::Server => &[libc::SYS_epoll_create1, libc::SYS_epoll_ctl],
        }
    }
}

/// The user cannot be changed.
#[derive(Debug, thiserror::Error)]
#[error("cannot change from root to uid {uid}")]
pub struct UserChangeError {
    /// The worker's own.
    uid: u32,
    source: io::Error,
}

/// Changes from root to a user of this process alone. Permitted capabilities stay if some are to be
/// kept.
pub(super) fn change_user(keep: CapabilitySet) -> Result<(), UserChangeError> {
    if !geteuid().is_root() {
        return Ok(());
    }
    let uid = FIRST_UID + getpid().as_raw().unsigned_abs();
    let (user, group) = (Uid::from_raw(uid), Gid::from_raw(uid));
    let changed = set_keepcaps(!keep.is_empty())
        .and_then(|()| setgroups(&[]))
        .and_then(|()| setresgid(group, group, group))
        .and_then(|()| setresuid(user, user, user));
    match changed {
        Ok(()) => Ok(()),
        // Root of a user namespace that has no other users, or without CAP_SETUID.
        Err(nix::Error::EINVAL | nix::Error::EPERM) => {
            log::debug!("the worker process stays root, without capabilities: no uid {uid} here");
            Ok(())
        }
        Err(errno) => Err(UserChangeError {
            uid,
            source: errno.into(),
        }),
    }
}

/// Gives up privileges but `keep`, files and the network. Before threads and rings are created.
pub(super) fn give_up_privileges(keep: CapabilitySet) -> Result<(), ConfineError> {
    confine::give_up_privileges(keep)?;
    // The filter of system calls alone leaves nothing to open.
    confine::give_up_paths(&[]).map(drop)
}

/// Restricts the system calls of all threads of this process, which may lock the files `locks`.
pub(super) fn restrict_system_calls(device: Kind, locks: &[u64]) -> Result<(), ConfineError> {
    refusing_open()?.install()?;
    filter(device, locks, SeccompAction::KillProcess)?.install()
}

/// Forbids all threads of this process to send descriptors, once the borrower has those of the
/// lease: with the medium's it would keep access to it after the lease.
pub(super) fn send_no_descriptors() -> Result<(), ConfineError> {
    let calls = SystemCalls::new(&[libc::SYS_sendmsg, libc::SYS_socketpair], &[]);
    calls.refused(SeccompAction::KillProcess)?.install()
}

/// Refuses open(2): the C library reads settings of the kernel at times, and does without.
fn refusing_open() -> Result<Filter, ConfineError> {
    SystemCalls::new(&[libc::SYS_openat], &[]).refused(SeccompAction::Errno(libc::EACCES as u32))
}

/// System calls of a worker beside the common ones.
const ALLOWED: &[i64] = &[
    // Refused by the other filter.
    libc::SYS_openat,
    libc::SYS_getrusage,
    // For eventfds of interrupts that are relayed, a server's requests, and frames of a tap interface.
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    // I/O on the medium.
    libc::SYS_fallocate,
    libc::SYS_fdatasync,
    libc::SYS_fsync,
    libc::SYS_io_uring_enter,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
];

/// The filter: any other system call has `otherwise` as its result.
fn filter(device: Kind, locks: &[u64], otherwise: SeccompAction) -> Result<Filter, ConfineError> {
    let pid = [getpid().as_raw().unsigned_abs().into()];
    let ioctls = device.ioctls();
    let conditional = [
        (libc::SYS_ioctl, 1, Argument::Is(&ioctls)),
        (
            libc::SYS_io_uring_register,
            1,
            Argument::Is(&[UNREGISTER_FILES]),
        ),
        (libc::SYS_newfstatat, 3, Argument::has(&EMPTY_PATH)),
        // Reading limits, not setting them.
        (libc::SYS_prlimit64, 2, Argument::Null),
        (libc::SYS_statx, 2, Argument::has(&EMPTY_PATH)),
    ];
    let mut conditional = [&conditional[..], &confine::common(&pid)].concat();
    if !locks.is_empty() {
        conditional.push((libc::SYS_flock, 0, Argument::Is(locks)));
    }
    SystemCalls::new(&[COMMON, ALLOWED, device.calls()].concat(), &conditional).allowed(otherwise)
}

#[cfg(test)]
mod tests {
    use std::{fs::File, net::TcpStream, process::Command};

    use vm_memory::mmap::{MmapRegion, MmapRegionError};

    use super::*;

    /// What a model that its guest has taken over would try. On a thread: a filter binds the thread
    /// that installs it, and the threads that it starts.
    #[test]
    fn a_confined_thread_opens_starts_and_connects_nothing() {
        let refused = |error: io::Error| error.raw_os_error() == Some(libc::EPERM);
        let confined = std::thread::spawn(move || {
            let null = File::open("/dev/null").unwrap();
            let eperm = SeccompAction::Errno(libc::EPERM as u32);
            refusing_open().unwrap().install_for_thread().unwrap();
            filter(Kind::Function, &[9000], eperm)
                .unwrap()
                .install_for_thread()
                .unwrap();
            let opened = File::open("/dev/null").unwrap_err();
            assert_eq!(opened.kind(), io::ErrorKind::PermissionDenied);
            assert!(refused(TcpStream::connect("127.0.0.1:9").unwrap_err()));
            assert!(refused(Command::new("true").spawn().unwrap_err()));
            let thread = std::thread::Builder::new().spawn(|| ());
            assert!(refused(thread.unwrap_err()));
            assert!(refused(
                nix::sys::signal::kill(getpid(), None).unwrap_err().into()
            ));
            let executable = libc::PROT_READ | libc::PROT_EXEC;
            let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            match MmapRegion::<()>::build(None, 4096, executable, private) {
                Err(MmapRegionError::Mmap(error)) => assert!(refused(error)),
                other => panic!("{other:?}"),
            }
            // The image of a model is locked by the lender.
            let unlocked = rustix::fs::flock(&null, rustix::fs::FlockOperation::Unlock);
            assert_eq!(unlocked, Err(rustix::io::Errno::PERM));
            // What it has stays usable.
            null.try_clone().unwrap();
        });
        confined.join().unwrap();
    }
}
