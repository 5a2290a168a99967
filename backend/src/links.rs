//! The sockets of devices under the name that SPDK's clients look for.

use std::{
    ffi::{OsStr, OsString},
    io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use farside_daemon::{DeviceId, SocketGroup, files, paths};

use crate::StartError;

/// Longest path at which a client can connect, in bytes (unix(7)).
const MAX_PATH: usize = 107;

fn target(device: &DeviceId) -> PathBuf {
    Path::new("..").join(paths::device_socket_name(device))
}

/// Links the socket of `device` in the VM's directory as `ID.spdk/cntrl`.
pub(crate) fn add(
    directory: &Path,
    group: Option<&SocketGroup>,
    device: &DeviceId,
) -> Result<(), StartError> {
    let inner = directory.join(paths::spdk_directory_name(device));
    let path = inner.join(paths::SPDK_SOCKET_NAME);
    let linked = match path.as_os_str().len() > MAX_PATH {
        true => Err(io::Error::other(format!(
            "SPDK cannot connect there: longer than {MAX_PATH} bytes"
        ))),
        false => files::create_directory(&inner).and_then(|()| files::link(&path, &target(device))),
    };
    linked.map_err(|source| StartError::Path { path, source })?;
    match group {
        Some(group) => Ok(group.admit_into(&inner, 0)?),
        None => Ok(()),
    }
}

/// Removes the links in the VM's directory, with their directories, and nothing else that is in it.
pub(crate) fn remove_all(directory: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(directory)?.flatten() {
        let name = entry.file_name();
        let Some(device) = device_of(&name) else {
            continue;
        };
        let path = entry.path().join(paths::SPDK_SOCKET_NAME);
        if std::fs::read_link(&path).is_ok_and(|to| to == target(&device)) {
            files::remove(&path)?;
        }
        // Fails if others have something in it.
        let _ = std::fs::remove_dir(entry.path());
    }
    Ok(())
}

fn device_of(name: &OsStr) -> Option<DeviceId> {
    let suffix = OsString::from(paths::SPDK_SUFFIX);
    let id = name.as_bytes().strip_suffix(suffix.as_bytes())?;
    str::from_utf8(id).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn a_link_leads_to_the_socket_of_its_device_and_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let device = "disk0".parse().unwrap();
        let listener = UnixListener::bind(path("disk0.sock")).unwrap();
        // Twice, as after a kill.
        add(directory.path(), None, &device).unwrap();
        add(directory.path(), None, &device).unwrap();
        UnixStream::connect(path("disk0.spdk/cntrl")).unwrap();
        listener.accept().unwrap();

        // What somebody else has made stays.
        std::fs::create_dir(path("other.spdk")).unwrap();
        std::os::unix::fs::symlink("/elsewhere", path("other.spdk/cntrl")).unwrap();
        std::fs::write(path("file.spdk"), []).unwrap();
        remove_all(directory.path()).unwrap();
        assert!(!path("disk0.spdk").exists());
        assert!(path("other.spdk/cntrl").is_symlink() && path("file.spdk").exists());
    }

    #[test]
    fn a_file_that_is_in_the_way_stays() {
        let directory = tempfile::tempdir().unwrap();
        let inner = directory.path().join("disk0.spdk");
        std::fs::create_dir(&inner).unwrap();
        std::fs::write(inner.join("cntrl"), b"a file").unwrap();
        add(directory.path(), None, &"disk0".parse().unwrap()).unwrap_err();
        assert_eq!(std::fs::read(inner.join("cntrl")).unwrap(), b"a file");
    }

    #[test]
    fn a_path_to_which_no_client_can_connect_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let device = "disk0".parse().unwrap();
        let deep = directory.path().join("e".repeat(90));
        let error = add(&deep, None, &device).unwrap_err();
        let text = farside_error_chain::Chain(&error).to_string();
        assert!(text.contains("107 bytes"), "{text}");
    }
}
