//! Default directories of configurations and state. Sockets: [`farside_daemon::paths`].

use std::{
    env,
    path::{Path, PathBuf},
};

use farside_daemon::VmName;

/// The directory of VM configurations and of `lender.toml`: `$FARSIDE_CONFIG_DIR`, else
/// `/etc/farside` for root, `$XDG_CONFIG_HOME/farside` or `~/.config/farside` for others.
pub fn config_dir() -> PathBuf {
    dir(
        "FARSIDE_CONFIG_DIR",
        "/etc/farside",
        "XDG_CONFIG_HOME",
        ".config",
    )
}

/// The directory of persistent state: `$FARSIDE_STATE_DIR`, else `/var/lib/farside` for root,
/// `$XDG_STATE_HOME/farside` or `~/.local/state/farside` for others.
pub fn state_dir() -> PathBuf {
    dir(
        "FARSIDE_STATE_DIR",
        "/var/lib/farside",
        "XDG_STATE_HOME",
        ".local/state",
    )
}

/// A VM configuration: `vm/NAME.toml` in [`config_dir`].
pub fn description(vm: &VmName) -> PathBuf {
    config_dir().join("vm").join(format!("{vm}.toml"))
}

/// The state of one VM: `vm/NAME` in [`state_dir`].
pub fn vm_state(vm: &VmName) -> PathBuf {
    state_dir().join("vm").join(vm.as_str())
}

/// The [fences](farside_lender_protocol::Fences) of a VM that was moved to this host.
pub fn fences(vm: &VmName) -> PathBuf {
    vm_state(vm).join("fences.json")
}

fn dir(ours: &str, of_root: &str, xdg: &str, in_home: &str) -> PathBuf {
    let from = |name| env::var_os(name).filter(|value| !value.is_empty());
    if let Some(dir) = from(ours) {
        return dir.into();
    }
    if rustix::process::getuid().is_root() {
        return of_root.into();
    }
    match (from(xdg), from("HOME")) {
        (Some(dir), _) => Path::new(&dir).join("farside"),
        (None, Some(home)) => Path::new(&home).join(in_home).join("farside"),
        (None, None) => of_root.into(),
    }
}
