//! Boots a VM with an IOMMU and runs the example `vfio-probe` in it, so that every call of
//! this crate runs on a real kernel:
//!
//! ```text
//! cargo test -p farside-vfio --test guest -- --ignored --nocapture
//! ```
//!
//! Debian's kernel has type1 only. iommufd is tested on the test bed's small kernel, which
//! `cargo xtask kernel` builds.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use farside_testbed::{Progress, Testbed, VmBuilder};
use farside_vfio::Api;

const TARGET: &str = "x86_64-unknown-linux-gnu";
const BOOT: Duration = Duration::from_secs(120);
const COMMAND: Duration = Duration::from_secs(60);

/// The device to probe, and a device with a BAR2.
const FUNCTIONS: [&str; 2] = ["0000:00:10.0", "0000:00:11.0"];

#[test]
#[ignore = "boots a VM; the end-to-end tests cover the same ways"]
fn debians_kernel_does_what_is_expected_of_type1() {
    let testbed = Testbed::prepare(&Progress::auto()).unwrap();
    let vm = testbed.vm("vfio-probe");
    probe(Api::Type1, vm);
}

#[test]
#[ignore = "boots a VM with the kernel of `cargo xtask kernel`; the end-to-end tests cover the same ways"]
fn a_kernel_with_iommufd_does_what_is_expected() {
    let testbed = Testbed::prepare(&Progress::auto()).unwrap();
    let kernel = testbed
        .iommufd_kernel()
        .expect("no small kernel in the cache: build it with `cargo xtask kernel`");
    let vm = testbed.vm("vfio-probe").kernel(kernel);
    probe(Api::Iommufd, vm);
}

/// Runs the probe in a VM whose kernel must have that interface.
fn probe(api: Api, vm: VmBuilder) {
    let program = fs::read(build_probe()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().join("disk.img");
    let file = fs::File::create(&disk).unwrap();
    file.set_len(16 << 20).unwrap();
    let vm = vm
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
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("probe");
    let status = Command::new(env!("CARGO"))
        .args([
            "build",
            "--package",
            "farside-vfio",
            "--example",
            "vfio-probe",
        ])
        .args(["--target", TARGET])
        .env("CARGO_TARGET_DIR", &directory)
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        // It would override RUSTFLAGS.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .status()
        .unwrap();
    assert!(status.success(), "building the probe");
    directory.join(TARGET).join("debug/examples/vfio-probe")
}
