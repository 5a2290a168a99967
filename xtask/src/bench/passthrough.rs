//! Physical devices of an emulated host: its guest is booted in turns with borrowed devices, and with the same
//! by plain `vfio-pci`.
//!
//! Accesses that trap are counted by the host's kernel (the `kvm_mmio` trace event), in both cases alike.

use std::{fs::File, ops::RangeInclusive, path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use farside_bench::{
    Better, Data, JobResult, Measurement, Pair, Passthrough, Section, Series, Target, Unit,
    fio::Timing, job::Job,
};
use farside_testbed::{HostVm, Nested};
use farside_tests::hosts::{start_with_fio, stripped};
use serde_json::json;

use super::{
    Parameters,
    drives::line,
    measure::Run,
    nested::{busy, connect_by_tcp, serve_by_tcp},
};
use crate::{
    interrupt,
    scene::{self, BOOT, SHORT},
};

const VM: &str = "bench";
/// RAM of the host, bytes: its guest's is in it.
const HOST_RAM: u64 = 2 << 30;
/// The guest's RAM, bytes.
const GUEST_RAM: u64 = 512 << 20;
/// Bytes of each device's medium.
const IMAGE: u64 = 256 << 20;
/// Longer than a benchmark.
const LIFE: Duration = Duration::from_secs(24 * 3600);

/// A device of the host by which its guest has a disk.
struct Device {
    /// Its name in QEMU.
    name: &'static str,
    /// In host and guest.
    bdf: &'static str,
    /// The host's QEMU gets these, and a drive `NAME`, or the ports of a hub that they name.
    args: &'static [&'static str],
    disk: Disk,
    /// Loads the guest's modules for it and its disk.
    load: &'static str,
    /// Where the data of its I/O is.
    data: Memory,
}

/// Where data is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    /// In the guest's RAM.
    Ram,
    /// In the controller memory buffer of the first of the devices: peer to peer.
    Buffer,
}

/// Where the disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Disk {
    /// Behind the device.
    Behind,
    /// At the host, by NVMe over TCP, and the device is a network interface.
    OverTcp,
}

/// The host's address in the network of that interface, and the guest's.
const NETWORK: [&str; 2] = ["10.9.0.1", "10.9.0.2"];
/// The host's file for that disk.
const FILE: &str = "/tmp/disk";

const DEVICES: [Device; 6] = [
    Device {
        name: "nvme",
        bdf: "0000:00:0a.0",
        args: &["nvme,drive=nvme,serial=nvme,cmb_size_mb=16,addr=a"],
        disk: Disk::Behind,
        // Its queues are in RAM, as without a buffer.
        load: "modprobe nvme use_cmb_sqes=0",
        data: Memory::Ram,
    },
    Device {
        name: "nvme-to-nvme",
        bdf: "0000:00:07.0",
        args: &["nvme,drive=nvme-to-nvme,serial=peer,addr=7"],
        disk: Disk::Behind,
        // Anew, so that what the driver writes to the MSI-X table is counted.
        load: "cd /sys/bus/pci/drivers/nvme; echo 0000:00:07.0 >unbind; echo 0000:00:07.0 >bind",
        data: Memory::Buffer,
    },
    Device {
        name: "qemu-xhci",
        bdf: "0000:00:0b.0",
        args: &[
            "qemu-xhci,id=xhci,addr=b",
            "usb-storage,bus=xhci.0,drive=qemu-xhci",
        ],
        disk: Disk::Behind,
        load: "modprobe -a xhci_pci usb_storage sd_mod",
        data: Memory::Ram,
    },
    Device {
        name: "ich9-ahci",
        bdf: "0000:00:0c.0",
        args: &[
            "ich9-ahci,id=sata,addr=c",
            "ide-hd,bus=sata.0,drive=ich9-ahci",
        ],
        disk: Disk::Behind,
        load: "modprobe -a ahci sd_mod",
        data: Memory::Ram,
    },
    Device {
        name: "e1000e",
        bdf: "0000:00:0d.0",
        args: &[
            "e1000e,netdev=e1000e,romfile=,addr=d",
            "virtio-net-pci,netdev=peer,romfile=,addr=e",
        ],
        disk: Disk::OverTcp,
        load: "modprobe -a e1000e",
        data: Memory::Ram,
    },
    Device {
        name: "igb",
        bdf: "0000:00:08.0",
        args: &["igb,netdev=igb,romfile=,addr=8"],
        disk: Disk::OverTcp,
        load: "modprobe -a igb",
        data: Memory::Ram,
    },
];

