//! Firmware that uses the borrowed device before the guest's kernel does.

use anyhow::ensure;
use farside_tests::{Cluster, MIB, Machine};
use libtest_mimic::Completion;

use crate::{check, passed};

pub fn ovmf_boots_the_guest_from_the_borrowed_drive(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let image = cluster.directory().join("disk0.img");
    farside_tests::testbed()?.make_boot_image(&image, 256 * MIB, "from.borrowed.drive")?;
    let drive = format!("disk0={}", image.display());
    let _lender = cluster.lend(&["--nvme", &drive])?;
    let backend = cluster.serve("a", &["disk0"]).start()?;
    let guest = cluster
        .guest("a")
        .memory(1024 * MIB)
        .cpus(2)
        .ovmf()
        .boot_from("disk0")
        .boot()?;
    ensure!(
        guest
            .sh("cat /proc/cmdline")?
            .contains("from.borrowed.drive")
    );
    guest.sh("test -d /sys/firmware/efi")?;
    guest.wait_disk()?;
    let borrow = check::open(cluster, &guest, "disk0", 1)?;
    ensure!(borrow.last_error.is_none(), "{borrow:?}");
    ensure!(
        backend.log().matches("DMA-ready").count() >= 2,
        "firmware and guest each enable bus mastering:\n{}",
        backend.log()
    );
    // The first partition of the image is OVMF's: write elsewhere.
    guest.sh("test -b /dev/nvme0n1p1")?;
    check::no_faults(cluster, &["disk0"])?;
    guest.power_off()?;
    cluster.wait_free("disk0")?;
    passed()
}

pub fn ovmf_on_an_i440fx_leaves_the_drive_to_the_guest(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let _backend = cluster.serve("a", &["disk0"]).start()?;
    let guest = cluster.guest("a").machine(Machine::I440fx).ovmf().boot()?;
    guest.sh("test -d /sys/firmware/efi")?;
    guest.wait_disk()?;
    let borrow = check::open(cluster, &guest, "disk0", 1)?;
    ensure!(borrow.last_error.is_none(), "{borrow:?}");
    check::io(&guest, "/dev/nvme0n1", 6)?;
    check::no_faults(cluster, &["disk0"])?;
    guest.power_off()?;
    passed()
}
