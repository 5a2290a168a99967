//! Drivers that are not Linux's: U-Boot's, which has its own for NVMe and virtio-blk.

use std::{
    fs::File,
    io::{Read, Write},
    os::unix::{
        fs::FileExt,
        net::{UnixListener, UnixStream},
    },
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context, bail, ensure};
use farside_testbed::Process;
use farside_tests::{BOOT, Cluster, MIB, SHORT, noise, testbed};
use libtest_mimic::Completion;
use rustix::net::sockopt;
use serde_json::json;

use crate::{check, passed};

/// Bytes of each disk, and of a transfer.
const DISK: u64 = 64 * MIB;
const TRANSFER: u64 = MIB;
const BLOCK: u64 = 512;
/// Where U-Boot has RAM for it.
const RAM: u64 = 16 * MIB;
/// Where on the disk it copies the first bytes to.
const COPY: u64 = 8 * MIB;

const PROMPT: &[u8] = b"\n=> ";

/// U-Boot's commands for a disk, its device and the option of `farside lend`.
const DISKS: [(&str, &str, &str); 2] = [
    ("nvme", "disk0", "--nvme"),
    ("virtio", "disk1", "--virtio-blk"),
];

pub fn u_boots_own_drivers_use_borrowed_disks(cluster: &Cluster) -> anyhow::Result<Completion> {
    let (mut lend, mut images) = (Vec::new(), Vec::new());
    for (seed, (_, device, option)) in (7..).zip(DISKS) {
        let data = noise(seed, TRANSFER as usize);
        let path = cluster.directory().join(device);
        let image = File::options()
            .create_new(true)
            .read(true)
            .write(true)
            .open(&path)?;
        image.set_len(DISK)?;
        image.write_all_at(&data, 0)?;
        lend.extend([option.to_owned(), format!("{device}={}", path.display())]);
        images.push((image, data));
    }
    let lend: Vec<&str> = lend.iter().map(String::as_str).collect();
    let _lender = cluster.lend(&lend)?;
    let devices = DISKS.map(|(_, device, _)| device);
    let _backend = cluster.serve("a", &devices).start()?;
    let mut machine = UBoot::start(cluster)?;
    for round in 0..2_u64 {
        for ((driver, ..), (image, data)) in DISKS.iter().zip(&images) {
            let to = COPY + round * TRANSFER;
            machine
                .copy(driver, to)
                .with_context(|| format!("{driver}, round {round}"))?;
            let mut copied = vec![0; data.len()];
            image.read_exact_at(&mut copied, to)?;
            ensure!(copied == *data, "{driver}, round {round}: the copy differs");
        }
        if round == 0 {
            machine.reset()?;
        }
    }
    check::no_faults(cluster, &devices)?;
    drop(machine);
    for device in devices {
        cluster.wait_free(device)?;
    }
    passed()
}

/// A machine with the borrowed disks that runs U-Boot, and its console.
struct UBoot {
    _qemu: Process,
    console: UnixStream,
}

impl UBoot {
    fn start(cluster: &Cluster) -> anyhow::Result<Self> {
        let testbed = testbed()?;
        let path = cluster.directory().join("console");
        let listener = UnixListener::bind(&path)?;
        let mut qemu = Command::new(testbed.qemu());
        qemu.args(["-machine", "q35,memory-backend=ram", "-m", "256"])
            .args(["-object", "memory-backend-memfd,id=ram,size=256M,share=on"])
            .args(testbed.accel().args())
            // Without a display U-Boot finds no NVMe device, QEMU's own neither.
            .args(["-nodefaults", "-vga", "std", "-display", "none"])
            .args(["-serial", "chardev:console"])
            .arg("-chardev")
            .arg(format!("socket,id=console,path={}", path.display()))
            .arg("-bios")
            .arg(testbed.u_boot())
            .stdin(Stdio::null());
        for (_, device, _) in DISKS {
            let socket = cluster.directory().join(format!("vm/a/{device}.sock"));
            let socket = json!({"type": "unix", "path": socket});
            let device = json!({"driver": "vfio-user-pci", "socket": socket});
            qemu.arg("-device").arg(device.to_string());
        }
        let qemu = Process::spawn(qemu)?;
        sockopt::set_socket_timeout(&listener, sockopt::Timeout::Recv, Some(SHORT))?;
        let (console, _) = listener.accept().context("QEMU does not connect")?;
        let mut machine = Self {
            _qemu: qemu,
            console,
        };
        machine.until(PROMPT, "prompt after the start")?;
        Ok(machine)
    }

    /// Reads the console up to this text. Returns what it has read.
    fn until(&mut self, text: &[u8], what: &str) -> anyhow::Result<String> {
        let deadline = Instant::now() + BOOT;
        let mut seen = Vec::new();
        while !seen.ends_with(text) {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut byte = [0];
            let read = match left.is_zero() {
                true => 0,
                false => {
                    self.console.set_read_timeout(Some(left))?;
                    let read = self.console.read(&mut byte);
                    read.with_context(|| format!("no {what}"))?
                }
            };
            if read == 0 {
                bail!(
                    "no {what}; the console has {}",
                    String::from_utf8_lossy(&seen)
                );
            }
            seen.push(byte[0]);
        }
        Ok(String::from_utf8_lossy(&seen).into_owned())
    }

    /// Runs a command; returns what it prints.
    fn run(&mut self, command: &str) -> anyhow::Result<String> {
        writeln!(self.console, "{command}")?;
        self.until(PROMPT, &format!("prompt after {command}"))
    }

    /// Copies the first bytes of a disk.
    fn copy(&mut self, driver: &str, to: u64) -> anyhow::Result<()> {
        self.run(&format!("{driver} scan"))?;
        let info = self.run(&format!("{driver} info"))?;
        let capacity = format!("Capacity: 64.0 MB = 0.0 GB ({} x {BLOCK})", DISK / BLOCK);
        ensure!(info.contains(&capacity), "{info}");
        let blocks = TRANSFER / BLOCK;
        for (command, at, done) in [("read", 0, "read"), ("write", to / BLOCK, "written")] {
            let output = self.run(&format!("{driver} {command} {RAM:x} {at:x} {blocks:x}"))?;
            let wanted = format!("{blocks} blocks {done}: OK");
            ensure!(output.contains(&wanted), "{output}");
        }
        Ok(())
    }

    /// Resets the machine.
    fn reset(&mut self) -> anyhow::Result<()> {
        let output = self.run("reset")?;
        ensure!(output.contains("U-Boot 20"), "no reset: {output}");
        Ok(())
    }
}
