//! The guest's driver on a borrowed network device.

use std::{
    net::TcpListener,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use farside_tests::{
    BOOT, Borrow, BorrowState, Cluster, FunctionId, Guest, MIB, SHORT, Tap, Transfer, noise,
    sha256, testbed,
};
use libtest_mimic::Completion;
use rustix::process::{Signal, kill_process};

use crate::{
    check,
    life::unplug,
    outlive::{child, worker},
    passed,
};

/// Timeout of a transfer.
const LONG: Duration = Duration::from_secs(300);
const MAC: &str = "52:54:00:12:34:56";

/// The network device is there, with an address and up. Returns the borrow, once the device reaches guest memory.
fn up(cluster: &Cluster, guest: &Guest<'_>, tap: &Tap) -> anyhow::Result<Borrow> {
    guest.sh("modprobe virtio_net")?;
    guest.wait_path("/sys/class/net/eth0", SHORT)?;
    guest.sh(&format!(
        "ip address add {}/24 dev eth0; ip link set eth0 up",
        tap.guest()
    ))?;
    let borrow = cluster.wait_state(guest.name(), "nic0", BorrowState::Ready)?;
    guest.sh(&format!("ping -c 1 -W 30 {}", tap.host()))?;
    Ok(borrow)
}

fn listen(tap: &Tap) -> anyhow::Result<(TcpListener, u16)> {
    let listener = TcpListener::bind((tap.host(), 0))?;
    let port = listener.local_addr()?.port();
    Ok((listener, port))
}

/// Moves `data` to the guest and back over TCP.
fn transfer(guest: &Guest<'_>, tap: &Tap, data: Vec<u8>) -> anyhow::Result<()> {
    let expected = sha256(&data);
    let host = tap.host();
    let (listener, port) = listen(tap)?;
    let sent = Transfer::send(listener, data);
    let fetch = format!("nc {host} {port} </dev/null >/tmp/data; sha256sum /tmp/data");
    let fetched = guest.sh_within(&fetch, LONG)?;
    ensure!(fetched.starts_with(&expected), "{fetched} came");
    sent.wait()?;

    let (listener, port) = listen(tap)?;
    let received = Transfer::receive(listener);
    guest.sh_within(&format!("nc {host} {port} </tmp/data"), LONG)?;
    let received = received.wait()?;
    ensure!(
        sha256(&received) == expected,
        "{} bytes came back",
        received.len()
    );
    Ok(())
}

pub fn a_network_device_carries_data_is_reset_and_removed(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    if let Some(why) = Tap::unable() {
        return Ok(Completion::ignored_with(why));
    }
    let tap = Tap::new(testbed()?)?;
    let lent = format!("nic0={},mac={MAC},queues=2", tap.name());
    let _lender = cluster.lend(&["--virtio-net", &lent])?;
    let _backend = cluster.serve("a", &["nic0"]).start()?;
    let guest = cluster.guest("a").whole().cpus(2).boot()?;
    let first = up(cluster, &guest, &tap)?;
    check::open(cluster, &guest, "nic0", first.dma_windows)?;

    let function = FunctionId::Device {
        vendor: 0x1af4,
        device: 0x1041,
    };
    let bdf = guest.find(function)?;
    let shown = guest.sh(&format!("lspci -v -s {bdf}"))?;
    ensure!(shown.contains("MSI-X: Enable+"), "{shown}");
    for (file, expected) in [("address", MAC), ("mtu", "1500"), ("carrier", "1")] {
        let value = guest.sh(&format!("cat /sys/class/net/eth0/{file}"))?;
        ensure!(value == expected, "{file}: {value}");
    }
    // The first feature bit is the leftmost: checksums, segments of TCP, buffers that are merged, queue pairs, event index.
    let features = guest.sh("cat /sys/class/net/eth0/device/features")?;
    for bit in [0, 1, 7, 8, 11, 12, 15, 17, 22, 29, 32] {
        let is_on = features.as_bytes().get(bit) == Some(&b'1');
        ensure!(is_on, "feature {bit} was not accepted: {features}");
    }
    transfer(&guest, &tap, noise(1, 32 * MIB as usize))?;
    let lent = cluster.status()?.lent("nic0")?;
    for (frames, bytes) in [
        ("frames_sent", "bytes_sent"),
        ("frames_received", "bytes_received"),
    ] {
        let (frames, bytes) = (lent.counter(frames)?, lent.counter(bytes)?);
        ensure!(bytes > 32 * MIB, "{bytes} bytes");
        log::info!("{bytes} bytes in {frames} frames");
    }
    // Segments that are longer than the MTU have passed as they are.
    let (frames, bytes) = (
        lent.counter("frames_received")?,
        lent.counter("bytes_received")?,
    );
    ensure!(
        bytes / frames > 1514,
        "{} bytes for each frame",
        bytes / frames
    );
    check::no_faults(cluster, &["nic0"])?;

    // Both pairs receive: of several connections, one at a time is enough.
    for seed in 0..8 {
        transfer(&guest, &tap, noise(seed, 64 << 10))?;
    }
    for pair in 0..2 {
        let count = "grep input.PAIR /proc/interrupts | awk '{print $2 + $3}'";
        let count = guest.sh(&count.replace("PAIR", &pair.to_string()))?;
        ensure!(count.parse::<u64>()? > 0, "pair {pair}: {count} interrupts");
    }

    // The driver lets go, and comes again.
    let driver = "/sys/bus/pci/drivers/virtio-pci";
    guest.sh(&format!("echo {bdf} >{driver}/unbind"))?;
    check::closed(cluster, "a", "nic0")?;
    guest.sh(&format!("echo 1 >/sys/bus/pci/devices/{bdf}/reset"))?;
    guest.sh(&format!("echo {bdf} >{driver}/bind"))?;
    up(cluster, &guest, &tap)?;
    guest.reboot(BOOT)?;
    let rebooted = up(cluster, &guest, &tap)?;
    ensure!(rebooted.generation == first.generation, "{rebooted:?}");
    transfer(&guest, &tap, noise(2, MIB as usize))?;
    check::no_faults(cluster, &["nic0"])?;

    unplug(&guest, "nic0")?;
    guest.wait_no_path("/sys/class/net/eth0", SHORT)?;
    cluster.wait_free("nic0")?;
    guest.power_off()?;
    passed()
}

pub fn processes_that_are_killed_cost_a_guest_no_connection(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    if let Some(why) = Tap::unable() {
        return Ok(Completion::ignored_with(why));
    }
    let tap = Tap::new(testbed()?)?;
    let lent = format!("nic0={}", tap.name());
    let mut lender = cluster.lend(&["--virtio-net", &lent])?;
    let keeper = cluster.serve("a", &["nic0"]).args(&["--keeper"]).start()?;
    let guest = cluster.guest("a").whole().boot()?;
    up(cluster, &guest, &tap)?;
    let restarts = || -> anyhow::Result<(u64, u64)> {
        let status = cluster.status()?;
        let backends = status.0.backend("a").and_then(|it| it.restarts);
        let connection = status.borrow("a", "nic0")?.connection;
        // Shown from the first restart on.
        let workers = connection.map_or(0, |it| it.restarts);
        Ok((backends.context("no keeper")?, workers))
    };
    // One connection over all of it.
    let going = Arc::new(AtomicBool::new(true));
    let (listener, port) = listen(&tap)?;
    let sent = Transfer::send_while(listener, Arc::clone(&going));
    let fetch = format!("nc {} {port} </dev/null | sha256sum", tap.host());
    let fetched = guest.exec_start(&fetch, LONG)?;
    for kill in 0..6 {
        let before = restarts()?;
        let victim = match kill % 2 {
            0 => worker(lender.pid(), "nic0")?,
            _ => child(keeper.pid(), "serve")?,
        };
        kill_process(victim, Signal::KILL)?;
        let killed = Instant::now();
        // A backend that was killed has no status for a while.
        while restarts().map_or(true, |now| now == before) {
            ensure!(killed.elapsed() < SHORT, "{}", keeper.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    let generation = || Ok::<_, anyhow::Error>(cluster.status()?.borrow("a", "nic0")?.generation);
    // The next lender adopts the worker, and with it the tap interface.
    let before = generation()?;
    lender.kill()?;
    lender = cluster.lend(&["--virtio-net", &lent])?;
    ensure!(generation()? == before, "{}", lender.log());
    // One that was stopped has ended its worker, and the next one attaches anew.
    lender.terminate()?;
    lender.wait_exit(SHORT)?;
    let _lender = cluster.lend(&["--virtio-net", &lent])?;
    cluster.wait_status("another worker", SHORT, |_| {
        Ok(generation().ok().filter(|now| *now != before))
    })?;
    going.store(false, Ordering::Relaxed);
    let (sent, fetched) = (String::from_utf8(sent.wait()?)?, fetched.wait()?);
    ensure!(fetched.stdout.starts_with(&sent), "{fetched} is not {sent}");
    transfer(&guest, &tap, noise(3, MIB as usize))?;
    check::no_faults(cluster, &["nic0"])?;
    guest.power_off()?;
    passed()
}
