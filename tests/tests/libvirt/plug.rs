//! Devices plugged into a running domain.

use std::fs;

use anyhow::{Context, Result, ensure};
use farside_tests::SHORT;

use crate::{
    domain::{Domain, read, write_and_read},
    stage::Stage,
};

/// Each drive's size.
const DRIVE: u64 = 64 << 20;

pub fn a_drive_is_attached_to_a_running_domain_and_detached(stage: &Stage) -> Result<()> {
    let drives = ["disk0", "disk1"].map(|name| -> Result<String> {
        let image = stage.cluster.image(name, DRIVE)?;
        Ok(format!("{name}={}", image.display()))
    });
    let [first, second] = drives;
    let _lender = stage
        .cluster
        .lend(&["--nvme", &first?, "--nvme", &second?])?;
    // So that `farside attach` knows that libvirt runs the VM.
    let description = format!(
        "manager = \"libvirt\"\ndevices = [\"disk0\"]\nlenders = [\"{}\"]\nmemory = \"512M\"\n",
        stage.lender().display()
    );
    fs::write(stage.path("/etc/farside/vm/web1.toml"), description)
        .context("writing the description")?;
    let domain = Domain::define(stage, "web1", &["disk0"])?;
    let guest = domain.boot()?;
    let on_first = write_and_read(&guest, "/dev/nvme0n1")?;
    ensure!(!guest.exec("ls /dev/nvme1n1", SHORT)?.success());

    stage.ok(&["farside", "attach", "web1", "disk1"])?;
    let on_second = write_and_read(&guest, "/dev/nvme1n1")?;
    stage.ok(&["farside", "detach", "web1", "disk1"])?;
    guest.wait_no_path("/dev/nvme1n1", SHORT)?;
    let lent = stage.cluster.status()?.lent("disk1")?;
    ensure!(lent.borrowed_by.is_none(), "{lent:?}");
    ensure!(read(&guest, "/dev/nvme0n1")? == on_first);

    stage.ok(&["farside", "attach", "web1", "disk1"])?;
    ensure!(
        read(&guest, "/dev/nvme1n1")? == on_second,
        "the data is gone"
    );
    // What was attached goes with the domain.
    domain.destroy()?;
    stage.nothing_left_of("web1")?;
    stage.cluster.wait_free("disk1").map(drop)
}