/// How the guest has the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Borrowed,
    Plain,
}

/// One run of a job.
struct Turn {
    measurement: Measurement,
    /// Interrupts that the guest's driver got for one I/O.
    interrupts: f64,
    /// Accesses to the device's BARs that trapped meanwhile.
    trapped: u64,
}

/// All jobs on all devices.
pub(super) fn measure(parameters: &Parameters<'_>) -> Result<(Vec<JobResult>, Section)> {
    let Parameters {
        program,
        testbed,
        progress,
        ..
    } = parameters;
    let task = progress.spinner("Booting a host with devices");
    let directory = scene::directory("passthrough")?;
    let mut host =
        testbed
            .host_vm("host")
            .memory(HOST_RAM)
            .file("usr/bin/farside", 0o755, stripped(program)?);
    for device in &DEVICES {
        host = host.args(device.in_host(directory.path())?);
    }
    let host = host.launch_host(BOOT)?;
    task.done();
    let measured = in_host(parameters, &host).map_err(|error| {
        let logs = host.exec_ok("tail -n 20 /tmp/*.log; dmesg | tail", SHORT);
        error.context(format!("the bench failed\n{}", logs.unwrap_or_default()))
    })?;
    host.shutdown(SHORT)?;
    Ok(measured)
}

fn in_host(parameters: &Parameters<'_>, host: &HostVm) -> Result<(Vec<JobResult>, Section)> {
    host.exec_ok("mkdir -p /run/farside", SHORT)?;
    let [address, _] = NETWORK;
    let network = format!(
        "set -e; modprobe virtio_net; ip addr add {address}/24 dev eth0
        ip link set lo up; ip link set eth0 up
        dd if=/dev/zero of={FILE} bs=1M count={} 2>/dev/null",
        IMAGE >> 20
    );
    host.exec_ok(&network, SHORT)?;
    serve_by_tcp(host, address, &[FILE])?;
    let repeats = parameters.settings.repeats;
    let task = parameters.progress.bar("Measuring", 2 * u64::from(repeats));
    let mut pairs = Vec::new();
    for repeat in 0..u64::from(repeats) {
        interrupt::check()?;
        let borrowed = borrowed(parameters, host)?;
        task.set(2 * repeat + 1);
        // The lender has given them back.
        for device in &DEVICES {
            host.bind(device.bdf, "vfio-pci")?;
        }
        let plain = guest(parameters, host, Way::Plain)?;
        task.set(2 * repeat + 2);
        pairs.push([borrowed, plain]);
    }
    task.done();
    let (mut results, mut series) = (Vec::new(), Vec::new());
    let jobs = parameters.jobs();
    let each = DEVICES
        .iter()
        .flat_map(|device| jobs.iter().map(move |job| (device, job)));
    for (n, (device, job)) in each.enumerate() {
        let turns: Vec<_> = pairs
            .iter()
            .map(|pair| [&pair[0][n], &pair[1][n]])
            .collect();
        let result = result(device, job, &turns);
        parameters.progress.note(&line(&result));
        series.extend(figures(&result.label(), &turns));
        results.push(result);
    }
    for (n, job) in jobs.iter().enumerate() {
        // The turns of the first device whose data is there.
        let turns = |data: Memory| {
            let device = DEVICES.iter().position(|device| device.data == data);
            let at = device.map(|device| device * jobs.len() + n);
            let borrowed = pairs.iter().map(|[borrowed, _]| borrowed);
            borrowed.filter_map(move |turns| turns.get(at?))
        };
        series.extend(beside_ram(job, turns(Memory::Ram), turns(Memory::Buffer)));
    }
    Ok((results, section(series)))
}

