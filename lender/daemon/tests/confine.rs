//! Confinement of threads of this process.

use std::{
    ffi::c_void,
    io::{self, Write},
    ptr,
};

use farside_daemon::confine::{self, COMMON, SeccompAction, SystemCalls};
use rustix::{
    process::{Resource, Rlimit, getpid, getrlimit, setrlimit},
    thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities},
};

/// Result of a system call that was made with these arguments.
fn checked(result: i64) -> io::Result<i64> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}

fn map(protection: i32) -> io::Result<*mut c_void> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping, where the kernel wants it.
    let mapped = unsafe { libc::mmap(ptr::null_mut(), 4096, protection, flags, -1, 0) };
    checked(mapped as i64).map(|_| mapped)
}

fn protect(page: *mut c_void, protection: i32) -> io::Result<()> {
    // SAFETY: `page` was mapped by `map`, and nothing refers to it.
    checked(unsafe { libc::mprotect(page, 4096, protection) }.into()).map(drop)
}

/// Backend and worker have these calls, with these conditions.
#[test]
fn memory_of_a_confined_thread_is_never_executable() {
    const DATA: i32 = libc::PROT_READ | libc::PROT_WRITE;
    const CODE: i32 = libc::PROT_READ | libc::PROT_EXEC;
    let confined = || {
        let filled = map(DATA).unwrap();
        protect(filled, CODE).unwrap();
        map(CODE).unwrap();

        let pid = [getpid().as_raw_nonzero().get() as u64];
        let calls = SystemCalls::new(COMMON, &confine::common(&pid));
        let eperm = SeccompAction::Errno(libc::EPERM as u32);
        let filter = calls.allowed(eperm).unwrap();
        confine::give_up_privileges(CapabilitySet::empty()).unwrap();
        filter.install_for_thread().unwrap();

        let filled = map(DATA).unwrap();
        protect(filled, libc::PROT_READ).unwrap();
        for protection in [CODE, DATA | libc::PROT_EXEC, libc::PROT_EXEC] {
            let refused = |error: io::Error| error.raw_os_error() == Some(libc::EPERM);
            assert!(refused(map(protection).unwrap_err()));
            assert!(refused(protect(filled, protection).unwrap_err()));
            // SAFETY: as in `protect`.
            let by_key =
                unsafe { libc::syscall(libc::SYS_pkey_mprotect, filled, 4096, protection, -1) };
            assert!(refused(checked(by_key).unwrap_err()));
        }
    };
    std::thread::scope(|scope| scope.spawn(confined).join().unwrap());
}

#[test]
fn a_limit_of_locked_memory_that_cannot_be_removed_keeps_its_capability() {
    let lock = CapabilitySet::IPC_LOCK;
    let held = capabilities(None).unwrap().permitted;
    if !held.contains(lock) {
        // For `cargo xtask test`: libtest captures `eprintln!`.
        let reason = "needs CAP_IPC_LOCK";
        let test = "a_limit_of_locked_memory_that_cannot_be_removed_keeps_its_capability";
        return writeln!(io::stdout().lock(), "skipped: {test}: {reason}").unwrap();
    }
    let limit = Some(64 << 10);
    let limited = || {
        let (current, maximum) = (limit, limit);
        setrlimit(Resource::Memlock, Rlimit { current, maximum }).unwrap();
    };
    let has = |set: CapabilitySet| {
        let sets = CapabilitySets {
            effective: set,
            permitted: set,
            inheritable: CapabilitySet::empty(),
        };
        set_capabilities(None, sets).unwrap();
    };
    // Capabilities belong to a thread, the limit to the process.
    let confined = || {
        if held.contains(CapabilitySet::SYS_RESOURCE) {
            limited();
            assert_eq!(confine::locking(), CapabilitySet::empty());
            assert_eq!(getrlimit(Resource::Memlock).maximum, None);
        }
        limited();
        has(lock);
        assert_eq!(confine::locking(), lock);
        confine::give_up_privileges(lock).unwrap();
        assert_eq!(capabilities(None).unwrap().effective, lock);
        has(CapabilitySet::empty());
        assert_eq!(confine::locking(), CapabilitySet::empty());
        assert_eq!(getrlimit(Resource::Memlock).maximum, limit);
    };
    std::thread::scope(|scope| scope.spawn(confined).join().unwrap());
}
