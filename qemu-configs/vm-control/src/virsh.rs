//! Controls libvirt through `virsh`.

use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use farside_daemon::{OutputError, output_within};
use serde_json::Value;

use crate::{Error, places, qemu::PRESS_AGAIN};

/// Polling interval: libvirt reports the end of a domain only to connected clients, so `virsh` is
/// polled.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// Time limit for short operations on a live QEMU, including device_add and bus-master enable.
const ANSWER: Duration = Duration::from_secs(60);

/// Time limit for a start: QEMU zeroes huge pages and preallocated RAM before libvirt answers.
const START: Duration = Duration::from_secs(600);

/// Runs QEMU's monitor command `line`, and returns QEMU's answer.
pub(crate) fn monitor_command(domain: &str, line: &Value) -> Result<Value, Error> {
    let line = line.to_string();
    let said = run(&["qemu-monitor-command", "--domain", domain, "--cmd", &line])?;
    serde_json::from_str(&said).map_err(|error| Error::Virsh {
        command: "qemu-monitor-command".to_owned(),
        said: format!("{error}: {said}"),
    })
}

/// Whether the domain is active.
pub(crate) fn is_running(domain: &str) -> Result<bool, Error> {
    let state = run(&["domstate", "--domain", domain])?;
    Ok(!matches!(state.trim(), "shut off" | "crashed"))
}

pub(crate) fn start(domain: &str) -> Result<(), Error> {
    run_within(&places::virsh(), &["start", "--domain", domain], START).map(drop)
}

/// Repeats the ACPI shutdown request (`virsh shutdown`), since a booting guest does not handle it,
/// and waits until the domain is shut off. Returns whether it is.
pub(crate) fn power_down(domain: &str, deadline: Instant) -> Result<bool, Error> {
    loop {
        if let Err(error) = run(&["shutdown", "--domain", domain]) {
            // Fails if it has shut off meanwhile.
            return match is_running(domain)? {
                true => Err(error),
                false => Ok(true),
            };
        }
        if wait_end(domain, deadline.min(Instant::now() + PRESS_AGAIN))? {
            return Ok(true);
        }
        if Instant::now() >= deadline {
            return Ok(false);
        }
    }
}

/// Destroys the domain at once.
pub(crate) fn destroy(domain: &str) -> Result<(), Error> {
    run(&["destroy", "--domain", domain]).map(drop)
}

/// Waits until the domain is shut off. Returns whether it is.
fn wait_end(domain: &str, deadline: Instant) -> Result<bool, Error> {
    while is_running(domain)? {
        if Instant::now() >= deadline {
            return Ok(false);
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    Ok(true)
}

/// Runs a command of `virsh`, in English. Returns its output, trimmed.
pub fn run(args: &[&str]) -> Result<String, Error> {
    run_within(&places::virsh(), args, ANSWER)
}

fn run_within(program: &Path, args: &[&str], limit: Duration) -> Result<String, Error> {
    let mut command = Command::new(program);
    // The output is parsed.
    command.arg("--quiet").args(args).env("LC_ALL", "C");
    let output = output_within(&mut command, limit).map_err(|error| match error {
        OutputError::Run(source) => Error::system(format!(
            "cannot run {} (package libvirt-clients; or name it in FARSIDE_VIRSH)",
            program.display()
        ))(source),
        OutputError::Late(limit) => Error::Late {
            what: format!("virsh {} has not ended", args.join(" ")),
            limit,
            advice: "see whether libvirt answers `virsh list`, and restart its daemon if not; the VMs go on meanwhile"
                .to_owned(),
        },
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Error::Virsh {
        command: args.first().copied().unwrap_or_default().to_owned(),
        said: said
            .trim()
            .trim_start_matches("error: ")
            .replace("\nerror: ", ": "),
    })
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn a_libvirt_that_hangs_is_named_after_the_limit() {
        let directory = tempfile::tempdir().unwrap();
        let hangs = directory.path().join("virsh");
        fs::write(&hangs, "#!/bin/sh\nexec sleep 1000\n").unwrap();
        fs::set_permissions(&hangs, fs::Permissions::from_mode(0o755)).unwrap();
        let limit = Duration::from_millis(50);
        let error = run_within(&hangs, &["destroy", "--domain", "web"], limit).unwrap_err();
        let said = error.to_string();
        for part in ["virsh destroy --domain web", "50ms", "virsh list"] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }
}
