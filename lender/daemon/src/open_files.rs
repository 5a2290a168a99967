//! The limit of open files, and those that are open at the start.

use std::{fs, io, os::fd::RawFd};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit of open files to the hard limit. The default soft limit of 1024
/// protects users of `select()`, which farside does not use; one function with 2048
/// vectors has more eventfds.
pub fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    set_limit(Rlimit {
        current: limit.maximum,
        ..limit
    });
}

/// Sets both limits of open files to `most`, or to the hard limit if that is lower: what a process that was taken
/// over can open costs the kernel memory.
pub fn limit_open_files(most: u64) {
    let hard = getrlimit(Resource::Nofile).maximum;
    let most = Some(hard.map_or(most, |hard| hard.min(most)));
    set_limit(Rlimit {
        current: most,
        maximum: most,
    });
}

fn set_limit(wanted: Rlimit) {
    let limit = getrlimit(Resource::Nofile);
    if limit == wanted {
        return;
    }
    if let Err(errno) = setrlimit(Resource::Nofile, wanted) {
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
