//! What a configuration asks of a host.

use std::{
    env,
    path::{Path, PathBuf},
};

use farside_vm_config::{Flash, VmConfig};

use super::{config_of, is_libvirt};
use crate::{Configuration, Error, Result};

/// QEMU's program when the configuration names none.
const QEMU: &str = "qemu-system-x86_64";

/// The QEMU of a VM.
pub(crate) fn qemu_of(config: &VmConfig) -> PathBuf {
    config.qemu.clone().unwrap_or_else(|| QEMU.into())
}

/// What is named, and not on this host.
pub(super) fn missing(vm: &str, configuration: &Configuration) -> Result<Vec<Error>> {
    let config = config_of(vm, configuration)?;
    let mut missing = Vec::new();
    let mut needs = |there: bool, what: &str, path: &Path, advice: &str| {
        if !there {
            missing.push(Error::refused(format!(
                "VM {vm} needs {what} {}, which is not there: {advice}",
                path.display()
            )));
        }
    };
    let program: PathBuf = match is_libvirt(&config) {
        true => farside_vm_control::virsh_program(),
        false => qemu_of(&config),
    };
    let there = find_program(&program).is_some();
    needs(there, "the program", &program, SAME_PLACE);
    if let Some(Flash { code, vars }) = &config.ovmf {
        needs(code.exists(), "the firmware", code, SAME_PLACE);
        let advice = "they are the VM's own: copy them, or keep them where both hosts see them";
        needs(vars.exists(), "the UEFI variables", vars, advice);
    }
    missing.extend(missing_lender(vm, &config));
    Ok(missing)
}

const SAME_PLACE: &str = "install it at the same place";

/// A socket of another host is a path here, with nothing behind it.
fn missing_lender(vm: &str, config: &VmConfig) -> Option<Error> {
    let lenders = config.lenders();
    let [lender] = &lenders[..] else {
        return None;
    };
    let path = lender.path().filter(|path| !path.exists())?;
    Some(Error::refused(format!(
        "the lender of VM {vm} is at {}, a socket that is not there: name it in the configuration as both hosts reach it (tcp:HOST:PORT)",
        path.display()
    )))
}

fn find_program(program: &Path) -> Option<PathBuf> {
    if program.components().count() > 1 {
        return program.is_file().then(|| program.to_owned());
    }
    let paths = env::var_os("PATH")?;
    env::split_paths(&paths)
        .map(|directory| directory.join(program))
        .find(|path| path.is_file())
}
