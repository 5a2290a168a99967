//! The sources of facts.

use std::{
    env,
    ffi::OsString,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
    time::Duration,
};

use farside_daemon::paths;
use farside_vm_config::places;

/// Longest file that is read, bytes: far more than any of those has.
const MAX_FILE: u64 = 4 << 20;

/// Default timeout for a tool or a lender.
const PATIENCE: Duration = Duration::from_millis(1500);

/// A host, or a directory that looks like one.
#[derive(Clone, Debug)]
pub struct Host {
    /// The system's files are below.
    pub(crate) root: PathBuf,
    /// farside's sockets.
    pub(crate) runtime: PathBuf,
    /// Descriptions.
    pub(crate) config: PathBuf,
    /// Whether farside's directories are others than those of its systemd units.
    pub(crate) moved: bool,
    /// Search path for executables, instead of this process' `PATH`.
    pub(crate) path: Option<OsString>,
    /// libvirt's tool.
    pub(crate) virsh: PathBuf,
    /// How long a tool or a lender may take to answer.
    pub(crate) patience: Duration,
}

impl Host {
    /// This host, with farside's directories as the environment has them.
    pub fn this() -> Self {
        let from = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
        let ours = ["RUNTIME", "CONFIG", "STATE"];
        Self {
            root: "/".into(),
            runtime: paths::runtime_dir(),
            config: places::config_dir(),
            moved: ours
                .iter()
                .any(|name| from(&format!("FARSIDE_{name}_DIR")).is_some()),
            path: None,
            virsh: from("FARSIDE_VIRSH").map_or_else(|| "virsh".into(), PathBuf::from),
            patience: PATIENCE,
        }
    }

    /// Sets the timeout of each tool and each lender; all are queried concurrently.
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// An artificial host below a directory, without executables.
    #[cfg(test)]
    pub(crate) fn at(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            runtime: root.join("run/farside"),
            config: root.join("etc/farside"),
            moved: false,
            path: Some(OsString::new()),
            virsh: "virsh".into(),
            patience: Duration::from_secs(30),
        }
    }

    /// A path of the system.
    pub(crate) fn system(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// The contents of a system file, if readable.
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        read(&self.system(path))
    }

    /// The same, as a number.
    pub(crate) fn number(&self, path: &str) -> Option<u64> {
        self.text(path)?.trim().parse().ok()
    }

    /// The files in a directory of the system whose names end so, sorted.
    pub(crate) fn files(&self, directory: &str, ending: &str) -> Vec<PathBuf> {
        files(&self.system(directory), ending)
    }
}

/// The contents of a file, if readable.
pub(crate) fn read(path: &Path) -> Option<String> {
    // Files in /proc may not be UTF-8 either.
    let mut bytes = Vec::new();
    let file = File::open(path).ok()?;
    file.take(MAX_FILE).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// The files in a directory whose names end so, sorted.
pub(crate) fn files(directory: &Path, ending: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    let mut files: Vec<_> = paths
        .filter(|path| path.is_file() && path.to_string_lossy().ends_with(ending))
        .collect();
    files.sort();
    files
}
