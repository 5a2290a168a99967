//! What a worker may do: use the descriptors that it has, and memory.
//!
//! A worker has no file system and no network (Landlock, and no system call that opens or connects
//! anything), cannot start programs, threads or processes, and gains no privileges by any means.
//! Started by root, it has a user of its own.

use std::{collections::BTreeMap, io};

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetError,
    Scope,
};
use nix::{
    sys::prctl::{set_dumpable, set_no_new_privs},
    unistd::{Gid, Uid, geteuid, getpid, setgroups, setresgid, setresuid},
};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter_all_threads,
};

/// The uid of a worker is its process id plus this: no other process has it. The range from
/// 1,879,048,192 to 2,147,352,575 is assigned to nobody (systemd, "Users, Groups, UIDs and GIDs").
const FIRST_UID: u32 = 2_000_000_000;

/// `IORING_UNREGISTER_FILES`, with which a ring ends (`linux/io_uring.h`).
const UNREGISTER_FILES: u64 = 3;

/// Whether a block device is read-only (`linux/fs.h`).
const BLKROGET: u64 = 0x125e;

/// What a worker serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A software model.
    Model,
    /// An open function of this host.
    Function,
}

impl Kind {
    /// Its requests of ioctl(2).
    fn ioctls(self) -> Vec<u64> {
        match self {
            Self::Model => vec![BLKROGET],
            Self::Function => farside_vfio::requests().to_vec(),
        }
    }

    /// Its system calls, beside those of all workers.
    fn calls(self) -> &'static [i64] {
        match self {
            Self::Model => &[],
            // The eventfds of interrupts that are relayed.
            Self::Function => &[
                libc::SYS_epoll_create1,
                libc::SYS_epoll_ctl,
                libc::SYS_epoll_pwait,
                libc::SYS_epoll_pwait2,
                #[cfg(target_arch = "x86_64")]
                libc::SYS_epoll_wait,
            ],
        }
    }
}

/// Why a worker cannot be confined.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfineError {
    /// The user cannot be changed.
    #[error("cannot change from root to uid {uid}")]
    User {
        /// The worker's own.
        uid: u32,
        /// The cause.
        source: io::Error,
    },
    /// Privileges by execve(2), or access by ptrace(2).
    #[error("cannot give up privileges")]
    Privileges(#[source] io::Error),
    /// Landlock.
    #[error("cannot give up the file system and the network")]
    Landlock(#[from] RulesetError),
    /// seccomp.
    #[error("cannot restrict system calls")]
    Seccomp(#[from] seccompiler::Error),
}

/// Gives up privileges, files and the network. Before threads and rings are created.
pub(super) fn give_up_privileges() -> Result<(), ConfineError> {
    if geteuid().is_root() {
        change_user()?;
    }
    let failed = |errno: nix::Error| ConfineError::Privileges(errno.into());
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    // The systemd units give none, and refuse capset(2). Ambient ones are among those that are
    // permitted.
    let has_none = capabilities(None).map(|held| held == none);
    if !has_none.map_err(|errno| ConfineError::Privileges(errno.into()))? {
        set_capabilities(None, none).map_err(|errno| ConfineError::Privileges(errno.into()))?;
    }
    set_no_new_privs().map_err(failed)?;
    // Processes of the same user cannot trace it.
    set_dumpable(false).map_err(failed)?;
    let abi = ABI::V6;
    let status = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))?
        .handle_access(AccessNet::from_all(abi))?
        .scope(Scope::from_all(abi))?
        .create()?
        .restrict_self()?;
    // The filter of system calls alone leaves nothing to open.
    log::debug!("Landlock: {:?}", status.ruleset);
    Ok(())
}

/// Changes from root to a user of this process alone.
fn change_user() -> Result<(), ConfineError> {
    let uid = FIRST_UID + getpid().as_raw().unsigned_abs();
    let (user, group) = (Uid::from_raw(uid), Gid::from_raw(uid));
    let changed = setgroups(&[])
        .and_then(|()| setresgid(group, group, group))
        .and_then(|()| setresuid(user, user, user));
    match changed {
        Ok(()) => Ok(()),
        // Root of a user namespace that has no other users, or without CAP_SETUID.
        Err(nix::Error::EINVAL | nix::Error::EPERM) => {
            log::debug!("the worker process stays root, without capabilities: no uid {uid} here");
            Ok(())
        }
        Err(errno) => Err(ConfineError::User {
            uid,
            source: errno.into(),
        }),
    }
}

/// Restricts the system calls of all threads of this process. Of several filters the strictest
/// result counts.
pub(super) fn restrict_system_calls(device: Kind) -> Result<(), ConfineError> {
    apply_filter_all_threads(&refusing_open()?)?;
    apply_filter_all_threads(&filter(device, SeccompAction::KillProcess)?)?;
    Ok(())
}

/// Forbids all threads of this process to send descriptors, once the borrower has those of the
/// lease: with the medium's it would keep access to it after the lease.
pub(super) fn send_no_descriptors() -> Result<(), ConfineError> {
    let rules = [libc::SYS_sendmsg, libc::SYS_socketpair].map(|call| (call, Vec::new()));
    let filter = SeccompFilter::new(
        BTreeMap::from(rules),
        SeccompAction::Allow,
        SeccompAction::KillProcess,
        std::env::consts::ARCH
            .try_into()
            .map_err(seccompiler::Error::Backend)?,
    );
    let filter: BpfProgram = filter
        .and_then(TryInto::try_into)
        .map_err(seccompiler::Error::Backend)?;
    apply_filter_all_threads(&filter)?;
    Ok(())
}

