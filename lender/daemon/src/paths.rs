//! Default paths of sockets, state and configurations.

use std::{
    env,
    ffi::OsString,
    io,
    path::{Component, Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    DeviceId, VmName,
    directory::{Directory, Owner},
};

/// The directory of farside's sockets: `$FARSIDE_RUNTIME_DIR`, else
/// `$XDG_RUNTIME_DIR/farside`, else `/run/farside` for root and
/// `/run/user/UID/farside` for others.
pub fn runtime_dir() -> PathBuf {
    runtime_dir_of(rustix::process::getuid().as_raw(), from)
}

fn runtime_dir_of(uid: u32, variable: impl Fn(&str) -> Option<OsString>) -> PathBuf {
    if let Some(dir) = variable("FARSIDE_RUNTIME_DIR") {
        return dir.into();
    }
    match (variable("XDG_RUNTIME_DIR"), uid) {
        (Some(dir), _) => Path::new(&dir).join("farside"),
        (None, 0) => "/run/farside".into(),
        (None, uid) => format!("/run/user/{uid}/farside").into(),
    }
}

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

fn dir(ours: &str, of_root: &str, xdg: &str, in_home: &str) -> PathBuf {
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

fn from(variable: &str) -> Option<OsString> {
    env::var_os(variable).filter(|value| !value.is_empty())
}

/// The socket of this host's lender.
pub fn lender_socket() -> PathBuf {
    runtime_dir().join("lender.sock")
}

/// The directory of what all users of this host share: `$FARSIDE_CONFIG_DIR`, else
/// `/etc/farside`.
pub fn host_config_dir() -> PathBuf {
    from("FARSIDE_CONFIG_DIR").map_or_else(|| "/etc/farside".into(), Into::into)
}

/// The directory of this host's certificates: `$FARSIDE_PKI_DIR`, else `pki` in
/// [`host_config_dir`].
pub fn pki_dir() -> PathBuf {
    from("FARSIDE_PKI_DIR").map_or_else(|| host_config_dir().join("pki"), Into::into)
}

/// The directory of one VM's backend's sockets.
pub fn vm_dir(vm: &VmName) -> PathBuf {
    runtime_dir().join("vm").join(vm.as_str())
}

/// Name of a device's socket in the VM's directory.
pub fn device_socket_name(device: &DeviceId) -> String {
    format!("{device}.sock")
}

/// The names at which clients find the sockets of devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SocketLayout {
    /// `ID.sock`.
    #[default]
    Plain,
    /// `ID.sock` and, for clients of SPDK, which are given a directory, `ID.spdk/cntrl`.
    Spdk,
}

/// Name of the directory, in the VM's, that has a device's socket where SPDK's clients look for it.
pub fn spdk_directory_name(device: &DeviceId) -> String {
    format!("{device}{SPDK_SUFFIX}")
}

/// How such a directory's name ends.
pub const SPDK_SUFFIX: &str = ".spdk";

/// Name of the socket that SPDK's clients look for in the directory that they are given.
pub const SPDK_SOCKET_NAME: &str = "cntrl";

/// The socket at which the keeper of a VM's backend listens for the next one.
pub fn keeper_socket(vm: &VmName) -> PathBuf {
    runtime_dir().join("keepers").join(vm.as_str())
}

/// Name of the socket for `farside status` in a VM's directory.
pub const STATUS_SOCKET_NAME: &str = "status";

/// The socket to which QEMU connects for a device of a VM.
pub fn device_socket(vm: &VmName, device: &DeviceId) -> PathBuf {
    vm_dir(vm).join(device_socket_name(device))
}

/// The socket of a VM's backend for `farside status`.
pub fn status_socket(vm: &VmName) -> PathBuf {
    vm_dir(vm).join(STATUS_SOCKET_NAME)
}

/// Name of the socket for attaching and detaching devices in a VM's directory.
pub const CONTROL_SOCKET_NAME: &str = "control";

/// The socket of a VM's backend for attaching and detaching devices.
pub fn control_socket(vm: &VmName) -> PathBuf {
    vm_dir(vm).join(CONTROL_SOCKET_NAME)
}

/// The QMP socket of a VM's QEMU.
pub fn monitor_socket(vm: &VmName) -> PathBuf {
    vm_dir(vm).join("qmp")
}

/// Creates `directory` with mode 0700 unless it exists, for sockets. Fails if another user owns it, or
/// one of the directories between it and the runtime directory, or if every user can replace entries
/// there: such a user could listen at the sockets in it. Groups of the directories are trusted.
///
/// For root, the directories above may belong to another user, that of the systemd units.
pub fn create_directory(directory: &Path) -> io::Result<()> {
    Directory::create(directory, 0o700, Owner::Ours).map(drop)
}

/// The user and the group that own `directory`. No symbolic link below the runtime or state directory is followed.
pub fn owners(directory: &Path) -> io::Result<(u32, u32)> {
    Directory::open(directory, Owner::Any)?.owners()
}

/// Lets every user search `directory`, if this user owns it.
pub fn make_searchable(directory: &Path) -> io::Result<()> {
    Directory::open(directory, Owner::Any)?.make_searchable()
}

/// The runtime or state directory if `path` is in it, else `path` itself.
pub(crate) fn configured(path: &Path) -> PathBuf {
    let is_above = |directory: &PathBuf| {
        let is_name = |component| matches!(component, Component::Normal(_));
        let below = path.strip_prefix(directory);
        below.is_ok_and(|below| below.components().all(is_name))
    };
    [runtime_dir(), state_dir()]
        .into_iter()
        .filter(is_above)
        .max_by_key(|directory| directory.as_os_str().len())
        .unwrap_or_else(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_default_is_where_every_user_creates_entries() {
        for (set, uid, directory) in [
            ("", 0, "/run/farside"),
            ("", 1000, "/run/user/1000/farside"),
            ("XDG_RUNTIME_DIR", 1000, "/x/farside"),
            ("FARSIDE_RUNTIME_DIR", 1000, "/x"),
        ] {
            let variable = |name: &str| (name == set).then(|| "/x".into());
            assert_eq!(runtime_dir_of(uid, variable), Path::new(directory), "{set}");
        }
    }
}
