//! Confinement of threads of this process.

use std::io::{self, Write};

use farside_daemon::confine;
use rustix::{
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities},
};

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