/// A turn with lender and backend, which have the devices no longer than that.
fn borrowed(parameters: &Parameters<'_>, host: &HostVm) -> Result<Vec<Turn>> {
    let start = |name: &'static str, args: &str, socket: &str| {
        let command = format!(
            "echo $$ >/run/{name}.pid
            export FARSIDE_RUNTIME_DIR=/run/farside
            exec farside {args} >/tmp/{name}.log 2>&1"
        );
        let daemon = host.exec_start(&command, LIFE)?;
        host.wait_path(socket, SHORT)?;
        anyhow::Ok((name, daemon))
    };
    let (mut lend, mut serve) = (
        "lend".to_owned(),
        format!("serve --vm {VM} --open-timeout 100"),
    );
    for Device { name, bdf, .. } in &DEVICES {
        lend += &format!(" --vfio {name}={bdf}");
        serve += &format!(" --device {name}");
    }
    let lender = start("lender", &lend, "/run/farside/lender.sock")?;
    let backend = start("backend", &serve, &control_socket())?;
    let turns = guest(parameters, host, Way::Borrowed)?;
    for (name, daemon) in [backend, lender] {
        let stop = format!("kill -TERM $(cat /run/{name}.pid)");
        host.exec_ok(&stop, SHORT)?;
        let ended = daemon.wait_for(SHORT)?;
        ensure!(ended.success(), "{name}: {ended}");
    }
    Ok(turns)
}

/// Boots the guest, and runs all jobs on each device.
fn guest(parameters: &Parameters<'_>, host: &HostVm, way: Way) -> Result<Vec<Turn>> {
    let devices = DEVICES.iter().flat_map(|Device { name, bdf, .. }| {
        let addr = bdf.rsplit(':').next();
        let device = match way {
            Way::Borrowed => json!({
                "driver": "vfio-user-pci", "addr": addr, "x-msg-timeout": 120_000,
                "socket": {"type": "unix", "path": socket(name)},
            }),
            Way::Plain => json!({"driver": "vfio-pci", "addr": addr, "host": bdf}),
        };
        ["-device".to_owned(), device.to_string()]
    });
    let guest = host.guest("g").memory(GUEST_RAM).zen().args(devices);
    let guest = start_with_fio(host, guest)?;
    let mut turns = Vec::new();
    for device in &DEVICES {
        let stage = Stage {
            parameters,
            host,
            guest: &guest,
            device,
        };
        let measured = stage.play();
        turns.extend(measured.with_context(|| format!("{}, {way:?}", device.name))?);
    }
    let trapped: u64 = turns.iter().map(|turn| turn.trapped).sum();
    ensure!(
        way == Way::Plain || trapped == 0,
        "{trapped} accesses to BARs of borrowed devices trapped while fio ran"
    );
    let ended = guest.shutdown(SHORT)?;
    ensure!(ended.success(), "QEMU in the host: {ended}");
    Ok(turns)
}

struct Stage<'a> {
    parameters: &'a Parameters<'a>,
    host: &'a HostVm,
    guest: &'a Nested<'a>,
    device: &'a Device,
}

