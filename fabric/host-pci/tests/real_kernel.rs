//! The crate against a real kernel: a VM with an emulated VT-d, an NVMe device with
//! virtual functions, and a network adapter with them.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use farside_testbed::{BarAddress, Progress, Testbed, Vm, Width};
use tempfile::TempDir;

const BOOT: Duration = Duration::from_secs(180);
const SHORT: Duration = Duration::from_secs(60);
const PROGRAM: &str = "/host-pci";
const DRIVE: &str = "0000:00:04.0";

/// The example, built with the profile of the workspace's tests, so that no dependency is
/// compiled again. The guest has the libraries that it is linked with.
fn program() -> Vec<u8> {
    let status = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--workspace", "--example", "host-pci"])
        .arg("--manifest-path")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"))
        // `cargo xtask test` sets it for libtest; dependencies would be built for it.
        .env_remove("RUSTC_BOOTSTRAP")
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    std::fs::read(target.join("debug/examples/host-pci")).unwrap()
}

struct Host {
    vm: Vm,
    /// The disks' images.
    _directory: TempDir,
}

/// An argument for a device with a separate image.
fn drive(directory: &TempDir, id: &str) -> String {
    let path = directory.path().join(id);
    File::create(&path).unwrap().set_len(64 << 20).unwrap();
    format!("if=none,format=raw,id={id},file={}", path.display())
}

impl Host {
    fn boot() -> Self {
        let testbed = Testbed::prepare(&Progress::auto()).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let vm = testbed
            .vm("host-pci")
            .iommu()
            .file(PROGRAM, 0o755, program())
            .args([
                "-drive",
                &drive(&directory, "plain"),
                "-drive",
                &drive(&directory, "shared"),
                "-device",
                "nvme,drive=plain,serial=1,addr=4",
                "-device",
                "pcie-root-port,id=port1,chassis=1,addr=5",
                "-device",
                "pcie-root-port,id=port2,chassis=2,addr=6",
                "-device",
                "igb,bus=port1",
                "-device",
                "nvme-subsys,id=subsystem",
                "-device",
                "nvme,bus=port2,serial=2,id=many,subsys=subsystem,sriov_max_vfs=2,\
                 max_ioqpairs=6,msix_qsize=7,sriov_vq_flexible=4,sriov_vi_flexible=2",
                "-device",
                "nvme-ns,drive=shared,bus=many,nsid=1,shared=on",
            ])
            .launch()
            .unwrap();
        vm.wait_agent(BOOT).unwrap();
        let host = Self {
            vm,
            _directory: directory,
        };
        host.shell("modprobe -a vfio_pci igb ext4");
        host
    }

    /// The output of a command that must succeed.
    #[track_caller]
    fn shell(&self, command: &str) -> String {
        let output = self.vm.exec(command, SHORT).unwrap();
        assert!(output.success(), "{command}: {output}");
        output.stdout
    }

    #[track_caller]
    fn run(&self, arguments: &str) -> String {
        self.shell(&format!("{PROGRAM} {arguments}"))
    }

    /// The message of a command that must fail.
    #[track_caller]
    fn refused(&self, arguments: &str) -> String {
        let command = format!("{PROGRAM} {arguments}");
        let output = self.vm.exec(&command, SHORT).unwrap();
        assert!(!output.success(), "{command}: {output}");
        output.stderr
    }

    fn driver(&self, bdf: &str) -> String {
        let link = format!("/sys/bus/pci/devices/{bdf}/driver");
        let command = format!("[ ! -e {link} ] || basename $(readlink {link})");
        self.shell(&command).trim().to_owned()
    }

    /// The block device, if it exists.
    fn disk(&self, path: &str) -> String {
        self.vm.wait_path(path, SHORT).unwrap();
        path.to_owned()
    }
}

#[track_caller]
fn assert_has(text: &str, part: &str) {
    assert!(text.contains(part), "no {part:?} in: {text}");
}

/// One VM, since booting it takes longest.
#[test]
fn a_real_kernel_does_what_is_expected_of_it() {
    let host = Host::boot();
    what_a_function_is(&host);
    to_vfio_pci_and_back(&host);
    what_is_in_use_is_refused(&host);
    virtual_functions(&host);
    dma_faults(&host);
    vfio_pci_missing(&host);
    host.vm.shutdown(SHORT).unwrap();
}

