//! Two virtual functions of one network adapter, each lent to a different guest at the same
//! time. The adapter's internal switch connects them.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use farside_testbed::{Nested, kernel_view::LiveMappings};

use super::{
    Set,
    facts::{VfFacts, seconds},
    host::{Host, socket},
};
use crate::{BOOT, MIB, SHORT, shared_ram};

/// The physical function, behind the root port.
const ADAPTER: &str = "0000:01:00.0";
/// Timeout of commands in an emulated nested guest under load.
const LONG: Duration = Duration::from_secs(600);
/// Each guest: name, device, memory, address. The memory size identifies the guest's
/// mappings.
const GUESTS: [(&str, &str, u64, &str); 2] = [
    ("g0", "vf-0", 256 * MIB, "10.0.1.1"),
    ("g1", "vf-1", 320 * MIB, "10.0.1.2"),
];

pub(super) fn vfs(set: &Set<'_>) -> Result<VfFacts> {
    let started = Instant::now();
    let mut facts = VfFacts::default();
    (set.tell)("booting the host");
    let builder = set.testbed.host_vm("host").args([
        "-device",
        "pcie-root-port,id=root-port,chassis=1,addr=5",
        "-netdev",
        "hubport,hubid=0,id=net",
        "-device",
        "igb,bus=root-port,netdev=net,romfile=",
    ]);
    let host = Host::launch(builder, set.programs)?;
    let played = play(set, &host, &mut facts);
    played.map_err(|error| error.context(host.story()))?;
    host.shutdown()?;
    facts.wall_s = seconds(started.elapsed());
    Ok(facts)
}

fn play(set: &Set<'_>, host: &Host, facts: &mut VfFacts) -> Result<()> {
    // The physical function's driver runs the mailbox and the switch.
    let up = format!(
        "set -e; modprobe igb
        name=$(ls /sys/bus/pci/devices/{ADAPTER}/net); ip link set $name up"
    );
    host.exec_ok(&up, SHORT)?;
    let lender = host.lend(&format!(
        "--name rack1 --vfs {ADAPTER}=2 --vfio vf=vfs-of:{ADAPTER}"
    ))?;
    let backends = GUESTS
        .iter()
        .map(|(vm, device, ..)| host.serve(vm, device, ""))
        .collect::<Result<Vec<_>>>()?;

    let mut guests = Vec::new();
    for (vm, device, memory, address) in GUESTS {
        (set.tell)(&format!("booting guest {vm}"));
        // From here on, only this function's domain changes.
        host.trace_iommu()?;
        let guest = host
            .guest(vm)
            .memory(memory)
            .vfio_user(&socket(vm, device))
            .launch()
            .map_err(|error| anyhow!("{error:#}{}", host.story()))?;
        guest.wait_agent(BOOT)?;
        bring_up(&guest, address)?;
        let live = LiveMappings::after(&host.iommu_trace()?);
        facts.bytes_mapped.push(live.bytes());
        let ram = shared_ram(guest.qmp())?;
        facts
            .guest_ram_bytes
            .push(ram.iter().map(|(_, len)| len).sum());
        guests.push(guest);
    }

    (set.tell)("the guests reach each other through the adapter");
    let arrived = guests
        .iter()
        .zip(GUESTS.iter().rev())
        .map(|(guest, (.., other))| {
            let output = guest.exec(&format!("ping -c 3 -W 30 {other}"), LONG)?;
            Ok(output.success())
        })
        .collect::<Result<Vec<bool>>>()?;
    facts.frames_arrived = arrived.iter().all(|arrived| *arrived);
    for (vm, device, ..) in GUESTS {
        let lent = host.lent(device)?;
        ensure!(
            lent.fault_total == 0,
            "{device}: DMA faults: {:?}",
            lent.faults
        );
        let used = lent.bus_master && lent.borrowed_by.as_deref() == Some(vm);
        facts.vfs_lent += u64::from(used);
    }

    for guest in guests {
        let ended = guest.shutdown(SHORT)?;
        ensure!(ended.success(), "QEMU in the host: {ended}");
    }
    for (_, device, ..) in GUESTS {
        host.wait_returned(device)?;
    }
    for backend in backends {
        backend.stop()?;
    }
    lender.stop()?;
    let left = host.exec_ok(
        &format!("cat /sys/bus/pci/devices/{ADAPTER}/sriov_numvfs"),
        SHORT,
    )?;
    ensure!(left.trim() == "0", "virtual functions left: {left}");
    Ok(())
}

/// Loads the driver and gives the interface an address.
fn bring_up(guest: &Nested<'_>, address: &str) -> Result<()> {
    let script = format!(
        "set -e; modprobe igbvf
        name=$(ls /sys/class/net | grep -v lo)
        ip addr add {address}/24 dev $name; ip link set $name up
        ip link show $name"
    );
    guest
        .exec_ok(&script, LONG)
        .context("the guest's virtual function")
        .map(drop)
}
