//! Binaries that are QEMU, too old versions of it, or something else.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    sync::Mutex,
};

use farside_qemu_configs::{ProbeError, QemuBinary, SANDBOX_OPTION, Version};
use tempfile::TempDir;

/// Serialises the tests: while another thread forks, an executable that is being written
/// fails with ETXTBSY.
static ALONE: Mutex<()> = Mutex::new(());

/// An executable that replies as QEMU does.
fn fake(directory: &TempDir, version: &str, devices: &str) -> PathBuf {
    let path = directory.path().join("qemu");
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in\n--version) echo '{version}' ;;\n\
         '-device help') echo '{devices}' ;;\n*) exit 9 ;;\nesac\n"
    );
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    path
}

const DEVICES: &str = r#"name "vfio-pci", bus PCI
name "vfio-user-pci", bus PCI, desc "VFIO over socket PCI device assignment""#;
const WHERE: &str = "borrowed devices need QEMU 10.1 or newer with vfio-user-pci: on Debian 13 \
    package qemu-system-x86 of trixie-backports, elsewhere your distribution's or \
    https://www.qemu.org/download/";

#[test]
fn a_new_enough_qemu_is_taken() {
    let _alone = ALONE.lock();
    let directory = TempDir::new().unwrap();
    let path = fake(&directory, "QEMU emulator version 10.1.0", DEVICES);
    let qemu = QemuBinary::probe(&path).unwrap();
    assert_eq!(qemu.version(), Version::NEEDED);
    assert_eq!(qemu.path(), path);
}

#[test]
fn a_qemu_that_cannot_confine_itself_is_noticed() {
    let _alone = ALONE.lock();
    let directory = TempDir::new().unwrap();
    let path = fake(&directory, "QEMU emulator version 10.1.0", DEVICES);
    let qemu = QemuBinary::probe(&path).unwrap();
    assert!(matches!(qemu.sandbox(), Err(ProbeError::Failed { .. })));
    let able = fs::read_to_string(&path)
        .unwrap()
        .replace("exit 9", "test \"$1 $3\" = '-sandbox -device'");
    fs::write(&path, able).unwrap();
    let [option, value] = qemu.sandbox().unwrap();
    assert_eq!(option, SANDBOX_OPTION);
    assert!(value.contains("spawn=deny"), "{value}");
}

#[test]
fn an_old_qemu_is_refused_with_the_version_that_is_needed() {
    let _alone = ALONE.lock();
    let directory = TempDir::new().unwrap();
    let path = fake(
        &directory,
        "QEMU emulator version 10.0.2 (Debian 1:10.0.2)",
        DEVICES,
    );
    let error = QemuBinary::probe(&path).unwrap_err().to_string();
    assert_eq!(error, format!("{path:?} is QEMU 10.0; {WHERE}"));
}

#[test]
fn a_qemu_without_the_device_is_refused() {
    let _alone = ALONE.lock();
    let directory = TempDir::new().unwrap();
    let path = fake(
        &directory,
        "QEMU emulator version 11.1.3",
        r#"name "vfio-pci""#,
    );
    let error = QemuBinary::probe(&path).unwrap_err().to_string();
    assert_eq!(
        error,
        format!("{path:?} is QEMU 11.1, but built without the device vfio-user-pci; {WHERE}")
    );
}

#[test]
fn what_is_not_qemu_is_refused() {
    let _alone = ALONE.lock();
    let directory = TempDir::new().unwrap();
    let path = fake(&directory, "ls (GNU coreutils) 9.1", "");
    assert!(matches!(
        QemuBinary::probe(&path),
        Err(ProbeError::NotQemu { .. })
    ));
    assert!(matches!(
        QemuBinary::probe("/bin/false"),
        Err(ProbeError::Failed { .. })
    ));
    let missing = directory.path().join("missing");
    let error = QemuBinary::probe(&missing).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("cannot run {missing:?}; {WHERE}")
    );
}
