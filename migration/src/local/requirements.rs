//! The requirements of a configuration.

use std::{
    env,
    path::{Path, PathBuf},
};

use farside_daemon::VmName;
use farside_error_chain::Chain;
use farside_vm_config::{Flash, HostConfig, VmConfig, places};

use super::{config_of, is_libvirt};
use crate::{Configuration, Error, Result};

/// The QEMU binary when the configuration names none.
const QEMU: &str = "qemu-system-x86_64";

/// The QEMU of a VM.
pub(crate) fn qemu_of(config: &VmConfig) -> PathBuf {
    config.qemu.clone().unwrap_or_else(|| QEMU.into())
}

/// The NTB endpoint of this host that the VM would use, in sysfs.
pub(super) fn endpoint(config: &VmConfig) -> Result<Option<PathBuf>> {
    if !config.ntb {
        return Ok(None);
    }
    let host = HostConfig::read().map_err(|error| Error::refused(Chain(&error).to_string()))?;
    let functions = Path::new("/sys/bus/pci/devices");
    Ok(host.ntb.map(|address| functions.join(address.to_string())))
}

/// The items in the configuration that this host lacks.
pub(super) fn missing(vm: &VmName, configuration: &Configuration) -> Result<Vec<Error>> {
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
    let binary: PathBuf = match is_libvirt(&config) {
        true => farside_vm_control::virsh_program(),
        false => qemu_of(&config),
    };
    let there = find_binary(&binary).is_some();
    needs(there, "the binary", &binary, SAME_PLACE);
    if let Some(Flash { code, vars }) = &config.ovmf {
        needs(code.exists(), "the firmware", code, SAME_PLACE);
        let advice = "they are the VM's own: copy them, or keep them where both hosts see them";
        needs(vars.exists(), "the UEFI variables", vars, advice);
    }
    match endpoint(&config) {
        Ok(None) => {}
        Ok(Some(path)) => {
            let advice = format!("correct `ntb` in {}", places::host().display());
            needs(path.exists(), "the NTB endpoint", &path, &advice);
        }
        Err(error) => missing.push(error),
    }
    missing.extend(missing_lender(vm, &config));
    Ok(missing)
}

const SAME_PLACE: &str = "install it at the same place";

/// The UNIX socket of another host's lender does not exist here.
fn missing_lender(vm: &VmName, config: &VmConfig) -> Option<Error> {
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

fn find_binary(binary: &Path) -> Option<PathBuf> {
    if binary.components().count() > 1 {
        return binary.is_file().then(|| binary.to_owned());
    }
    let paths = env::var_os("PATH")?;
    env::split_paths(&paths)
        .map(|directory| directory.join(binary))
        .find(|path| path.is_file())
}