impl Stage<'_> {
    /// A run of each job.
    fn play(&self) -> Result<Vec<Turn>> {
        let disk = self.bind()?;
        let jobs = self.parameters.jobs().into_iter();
        let turns = jobs.map(|job| self.turn(&disk, job).with_context(|| job.name.clone()));
        let turns = turns.collect();
        if self.device.disk == Disk::OverTcp {
            let disconnect = format!(
                "for controller in /sys/class/nvme/*; do
                    [ $(cat $controller/transport) != tcp ] || echo 1 >$controller/delete_controller
                done
                ip link set $(ls /sys/bus/pci/devices/{}/net) down",
                self.device.bdf
            );
            self.guest.exec_ok(&disconnect, SHORT)?;
        }
        turns
    }

    /// Has the guest's driver use the device. Returns the name of its disk.
    fn bind(&self) -> Result<String> {
        let Device { bdf, load, .. } = self.device;
        self.count_traps()?;
        let (connect, of_disk) = match self.device.disk {
            Disk::Behind => (String::new(), format!("/{bdf}/")),
            Disk::OverTcp => (connect(bdf), "/nvme-subsystem/".to_owned()),
        };
        let bind = format!(
            "set -e; {load}
            {connect}
            until link=$(ls -l /sys/block | grep -m 1 {of_disk}); do sleep 0.1; done
            echo ${{link##*/}}"
        );
        let disk = self.guest.exec_ok(&bind, SHORT).context("no disk")?;
        // Otherwise a count of none would say nothing.
        ensure!(
            !self.device.has_msix() || self.host.counted_mmio()? > 0,
            "the driver has set interrupts up, and no access to the MSI-X table was counted"
        );
        Ok(disk.trim().to_owned())
    }

    fn turn(&self, disk: &str, job: &Job) -> Result<Turn> {
        let seconds = self.parameters.settings.seconds;
        let buffer = format!("/sys/bus/pci/devices/{}/p2pmem/allocate", DEVICES[0].bdf);
        let run = Run {
            vm: self.guest,
            drive: disk,
            cpu: &|| busy(self.host),
            timing: Timing { ramp: 0, seconds },
            memory: (self.device.data == Memory::Buffer).then_some(buffer.as_str()),
        };
        self.count_traps()?;
        let before = self.interrupts()?;
        let measurement = run.measure(job)?;
        let interrupts = self.interrupts()? - before;
        let ios = measurement.iops * f64::from(seconds);
        Ok(Turn {
            measurement,
            interrupts: interrupts as f64 / ios,
            trapped: self.host.counted_mmio()?,
        })
    }

    /// Interrupts of the device so far, as the guest counts them.
    fn interrupts(&self) -> Result<u64> {
        let text = self.guest.exec_ok("cat /proc/interrupts", SHORT)?;
        let interrupts = farside_testbed::kernel_view::interrupts(&text);
        let of_device = interrupts
            .iter()
            .filter(|line| line.what.contains(self.device.bdf));
        Ok(of_device.map(|line| line.count).sum())
    }

    /// The host's kernel counts accesses to the device's BARs that trap, from now on.
    fn count_traps(&self) -> Result<()> {
        let resources = format!("cat /sys/bus/pci/devices/{}/resource", self.device.bdf);
        let bars = bars(&self.guest.exec_ok(&resources, SHORT)?)?;
        self.host.count_mmio(&bars)
    }
}

impl Device {
    /// Arguments for the host's QEMU.
    fn in_host(&self, directory: &Path) -> Result<Vec<String>> {
        let devices = self.args.iter().flat_map(|device| ["-device", device]);
        let devices = devices.map(str::to_owned);
        if self.disk == Disk::OverTcp {
            let ids = self.args.iter().flat_map(|device| device.split(','));
            let ids = ids.filter_map(|option| option.strip_prefix("netdev="));
            let ports =
                ids.flat_map(|id| ["-netdev".to_owned(), format!("hubport,hubid=9,id={id}")]);
            return Ok(ports.chain(devices).collect());
        }
        let image = directory.join(self.name);
        File::create(&image)
            .and_then(|file| file.set_len(IMAGE))
            .with_context(|| format!("making {}", image.display()))?;
        let drive = format!(
            "if=none,id={},format=raw,file={}",
            self.name,
            image.display()
        );
        Ok(["-drive".to_owned(), drive]
            .into_iter()
            .chain(devices)
            .collect())
    }

    /// Its driver writes to the MSI-X table, which always traps.
    fn has_msix(&self) -> bool {
        self.name != "ich9-ahci"
    }
}

/// A shell command of the guest that connects it to the disk by the network interface at `bdf`.
fn connect(bdf: &str) -> String {
    let [host, own] = NETWORK;
    format!(
        "until name=$(ls /sys/bus/pci/devices/{bdf}/net); do sleep 0.1; done
        ip addr add {own}/24 dev $name; ip link set $name up
        until ping -c 1 -W 1 {host} >/dev/null; do sleep 0.1; done
        {}",
        connect_by_tcp(host)
    )
}

fn socket(device: &str) -> String {
    format!("/run/farside/vm/{VM}/{device}.sock")
}

/// The backend's, which it creates last.
fn control_socket() -> String {
    format!("/run/farside/vm/{VM}/control")
}

/// The memory BARs of `/sys/bus/pci/devices/BDF/resource`, GPA.
fn bars(resource: &str) -> Result<Vec<RangeInclusive<u64>>> {
    /// `IORESOURCE_MEM` of Linux.
    const MEMORY: u64 = 0x200;
    let mut bars = Vec::new();
    for line in resource.lines().take(6) {
        let numbers: Vec<u64> = line
            .split_whitespace()
            .map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16))
            .collect::<Result<_, _>>()
            .with_context(|| format!("resources of a device: {resource}"))?;
        match numbers.as_slice() {
            &[first, last, flags] if flags & MEMORY != 0 => bars.push(first..=last),
            _ => {}
        }
    }
    ensure!(!bars.is_empty(), "a device without BARs: {resource}");
    Ok(bars)
}

