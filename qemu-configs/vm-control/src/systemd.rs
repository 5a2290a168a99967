//! The backend, and QEMU, as systemd units, if systemd runs this host and the units are installed.

use std::{path::Path, process::Command, time::Duration};

use farside_daemon::{OutputError, VmName, output_within};

use crate::{Error, places::from_env};

const TEMPLATE: &str = "farside@.service";

/// The unit of farside's examples that runs QEMU.
const QEMU_TEMPLATE: &str = "farside-qemu@.service";

/// More than systemd gives the unit to start (90 s) and to stop (TimeoutStopSec).
const JOB: Duration = Duration::from_secs(120);

/// Whether systemd runs backends: it manages this host, this user may control it, farside's
/// directories are those of the unit, and the unit is installed.
pub(crate) fn has_unit() -> bool {
    let moved = ["RUNTIME", "CONFIG", "STATE"]
        .iter()
        .any(|name| from_env(&format!("FARSIDE_{name}_DIR")).is_some());
    Path::new("/run/systemd/system").exists()
        && rustix::process::geteuid().is_root()
        && !moved
        && run(&["cat", "--quiet", TEMPLATE]).is_ok()
}

/// Whether the unit that runs QEMU is installed, too.
pub(crate) fn has_qemu_unit() -> bool {
    run(&["cat", "--quiet", QEMU_TEMPLATE]).is_ok()
}

pub(crate) fn start(vm: &VmName) -> Result<(), Error> {
    start_unit(&unit(vm))
}

/// Starts the unit that runs QEMU, and those that it requires.
pub(crate) fn start_qemu(vm: &VmName) -> Result<(), Error> {
    start_unit(&qemu_unit(vm))
}

/// Runs the generator, which gives the backend's socket unit the devices that are configured now.
pub(crate) fn reload() -> Result<(), Error> {
    run(&["daemon-reload"]).map(drop)
}

pub(crate) fn stop_qemu(vm: &VmName) -> Result<(), Error> {
    run(&["stop", &qemu_unit(vm)]).map(drop)
}

fn start_unit(unit: &str) -> Result<(), Error> {
    let started = run(&["start", unit]).map(drop);
    started.map_err(|error| match error {
        Error::Systemd { command, said } => Error::Systemd {
            command,
            said: format!("{said} (its log: journalctl -u {unit})"),
        },
        other => other,
    })
}

pub(crate) fn stop(vm: &VmName) -> Result<(), Error> {
    run(&["stop", &unit(vm)]).map(drop)
}

pub(crate) fn is_active(vm: &VmName) -> Result<bool, Error> {
    match run(&["is-active", "--quiet", &unit(vm)]) {
        Ok(_) => Ok(true),
        Err(Error::Systemd { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The instance is the unescaped name: the template uses `%i`, which does not unescape, and a name
/// has no character that needs escaping.
fn unit(vm: &VmName) -> String {
    format!("farside@{vm}.service")
}

pub(crate) fn qemu_unit(vm: &VmName) -> String {
    format!("farside-qemu@{vm}.service")
}

/// The user of the unit, if it is not root.
pub(crate) fn user(vm: &VmName) -> Result<Option<String>, Error> {
    let user = run(&["show", "--value", "--property=User", &unit(vm)])?;
    let user = user.trim();
    let root = user.is_empty() || user == "root" || user == "0";
    Ok((!root).then(|| user.to_owned()))
}

fn run(args: &[&str]) -> Result<String, Error> {
    let mut command = Command::new("systemctl");
    let output = output_within(command.args(args), JOB).map_err(|error| match error {
        OutputError::Run(source) => Error::system("cannot run systemctl")(source),
        OutputError::Late(limit) => Error::Late {
            what: format!("systemctl {} has not ended", args.join(" ")),
            limit,
            advice: "see what systemd waits for with `systemctl list-jobs`".to_owned(),
        },
    })?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(Error::Systemd {
            command: args.join(" "),
            said: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_names_the_vm_as_its_description_does() {
        assert_eq!(
            unit(&"rack1-web.2".parse().unwrap()),
            "farside@rack1-web.2.service"
        );
    }
}