fn what_a_function_is(host: &Host) {
    host.disk("/dev/nvme0n1");
    let list = host.run("list");
    assert_has(&list, "0000:00:04.0 [1b36:0010] class 0108 (nvme)");
    assert_has(&host.run("list class=0200"), "[8086:10c9]");
    let show = host.run("show 00:04.0");
    for part in ["kind: Endpoint", "unused", "viable"] {
        assert_has(&show, part);
    }
    assert_has(&host.run("show 00:05.0"), "kind: PciBridge");
    assert_has(&host.refused("list class=0300"), "0000:00:04.0");
    assert_has(&host.refused("with 00:05.0 true"), "PCI bridge");
}

fn to_vfio_pci_and_back(host: &Host) {
    let group = "basename $(readlink /sys/bus/pci/devices/0000:00:04.0/iommu_group)";
    let node = format!("/dev/vfio/{}", host.shell(group).trim());
    let printed = host.run(&format!(
        "with 00:04.0 '[ -e {node} ] && {PROGRAM} show 00:04.0'"
    ));
    assert_has(&printed, "former: Driver(\"nvme\")");
    assert_has(&printed, "\"vfio-pci\"");
    assert_eq!(host.driver(DRIVE), "nvme");
    // As after a kill: vfio-pci has it, and its previous driver is unknown.
    host.run("leave 00:04.0");
    assert_eq!(host.driver(DRIVE), "vfio-pci");
    assert_has(&host.run("restore 00:04.0"), "former: Unknown");
    assert_eq!(host.driver(DRIVE), "nvme");
    let forced = "cat /sys/bus/pci/devices/0000:00:04.0/driver_override";
    assert_eq!(host.shell(forced).trim(), "(null)");
    host.disk(disks(host).0);
}

/// The disk of the device under test, and the other one. The kernel probes both devices
/// concurrently, and numbers them in order of completion.
fn disks(host: &Host) -> (&'static str, &'static str) {
    let (first, second) = ("/dev/nvme0n1", "/dev/nvme1n1");
    let at = format!("ls /sys/bus/pci/devices/{DRIVE}/nvme");
    match host.shell(&at).trim() {
        "nvme0" => (first, second),
        "nvme1" => (second, first),
        other => panic!("the device is {other:?}"),
    }
}

fn what_is_in_use_is_refused(host: &Host) {
    // Multipath: the second disk is not below a PCI function.
    let (own, shared) = disks(host);
    host.disk(shared);
    let controller = shared
        .trim_start_matches("/dev/")
        .trim_end_matches("n1")
        .to_owned();
    let controller = format!("basename $(realpath /sys/class/nvme/{controller}/device)");
    let controller = host.shell(&controller).trim().to_owned();
    host.shell(&format!(
        "mkdir -p /mnt && mkfifo /tmp/end && mkfs.ext4 -q {own} && mkfs.ext4 -q {shared}"
    ));
    for (bdf, disk) in [(DRIVE, own), (controller.as_str(), shared)] {
        let name = disk.trim_start_matches("/dev/");
        assert_has(&host.run(&format!("show {bdf}")), "unused");
        host.shell(&format!("mount -t ext4 {disk} /mnt"));
        assert_has(
            &host.refused(&format!("with {bdf} true")),
            &format!("{name} is mounted at /mnt"),
        );
        host.shell("umount /mnt");
        // As in a container: a mount that is in no mount table that we can read.
        let container = format!(
            "busybox unshare -m sh -c 'mount -t ext4 {disk} /mnt && touch /tmp/mounted && \
             cat /tmp/end'"
        );
        let container = host.vm.exec_start(&container, SHORT).unwrap();
        host.vm.wait_path("/tmp/mounted", SHORT).unwrap();
        assert_has(
            &host.refused(&format!("with {bdf} true")),
            &format!("{name} is open for one user alone"),
        );
        host.shell("echo >/tmp/end");
        assert!(container.wait().unwrap().success());
        host.shell("rm /tmp/mounted");
        assert_has(&host.run(&format!("show {bdf}")), "unused");
        assert_eq!(host.driver(bdf), "nvme");
    }
    let adapter = host.run("list class=0200");
    let adapter = adapter.split(' ').next().unwrap();
    let interface = host.shell(&format!("ls /sys/bus/pci/devices/{adapter}/net"));
    let interface = interface.trim();
    host.shell(&format!("ip link set {interface} up"));
    assert_has(
        &host.refused(&format!("with {adapter} true")),
        &format!("{interface} is up"),
    );
    assert_eq!(host.driver(adapter), "igb");
    host.run(&format!("force {adapter} true"));
    assert_eq!(host.driver(adapter), "igb");
    host.run(&format!("with {adapter} true"));
}

