//! The guest's driver on a borrowed network device.

use std::{
    net::TcpListener,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use farside_tests::{
    BOOT, Borrow, BorrowState, Cluster, FunctionId, Guest, MIB, SHORT, Transfer, noise, sha256,
    testbed,
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

/// A tap interface of this machine, with an address in a network of its own.
struct Wire {
    name: String,
    network: String,
}

impl Wire {
    fn new() -> anyhow::Result<Self> {
        static WIRES: AtomicU32 = AtomicU32::new(0);
        let number = WIRES.fetch_add(1, Ordering::Relaxed);
        let pid = std::process::id();
        let wire = Self {
            name: format!("fs{pid}-{number}"),
            network: format!(
                "10.{}.{}",
                64 + pid % 64 + 64 * (number % 2),
                pid / 64 % 256
            ),
        };
        let Self { name, network } = &wire;
        ip(&format!("tuntap add {name} mode tap"))?;
        ip(&format!("address add {network}.1/24 dev {name}"))?;
        ip(&format!("link set {name} up"))?;
        Ok(wire)
    }

    fn host(&self) -> String {
        format!("{}.1", self.network)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        if let Err(error) = ip(&format!("link delete {}", self.name)) {
            log::error!("{error:#}");
        }
    }
}

fn ip(line: &str) -> anyhow::Result<()> {
    let output = testbed()?.tool("ip").args(line.split(' ')).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "ip {line}: {said}");
    Ok(())
}

/// The network device is there, with an address and up. Returns the borrow, once the device reaches guest memory.
fn up(cluster: &Cluster, guest: &Guest<'_>, wire: &Wire) -> anyhow::Result<Borrow> {
    guest.sh("modprobe virtio_net")?;
    guest.wait_path("/sys/class/net/eth0", SHORT)?;
    guest.sh(&format!(
        "ip address add {}.2/24 dev eth0; ip link set eth0 up",
        wire.network
    ))?;
    let borrow = cluster.wait_state(guest.name(), "nic0", BorrowState::Ready)?;
    guest.sh(&format!("ping -c 1 -W 30 {}", wire.host()))?;
    Ok(borrow)
}

fn listen(wire: &Wire) -> anyhow::Result<(TcpListener, u16)> {
    let listener = TcpListener::bind((wire.host(), 0))?;
    let port = listener.local_addr()?.port();
    Ok((listener, port))
}

/// Moves `data` to the guest and back over TCP. Meanwhile `during` is called.
fn transfer(
    guest: &Guest<'_>,
    wire: &Wire,
    data: Vec<u8>,
    during: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let expected = sha256(&data);
    let host = wire.host();
    let (listener, port) = listen(wire)?;
    let sent = Transfer::send(listener, data);
    let fetch = format!("nc {host} {port} </dev/null >/tmp/data; sha256sum /tmp/data");
    let fetched = guest.exec_start(&fetch, LONG)?;
    during()?;
    let fetched = fetched.wait()?;
    ensure!(
        fetched.success() && fetched.stdout.contains(&expected),
        "{fetched}"
    );
    sent.wait()?;

    let (listener, port) = listen(wire)?;
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

fn refusal() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("a tap interface takes root");
    }
    match std::fs::File::open("/dev/net/tun") {
        Ok(_) => None,
        Err(_) => Some("this kernel has no /dev/net/tun"),
    }
}

pub fn a_network_device_carries_data_is_reset_and_removed(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    if let Some(why) = refusal() {
        return Ok(Completion::ignored_with(why));
    }
    let wire = Wire::new()?;
    let lent = format!("nic0={},mac={MAC}", wire.name);
    let _lender = cluster.lend(&["--virtio-net", &lent])?;
    let _backend = cluster.serve("a", &["nic0"]).start()?;
    let guest = cluster.guest("a").whole().cpus(2).boot()?;
    let first = up(cluster, &guest, &wire)?;
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
    // The first feature bit is the leftmost: checksums, segments of TCP, buffers that are merged, event index.
    let features = guest.sh("cat /sys/class/net/eth0/device/features")?;
    for bit in [0, 1, 7, 8, 11, 12, 15, 29, 32] {
        let is_on = features.as_bytes().get(bit) == Some(&b'1');
        ensure!(is_on, "feature {bit} was not accepted: {features}");
    }
    transfer(&guest, &wire, noise(1, 32 * MIB as usize), || Ok(()))?;
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

    // The driver lets go, and comes again.
    let driver = "/sys/bus/pci/drivers/virtio-pci";
    guest.sh(&format!("echo {bdf} >{driver}/unbind"))?;
    check::closed(cluster, "a", "nic0")?;
    guest.sh(&format!("echo 1 >/sys/bus/pci/devices/{bdf}/reset"))?;
    guest.sh(&format!("echo {bdf} >{driver}/bind"))?;
    up(cluster, &guest, &wire)?;
    guest.reboot(BOOT)?;
    let rebooted = up(cluster, &guest, &wire)?;
    ensure!(rebooted.generation == first.generation, "{rebooted:?}");
    transfer(&guest, &wire, noise(2, MIB as usize), || Ok(()))?;
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
    if let Some(why) = refusal() {
        return Ok(Completion::ignored_with(why));
    }
    let wire = Wire::new()?;
    let lender = cluster.lend(&["--virtio-net", &format!("nic0={}", wire.name)])?;
    let keeper = cluster.serve("a", &["nic0"]).args(&["--keeper"]).start()?;
    let guest = cluster.guest("a").whole().boot()?;
    up(cluster, &guest, &wire)?;
    let restarts = || -> anyhow::Result<(u64, u64)> {
        let status = cluster.status()?;
        let backends = status.0.backend("a").and_then(|it| it.restarts);
        let connection = status.borrow("a", "nic0")?.connection;
        // Shown from the first restart on.
        let workers = connection.map_or(0, |it| it.restarts);
        Ok((backends.context("no keeper")?, workers))
    };
    transfer(&guest, &wire, noise(3, 96 * MIB as usize), || {
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
        Ok(())
    })?;
    check::no_faults(cluster, &["nic0"])?;
    guest.power_off()?;
    passed()
}
