//! A device that is programmed to access addresses beyond its guest's RAM.

use anyhow::{Context, ensure};
use farside_fabric::{Access, FaultReason};
use farside_tests::{Cluster, DmaTester, MIB, Status, noise, sha256};
use libtest_mimic::Completion;

use crate::{check, passed};

const PAGE: u64 = 4096;
/// QEMU's BIOS, at the top of 4 GiB: a ROM that is not shared.
const BIOS_ROM: u64 = 0xfffc_0000;
/// The BIOS's copy below 1 MiB: RAM, write-protected.
const BIOS_SHADOW: u64 = 0xf_0000;

pub fn dma_reaches_guest_ram_and_nothing_else(cluster: &Cluster) -> anyhow::Result<Completion> {
    let _lender = cluster.lend(&["--dma-test", "dma0", "--dma-test", "dma1"])?;
    let _backend_a = cluster.serve("a", &["dma0"]).start()?;
    let _backend_b = cluster.serve("b", &["dma1"]).start()?;
    let (ram_a, ram_b) = (512 * MIB, 1024 * MIB);
    // With a VGA adapter, the machine has the VGA hole below 1 MiB.
    let vga = ["-device", "VGA,romfile="];
    let a = cluster.guest("a").memory(ram_a).args(&vga).boot()?;
    let b = cluster.guest("b").memory(ram_b).boot()?;
    let tester = DmaTester::new(&a)?;
    let tester_b = DmaTester::new(&b)?;
    tester_b.set_bus_master(true)?;

    // No DMA before bus-master enable.
    let page = a.alloc_page(2 * MIB)?;
    let early = tester.fill(page.gpa, PAGE, 0xdead_beef)?;
    ensure!(early.faulted && early.moved == 0, "{early:?}");
    ensure!(a.read_page(page, 0, PAGE)? == vec![0; PAGE as usize]);
    expect_fault(
        &cluster.status()?,
        page.gpa,
        Access::Write,
        &[FaultReason::BusMasterDisabled],
    )?;
    check::closed(cluster, "a", "dma0")?;

    // All of the guest's RAM.
    tester.set_bus_master(true)?;
    check::open(cluster, &a, "dma0", 1)?;
    check::open(cluster, &b, "dma1", 1)?;
    let data = noise(4, MIB as usize);
    a.write_page(page, 0, &data)?;
    let copied = tester.copy(page.gpa, page.gpa + MIB, MIB)?;
    ensure!(!copied.faulted && copied.moved == MIB, "{copied:?}");
    ensure!(sha256(&a.read_page(page, MIB, MIB)?) == sha256(&data));
    let sum = tester.checksum(page.gpa, MIB)?;
    ensure!(sum.result == u64::from(crc32c::crc32c(&data)), "{sum:?}");
    let filled = tester.fill(page.gpa + PAGE, PAGE, 0x0403_0201)?;
    ensure!(!filled.faulted, "{filled:?}");
    let around = a.read_page(page, PAGE - 1, PAGE + 2)?;
    ensure!(around[0] == data[PAGE as usize - 1], "the byte before");
    ensure!(around[1..5] == [1, 2, 3, 4] && around[PAGE as usize] == 4);
    ensure!(
        around[PAGE as usize + 1] == data[2 * PAGE as usize],
        "the byte behind"
    );

    // An address that only the other VM's RAM contains.
    let mut theirs = b.alloc_page(2 * MIB)?;
    for _ in 0..400 {
        if theirs.gpa >= ram_a {
            break;
        }
        theirs = b.alloc_page(2 * MIB)?;
    }
    ensure!(theirs.gpa >= ram_a, "VM b has no page above {ram_a:#x}");
    let secret = noise(5, PAGE as usize);
    b.write_page(theirs, 0, &secret)?;
    // The other VM's device can access it: it exists.
    let own = tester_b.checksum(theirs.gpa, PAGE)?;
    ensure!(own.result == u64::from(crc32c::crc32c(&secret)), "{own:?}");

    use FaultReason::{BorrowerDomain, LenderDomain, Permission, Window};
    let outside = [LenderDomain, Window, BorrowerDomain];
    let protected = [LenderDomain, Window, BorrowerDomain, Permission];
    let targets = [
        ("the other VM's memory", theirs.gpa, &outside[..]),
        ("the first byte above RAM", ram_a, &outside),
        ("the VGA hole", 0xa_0000, &outside),
        ("the BIOS's shadow", BIOS_SHADOW, &protected),
        ("the BIOS ROM", BIOS_ROM, &protected),
        ("the interrupt controller", 0xfee0_0000, &outside),
        ("high memory that is not there", 1 << 32, &outside),
        ("an address of 2^40", 1 << 40, &outside),
        ("the last page", u64::MAX - PAGE + 1 - 8, &outside),
    ];
    let rom = a.phys_read(BIOS_ROM, PAGE)?;
    let shadow = a.phys_read(BIOS_SHADOW, PAGE)?;
    for (what, iova, reasons) in targets {
        let before = cluster.status()?.lent("dma0")?.fault_total;
        let answer = tester.write8(iova, 0x5555_5555_5555_5555)?;
        ensure!(
            answer.faulted && answer.moved == 0 && answer.fault_iova == iova,
            "{what} ({iova:#x}): {answer:?}"
        );
        let status = cluster.status()?;
        expect_fault(&status, iova, Access::Write, reasons).context(what)?;
        let total = status.lent("dma0")?.fault_total;
        ensure!(total == before + 1, "{what}: {before} faults, then {total}");
    }
    ensure!(
        b.read_page(theirs, 0, PAGE)? == secret,
        "VM b's memory changed"
    );
    ensure!(a.phys_read(BIOS_ROM, PAGE)? == rom, "the ROM changed");
    ensure!(
        a.phys_read(BIOS_SHADOW, PAGE)? == shadow,
        "the shadow changed"
    );

    // Reads are refused as well, and return no data.
    let read = tester.read8(theirs.gpa)?;
    ensure!(read.faulted && read.data == u64::MAX, "{read:?}");
    expect_fault(&cluster.status()?, theirs.gpa, Access::Read, &outside)?;
    // An access that begins in RAM and ends outside stops at the edge.
    let over = tester.fill(ram_a - 8, 16, 0x7777_7777)?;
    ensure!(over.faulted && over.moved <= 8, "{over:?}");
    ensure!(over.fault_iova >= ram_a - 8, "{over:?}");

    // The text output of `farside status` has the same.
    let text = cluster.run(&["status"])?.stdout;
    let line = format!("DMA Read of 8 bytes at IOVA {:#x} refused: ", theirs.gpa);
    ensure!(text.contains(&line), "{text}");
    ensure!(
        cluster.status()?.lent("dma1")?.fault_total == 0,
        "VM b's device had a fault"
    );

    // No DMA after bus-master enable is cleared.
    tester.set_bus_master(false)?;
    check::closed(cluster, "a", "dma0")?;
    let late = tester.fill(page.gpa, PAGE, 0)?;
    ensure!(late.faulted && late.moved == 0, "{late:?}");
    ensure!(a.read_page(page, 0, PAGE)? == data[..PAGE as usize]);
    check::open(cluster, &b, "dma1", 1)?;
    passed()
}

/// Checks that this is the last fault of `dma0`.
fn expect_fault(
    status: &Status,
    iova: u64,
    access: Access,
    reasons: &[FaultReason],
) -> anyhow::Result<()> {
    let lent = status.lent("dma0")?;
    let last = lent.faults.last().context("no fault is reported")?;
    ensure!(
        last.iova.get() == iova && last.access == access && reasons.contains(&last.reason),
        "expected a {access:?} at {iova:#x}, refused by one of {reasons:?}; reported: {last:?}"
    );
    Ok(())
}
