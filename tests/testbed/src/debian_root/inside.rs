//! The inside of a Debian root: a private copy, in separate mount and PID namespaces.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};

const ENTER: &str = include_str!("enter.sh");

/// The environment of processes inside.
const ENVIRONMENT: [(&str, &str); 3] = [
    (
        "PATH",
        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    ),
    ("HOME", "/root"),
    ("LC_ALL", "C.UTF-8"),
];

/// A private copy of a Debian root, in which processes run as root: writes go to memory,
/// `/run` and `/tmp` are empty, `/dev` and `/sys` are the machine's, and it has its own PID
/// namespace; network and host name are the machine's, unless it was entered by
/// [`super::DebianRoot::enter_as`]. Its services are not started.
///
/// On drop, and when this process is killed, all processes inside end and nothing is left
/// behind.
#[derive(Debug)]
pub struct Inside {
    first: Child,
    pid: u32,
    namespaces: &'static [&'static str],
    _mounted_on: tempfile::TempDir,
}

impl Inside {
    pub(super) fn start(root: &Path, binds: &[(&Path, &Path)], host: Option<&str>) -> Result<Self> {
        let namespaces: &[&str] = match host {
            None => &["--mount", "--pid"],
            Some(_) => &["--mount", "--pid", "--net", "--uts"],
        };
        let mounted_on = tempfile::Builder::new()
            .prefix("farside-root-")
            .tempdir()
            .context("creating a directory to mount on")?;
        let mut command = Command::new("unshare");
        command
            .args(namespaces)
            .args(["--fork", "--propagation", "private"])
            .args(["sh", "-c", ENTER, "enter.sh"])
            .args([mounted_on.path(), root]);
        for (from, to) in binds {
            command.args([from, to]);
        }
        if let Some(host) = host {
            command.env("FARSIDE_HOST", host);
        }
        let mut first = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("running unshare")?;
        let mut said = String::new();
        if let Some(stdout) = first.stdout.take() {
            BufReader::new(stdout)
                .read_line(&mut said)
                .context("waiting for the mounts")?;
        }
        let pid = said.strip_prefix("ready ").map(|pid| pid.trim().parse());
        let Some(Ok(pid)) = pid else {
            let mut complaint = String::new();
            if let Some(mut stderr) = first.stderr.take() {
                let _ = stderr.read_to_string(&mut complaint);
            }
            let status = first.wait().context("waiting for unshare")?;
            bail!("mounting failed ({status}): {}", complaint.trim_end());
        };
        Ok(Self {
            first,
            pid,
            namespaces,
            _mounted_on: mounted_on,
        })
    }

    /// A command to run inside, as root, with a clean environment.
    ///
    /// Killing the command does not kill its children; those end with `self`.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args(self.namespaces)
            .args(["--target", &self.pid.to_string(), "--"])
            .arg(program)
            .env_clear()
            .envs(ENVIRONMENT);
        command
    }

    /// The process id of its first process, which refers to its namespaces.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The path by which this process reaches an absolute path of the inside.
    pub fn path(&self, inside: impl AsRef<Path>) -> PathBuf {
        let inside = inside.as_ref();
        let inside = inside.strip_prefix("/").unwrap_or(inside);
        Path::new("/proc")
            .join(self.pid.to_string())
            .join("root")
            .join(inside)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        // The first process ends, and the kernel ends all others before it reports that.
        drop(self.first.stdin.take());
        if let Err(error) = self.first.wait() {
            log::warn!("cannot wait for the end of a Debian root: {error}");
        }
    }
}