fn result(device: &Device, job: &Job, turns: &[[&Turn; 2]]) -> JobResult {
    let interrupts = |side: usize| turns.iter().map(|turn| turn[side].interrupts).sum::<f64>();
    JobResult {
        job: job.name.to_string(),
        network: None,
        passthrough: Some(Passthrough {
            device: device.name.to_owned(),
            interrupts_ratio: interrupts(0) / interrupts(1),
            trapped_accesses_after_start: turns.iter().map(|[borrowed, _]| borrowed.trapped).sum(),
        }),
        pairs: turns
            .iter()
            .map(|[borrowed, plain]| Pair {
                borrowed: borrowed.measurement,
                beside: plain.measurement,
            })
            .collect(),
    }
}

/// Series about a job: interrupts and trapped accesses.
fn figures(label: &str, turns: &[[&Turn; 2]]) -> [Series; 4] {
    let name = |what: &str, side: usize| {
        let side = [super::BORROWED, Passthrough::BESIDE][side];
        format!("{what}, {label}, {side}")
    };
    let series = |what: &str, side: usize, of: fn(&Turn) -> f64| Series {
        name: name(what, side),
        unit: Unit::Count,
        better: Better::Less,
        data: Data::Repeats(turns.iter().map(|turn| of(turn[side])).collect()),
        against: None,
        target: None,
    };
    let (interrupts, traps) = ("interrupts for one I/O", "trapped accesses");
    [
        Series {
            against: Some(name(interrupts, 1)),
            ..series(interrupts, 0, |turn| turn.interrupts)
        },
        series(interrupts, 1, |turn| turn.interrupts),
        Series {
            target: Some(Target::AtMost(0.0)),
            ..series(traps, 0, |turn| turn.trapped as f64)
        },
        series(traps, 1, |turn| turn.trapped as f64),
    ]
}

/// Bandwidth of a borrowed device to the buffer of another one, beside that to RAM.
fn beside_ram<'a>(
    job: &Job,
    ram: impl Iterator<Item = &'a Turn>,
    buffer: impl Iterator<Item = &'a Turn>,
) -> [Series; 2] {
    let name = |place: &str| format!("{}, borrowed, data in {place}", job.name);
    let series = |place: &str, data: Vec<f64>| Series {
        name: name(place),
        unit: Unit::BytesPerSecond,
        better: Better::More,
        data: Data::Repeats(data),
        against: None,
        target: None,
    };
    let bandwidth = |turn: &Turn| turn.measurement.bandwidth;
    [
        series("RAM", ram.map(bandwidth).collect()),
        Series {
            against: Some(name("RAM")),
            ..series("another one's buffer", buffer.map(bandwidth).collect())
        },
    ]
}

fn section(series: Vec<Series>) -> Section {
    Section {
        name: "passthrough".into(),
        title: "Physical devices: interrupts and trapped accesses".into(),
        about: "The same jobs, on a device that the guest borrows and on the same device by plain \
                vfio-pci. Interrupts are those of the guest's driver. Trapped accesses are reads \
                and writes of the device's BARs by the guest that reached KVM while fio ran: each \
                is a round trip to QEMU, and where the device is borrowed, to the backend. \
                The data of nvme-to-nvme is in the controller memory buffer of nvme: bandwidth is that \
                peer to peer beside that of nvme to RAM."
            .into(),
        series,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_bars_are_found_among_resources() {
        let resource = "0x00000000fe800000 0x00000000fe803fff 0x0000000000140204\n\
            0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
            0x000000000000c000 0x000000000000c01f 0x0000000000040101\n";
        assert_eq!(bars(resource).unwrap(), [0xfe80_0000..=0xfe80_3fff]);
        for other in ["", "0x0 0x0 0x0\n", "what\n"] {
            assert!(bars(other).is_err(), "{other:?}");
        }
    }
}
