//! Boots a VM with an IOMMU and runs the example `vfio-probe` in it, so that every call of
//! this crate runs on a real kernel.
//!
//! Debian's kernel has type1 only; the test bed builds modules with iommufd for it.

use std::env;
use std::fs;
use std::io::{Write, stdout};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use farside_testbed::{PackagesUnavailable, Progress, Testbed, VmBuilder};
use farside_vfio::Api;

// An emulated VM shares its CPUs with other tests.
const BOOT: Duration = Duration::from_secs(600);
const COMMAND: Duration = Duration::from_secs(300);

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
fn a_kernel_with_iommufd_does_what_is_expected() {
    let progress = Progress::auto();
    let testbed = Testbed::prepare(&progress).unwrap();
    let modules = match testbed.iommufd_modules(&progress) {
        Err(error) if error.is::<PackagesUnavailable>() => {
            let why = format!("{error:#}").replace('\n', "; ");
            let test = "a_kernel_with_iommufd_does_what_is_expected";
            writeln!(stdout().lock(), "skipped: {test}: {why}").unwrap();
            return;
        }
        modules => modules.unwrap(),
    };
    let vm = testbed.vm("vfio-probe").iommufd(&modules);
    probe(Api::Iommufd, vm);
}

/// Runs the probe in a VM whose kernel must have that interface.
fn probe(api: Api, vm: VmBuilder) {
    let program = fs::read(probe_program()).unwrap();
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
    let bind = format!(
        "set -e\nmodprobe -a vfio_pci vfio_iommu_type1\n{}",
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

/// The probe: `$FARSIDE_VFIO_PROBE`, else cargo's build.
fn probe_program() -> PathBuf {
    if let Some(path) = env::var_os("FARSIDE_VFIO_PROBE") {
        return path.into();
    }
    let status = Command::new(env!("CARGO"))
        .args(["build", "--package", "farside-vfio"])
        .args(["--example", "vfio-probe"])
        .status()
        .unwrap();
    assert!(status.success(), "building the probe");
    // Beside the directory of this test's binary.
    let test = env::current_exe().unwrap();
    let profile = test.parent().and_then(|deps| deps.parent()).unwrap();
    profile.join("examples/vfio-probe")
}
