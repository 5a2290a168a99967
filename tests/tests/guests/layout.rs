//! Layouts of guest RAM.

use anyhow::ensure;
use farside_fabric::host_memory::meminfo_bytes;
use farside_tests::{BOOT, BorrowState, Cluster, DmaTester, MIB, noise, sha256};
use libtest_mimic::Completion;
use serde_json::json;

use crate::{check, passed};

const RAM: u64 = 5 << 30;
/// Required memory: guest RAM is populated on the host, and the rest needs some.
const NEEDED: u64 = RAM + (2 << 30);
/// Memory below 4 GiB that the guest's kernel does not use.
const LOW: u64 = 0x1000_0000;
const FOUR_GIB: u64 = 1 << 32;

pub fn a_5_gib_guest_gets_two_windows_and_dma_above_4_gib(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let available = available_memory()?;
    if available < NEEDED {
        return Ok(Completion::ignored_with(format!(
            "{} MiB of memory are available, a guest of {} MiB needs {} MiB",
            available / MIB,
            RAM / MIB,
            NEEDED / MIB
        )));
    }
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let text = "name = \"big\"\ndevices = [\"dma0\", \"disk0\"]\nmemory = \"5 GiB\"\ncpus = 2\n";
    let config = cluster.file("big.toml", text)?;
    let path = config.display().to_string();
    let _backend = cluster
        .serve("big", &[])
        .args(&["--config", &path])
        .start()?;
    let guest = cluster
        .guest("big")
        .config(config)
        .append(&format!("memmap=1M${LOW:#x}"))
        .boot()?;
    guest.wait_disk()?;
    let borrow = check::open_with_bars(cluster, &guest, "disk0", 3, 64 << 10)?;
    ensure!(borrow.guest_ram_bytes > RAM - MIB, "{borrow:?}");
    ensure!(borrow.layout_probes < 200, "{borrow:?}");
    ensure!(borrow.bytes_pinned_before_bme == 0, "{borrow:?}");
    check::io(&guest, "/dev/nvme0n1", 5)?;

    let tester = DmaTester::new(&guest)?;
    tester.set_bus_master(true)?;
    check::open(cluster, &guest, "dma0", 2)?;
    let page = guest.alloc_page(2 * MIB)?;
    ensure!(page.gpa >= FOUR_GIB, "the guest's page is low: {page:?}");
    let data = noise(9, MIB as usize);
    guest.write_page(page, 0, &data)?;
    let down = tester.copy(page.gpa, LOW, MIB)?;
    ensure!(!down.faulted && down.moved == MIB, "{down:?}");
    ensure!(sha256(&guest.phys_read(LOW, MIB)?) == sha256(&data));
    let up = tester.copy(LOW, page.gpa + MIB, MIB)?;
    ensure!(!up.faulted && up.moved == MIB, "{up:?}");
    ensure!(sha256(&guest.read_page(page, MIB, MIB)?) == sha256(&data));
    check::no_faults(cluster, &["dma0", "disk0"])?;
    guest.power_off()?;
    cluster.wait_free("disk0")?;
    cluster.wait_free("dma0")?;
    passed()
}

