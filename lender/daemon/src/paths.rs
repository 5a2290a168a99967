//! Default paths of sockets.

use std::{
    env,
    fs::DirBuilder,
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

use rustix::fs::FileType;

use crate::{DeviceId, VmName};

/// The directory of farside's sockets: `$FARSIDE_RUNTIME_DIR`, else
/// `$XDG_RUNTIME_DIR/farside`, else `/run/farside` for root and
/// `/run/user/UID/farside` for others.
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
        format!("/run/user/{}/farside", uid.as_raw()).into()
    }
}

/// The socket of this host's lender.
pub fn lender_socket() -> PathBuf {
    runtime_dir().join("lender.sock")
}

/// The directory of this host's certificates: `$FARSIDE_PKI_DIR`, else `pki` in
/// `$FARSIDE_CONFIG_DIR`, else `/etc/farside/pki`.
pub fn pki_dir() -> PathBuf {
    let from = |name| env::var_os(name).filter(|value| !value.is_empty());
    match (from("FARSIDE_PKI_DIR"), from("FARSIDE_CONFIG_DIR")) {
        (Some(dir), _) => dir.into(),
        (None, Some(dir)) => PathBuf::from(dir).join("pki"),
        (None, None) => "/etc/farside/pki".into(),
    }
}

/// The directory of one VM's backend's sockets.
pub fn vm_dir(vm: &VmName) -> PathBuf {
    runtime_dir().join("vm").join(vm.as_str())
}

/// Name of a device's socket in the VM's directory.
pub fn device_socket_name(device: &DeviceId) -> String {
    format!("{device}.sock")
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

/// Creates `directory` with mode 0700 unless it exists. Fails if another user owns it, or one of the
/// directories between it and the runtime directory, or if every user can replace entries there: such
/// a user could listen at the sockets in it. Groups of the directories are trusted.
///
/// For root, the directories above may belong to another user, that of the systemd units.
pub fn create_directory(directory: &Path) -> io::Result<()> {
    create_in(directory, &runtime_dir())
}

fn create_in(directory: &Path, runtime: &Path) -> io::Result<()> {
    // Nothing is created in a directory of another user.
    check_existing(directory, runtime)?;
    let at = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => io::Error::new(
            error.kind(),
            format!("{error}: set FARSIDE_RUNTIME_DIR to a directory of this user"),
        ),
        _ => error,
    };
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(at)?;
    check_existing(directory, runtime)?;
    // Where symbolic links lead to.
    let (directory, runtime) = (directory.canonicalize()?, runtime.canonicalize());
    check_existing(&directory, runtime.as_deref().unwrap_or(&directory))
}

/// Checks `directory` and those above it in `runtime`, as far as they exist.
fn check_existing(directory: &Path, runtime: &Path) -> io::Result<()> {
    let user = rustix::process::geteuid().as_raw();
    let above = directory.ancestors().skip(1);
    let above = above.take_while(|above| above.starts_with(runtime));
    for path in std::iter::once(directory).chain(above) {
        let meta = match std::fs::symlink_metadata(path) {
            Ok(meta) => meta,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        let any_owner = user == 0 && path != directory;
        check_replaceable(path, meta.uid(), meta.mode(), (!any_owner).then_some(user))?;
    }
    Ok(())
}

/// Fails if a user other than `user` and root, if there is one, owns this directory or link, or
/// every user can replace its entries.
fn check_replaceable(path: &Path, owner: u32, mode: u32, user: Option<u32>) -> io::Result<()> {
    const OTHERS_WRITE: u32 = 0o002;
    const STICKY: u32 = 0o1000;
    let path = path.display();
    let denied = |text| Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    if let Some(user) = user.filter(|&user| ![user, 0].contains(&owner)) {
        return denied(format!(
            "{path} belongs to user {owner}, not to {user}: remove it, or set FARSIDE_RUNTIME_DIR to another"
        ));
    }
    let is_link = FileType::from_raw_mode(mode) == FileType::Symlink;
    if !is_link && mode & (OTHERS_WRITE | STICKY) == OTHERS_WRITE {
        return denied(format!(
            "every user may write to {path} (mode {mode:04o}) and replace sockets in it: `chmod o-w {path}`",
            mode = mode & 0o7777
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

    #[test]
    fn a_parent_that_every_user_may_write_to_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let open = parent.path().join("open");
        std::fs::create_dir(&open).unwrap();
        std::fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
        let link = parent.path().join("link");
        std::os::unix::fs::symlink(&open, &link).unwrap();
        for runtime in [&open, &link] {
            let error = create_in(&runtime.join("vm/web1"), runtime);
            let error = error.unwrap_err().to_string();
            let named = format!("chmod o-w {}", open.display());
            assert!(error.contains(&named), "{error}");
        }
    }

    #[test]
    fn another_users_directories_and_links_are_refused() {
        let path = Path::new("/tmp/farside-1000");
        for kind in [FileType::Directory, FileType::Symlink] {
            let mode = kind.as_raw_mode() | 0o755;
            let check = |owner, user| check_replaceable(path, owner, mode, user);
            check(1000, Some(1000)).unwrap();
            check(0, Some(1000)).unwrap();
            check(1000, None).unwrap();
            check(1000, Some(0)).unwrap_err();
            let error = check(65534, Some(1000)).unwrap_err().to_string();
            assert!(
                error.contains("belongs to user 65534, not to 1000"),
                "{error}"
            );
        }
    }
}
