//! The processes that keep a backend.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use rustix::process::Pid;

use crate::{Cluster, load::TIMEOUT};

/// The processes that keep a cluster's only backend.
pub struct Keepers {
    /// The parent of the backend, or the process that took its place.
    pub keeper: Pid,
    /// The process that waits to take its place.
    pub spare: Pid,
}

impl Keepers {
    /// Least time between two kills of a backend that is started again: a keeper gives one up of which 100 have ended in 10 s.
    pub const INTERVAL: Duration = Duration::from_millis(110);

    /// Those that are not `backend`, as soon as there are both.
    ///
    /// # Errors
    /// When there are not both within [`TIMEOUT`].
    pub fn find(cluster: &Cluster, backend: u32) -> Result<Self> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let mut all = processes(cluster);
            all.retain(|(pid, _)| pid.as_raw_nonzero().get().cast_unsigned() != backend);
            if let [one, two] = all[..]
                && one.1 != two.1
            {
                let (spare, keeper) = if one.1 { (one, two) } else { (two, one) };
                return Ok(Self {
                    keeper: keeper.0,
                    spare: spare.0,
                });
            }
            ensure!(
                Instant::now() < deadline,
                "no keeper with a spare within {TIMEOUT:?}: {all:?}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The processes of a backend with a keeper, and whether each is a spare keeper.
fn processes(cluster: &Cluster) -> Vec<(Pid, bool)> {
    let directory = cluster.directory().as_os_str().as_encoded_bytes();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let read = |name| fs::read(entry.path().join(name)).unwrap_or_default();
        let pid = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        // Those that have ended have neither.
        let is_ours = read("cmdline")
            .split(|byte| *byte == 0)
            .any(|word| word == b"--keeper")
            && read("environ")
                .windows(directory.len())
                .any(|part| part == directory);
        if let Some(pid) = pid.and_then(Pid::from_raw).filter(|_| is_ours) {
            found.push((pid, read("comm").starts_with(b"farside-spare")));
        }
    }
    found
}