pub fn memory_that_is_plugged_in_is_reached_at_once_and_not_before(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let _lender = cluster.lend(&["--dma-test", "dma0"])?;
    let _backend = cluster.serve("grows", &["dma0"]).start()?;
    let guest = cluster
        .guest("grows")
        .args(&["-m", "slots=2,maxmem=2G"])
        .append("memhp_default_state=offline")
        .boot()?;
    let tester = DmaTester::new(&guest)?;
    tester.set_bus_master(true)?;
    let small = check::open(cluster, &guest, "dma0", 1)?;
    // The address of the first DIMM of a guest without high memory.
    let fill = || tester.fill(FOUR_GIB, MIB, 0x5eed_f00d);
    let before = fill()?;
    ensure!(before.faulted && before.moved == 0, "{before:?}");

    let qmp = guest.qmp();
    let memory = json!({
        "qom-type": "memory-backend-memfd", "id": "more", "size": 256 * MIB, "share": true,
    });
    qmp.execute("object-add", memory)?;
    qmp.device_add(json!({ "driver": "pc-dimm", "id": "dimm0", "memdev": "more" }))?;
    // QEMU maps it for the backend before it replies. The guest's kernel does not use it.
    let large = cluster.status()?.borrow("grows", "dma0")?;
    ensure!(
        large.bytes_pinned == small.bytes_pinned + 256 * MIB && large.dma_windows == 2,
        "before: {small:?}, after: {large:?}"
    );
    let after = fill()?;
    ensure!(!after.faulted && after.moved == MIB, "{after:?}");
    let pattern = 0x5eed_f00d_u32.to_le_bytes().repeat(MIB as usize / 4);
    let read = tester.checksum(FOUR_GIB, MIB)?;
    ensure!(
        read.result == u64::from(crc32c::crc32c(&pattern)),
        "{read:?}"
    );
    let lent = cluster.status()?.lent("dma0")?;
    ensure!(lent.fault_total == 1, "{lent:?}");
    guest.power_off()?;
    cluster.wait_free("dma0")?;
    passed()
}

/// virtio-mem's blocks of 2 MiB share the device's window, and I/O continues.
pub fn a_virtio_mem_device_is_resized_under_io(cluster: &Cluster) -> anyhow::Result<Completion> {
    const REGION: u64 = 2 << 30;
    const PLUGGED: u64 = 1 << 30;
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let _backend = cluster.serve("grows", &["disk0"]).start()?;
    let object = format!("memory-backend-memfd,id=more,size={REGION},share=on,reserve=off");
    let guest = cluster
        .guest("grows")
        .whole()
        .args(&["-m", "slots=2,maxmem=4G"])
        .args(&["-object", &object])
        .args(&["-device", "virtio-mem-pci,id=vmem,memdev=more"])
        .append("memhp_default_state=online_movable")
        .boot()?;
    guest.wait_disk()?;
    guest.sh("modprobe virtio_mem")?;
    let small = check::open(cluster, &guest, "disk0", 1)?;

    // Until both resizes are done, behind the blocks that `check::io` writes.
    let fio = "until [ -e /tmp/resized ]; do \
               fio --name=verify --filename=/dev/nvme0n1 --offset=16M --rw=randwrite --bs=4k \
               --size=16M --direct=1 --ioengine=libaio --iodepth=8 --verify=crc32c \
               --verify_fatal=1 --time_based --runtime=20 --output-format=terse || exit 1; \
               done";
    let busy = guest.exec_start(fio, BOOT)?;
    let qmp = guest.qmp();
    let resize = |size: u64| {
        qmp.execute(
            "qom-set",
            json!({ "path": "/machine/peripheral/vmem", "property": "requested-size", "value": size }),
        )?;
        cluster.wait_status("memory of the new size", BOOT, |status| {
            let borrow = status.borrow("grows", "disk0")?;
            ensure!(borrow.state == BorrowState::Ready, "{borrow:?}");
            Ok((borrow.bytes_pinned == small.bytes_pinned + size).then_some(borrow))
        })
    };
    let large = resize(PLUGGED)?;
    // One window for the region, in LUT entries of 128 MiB.
    ensure!(large.dma_windows == 2, "{small:?}, then {large:?}");
    ensure!(
        u64::from(large.lut_entries) == u64::from(small.lut_entries) + REGION / (128 * MIB),
        "{small:?}, then {large:?}"
    );
    check::io(&guest, "/dev/nvme0n1", 7)?;
    let gone = resize(0)?;
    ensure!(gone.dma_windows == 1, "{gone:?}");
    guest.sh("touch /tmp/resized")?;
    let output = busy.wait()?;
    ensure!(output.success(), "{output}");
    check::no_faults(cluster, &["disk0"])?;
    guest.power_off()?;
    cluster.wait_free("disk0")?;
    passed()
}

fn available_memory() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    Ok(meminfo_bytes(&text, "MemAvailable").unwrap_or(0))
}
