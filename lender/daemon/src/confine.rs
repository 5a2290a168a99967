//! Confinement of a process: it gives up privileges, paths and system calls that it does not need.
//!
//! Privileges and paths belong to a thread, and the threads that it starts inherit the loss: give
//! them up before threads are started. System calls are restricted for all threads at once.

use std::{collections::BTreeMap, io, path::PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope, path_beneath_rules,
};
use nix::sys::prctl::{set_dumpable, set_no_new_privs};
use rustix::{
    process::{Resource, Rlimit, setrlimit},
    thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities},
};
use seccompiler::{
    BackendError, BpfProgram, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter_all_threads,
};

pub use seccompiler::SeccompAction;

/// A process cannot be confined.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfineError {
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

impl ConfineError {
    /// Whether the kernel has no system call filters.
    pub fn is_unsupported(&self) -> bool {
        let Self::Seccomp(seccompiler::Error::Prctl(error) | seccompiler::Error::Seccomp(error)) =
            self
        else {
            return false;
        };
        matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL))
    }
}

/// A right to a file, or to all files below a directory, that a confined process keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// Reading files.
    Read,
    /// Removing files.
    Remove,
}

impl Right {
    fn access(self) -> AccessFs {
        match self {
            Self::Read => AccessFs::ReadFile,
            Self::Remove => AccessFs::RemoveFile,
        }
    }
}

/// If this process may exceed its limit of locked memory (CAP_IPC_LOCK), as a guest's memory can,
/// removes that limit, so that it needs no capability. Returns the capability if that is refused
/// (without CAP_SYS_RESOURCE), else none.
pub fn locking() -> CapabilitySet {
    let held = capabilities(None).map_or(CapabilitySet::empty(), |held| held.effective);
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    match held.contains(CapabilitySet::IPC_LOCK) && setrlimit(Resource::Memlock, unlimited).is_err()
    {
        true => CapabilitySet::IPC_LOCK,
        false => CapabilitySet::empty(),
    }
}

/// Gives up privileges: new ones by execve(2), being traced by processes of the same user, and, last,
/// all capabilities of this thread but `keep`.
///
/// # Errors
/// [`ConfineError::Privileges`].
pub fn give_up_privileges(keep: CapabilitySet) -> Result<(), ConfineError> {
    set_no_new_privs()
        .and_then(|()| set_dumpable(false))
        .map_err(|errno| ConfineError::Privileges(errno.into()))?;
    let kept = CapabilitySets {
        effective: keep,
        permitted: keep,
        inheritable: CapabilitySet::empty(),
    };
    // The systemd units give none, and refuse capset(2). Ambient ones are among those that are
    // permitted and inheritable.
    match capabilities(None) {
        Ok(held) if held == kept => Ok(()),
        Ok(_) => set_capabilities(None, kept),
        Err(errno) => Err(errno),
    }
    .map_err(|errno| ConfineError::Privileges(errno.into()))
}

/// Gives up the file system apart from `kept`, TCP, and abstract UNIX sockets and signals of
/// processes outside, as far as the kernel's Landlock has them. Paths that do not exist are ignored.
/// Returns whether the kernel has Landlock.
///
/// # Errors
/// [`ConfineError::Landlock`].
pub fn give_up_paths(kept: &[(PathBuf, Right)]) -> Result<bool, ConfineError> {
    let abi = ABI::V6;
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))?
        .handle_access(AccessNet::from_all(abi))?
        .scope(Scope::from_all(abi))?
        .create()?;
    for (path, right) in kept {
        rules = rules.add_rules(path_beneath_rules([path], right.access()))?;
    }
    let status = rules.restrict_self()?;
    log::debug!("Landlock: {:?}", status.ruleset);
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

