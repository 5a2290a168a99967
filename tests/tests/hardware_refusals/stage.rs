//! The shared host: two NVMe devices, a network card, an IOMMU group of two, a device
//! without reset, and both ports of two NTBs.

use std::{path::Path, time::Instant};

use anyhow::{Result, ensure};
use farside_testbed::VmBuilder;
use farside_tests::{Cluster, Daemon, MIB, SHORT, testbed};

use crate::host::Host;

/// An unused NVMe device.
pub const DRIVE: &str = "0000:00:04.0";
/// An NVMe device with a mounted file system.
pub const MOUNTED: &str = "0000:00:05.0";
/// A bridge: the card's root port.
pub const BRIDGE: &str = "0000:00:06.0";
/// A network card with SR-IOV, whose interface is up.
pub const CARD: &str = "0000:01:00.0";
/// A conventional PCI function without driver, and the other one of its group.
pub const GROUPED: &str = "0000:02:01.0";
pub const NEIGHBOUR: &str = "0000:02:02.0";
/// A function without a reset method.
pub const NO_RESET: &str = "0000:00:08.0";
/// Both ports of an NTB.
pub const PORT_A: &str = "0000:00:10.0";
pub const PORT_B: &str = "0000:00:11.0";
/// Both ports of another NTB, whose windows differ.
pub const SMALL: &str = "0000:00:12.0";
pub const LARGE: &str = "0000:00:13.0";

/// The host, and the processes outside it.
pub struct Stage {
    pub host: Host,
    _cluster: Cluster,
    _ntbs: [Daemon; 2],
}

impl Stage {
    pub fn new() -> Result<Self> {
        let cluster = Cluster::new()?;
        let ntbs = [
            ntb(&cluster, ["a", "b"], &["--window-size", "128M"])?,
            ntb(
                &cluster,
                ["c", "d"],
                &["--window-size", "64M", "--window-size-b", "128M"],
            )?,
        ];
        let builder = testbed()?.host_vm("host");
        let rom = cluster.directory().join("drive.rom");
        std::fs::write(&rom, rom_image())?;
        let at = format!("addr=4,romfile={}", rom.display());
        let mut builder = drive(&cluster, builder, "free", &at)?;
        builder = drive(&cluster, builder, "mounted", "addr=5")?.args([
            "-device",
            "pcie-root-port,id=root-port,chassis=1,addr=6",
            "-netdev",
            "hubport,hubid=0,id=net",
            "-device",
            "igb,bus=root-port,netdev=net,romfile=",
            "-device",
            "pcie-pci-bridge,id=conventional,addr=7",
            "-device",
            "edu,bus=conventional,addr=1",
            "-device",
            "virtio-rng-pci,bus=conventional,addr=2",
            "-device",
            "edu,addr=8",
        ]);
        for (port, addr) in [("a", "10"), ("b", "11"), ("c", "12"), ("d", "13")] {
            let path = cluster.directory().join(format!("{port}.sock"));
            let device = serde_json::json!({
                "driver": "vfio-user-pci",
                "socket": {"type": "unix", "path": path.to_str()},
                "addr": addr,
                "x-msg-timeout": 120_000,
            });
            builder = builder.args(["-device".to_owned(), device.to_string()]);
        }
        let host = Host::launch(builder)?;
        let set_up = format!(
            "set -e
            modprobe igb; ip link set lo up
            ip link set $(ls /sys/bus/pci/devices/{CARD}/net) up
            disk=$(ls /sys/bus/pci/devices/{MOUNTED}/nvme)n1
            mkfs.ext4 -q /dev/$disk
            mkdir -p /mnt/data /run/farside /run/lender /run/borrower
            mount -t ext4 /dev/$disk /mnt/data"
        );
        host.exec_ok(&set_up, SHORT)?;
        Ok(Self {
            host,
            _cluster: cluster,
            _ntbs: ntbs,
        })
    }

    /// Powers the host off.
    pub fn end(self) -> Result<()> {
        self.host.shutdown()
    }
}

/// An expansion ROM of 2 KiB, whose code returns at once.
pub fn rom_image() -> Vec<u8> {
    let mut rom = vec![0; 2048];
    rom[..4].copy_from_slice(&[0x55, 0xaa, 4, 0xcb]);
    // The data structure: its place, signature, length, image of four times 512 bytes, and no further one.
    rom[0x18] = 0x1c;
    rom[0x1c..0x20].copy_from_slice(b"PCIR");
    rom[0x1c + 0x0a] = 0x18;
    rom[0x1c + 0x10] = 4;
    rom[0x1c + 0x15] = 0x80;
    rom[2040..].copy_from_slice(b"of drive");
    let sum = rom.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    rom[0x100] = sum.wrapping_neg();
    rom
}

/// An NVMe device of 64 MiB.
pub fn drive(cluster: &Cluster, vm: VmBuilder, name: &str, at: &str) -> Result<VmBuilder> {
    let image = cluster.image(name, 64 * MIB)?;
    Ok(vm.args([
        "-drive".to_owned(),
        format!("if=none,id={name},format=raw,file={}", image.display()),
        "-device".to_owned(),
        format!("nvme,drive={name},serial={name},{at}"),
    ]))
}

fn ntb(cluster: &Cluster, names: [&str; 2], more: &[&str]) -> Result<Daemon> {
    let paths = names.map(|name| cluster.directory().join(format!("{name}.sock")));
    let ports = ["A", "B"].map(String::from);
    let ports: Vec<String> = ports
        .iter()
        .zip(&paths)
        .map(|(port, path)| format!("{port}={}", path.display()))
        .collect();
    let args = ["ntb", "--port", &ports[0], "--port", &ports[1]];
    let ntb = cluster.start("an NTB", &[&args, more].concat())?;
    for path in &paths {
        await_path(path)?;
    }
    Ok(ntb)
}

fn await_path(path: &Path) -> Result<()> {
    let deadline = Instant::now() + SHORT;
    while !path.exists() {
        ensure!(Instant::now() < deadline, "{} is not there", path.display());
        std::thread::sleep(std::time::Duration::from_millis(25));
    }
    Ok(())
}
