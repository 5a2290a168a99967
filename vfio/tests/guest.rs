//! Boots a VM with an IOMMU and runs the example `vfio-probe` in it, so that
//! every call of this crate meets the real kernel:
//!
//! ```text
//! cargo test -p farside-vfio --test guest -- --ignored --nocapture
//! ```

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{env, fs};

use farside_testbed::{Progress, Testbed};

const TARGET: &str = "x86_64-unknown-linux-gnu";
const BOOT: Duration = Duration::from_secs(120);
const COMMAND: Duration = Duration::from_secs(60);

#[test]
#[ignore = "boots a VM; the end-to-end tests cover the same ways"]
fn the_kernel_does_what_this_crate_expects() {
    let program = fs::read(build_probe()).unwrap();
    let testbed = Testbed::prepare(&Progress::auto()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk.img");
    let file = fs::File::create(&disk).unwrap();
    file.set_len(16 << 20).unwrap();
    let vm = testbed
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
        .file("probe", 0o755, program)
        .launch()
        .unwrap();
    vm.wait_agent(BOOT).unwrap();
    vm.exec_ok("modprobe -a vfio_pci vfio_iommu_type1", COMMAND)
        .unwrap();
    for bdf in ["0000:00:10.0", "0000:00:11.0"] {
        let bind = format!(
            "echo vfio-pci > /sys/bus/pci/devices/{bdf}/driver_override && \
             echo {bdf} > /sys/bus/pci/drivers_probe"
        );
        vm.exec_ok(&bind, COMMAND).unwrap();
    }
    let run = "RUST_BACKTRACE=1 /probe 0000:00:10.0 0000:00:11.0 2>&1";
    let output = vm.exec(run, COMMAND).unwrap();
    let text = output.stdout;
    println!("{text}");
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
