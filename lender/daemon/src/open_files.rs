//! The limit of open files, and those that are open at the start.

use std::{fs, io, os::fd::RawFd};

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

/// Closes all descriptors but the standard streams: those that the parent process itself inherited
/// without close-on-exec. Call it before anything is opened.
///
/// # Errors
/// `/proc` is not mounted.
pub fn close_inherited() -> io::Result<()> {
    let open = fs::read_dir("/proc/self/fd")?
        .map(|entry| Ok(entry?.file_name()))
        .collect::<io::Result<Vec<_>>>()?;
    let numbers = open
        .iter()
        .filter_map(|name| name.to_str()?.parse::<RawFd>().ok());
    for number in numbers.filter(|number| *number > libc::STDERR_FILENO) {
        // Fails for the directory, which is closed.
        let _ = nix::unistd::close(number);
    }
    Ok(())
}
