//! Two VMs with kernels of their own as hosts, and a guest in one of them: what farside borrows from the
//! other beside what Linux's NVMe over TCP has from there.

use std::{path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use farside_bench::{JobResult, Measurement, Network, fio::Timing, job::Job};
use farside_testbed::{HostVm, Nested, VmBuilder};
use farside_tests::hosts::{disk_of, start_with_fio, stripped};
use tempfile::TempDir;

use super::{Parameters, hosts::MBIT};
use crate::{
    bench::{
        measure::Run,
        nested::{busy, connect_by_tcp, serve_by_tcp},
    },
    scene::{self, BOOT, DEVICE, SHORT},
};

const FAR: &str = "10.0.0.2";
/// Bytes of each of the far host's images, which are in memory.
const IMAGE_MIB: u32 = 64;
/// RAM of the near host, bytes: its guest's is in it.
const NEAR_RAM: u64 = 2 << 30;
/// The guest's RAM, bytes.
const GUEST_RAM: u64 = 512 << 20;
/// Longer than a benchmark.
const LIFE: Duration = Duration::from_secs(24 * 3600);
/// Serial number of the disks beside the borrowed one.
const SERIAL: &str = "over-tcp";

/// QEMU's devices on the kernel's NVMe over TCP, which farside is compared with.
const PEERS: [&str; 2] = ["kernel, virtio-blk", "kernel, QEMU's nvme"];

/// All jobs with all delays.
pub(in super::super) fn in_vms(parameters: &Parameters<'_>) -> Result<Vec<JobResult>> {
    let Parameters {
        program,
        testbed,
        progress,
        ..
    } = parameters;
    let task = progress.spinner("Booting two hosts");
    let directory = scene::directory("hosts")?;
    let binary = stripped(program)?;
    let host = |name: &str, server, mac| {
        let host = testbed
            .host_vm(name)
            // What is compared has threads that run side by side on a real host.
            .vcpus(2)
            .file("usr/bin/farside", 0o755, binary.clone());
        card(host, &directory, server, mac)
    };
    let far = host("far", "on", 2).launch_host(BOOT)?;
    let near = host("near", "off", 1).memory(NEAR_RAM).launch_host(BOOT)?;
    task.done();
    let measured = measure(parameters, &near, &far);
    let measured = measured.map_err(|error| {
        let log = |host: &HostVm| host.exec_ok("tail -n 20 /tmp/*.log; dmesg | tail", SHORT);
        let logs = [&near, &far].map(|host| log(host).unwrap_or_default());
        error.context(format!("the bench failed\n{}", logs.join("\n")))
    })?;
    for host in [near, far] {
        host.shutdown(SHORT)?;
    }
    Ok(measured)
}

/// A network card; the VM of its `server` starts first.
fn card(builder: VmBuilder, directory: &TempDir, server: &str, mac: u8) -> VmBuilder {
    let path = directory.path().join("network.sock");
    builder.args([
        "-netdev".to_owned(),
        format!(
            "stream,id=net,server={server},addr.type=unix,addr.path={}",
            path.display()
        ),
        "-device".to_owned(),
        format!("virtio-net-pci,netdev=net,romfile=,mac=52:54:00:00:00:{mac:02x}"),
    ])
}

fn measure(parameters: &Parameters<'_>, near: &HostVm, far: &HostVm) -> Result<Vec<JobResult>> {
    for (host, address) in [(near, "10.0.0.1"), (far, FAR)] {
        let up = format!(
            "set -e; modprobe -a virtio_net sch_netem; ip addr add {address}/24 dev eth0
            ip link set lo up; ip link set eth0 up; mkdir -p /run/farside"
        );
        host.exec_ok(&up, SHORT)?;
    }
    near.exec_ok(&format!("ping -c 1 -W 30 {FAR}"), SHORT)?;
    let _lender = lend(far)?;
    let _backend = borrow(near)?;
    let guest = start_guest(near)?;
    let disks = find_disks(&guest)?;
    let mut results = Vec::new();
    for delay_us in parameters.delays() {
        for host in [near, far] {
            shape(host, delay_us)?;
        }
        for job in parameters.jobs() {
            for (peer, beside) in PEERS.iter().zip(&disks.beside) {
                let network = Network {
                    hosts: farside_bench::Hosts::Vms,
                    delay_us,
                    peer: (*peer).to_owned(),
                    tls: false,
                };
                let run = |disk: &str, job: &Job, seconds: u32| -> Result<Measurement> {
                    let run = Run {
                        vm: &guest,
                        drive: disk,
                        cpu: &|| Ok(busy(near)? + busy(far)?),
                        timing: Timing { ramp: 0, seconds },
                        memory: None,
                    };
                    run.measure(job)
                        .with_context(|| format!("{} on {disk}", job.name))
                };
                results.push(parameters.compare(
                    job,
                    network,
                    &mut |job, seconds| run(&disks.borrowed, job, seconds),
                    &mut |job, seconds| run(beside, job, seconds),
                )?);
            }
        }
    }
    let ended = guest.shutdown(SHORT)?;
    ensure!(ended.success(), "QEMU in the near host: {ended}");
    Ok(results)
}

/// Lends one image, and makes two others namespaces of an NVMe/TCP target.
fn lend(far: &HostVm) -> Result<impl Sized + '_> {
    let images = format!(
        "set -e
        mkdir /images; mount -t tmpfs none /images
        for n in 0 1 2; do dd if=/dev/zero of=/images/$n bs=1M count={IMAGE_MIB} 2>/dev/null; done"
    );
    far.exec_ok(&images, SHORT)?;
    serve_by_tcp(far, FAR, &["/images/1", "/images/2"])?;
    let lend = format!(
        "export FARSIDE_RUNTIME_DIR=/run/farside
        exec farside lend --nvme {DEVICE}=/images/0 --listen tcp:{FAR}:7410 --listen-plain \
        --borrower network >/tmp/lender.log 2>&1"
    );
    let lender = far.exec_start(&lend, LIFE)?;
    far.wait_path("/run/farside/lender.sock", SHORT)?;
    Ok(lender)
}

