//! Boots two VMs with IOMMUs, connects them by an NTB, and runs the example `ntb-probe` in
//! each, so that every call of this crate runs on real kernels:
//!
//! ```text
//! cargo test -p farside-ntb --test guest -- --ignored --nocapture
//! ```

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{env, fs, thread};

use farside_daemon::Wakeup;
use farside_ntb_server::{Config, NtbServer, PortAt, PortConfig};
use farside_testbed::{Progress, Testbed};

const TARGET: &str = "x86_64-unknown-linux-gnu";
const BOOT: Duration = Duration::from_secs(120);
const COMMAND: Duration = Duration::from_secs(60);
const PROBE: Duration = Duration::from_secs(300);
const NTB: &str = "0000:00:10.0";
const DRIVE: &str = "0000:00:11.0";

#[test]
#[ignore = "boots two VMs; the end-to-end tests cover the same ways"]
fn two_kernels_do_what_this_crate_expects() {
    let program = fs::read(build_probe()).unwrap();
    let testbed = Testbed::prepare(&Progress::auto()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let sizes = PortConfig {
        window_size: 64 << 20,
        lut_entries: 64,
    };
    let port = |name| PortAt {
        socket: directory.path().join(name),
        sizes,
    };
    let config = Config {
        ports: [port("a"), port("b")],
    };
    let server = NtbServer::start(&config).unwrap();
    let stop = Wakeup::new().unwrap();
    thread::scope(|scope| {
        let serving = scope.spawn(|| server.run(&stop).unwrap());
        let disk = directory.path().join("disk.img");
        fs::File::create(&disk).unwrap().set_len(16 << 20).unwrap();
        let vm = |name, socket: &Path| {
            let socket = socket.display();
            testbed
                .vm(name)
                .iommu()
                .without_module("nvme")
                .file("probe", 0o755, program.clone())
                .args([
                    "-device",
                    &format!(
                        "{{\"driver\":\"vfio-user-pci\",\"addr\":\"10\",\
                         \"socket\":{{\"type\":\"unix\",\"path\":\"{socket}\"}}}}"
                    ),
                ])
        };
        let a = vm("ntb-a", &config.ports[0].socket).launch().unwrap();
        let b = vm("ntb-b", &config.ports[1].socket)
            .args([
                "-drive",
                &format!("if=none,id=disk,format=raw,file={}", disk.display()),
                "-device",
                "nvme,serial=farside-probe,drive=disk,addr=11",
            ])
            .launch()
            .unwrap();
        for (vm, functions) in [(&a, &[NTB][..]), (&b, &[NTB, DRIVE])] {
            vm.wait_agent(BOOT).unwrap();
            vm.exec_ok("modprobe -a vfio_pci vfio_iommu_type1", COMMAND)
                .unwrap();
            for bdf in functions {
                let bind = format!(
                    "echo vfio-pci > /sys/bus/pci/devices/{bdf}/driver_override && \
                     echo {bdf} > /sys/bus/pci/drivers_probe"
                );
                vm.exec_ok(&bind, COMMAND).unwrap();
            }
        }
        let run = |role| format!("RUST_BACKTRACE=1 /probe {role} 2>&1");
        let borrower = run(format!("borrower {NTB}"));
        let borrower = a.exec_start(&borrower, PROBE).unwrap();
        let lender = b.exec(&run(format!("lender {NTB} {DRIVE}")), PROBE);
        let outputs = [borrower.wait(), lender].map(|output| output.unwrap().stdout);
        for output in &outputs {
            println!("{output}");
        }
        for (vm, output) in [&a, &b].into_iter().zip(outputs) {
            assert!(output.contains("probe: all is well"), "{output}");
            let faults = vm.exec_ok("dmesg | grep DMAR: || true", COMMAND).unwrap();
            assert!(!faults.contains("fault addr"), "{faults}");
        }
        for vm in [a, b] {
            vm.shutdown(BOOT).unwrap();
        }
        stop.raise();
        serving.join().unwrap();
    });
}

/// The probe, statically linked.
fn build_probe() -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("probe");
    let status = Command::new(env!("CARGO"))
        .args([
            "build",
            "--package",
            "farside-ntb",
            "--example",
            "ntb-probe",
        ])
        .args(["--target", TARGET])
        .env("CARGO_TARGET_DIR", &directory)
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        // It would override RUSTFLAGS.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .status()
        .unwrap();
    assert!(status.success(), "building the probe");
    directory.join(TARGET).join("debug/examples/ntb-probe")
}
