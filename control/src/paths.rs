//! Where sockets are, when nobody says otherwise.

use std::{
    env,
    fs::DirBuilder,
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

/// The folder of farside's sockets: `$FARSIDE_RUNTIME_DIR`, else
/// `$XDG_RUNTIME_DIR/farside`, else `/run/farside` for root and
/// `/tmp/farside-UID` for others.
pub fn runtime_dir() -> PathBuf {
    let from = |name| env::var_os(name).filter(|value| !value.is_empty());
    if let Some(dir) = from("FARSIDE_RUNTIME_DIR") {
        return dir.into();
    }
    if let Some(dir) = from("XDG_RUNTIME_DIR") {
        return PathBuf::from(dir).join("farside");
    }
    let uid = rustix::process::getuid();
    if uid.is_root() {
        "/run/farside".into()
    } else {
        format!("/tmp/farside-{}", uid.as_raw()).into()
    }
}

/// The lender of this host.
pub fn lender_socket() -> PathBuf {
    runtime_dir().join("lender.sock")
}

/// The sockets of one VM's backend.
pub fn vm_dir(vm: &str) -> PathBuf {
    runtime_dir().join("vm").join(vm)
}

/// The name in a VM's folder of the socket for one of its devices.
pub fn device_socket_name(device: &str) -> String {
    format!("{device}.sock")
}

/// The name in a VM's folder of the socket that answers `farside status`.
pub const STATUS_SOCKET_NAME: &str = "status";

/// Where QEMU finds a device of a VM.
pub fn device_socket(vm: &str, device: &str) -> PathBuf {
    vm_dir(vm).join(device_socket_name(device))
}

/// Where a VM's backend answers `farside status`.
pub fn status_socket(vm: &str) -> PathBuf {
    vm_dir(vm).join(STATUS_SOCKET_NAME)
}

/// The name in a VM's folder of the socket where its backend is told what to
/// serve; see [`crate::admin`].
pub const CONTROL_SOCKET_NAME: &str = "control";

/// Where a VM's backend is told what to serve.
pub fn control_socket(vm: &str) -> PathBuf {
    vm_dir(vm).join(CONTROL_SOCKET_NAME)
}

/// Where a VM's QEMU listens for QMP.
pub fn monitor_socket(vm: &str) -> PathBuf {
    vm_dir(vm).join("qmp")
}

/// Makes `folder`, for this user alone, unless it is there. Refuses one that
/// another user owns and who could put sockets of his own there: the fallback
/// in `/tmp` has a name that others can guess.
pub fn create_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    let owner = std::fs::metadata(folder)?.uid();
    let ours = rustix::process::geteuid().as_raw();
    if owner != ours && owner != 0 {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!(
                "the folder belongs to user {owner}, not to {ours}: remove it, or name another in FARSIDE_RUNTIME_DIR"
            ),
        ));
    }
    Ok(())
}
