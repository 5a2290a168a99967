//! QEMU as the user that Debian's libvirt configures.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
};

use anyhow::{Context, Result, ensure};

use crate::{
    domain::{Domain, write_and_read},
    stage::Stage,
};

/// Size of the NVMe namespace.
const DRIVE: u64 = 64 << 20;

pub fn qemu_of_another_user_reaches_its_devices_by_a_group(stage: &Stage) -> Result<()> {
    let (_lender, _) = stage.cluster.lend_disk(DRIVE)?;
    let domain = Domain::define(stage, "web1", &["disk0"])?;
    // The test's directory, with the agent's socket and the console.
    let open = |path: &std::path::Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode))
            .with_context(|| path.display().to_string())
    };
    open(stage.cluster.directory(), 0o777)?;
    domain.let_anyone_in()?;

    // Without the group that user may not connect.
    let said = stage.fails(&["virsh", "start", "web1"])?;
    ensure!(said.contains("Permission denied"), "{said}");
    stage.nothing_left_of("web1")?;

    domain.describe(&["disk0"], "socket-group = \"libvirt-qemu\"")?;
    let guest = domain.boot()?;
    write_and_read(&guest, "/dev/nvme0n1")?;
    let qemu = stage.pid_of(&["-name", "guest=web1,debug-threads=on"])?;
    let user = fs::metadata(stage.path(format!("/proc/{qemu}")))?.uid();
    ensure!(user != 0, "QEMU runs as root");
    domain.destroy()?;
    stage.nothing_left_of("web1")
}
