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

/// Changes from root to a user of this process alone. Before threads and rings are created.
pub(super) fn drop_privileges() -> Result<(), ConfineError> {
    if geteuid().is_root() {
        let uid = FIRST_UID + getpid().as_raw().unsigned_abs();
        let (user, group) = (Uid::from_raw(uid), Gid::from_raw(uid));
        let changed = setgroups(&[])
            .and_then(|()| setresgid(group, group, group))
            .and_then(|()| setresuid(user, user, user));
        match changed {
            Ok(()) => {}
            // Root of a user namespace without that uid: no user of the host has it.
            Err(nix::Error::EINVAL) => log::debug!("uid {uid} is not mapped in this namespace"),
            Err(errno) => {
                return Err(ConfineError::User {
                    uid,
                    source: errno.into(),
                });
            }
        }
    }
    // Processes of the same user cannot trace it.
    set_dumpable(false).map_err(|errno| ConfineError::Privileges(errno.into()))
}

/// Restricts all threads of this process.
pub(super) fn confine() -> Result<(), ConfineError> {
    set_no_new_privs().map_err(|errno| ConfineError::Privileges(errno.into()))?;
    let abi = ABI::V6;
    // As far as the kernel has it: the system call filter alone leaves nothing to open.
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))?
        .handle_access(AccessNet::from_all(abi))?
        .scope(Scope::from_all(abi))?
        .create()?
        .restrict_self()?;
    // Of two filters the stricter result counts.
    apply_filter_all_threads(&refusing_open()?)?;
    apply_filter_all_threads(&filter(SeccompAction::KillProcess)?)?;
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
    libc::SYS_fcntl,
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
    libc::SYS_sendto,
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
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rseq,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
];

/// The filter: any other system call has `otherwise` as its result.
fn filter(otherwise: SeccompAction) -> Result<BpfProgram, seccompiler::Error> {
    let when = |conditions: Vec<SeccompCondition>| SeccompRule::new(conditions);
    let argument = |number, operator, value: u64| {
        SeccompCondition::new(number, SeccompCmpArgLen::Dword, operator, value)
    };
    let not_executable = SeccompCmpOp::MaskedEq(libc::PROT_EXEC as u64);
    let of_descriptor = SeccompCmpOp::MaskedEq(libc::AT_EMPTY_PATH as u64);
    let own_pid = getpid().as_raw().unsigned_abs();
    let is = SeccompCmpOp::Eq;
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        ALLOWED.iter().map(|&call| (call, Vec::new())).collect();
    for (call, number, operator, values) in [
        (libc::SYS_mmap, 2, not_executable.clone(), &[0][..]),
        (libc::SYS_mprotect, 2, not_executable, &[0]),
        // Of a descriptor; of a path, it would tell whether that exists.
        (
            libc::SYS_statx,
            2,
            of_descriptor,
            &[libc::AT_EMPTY_PATH as u64],
        ),
        (
            libc::SYS_io_uring_register,
            1,
            is.clone(),
            &[UNREGISTER_FILES],
        ),
        (libc::SYS_prctl, 0, is.clone(), &[libc::PR_SET_NAME as u64]),
        (libc::SYS_tgkill, 0, is.clone(), &[own_pid.into()]),
        (libc::SYS_socketpair, 0, is.clone(), &[libc::AF_UNIX as u64]),
        (
            libc::SYS_ioctl,
            1,
            is,
            // The medium: sectors are discarded by fallocate(2).
            &[libc::FIONBIO, BLKROGET],
        ),
    ] {
        let mut any = Vec::new();
        for &value in values {
            any.push(when(vec![argument(number, operator.clone(), value)?])?);
        }
        rules.insert(call, any);
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
            seccompiler::apply_filter(&filter(eperm).unwrap()).unwrap();
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
