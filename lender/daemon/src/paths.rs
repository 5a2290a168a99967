//! Default paths of sockets.

use std::{
    env,
    fs::DirBuilder,
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

/// The directory of farside's sockets: `$FARSIDE_RUNTIME_DIR`, else
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

/// The socket of this host's lender.
pub fn lender_socket() -> PathBuf {
    runtime_dir().join("lender.sock")
}

/// The directory of one VM's backend's sockets.
pub fn vm_dir(vm: &str) -> PathBuf {
    runtime_dir().join("vm").join(vm)
}

/// Name of a device's socket in the VM's directory.
pub fn device_socket_name(device: &str) -> String {
    format!("{device}.sock")
}

/// Name of the socket for `farside status` in a VM's directory.
pub const STATUS_SOCKET_NAME: &str = "status";

/// The socket to which QEMU connects for a device of a VM.
pub fn device_socket(vm: &str, device: &str) -> PathBuf {
    vm_dir(vm).join(device_socket_name(device))
}

/// The socket of a VM's backend for `farside status`.
pub fn status_socket(vm: &str) -> PathBuf {
    vm_dir(vm).join(STATUS_SOCKET_NAME)
}

/// Name of the socket for attaching and detaching devices in a VM's directory.
pub const CONTROL_SOCKET_NAME: &str = "control";

/// The socket of a VM's backend for attaching and detaching devices.
pub fn control_socket(vm: &str) -> PathBuf {
    vm_dir(vm).join(CONTROL_SOCKET_NAME)
}

/// The QMP socket of a VM's QEMU.
pub fn monitor_socket(vm: &str) -> PathBuf {
    vm_dir(vm).join("qmp")
}

/// Creates `directory` with mode 0700 unless it exists. Fails if another user owns it or
/// can replace sockets in it: the fallback in `/tmp` has a predictable name.
pub fn create_directory(directory: &Path) -> io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)?;
    let owner = std::fs::metadata(directory)?.uid();
    let ours = rustix::process::geteuid().as_raw();
    if owner != ours && owner != 0 {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!(
                "the directory belongs to user {owner}, not to {ours}: remove it, or set FARSIDE_RUNTIME_DIR to another"
            ),
        ));
    }
    // Also its parents up to the runtime directory.
    let runtime = runtime_dir();
    let above = directory.ancestors().skip(1);
    let above = above.take_while(|above| above.starts_with(&runtime));
    std::iter::once(directory)
        .chain(above)
        .try_for_each(check_writers)
}

/// Fails for a directory in which every user can replace sockets.
fn check_writers(directory: &Path) -> io::Result<()> {
    const OTHERS_WRITE: u32 = 0o002;
    const STICKY: u32 = 0o1000;
    let mode = std::fs::metadata(directory)?.mode();
    if mode & (OTHERS_WRITE | STICKY) == OTHERS_WRITE {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!(
                "every user may write to {0} (mode {1:04o}) and replace sockets in it: `chmod o-w {0}`",
                directory.display(),
                mode & 0o7777
            ),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{fs::Permissions, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn a_directory_that_every_user_may_write_to_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("run");
        create_directory(&directory).unwrap();
        for (mode, good) in [
            (0o777, false),
            (0o702, false),
            (0o1777, true),
            (0o775, true),
        ] {
            std::fs::set_permissions(&directory, Permissions::from_mode(mode)).unwrap();
            let made = create_directory(&directory);
            assert_eq!(made.is_ok(), good, "{mode:o}: {made:?}");
            if let Err(error) = made {
                let error = error.to_string();
                assert!(error.contains("chmod o-w"), "{error}");
            }
        }
    }
}
