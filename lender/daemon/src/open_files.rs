//! The limit of open files.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit of open files to the hard limit. The default soft limit of 1024
/// protects users of `select()`, which farside does not use; one function with 2048
/// vectors has more eventfds.
pub fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(errno) = setrlimit(Resource::Nofile, raised) {
        log::warn!(
            "the limit of open files stays at {}: {errno}; devices with many vectors may need more",
            limit.current.unwrap_or(u64::MAX)
        );
    }
}
