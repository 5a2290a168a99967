//! Where sockets are, when nobody says otherwise.

use std::{env, path::PathBuf};

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

/// Where QEMU finds a device of a VM.
pub fn device_socket(vm: &str, device: &str) -> PathBuf {
    vm_dir(vm).join(format!("{device}.sock"))
}

/// Where a VM's backend answers `farside status`.
pub fn status_socket(vm: &str) -> PathBuf {
    vm_dir(vm).join("status")
}
