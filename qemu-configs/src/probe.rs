//! Checks whether a QEMU binary supports borrowed devices.

use std::{
    fmt, io,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use farside_daemon::{OutputError, output_within};

/// A version of QEMU, without the micro release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// First number.
    pub major: u32,
    /// Second number.
    pub minor: u32,
}

impl Version {
    /// The first with `vfio-user-pci`.
    pub const NEEDED: Self = Self {
        major: 10,
        minor: 1,
    };

    /// Parses the output of `--version`: "QEMU emulator version 11.1.3 (…)".
    fn parse(text: &str) -> Option<Self> {
        let (_, rest) = text.split_once("version ")?;
        let mut numbers = rest.split(|c: char| !c.is_ascii_digit());
        Some(Self {
            major: numbers.next()?.parse().ok()?,
            minor: numbers.next()?.parse().ok()?,
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A QEMU binary that supports borrowed devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QemuBinary {
    path: PathBuf,
    version: Version,
}

impl QemuBinary {
    /// Queries the QEMU at `path` (or of that name in `PATH`) for its version and devices.
    pub fn probe(path: impl AsRef<Path>) -> Result<Self, ProbeError> {
        let path = path.as_ref();
        Self::probe_by(path, |args| ask(path, args, ANSWER))
    }

    /// As [`QemuBinary::probe`], with queries by the caller: `ask` runs the QEMU at `path` with
    /// arguments, and returns its output.
    pub fn probe_by<E: From<ProbeError>>(
        path: &Path,
        mut ask: impl FnMut(&[&str]) -> Result<String, E>,
    ) -> Result<Self, E> {
        let text = ask(&["--version"])?;
        let version = Version::parse(&text).ok_or_else(|| ProbeError::NotQemu {
            path: path.to_owned(),
            said: text.lines().next().unwrap_or_default().to_owned(),
        })?;
        if version < Version::NEEDED {
            return Err(ProbeError::TooOld {
                path: path.to_owned(),
                found: version,
            }
            .into());
        }
        if !ask(&["-device", "help"])?.contains("\"vfio-user-pci\"") {
            return Err(ProbeError::NoVfioUser {
                path: path.to_owned(),
                found: version,
            }
            .into());
        }
        Ok(Self {
            path: path.to_owned(),
            version,
        })
    }

    /// The option with which QEMU confines itself: it can then start no processes, gain no
    /// privileges and change no scheduling. Fails if this QEMU, or the kernel, cannot do that.
    pub fn sandbox(&self) -> Result<[&'static str; 2], ProbeError> {
        // QEMU confines itself before it answers this.
        let option = [SANDBOX_OPTION, SANDBOX];
        ask(
            &self.path,
            &[&option[..], &["-device", "help"]].concat(),
            ANSWER,
        )?;
        Ok(option)
    }

    /// Its path, as given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.version
    }
}

/// A QEMU binary that cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum ProbeError {
    /// It does not exist, or cannot be run.
    #[error("cannot run {path:?}; {WHERE}")]
    Run {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// It did not exit in time, and was killed.
    #[error("{path:?} {question} did not exit within {limit:?}")]
    Late {
        path: PathBuf,
        question: String,
        limit: Duration,
    },
    /// It exited with an error.
    #[error("{path:?} {question} failed ({status}): {said}")]
    Failed {
        path: PathBuf,
        question: String,
        status: std::process::ExitStatus,
        said: String,
    },
    /// It is not QEMU.
    #[error("{path:?} does not seem to be QEMU; its --version output is {said:?}")]
    NotQemu { path: PathBuf, said: String },
    /// It is too old.
    #[error("{path:?} is QEMU {found}; {WHERE}")]
    TooOld { path: PathBuf, found: Version },
    /// It was built without the device.
    #[error("{path:?} is QEMU {found}, but built without the device vfio-user-pci; {WHERE}")]
    NoVfioUser { path: PathBuf, found: Version },
}

/// The requirements, and how to obtain them.
const WHERE: &str = "borrowed devices need QEMU 10.1 or newer with vfio-user-pci: \
    on Debian 13 package qemu-system-x86 of trixie-backports, \
    elsewhere your distribution's or https://www.qemu.org/download/";

/// The name of the option in [`QemuBinary::sandbox`].
pub const SANDBOX_OPTION: &str = "-sandbox";

const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// Time limit for a query; QEMU answers these before it creates a machine.
const ANSWER: Duration = Duration::from_secs(60);

fn ask(path: &Path, args: &[&str], limit: Duration) -> Result<String, ProbeError> {
    let mut command = Command::new(path);
    let output = output_within(command.args(args), limit).map_err(|error| match error {
        OutputError::Run(source) => ProbeError::Run {
            path: path.to_owned(),
            source,
        },
        OutputError::Late(limit) => ProbeError::Late {
            path: path.to_owned(),
            question: args.join(" "),
            limit,
        },
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(ProbeError::Failed {
            path: path.to_owned(),
            question: args.join(" "),
            status: output.status,
            said: said.lines().next().unwrap_or_default().to_owned(),
        });
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn a_qemu_that_hangs_is_named_after_the_limit() {
        let directory = tempfile::tempdir().unwrap();
        let hangs = directory.path().join("qemu");
        fs::write(&hangs, "#!/bin/sh\nexec sleep 1000\n").unwrap();
        fs::set_permissions(&hangs, fs::Permissions::from_mode(0o755)).unwrap();
        let error = ask(&hangs, &["--version"], Duration::from_millis(50)).unwrap_err();
        assert!(matches!(error, ProbeError::Late { .. }), "{error}");
        assert!(
            error.to_string().contains("--version did not exit"),
            "{error}"
        );
    }

    #[test]
    fn reads_versions_of_releases_distributions_and_development() {
        let parse = |text| Version::parse(text).map(|v| (v.major, v.minor));
        let debian = "QEMU emulator version 11.1.3 (Debian 1:11.1.3+ds-1~bpo13+1)\nCopyright";
        assert_eq!(parse(debian), Some((11, 1)));
        assert_eq!(parse("QEMU emulator version 10.0.50"), Some((10, 0)));
        assert_eq!(parse("QEMU emulator version 10.1"), Some((10, 1)));
        assert_eq!(parse("bash, version x"), None);
        assert_eq!(parse(""), None);
    }
}