/// A condition on an argument of a system call.
#[derive(Clone, Copy, Debug)]
pub enum Argument<'a> {
    /// It is one of these.
    Is(&'a [u64]),
    /// The bits of `mask` have one of these values.
    Masked(u64, &'a [u64]),
    /// It is a null pointer.
    Null,
}

impl<'a> Argument<'a> {
    /// It has this flag.
    pub const fn has(flag: &'a u64) -> Self {
        Self::Masked(*flag, std::slice::from_ref(flag))
    }

    /// It does not have this flag.
    pub const fn has_not(flag: u64) -> Self {
        Self::Masked(flag, &[0])
    }

    fn rules(self, number: u8) -> Result<Vec<SeccompRule>, BackendError> {
        let (operator, width, values): (_, _, &[u64]) = match self {
            Self::Is(values) => (SeccompCmpOp::Eq, SeccompCmpArgLen::Dword, values),
            Self::Masked(mask, values) => (
                SeccompCmpOp::MaskedEq(mask),
                SeccompCmpArgLen::Dword,
                values,
            ),
            Self::Null => (SeccompCmpOp::Eq, SeccompCmpArgLen::Qword, &[0]),
        };
        let rule = |value: &u64| {
            let condition = SeccompCondition::new(number, width.clone(), operator.clone(), *value)?;
            SeccompRule::new(vec![condition])
        };
        values.iter().map(rule).collect()
    }
}

/// System calls: those with any arguments, and those with a condition on the argument of that number.
#[derive(Clone, Debug, Default)]
pub struct SystemCalls<'a> {
    calls: Vec<i64>,
    conditional: Vec<(i64, u8, Argument<'a>)>,
}

impl<'a> SystemCalls<'a> {
    /// These.
    pub fn new(calls: &[i64], conditional: &[(i64, u8, Argument<'a>)]) -> Self {
        Self {
            calls: calls.to_vec(),
            conditional: conditional.to_vec(),
        }
    }

    /// The filter that allows these; any other one has `otherwise` as its result.
    ///
    /// # Errors
    /// [`ConfineError::Seccomp`].
    pub fn allowed(self, otherwise: SeccompAction) -> Result<Filter, ConfineError> {
        self.filter(otherwise, SeccompAction::Allow)
    }

    /// The filter that has `refused` as the result of these, and allows others.
    ///
    /// # Errors
    /// [`ConfineError::Seccomp`].
    pub fn refused(self, refused: SeccompAction) -> Result<Filter, ConfineError> {
        self.filter(SeccompAction::Allow, refused)
    }

    fn filter(self, others: SeccompAction, these: SeccompAction) -> Result<Filter, ConfineError> {
        let built = self.build(others, these);
        Ok(Filter(built.map_err(seccompiler::Error::Backend)?))
    }

    fn build(
        self,
        others: SeccompAction,
        these: SeccompAction,
    ) -> Result<BpfProgram, BackendError> {
        let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
        for (call, number, argument) in self.conditional {
            rules
                .entry(call)
                .or_default()
                .extend(argument.rules(number)?);
        }
        for call in self.calls {
            // No rules: any arguments.
            let conditions = rules.insert(call, Vec::new());
            debug_assert!(
                conditions.is_none_or(|it| it.is_empty()),
                "system call {call} has conditions, and has none"
            );
        }
        let arch = std::env::consts::ARCH.try_into()?;
        SeccompFilter::new(rules, others, these, arch)?.try_into()
    }
}

/// A filter of system calls. Of several filters the strictest result counts.
#[derive(Clone, Debug)]
pub struct Filter(BpfProgram);

impl Filter {
    /// Installs it for all threads of this process.
    ///
    /// # Errors
    /// [`ConfineError::Seccomp`].
    pub fn install(&self) -> Result<(), ConfineError> {
        Ok(apply_filter_all_threads(&self.0)?)
    }

    /// Installs it for this thread and the threads that it starts.
    ///
    /// # Errors
    /// [`ConfineError::Seccomp`].
    pub fn install_for_thread(&self) -> Result<(), ConfineError> {
        Ok(seccompiler::apply_filter(&self.0)?)
    }
}

/// System calls of every confined process: the descriptors that it has, memory, time, and what the C
/// library does for threads.
pub const COMMON: &[i64] = &[
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
    // A further filter.
    libc::SYS_seccomp,
    libc::SYS_sched_getaffinity,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
];

/// Commands of fcntl(2): no owner of signals, and no other mode of what others use, too.
const FCNTL: &[u64] = &[
    libc::F_DUPFD_CLOEXEC as u64,
    libc::F_GETFD as u64,
    libc::F_GETFL as u64,
    libc::F_ADD_SEALS as u64,
    libc::F_GET_SEALS as u64,
];

/// Options of prctl(2): of a thread that starts, and before a further filter.
const PRCTL: &[u64] = &[libc::PR_SET_NAME as u64, libc::PR_SET_NO_NEW_PRIVS as u64];

/// The type of [socketpair(2)](libc::socketpair): datagrams would reach any socket of the host.
const PAIR: &[u64] = &[(libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) as u64];

/// [`COMMON`] system calls with conditions. `pid` is this process.
pub fn common(pid: &[u64; 1]) -> [(i64, u8, Argument<'_>); 7] {
    [
        (libc::SYS_fcntl, 1, Argument::Is(FCNTL)),
        (libc::SYS_mmap, 2, Argument::has_not(libc::PROT_EXEC as u64)),
        (
            libc::SYS_mprotect,
            2,
            Argument::has_not(libc::PROT_EXEC as u64),
        ),
        (libc::SYS_prctl, 0, Argument::Is(PRCTL)),
        // To the peer of a connection: no address.
        (libc::SYS_sendto, 4, Argument::Null),
        (libc::SYS_socketpair, 1, Argument::Is(PAIR)),
        (libc::SYS_tgkill, 0, Argument::Is(pid)),
    ]
}
