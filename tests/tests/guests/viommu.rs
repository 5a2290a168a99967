//! A borrowed device behind a vIOMMU: the guest maps and unmaps each page of an
//! I/O.

use std::time::Duration;

use anyhow::ensure;
use farside_tests::{Cluster, DmaTester, GuestBuilder, MIB, SHORT, noise, sha256, sha256_of};
use libtest_mimic::Completion;

use crate::{check, passed};

const DISK: &str = "/dev/nvme0n1";
const FIO: Duration = Duration::from_secs(600);

/// A guest whose kernel translates all DMA, and flushes the IOTLB at each unmap.
fn guest<'a>(cluster: &'a Cluster, vm: &str) -> GuestBuilder<'a> {
    let translate = "intel_iommu=on iommu.passthrough=0";
    cluster.guest(vm).whole().append(translate)
}

pub fn pages_are_mapped_for_each_io_and_for_no_longer(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let image = cluster.image("disk0.img", 64 * MIB)?;
    let disk = format!("disk0={}", image.display());
    let _lender = cluster.lend(&["--nvme", &disk, "--dma-test", "dma0"])?;
    let _backend = cluster.serve("a", &["disk0", "dma0"]).start()?;
    let viommu = ["-device", "intel-iommu,caching-mode=on"];
    let guest = guest(cluster, "a").cpus(2).args(&viommu).boot()?;
    guest.wait_disk()?;
    let group = guest.sh("cat /sys/block/nvme0n1/device/device/iommu_group/type")?;
    ensure!(
        group.starts_with("DMA"),
        "the disk's IOMMU group is {group}"
    );

    check::io(&guest, DISK, 21)?;
    ensure!(sha256_of(&image, 0, 2 * MIB)? == sha256(&noise(21, 2 * MIB as usize)));
    // Many pages concurrently, of many buffers.
    guest.sh_within(
        &format!(
            "fio --name=verify --filename={DISK} --rw=randwrite --bs=4k-128k --size=16M \
             --direct=1 --ioengine=libaio --iodepth=16 --verify=crc32c --do_verify=1 \
             --verify_fatal=1 --output-format=terse"
        ),
        FIO,
    )?;
    // The queues' pages remain mapped while bus-master enable is cleared and set.
    guest.sh("nvme reset /dev/nvme0")?;
    guest.wait_disk()?;
    check::io(&guest, DISK, 22)?;
    check::no_faults(cluster, &["disk0"])?;

    // Windows consist of LUT entries, not of pages, and only queues are still mapped.
    let status = cluster.status()?;
    let lent = status.lent("disk0")?;
    ensure!(lent.bus_master && lent.windows <= 4, "{lent:?}");
    ensure!(
        (1..8 * MIB).contains(&lent.bytes_mapped),
        "no I/O is under way: {lent:?}"
    );

    // RAM was mapped until the guest enabled translation.
    let tester = DmaTester::new(&guest)?;
    tester.set_bus_master(true)?;
    let page = guest.alloc_page(2 * MIB)?;
    guest.write_page(page, 0, &[7; 4096])?;
    let answer = tester.fill(page.gpa, 4096, 0xdead_beef)?;
    ensure!(answer.faulted && answer.moved == 0, "{answer:?}");
    ensure!(guest.read_page(page, 0, 4096)? == [7; 4096]);
    ensure!(cluster.status()?.lent("dma0")?.fault_total == 1);

    guest.power_off()?;
    cluster.wait_free("disk0")?;
    passed()
}

pub fn one_that_hides_its_mappings_is_named(cluster: &Cluster) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let backend = cluster.serve("a", &["disk0"]).start()?;
    let refused = cluster.run(&["qemu", "--vm", "a", "--", "-device", "intel-iommu"])?;
    ensure!(!refused.status.success(), "{refused:?}");
    ensure!(
        refused
            .stderr
            .contains("use -device intel-iommu,caching-mode=on"),
        "{refused:?}"
    );

    // A file that only QEMU reads.
    let file = cluster.file("viommu.cfg", "[device]\ndriver = \"intel-iommu\"\n")?;
    let file = file.display().to_string();
    let guest = guest(cluster, "a").args(&["-readconfig", &file]).start()?;
    ensure!(!guest.wait_exit(SHORT)?.success());
    let log = guest.qemu_log();
    ensure!(log.contains("requires caching mode"), "{log}");
    backend.wait_log("-device intel-iommu,caching-mode=on", SHORT)?;
    cluster.wait_free("disk0")?;
    passed()
}
