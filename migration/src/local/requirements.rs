//! What a description asks of a host.

use std::{
    env,
    path::{Path, PathBuf},
};

use farside_vm_config::{Flash, VmConfig};

use super::{config_of, is_libvirt};
use crate::{Description, Error, Result};

/// QEMU's program when the description names none.
const QEMU: &str = "qemu-system-x86_64";

/// Whether this host has what is named.
pub(super) fn check(vm: &str, description: &Description) -> Result<()> {
    let config = config_of(vm, description)?;
    let missing = |what: &str, path: &Path, advice: &str| {
        Err(Error::refused(format!(
            "VM {vm} needs {what} {}, which is not there: {advice}",
            path.display()
        )))
    };
    let program: PathBuf = match is_libvirt(&config) {
        true => "virsh".into(),
        false => config.qemu.clone().unwrap_or_else(|| QEMU.into()),
    };
    if find_program(&program).is_none() {
        return missing("the program", &program, "install it at the same place");
    }
    if let Some(Flash { code, vars }) = &config.ovmf {
        if !code.exists() {
            return missing("the firmware", code, "install it at the same place");
        }
        if !vars.exists() {
            let advice = "they are the VM's own: copy them, or keep them where both hosts see them";
            return missing("the UEFI variables", vars, advice);
        }
    }
    check_lenders(vm, &config)
}

/// A socket of another host is a path here, with nothing behind it.
fn check_lenders(vm: &str, config: &VmConfig) -> Result<()> {
    let lenders = config.lenders();
    let absent = |path: &Path| !path.exists();
    match lenders
        .iter()
        .filter_map(|lender| lender.path())
        .find(|path| absent(path))
    {
        Some(path) if lenders.len() == 1 => Err(Error::refused(format!(
            "the lender of VM {vm} is at {}, a socket that is not there: name it in the description as both hosts reach it (tcp:HOST:PORT)",
            path.display()
        ))),
        _ => Ok(()),
    }
}

fn find_program(program: &Path) -> Option<PathBuf> {
    if program.components().count() > 1 {
        return program.is_file().then(|| program.to_owned());
    }
    let paths = env::var_os("PATH")?;
    env::split_paths(&paths)
        .map(|folder| folder.join(program))
        .find(|path| path.is_file())
}