fn virtual_functions(host: &Host) {
    let adapter = host.run("list class=0200");
    let adapter = adapter.split(' ').next().unwrap();
    assert_has(
        &host.refused(&format!("vfs {adapter} 8 true")),
        "1 to 7 virtual functions",
    );
    assert_has(&host.refused("vfs 00:04.0 1 true"), "no SR-IOV");
    let inner = format!(
        "for vf in $({PROGRAM} list vfs-of:{adapter} | cut -d\" \" -f1); do \
         {PROGRAM} with $vf \"{PROGRAM} show $vf\"; done; \
         {PROGRAM} with {adapter} true 2>&1; true"
    );
    let printed = host.run(&format!("vfs {adapter} 2 '{inner}'"));
    assert_eq!(
        printed.matches("class 0200 (no driver)").count(),
        2,
        "{printed}"
    );
    assert_eq!(printed.matches("former: None").count(), 2, "{printed}");
    assert_eq!(printed.matches("\nviable").count(), 2, "{printed}");
    assert_has(&printed, "has 2 virtual functions");
    assert_has(
        &host.refused(&format!("list vfs-of:{adapter}")),
        "none of its 7 virtual functions",
    );
    let numvfs = format!("cat /sys/bus/pci/devices/{adapter}/sriov_drivers_autoprobe");
    assert_eq!(host.shell(&numvfs).trim(), "1");
}

/// The device is programmed to fetch a command from an unmapped address.
fn dma_faults(host: &Host) {
    let vm = &host.vm;
    let (log, fault) = ("/tmp/faults", 0x1234_5000u64);
    host.shell(&format!(
        "echo {DRIVE} >/sys/bus/pci/devices/{DRIVE}/driver/unbind"
    ));
    let reading =
        format!("{PROGRAM} faults 12345000 | while read line; do echo $line >>{log}; done");
    let reading = vm.exec_start(&reading, SHORT).unwrap();
    // Its first line reports that it is reading.
    vm.wait_path(log, SHORT).unwrap();
    let command = vm.config_read(DRIVE, 4, Width::U16).unwrap();
    vm.config_write(DRIVE, 4, Width::U16, command | 6).unwrap();
    let write = |offset, value| {
        let at = BarAddress {
            bdf: DRIVE.into(),
            bar: 0,
            offset,
        };
        vm.mmio_write(&at, Width::U32, value).unwrap();
    };
    // NVMe 2.0, 3.1: disable, as the driver leaves it enabled and shut down; admin queues
    // of 32 entries; enable; the doorbell.
    write(0x14, 0);
    write(0x24, 0x001f_001f);
    write(0x28, fault);
    write(0x2c, 0);
    write(0x30, fault + 0x1000);
    write(0x34, 0);
    write(0x14, 0x0046_0001);
    write(0x1000, 1);
    let ended = reading.wait().unwrap();
    let printed = host.shell(&format!("cat {log}"));
    assert!(ended.success(), "{ended}\n{printed}");
    assert_has(
        &printed,
        "Fault(KernelDmaFault { bdf: 0000:00:04.0, iova: 12345000, access: Read, ",
    );
    host.shell(&format!("echo {DRIVE} >/sys/bus/pci/drivers_probe"));
}

fn vfio_pci_missing(host: &Host) {
    host.shell("rmmod vfio_pci");
    let refused = host.refused("with 00:04.0 true");
    assert_has(&refused, "run `modprobe vfio-pci`");
    host.shell("modprobe vfio-pci");
    host.run("with 00:04.0 true");
}
