//! Processes killed, or ended at an inconvenient moment.

use anyhow::{Result, ensure};
use farside_tests::{BOOT, SHORT};

use crate::{
    domain::{Domain, read, write_and_read},
    stage::Stage,
};

/// Size of the NVMe namespace.
const DRIVE: u64 = 64 << 20;

/// Reads and writes until I/O fails.
const BUSY: &str = "while dd if=/tmp/data of=/dev/nvme0n1 bs=64k oflag=direct 2>/dev/null; \
                    do dd if=/dev/nvme0n1 of=/dev/null bs=64k iflag=direct 2>/dev/null; done";

pub fn libvirtd_is_killed_and_the_domain_does_not_notice(stage: &Stage) -> Result<()> {
    let (_lender, _) = stage.cluster.lend_disk(DRIVE)?;
    let domain = Domain::define(stage, "web1", &["disk0"])?;
    let guest = domain.boot()?;
    let written = write_and_read(&guest, "/dev/nvme0n1")?;

    restart_libvirtd(stage, || {
        ensure!(read(&guest, "/dev/nvme0n1")? == written);
        Ok(())
    })?;
    ensure!(stage.backend_runs("web1")?);
    let again = write_and_read(&guest, "/dev/nvme0n1")?;
    ensure!(again != written);

    // libvirt detects QEMU's end, and the hook cleans up.
    let qemu = stage.pid_of(&["-name", "guest=web1,debug-threads=on"])?;
    stage.sh(&format!("kill -9 {qemu}"))?;
    stage.wait_off("web1")?;
    stage.nothing_left_of("web1")?;
    stage.cluster.wait_free("disk0").map(drop)
}

/// Kills libvirtd, and starts another; `between` runs while there is none. The new one
/// serves requests before it has its domains back, and a domain destroyed then is "not
/// running" as soon as its QEMU has ended. It answers a monitor command after that.
fn restart_libvirtd(stage: &Stage, between: impl Fn() -> Result<()>) -> Result<()> {
    stage.kill_libvirtd()?;
    between()?;
    stage.start_libvirtd()?;
    let query = r#"{"execute":"query-status"}"#;
    let status = stage.virsh(&["qemu-monitor-command", "web1", query])?;
    ensure!(status.contains(r#""running":true"#), "{status}");
    Ok(())
}

pub fn a_domain_is_destroyed_during_io_and_its_backend_killed_under_it(
    stage: &Stage,
) -> Result<()> {
    let (_lender, _) = stage.cluster.lend_disk(DRIVE)?;
    let domain = Domain::define(stage, "web1", &["disk0"])?;
    let guest = domain.boot()?;
    write_and_read(&guest, "/dev/nvme0n1")?;
    let busy = guest.exec_start(BUSY, BOOT)?;
    domain.destroy()?;
    ensure!(
        busy.wait_for(SHORT).is_err(),
        "the guest outlived its domain"
    );
    stage.nothing_left_of("web1")?;
    stage.cluster.wait_free("disk0")?;

    let guest = domain.boot()?;
    let written = write_and_read(&guest, "/dev/nvme0n1")?;
    stage.kill_backend("web1")?;
    // The lender has detected its end, and the domain continues without the device.
    stage.cluster.wait_free("disk0")?;
    let failed = guest.exec(
        "dd if=/dev/nvme0n1 of=/dev/null bs=4k count=1 iflag=direct",
        SHORT,
    );
    ensure!(
        !failed.is_ok_and(|output| output.success()),
        "a disk without a backend was read"
    );
    // A restarted libvirtd does not end such a domain either.
    restart_libvirtd(stage, || Ok(()))?;
    domain.destroy()?;

    let guest = domain.boot()?;
    ensure!(read(&guest, "/dev/nvme0n1")? == written, "the data is gone");
    domain.destroy()?;
    stage.nothing_left_of("web1")
}
