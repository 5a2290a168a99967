//! VMs that play hosts, and guests in them.

use std::sync::OnceLock;
use std::time::Duration;

use farside_testbed::{Progress, Testbed};

/// Several emulated guests may share two CPUs.
const BOOT: Duration = Duration::from_secs(180);
const SHORT: Duration = Duration::from_secs(60);

fn testbed() -> &'static Testbed {
    static TESTBED: OnceLock<Testbed> = OnceLock::new();
    TESTBED.get_or_init(|| Testbed::prepare(&Progress::auto()).unwrap())
}

#[test]
fn a_nested_guest_uses_a_physical_drive_by_vfio() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk.img");
    std::fs::File::create(&image)
        .unwrap()
        .set_len(64 << 20)
        .unwrap();
    let host = testbed()
        .host_vm("host")
        .args([
            "-drive",
            &format!("if=none,id=disk,format=raw,file={}", image.display()),
            "-device",
            "nvme,drive=disk,serial=1,addr=4",
        ])
        .launch_host(BOOT)
        .unwrap();
    let bdf = "0000:00:04.0";
    host.bind(bdf, "vfio-pci").unwrap();
    let group = format!("basename $(readlink /sys/bus/pci/devices/{bdf}/iommu_group)");
    let group = host.exec_ok(&group, SHORT).unwrap();
    host.wait_path(&format!("/dev/vfio/{}", group.trim()), SHORT)
        .unwrap();

    for round in 1..=2 {
        let guest = host
            .guest("inner")
            .args(["-device", &format!("vfio-pci,host={bdf}")])
            .launch()
            .unwrap();
        guest.wait_agent(BOOT).unwrap();
        guest.exec_ok("modprobe nvme", SHORT).unwrap();
        guest.wait_path("/dev/nvme0n1", SHORT).unwrap();
        let script = format!(
            "set -e; echo round {round} | dd of=/tmp/text bs=512 conv=sync
            dd if=/tmp/text of=/dev/nvme0n1 bs=512 oflag=direct"
        );
        guest.exec_ok(&script, SHORT).unwrap();
        let ended = guest.shutdown(SHORT).unwrap();
        assert!(ended.success(), "{ended}");
        let image = std::fs::read(&image).unwrap();
        assert!(image.starts_with(format!("round {round}\n").as_bytes()));
    }

    let broken = host.guest("broken").args(["-device", "no-such-device"]);
    let error = format!("{:#}", broken.launch().unwrap_err());
    assert!(error.contains("no-such-device"), "{error}");
    let two: Vec<_> = (0..2)
        .map(|_| host.guest("two").launch().unwrap())
        .collect();
    let error = host.guest("third").launch().unwrap_err().to_string();
    assert!(error.contains("nested_guests"), "{error}");
    drop(two);
    host.guest("again").launch().unwrap().kill().unwrap();
    host.shutdown(SHORT).unwrap();
}