/// Refuses open(2): the C library reads settings of the kernel at times, and does without.
fn refusing_open() -> Result<BpfProgram, seccompiler::Error> {
    let rules = BTreeMap::from([(libc::SYS_openat, Vec::new())]);
    let refused = SeccompAction::Errno(libc::EACCES as u32);
    let arch = std::env::consts::ARCH.try_into()?;
    Ok(SeccompFilter::new(rules, SeccompAction::Allow, refused, arch)?.try_into()?)
}

/// System calls of a worker, whatever their arguments.
const ALLOWED: &[i64] = &[
    // Refused by the other filter.
    libc::SYS_openat,
    // Descriptors that it has: the medium, memory files, eventfds, the broker and the backend.
    libc::SYS_close,
    libc::SYS_dup3,
    libc::SYS_eventfd2,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_ftruncate,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_lseek,
    libc::SYS_memfd_create,
    libc::SYS_ppoll,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_write,
    libc::SYS_writev,
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
    // Memory.
    libc::SYS_brk,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_munmap,
    // Time and scheduling.
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_futex,
    libc::SYS_nanosleep,
    libc::SYS_sched_yield,
    // Threads: the first calls of those that start at this moment, signals, and their end.
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_getpid,
    libc::SYS_getrusage,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rseq,
    libc::SYS_rt_sigreturn,
    // A further filter.
    libc::SYS_seccomp,
    libc::SYS_sched_getaffinity,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
];

/// Commands of fcntl(2).
const FCNTL: &[u64] = &[
    libc::F_DUPFD_CLOEXEC as u64,
    libc::F_GETFD as u64,
    libc::F_GETFL as u64,
    libc::F_ADD_SEALS as u64,
];

/// Options of prctl(2): of a thread that starts, and before a further filter.
const PRCTL: &[u64] = &[libc::PR_SET_NAME as u64, libc::PR_SET_NO_NEW_PRIVS as u64];

/// The filter: any other system call has `otherwise` as its result.
fn filter(device: Kind, otherwise: SeccompAction) -> Result<BpfProgram, seccompiler::Error> {
    let is = SeccompCmpOp::Eq;
    let has = |flag: libc::c_int| SeccompCmpOp::MaskedEq(flag as u64);
    let pid = getpid().as_raw().unsigned_abs();
    let pair = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let ioctls = device.ioctls();
    let allowed = ALLOWED.iter().chain(device.calls());
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        allowed.map(|&call| (call, Vec::new())).collect();
    // (call, number of the argument, its values)
    for (call, number, operator, values) in [
        // No owner of signals, and no other mode of what others use, too.
        (libc::SYS_fcntl, 1, is.clone(), FCNTL),
        (libc::SYS_ioctl, 1, is.clone(), &ioctls),
        (
            libc::SYS_io_uring_register,
            1,
            is.clone(),
            &[UNREGISTER_FILES],
        ),
        (libc::SYS_mmap, 2, has(libc::PROT_EXEC), &[0]),
        (libc::SYS_mprotect, 2, has(libc::PROT_EXEC), &[0]),
        // Of a descriptor; of a path, it would tell whether that exists.
        (
            libc::SYS_newfstatat,
            3,
            has(libc::AT_EMPTY_PATH),
            &[libc::AT_EMPTY_PATH as u64],
        ),
        (
            libc::SYS_statx,
            2,
            has(libc::AT_EMPTY_PATH),
            &[libc::AT_EMPTY_PATH as u64],
        ),
        (libc::SYS_prctl, 0, is.clone(), PRCTL),
        // To the peer of a connection: no address.
        (libc::SYS_sendto, 4, is.clone(), &[0]),
        // Datagrams would reach any socket of the host.
        (libc::SYS_socketpair, 1, is.clone(), &[pair as u64]),
        (libc::SYS_tgkill, 0, is.clone(), &[pid as u64]),
    ] {
        let width = match call {
            libc::SYS_sendto => SeccompCmpArgLen::Qword,
            _ => SeccompCmpArgLen::Dword,
        };
        let rule = |value: &u64| {
            let condition = SeccompCondition::new(number, width.clone(), operator.clone(), *value)?;
            SeccompRule::new(vec![condition])
        };
        let any: Result<_, seccompiler::BackendError> = values.iter().map(rule).collect();
        rules.insert(call, any?);
    }
    let arch = std::env::consts::ARCH.try_into()?;
    let filter = SeccompFilter::new(rules, otherwise, SeccompAction::Allow, arch)?;
    Ok(filter.try_into()?)
}

#[cfg(test)]
mod tests {
    use std::{fs::File, net::TcpStream, process::Command};

    use super::*;

    /// What a model that its guest has taken over would try. On a thread: a filter binds the thread
    /// that installs it, and the threads that it starts.
    #[test]
    fn a_confined_thread_opens_starts_and_connects_nothing() {
        let refused = |error: io::Error| error.raw_os_error() == Some(libc::EPERM);
        let confined = std::thread::spawn(move || {
            let null = File::open("/dev/null").unwrap();
            let eperm = SeccompAction::Errno(libc::EPERM as u32);
            seccompiler::apply_filter(&refusing_open().unwrap()).unwrap();
            seccompiler::apply_filter(&filter(Kind::Function, eperm).unwrap()).unwrap();
            let opened = File::open("/dev/null").unwrap_err();
            assert_eq!(opened.kind(), io::ErrorKind::PermissionDenied);
            assert!(refused(TcpStream::connect("127.0.0.1:9").unwrap_err()));
            assert!(refused(Command::new("true").spawn().unwrap_err()));
            let thread = std::thread::Builder::new().spawn(|| ());
            assert!(refused(thread.unwrap_err()));
            assert!(refused(
                nix::sys::signal::kill(getpid(), None).unwrap_err().into()
            ));
            // What it has stays usable.
            null.try_clone().unwrap();
        });
        confined.join().unwrap();
    }
}
