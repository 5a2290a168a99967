//! Boots a VM with an IOMMU and runs the example `vfio-probe` in it, so that
//! every call of this crate meets the real kernel:
//!
//! ```text
//! cargo test -p farside-vfio --test guest -- --ignored --nocapture
//! ```
//!
//! Debian's kernel has type1 only. For iommufd, `FARSIDE_IOMMUFD_KERNEL` names
//! the image of a kernel with `CONFIG_IOMMUFD`, `CONFIG_VFIO_DEVICE_CDEV`,
//! `CONFIG_VFIO_PCI`, `CONFIG_VFIO_PCI_DMABUF`, `CONFIG_INTEL_IOMMU`,
//! `CONFIG_IRQ_REMAP`, `CONFIG_VIRTIO_PCI` and `CONFIG_VIRTIO_CONSOLE` built in.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{env, fs};

use farside_testbed::{Progress, Testbed};
use farside_vfio::Api;

const TARGET: &str = "x86_64-unknown-linux-gnu";
const KERNEL: &str = "FARSIDE_IOMMUFD_KERNEL";
const BOOT: Duration = Duration::from_secs(120);
const COMMAND: Duration = Duration::from_secs(60);

/// The drive to probe, and a device with a BAR2.
const FUNCTIONS: [&str; 2] = ["0000:00:10.0", "0000:00:11.0"];

#[test]
#[ignore = "boots a VM; the end-to-end tests cover the same ways"]
fn debians_kernel_does_what_is_expected_of_type1() {
    probe(Api::Type1, None);
}

#[test]
#[ignore = "boots a VM with a kernel that FARSIDE_IOMMUFD_KERNEL names"]
fn a_kernel_with_iommufd_does_what_is_expected() {
    match env::var_os(KERNEL) {
        Some(kernel) => probe(Api::Iommufd, Some(kernel.into())),
        None => println!("skipped: {KERNEL} names no kernel with CONFIG_IOMMUFD"),
    }
}

/// Runs the probe under a kernel that is to offer that interface: the test
/// bed's own, or another.
fn probe(api: Api, kernel: Option<PathBuf>) {
    let program = fs::read(build_probe()).unwrap();
    let testbed = Testbed::prepare(&Progress::auto()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk.img");
    let file = fs::File::create(&disk).unwrap();
    file.set_len(16 << 20).unwrap();
    let mut vm = testbed
        .vm("vfio-probe")
        .iommu()
        .without_module("nvme")
        .args([
            "-drive",
            &format!("if=none,id=disk,format=raw,file={}", disk.display()),
            "-device",
            "nvme,serial=probe,drive=disk,addr=10",
            "-object",
            "memory-backend-memfd,id=window,size=16M,share=on",
            "-device",
            "ivshmem-plain,memdev=window,addr=11",
        ])
        .file("probe", 0o755, program);
    if let Some(kernel) = kernel {
        // The last of them counts.
        vm = vm.arg("-kernel").arg(kernel);
    }
    let vm = vm.launch().unwrap();
    vm.wait_agent(BOOT).unwrap();
    let bind = FUNCTIONS.map(|bdf| {
        format!(
            "echo vfio-pci > /sys/bus/pci/devices/{bdf}/driver_override\n\
             [ ! -e /sys/bus/pci/devices/{bdf}/driver ] || \
             echo {bdf} > /sys/bus/pci/devices/{bdf}/driver/unbind\n\
             echo {bdf} > /sys/bus/pci/drivers_probe\n"
        )
    });
    // Built in where there are no modules.
    let bind = format!(
        "modprobe -a vfio_pci vfio_iommu_type1\nset -e\n{}",
        bind.concat()
    );
    vm.exec_ok(&bind, COMMAND).unwrap();
    let run = format!("RUST_BACKTRACE=1 /probe {} 2>&1", FUNCTIONS.join(" "));
    let text = vm.exec(&run, COMMAND).unwrap().stdout;
    println!("{text}");
    assert!(text.contains(&format!("interface: {api}\n")), "{text}");
    assert!(text.contains("probe: all is well"), "{text}");
    let faults = vm.exec_ok("dmesg | grep DMAR: || true", COMMAND).unwrap();
    assert!(!faults.contains("fault addr"), "{faults}");
    vm.shutdown(BOOT).unwrap();
}

/// The probe, statically linked.
fn build_probe() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("probe");
    let status = Command::new(env!("CARGO"))
        .args([
            "build",
            "--package",
            "farside-vfio",
            "--example",
            "vfio-probe",
        ])
        .args(["--target", TARGET])
        .env("CARGO_TARGET_DIR", &folder)
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        // It would win over RUSTFLAGS.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .status()
        .unwrap();
    assert!(status.success(), "building the probe");
    folder.join(TARGET).join("debug/examples/vfio-probe")
}