/// Borrows the image, and connects the kernel to its target.
fn borrow(near: &HostVm) -> Result<impl Sized + '_> {
    near.exec_ok(&connect_by_tcp(FAR), SHORT)
        .context("connecting to the kernel's NVMe/TCP target")?;
    for n in 1..=2 {
        near.wait_path(&format!("/dev/nvme0n{n}"), SHORT)?;
    }
    let serve = format!(
        "export FARSIDE_RUNTIME_DIR=/run/farside
        exec farside serve --vm bench --device {DEVICE} --lender tcp:{FAR}:7410 \
        --open-timeout 100 >/tmp/backend.log 2>&1"
    );
    let backend = near.exec_start(&serve, LIFE)?;
    near.wait_path(&socket(), SHORT)?;
    Ok(backend)
}

fn socket() -> String {
    let socket = scene::socket(Path::new("/run/farside"), "bench");
    socket.display().to_string()
}

/// The delay is half in each direction.
fn shape(host: &HostVm, delay_us: u32) -> Result<()> {
    let half = f64::from(delay_us) / 2.0;
    // The shell would run its own `tc`, which does not know netem.
    let netem = format!(
        "/usr/sbin/tc qdisc replace dev eth0 root netem delay {half}us rate {MBIT}mbit limit 10000"
    );
    host.exec_ok(&netem, SHORT).map(drop)
}

/// A guest with all three disks, and with fio.
fn start_guest(near: &HostVm) -> Result<Nested<'_>> {
    let disk = |n: u32| {
        format!(
            "driver=host_device,node-name=disk{n},filename=/dev/nvme0n{n},cache.direct=on,aio=io_uring"
        )
    };
    let guest = near.guest("g").memory(GUEST_RAM).vfio_user(&socket());
    let guest = guest
        .args(["-blockdev", &disk(1)])
        .args([
            "-device",
            &format!("virtio-blk-pci,drive=disk1,serial={SERIAL}"),
        ])
        .args(["-blockdev", &disk(2)])
        .args(["-device", &format!("nvme,drive=disk2,serial={SERIAL}")]);
    let guest = start_with_fio(near, guest)?;
    guest.exec_ok("modprobe nvme", BOOT)?;
    Ok(guest)
}

struct Disks {
    borrowed: String,
    /// As [`PEERS`].
    beside: [String; 2],
}

fn find_disks(guest: &Nested<'_>) -> Result<Disks> {
    for disk in ["nvme0n1", "nvme1n1"] {
        guest.wait_path(&format!("/dev/{disk}"), BOOT)?;
    }
    let serials = guest.exec_ok("cat /sys/block/nvme[01]n1/device/serial", SHORT)?;
    let own = serials.lines().position(|line| line.trim() == SERIAL);
    let own = own.with_context(|| format!("no disk {SERIAL} among {serials:?}"))?;
    Ok(Disks {
        borrowed: format!("nvme{}n1", 1 - own),
        beside: [disk_of(guest, SERIAL)?, format!("nvme{own}n1")],
    })
}
