//! Hosts that cannot lend physical devices at all.

use anyhow::{Result, ensure};
use farside_testbed::VmBuilder;
use farside_tests::{Cluster, testbed};

use crate::{
    host::{HERE, Host},
    stage::{DRIVE, drive},
};

pub fn a_host_without_an_iommu_says_how_to_turn_one_on() -> Result<()> {
    let words = ["without an IOMMU", "firmware", "CONFIG_IOMMU_SUPPORT"];
    refuses(testbed()?.vm("plain").nested_guests(1), &words)
}

pub fn an_iommu_that_the_kernel_leaves_off_is_told_from_none() -> Result<()> {
    let off = testbed()?.host_vm("off").append("intel_iommu=off");
    refuses(
        off,
        &[
            "without an IOMMU",
            "`intel_iommu=off`; remove",
            "kernel command line",
        ],
    )
}

fn refuses(vm: VmBuilder, words: &[&str]) -> Result<()> {
    let cluster = Cluster::new()?;
    let host = Host::launch(drive(&cluster, vm, "free", "addr=4")?)?;
    host.exec_ok("mkdir -p /run/farside", farside_tests::SHORT)?;
    let lend = format!("lend --vfio disk0={DRIVE}");
    host.refuses("no IOMMU", HERE, &lend, words)?;
    host.verdict()?;
    ensure!(host.driver(DRIVE)? == "nvme");
    host.shutdown()
}
