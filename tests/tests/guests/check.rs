//! Shared checks.

use anyhow::{Context, ensure};
use farside_tests::{Borrow, BorrowState, Cluster, Guest, MIB, noise, sha256, shared_ram};

/// The device is ready, and its windows, of that number, map exactly the RAM that QEMU
/// reports.
pub fn open(
    cluster: &Cluster,
    guest: &Guest<'_>,
    device: &str,
    windows: u32,
) -> anyhow::Result<Borrow> {
    open_with_bars(cluster, guest, device, windows, 0)
}

/// As [`open`], of a device with windows onto as many bytes of other devices' BARs, too.
pub fn open_with_bars(
    cluster: &Cluster,
    guest: &Guest<'_>,
    device: &str,
    windows: u32,
    bars: u64,
) -> anyhow::Result<Borrow> {
    let borrow = cluster.wait_state(guest.name(), device, BorrowState::Ready)?;
    let ram = shared_ram(guest.qmp())?;
    let bytes: u64 = ram.iter().map(|(_, len)| len).sum();
    let lent = cluster.status()?.lent(device)?;
    ensure!(
        borrow.bytes_pinned == bytes,
        "{} bytes pinned, but QEMU has {bytes} bytes of shared RAM: {ram:x?}",
        borrow.bytes_pinned
    );
    ensure!(borrow.dma_windows == windows, "{borrow:?}");
    ensure!(borrow.lut_entries >= windows, "{borrow:?}");
    ensure!(
        lent.bus_master
            && lent.bytes_mapped == bytes + bars
            && lent.windows == windows
            && lent.lut_entries == borrow.lut_entries
            && lent.borrowed_by.as_deref() == Some(guest.name()),
        "lender: {lent:?}, backend: {borrow:?}"
    );
    Ok(borrow)
}

/// The device is borrowed, and nothing is pinned or mapped, on either side.
pub fn closed(cluster: &Cluster, vm: &str, device: &str) -> anyhow::Result<Borrow> {
    let borrow = cluster.wait_state(vm, device, BorrowState::Leased)?;
    ensure!(borrow.is_closed() && borrow.bytes_locked == 0, "{borrow:?}");
    let lent = cluster.status()?.lent(device)?;
    ensure!(lent.is_closed(), "{lent:?}");
    ensure!(lent.borrowed_by.as_deref() == Some(vm), "{lent:?}");
    Ok(borrow)
}

/// No device had a DMA fault.
pub fn no_faults(cluster: &Cluster, devices: &[&str]) -> anyhow::Result<()> {
    let status = cluster.status()?;
    for device in devices {
        let lent = status.lent(device)?;
        ensure!(lent.fault_total == 0, "{device}: {lent:?}");
    }
    Ok(())
}

/// Bytes that the guest writes are read back from the device, not from the guest's cache.
pub fn io(guest: &Guest<'_>, disk: &str, seed: u64) -> anyhow::Result<()> {
    let data = noise(seed, 2 * MIB as usize);
    guest.write_file("/tmp/io", &data)?;
    guest.sh(&format!("dd if=/tmp/io of={disk} bs=256k oflag=direct"))?;
    let back = guest.sh(&format!(
        "dd if={disk} bs=256k count=8 iflag=direct | sha256sum"
    ))?;
    ensure!(back.contains(&sha256(&data)), "read back: {back}");
    Ok(())
}

/// The first number in the output of a command in the guest.
pub fn number(guest: &Guest<'_>, command: &str) -> anyhow::Result<u64> {
    let printed = guest.sh(command)?;
    printed
        .split_whitespace()
        .next()
        .and_then(|word| word.parse().ok())
        .with_context(|| format!("{command} printed {printed:?}"))
}
