//! A VM's domain in libvirt, through virsh.

use std::process::{Command, Stdio};

use farside_vm_config::places;

use crate::{Error, ErrorKind, Result};

/// The XML of a domain, as it is when it does not run.
pub(super) fn xml(domain: &str) -> Result<String> {
    virsh(&["dumpxml", "--inactive", domain])
}

/// Defines a domain, or changes it to `xml`.
pub(super) fn define(domain: &str, xml: &str) -> Result<()> {
    let path = places::vm_state(domain).join("arrived.xml");
    farside_control::files::replace(&path, xml.as_bytes())?;
    virsh(&["define", &path.to_string_lossy()]).map(drop)
}

/// Removes a domain's definition; its variables of UEFI stay.
pub(super) fn undefine(domain: &str) -> Result<()> {
    virsh(&["undefine", "--keep-nvram", domain]).map(drop)
}

/// Whether libvirt has an image of the domain's memory, to go on from.
pub(super) fn has_saved_state(domain: &str) -> Result<bool> {
    let info = virsh(&["dominfo", domain])?;
    let saved = info
        .lines()
        .find_map(|line| line.strip_prefix("Managed save:"));
    Ok(saved.is_some_and(|saved| saved.trim() == "yes"))
}

fn virsh(args: &[&str]) -> Result<String> {
    let vm_error = |message| Error::new(ErrorKind::Vm, message);
    let output = Command::new("virsh")
        // Its words are read.
        .env("LC_ALL", "C")
        .arg("--quiet")
        .args(args)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| {
            vm_error(format!(
                "cannot run virsh: {error}; install libvirt's client tools"
            ))
        })?;
    if !output.status.success() {
        return Err(vm_error(format!(
            "virsh {}: {}",
            args.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        )));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
