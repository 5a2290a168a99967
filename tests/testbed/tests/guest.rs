//! The test bed with real guests. If the test bed cannot be prepared (no apt, no network),
//! these tests fail with the reason.

use std::sync::OnceLock;
use std::time::Duration;

use farside_testbed::{BarAddress, Boot, Firmware, Machine, Progress, Testbed, Vm, Width};
use serde_json::json;

/// Several emulated guests may share two CPUs.
const BOOT: Duration = Duration::from_secs(180);
const SHORT: Duration = Duration::from_secs(60);

fn testbed() -> &'static Testbed {
    static TESTBED: OnceLock<Testbed> = OnceLock::new();
    TESTBED.get_or_init(|| Testbed::prepare(&Progress::auto()).unwrap())
}

fn shell(vm: &Vm, command: &str) -> String {
    vm.exec_ok(command, SHORT).unwrap()
}

/// The sysfs name of the only PCI function with that vendor and device.
fn find(vm: &Vm, id: &str) -> String {
    let line = shell(vm, &format!("lspci -D -d {id}"));
    line.split_whitespace().next().unwrap().to_owned()
}

#[test]
fn a_guest_boots_with_its_tools_and_powers_off() {
    let vm = testbed().vm("tools").memory(512 << 20).launch().unwrap();
    vm.wait_agent(BOOT).unwrap();
    assert_eq!(shell(&vm, "uname -r").trim(), vm.kernel_release());
    assert!(shell(&vm, "lspci").contains("Virtio console"));
    assert!(shell(&vm, "fio --version").starts_with("fio-3."));
    assert!(shell(&vm, "nvme version").contains("nvme version"));
    for module in ["xfs", "vfio-pci", "9p", "vfat"] {
        shell(&vm, &format!("modprobe {module}"));
    }

    let output = vm.exec("echo out; echo err >&2; exit 7", SHORT).unwrap();
    assert_eq!(output.code, Some(7));
    assert_eq!((&*output.stdout, &*output.stderr), ("out\n", "err\n"));
    // Enough time for the shell to start.
    let slow = vm
        .exec("echo started; sleep 1000", Duration::from_secs(10))
        .unwrap();
    assert!(slow.timed_out && slow.stdout == "started\n", "{slow}");
    // A background process does not delay the reply.
    shell(&vm, "sleep 1000 &");

    let data: Vec<u8> = (0..3_000_000u32).map(|i| i as u8).collect();
    vm.write_file("/tmp/directory/data", &data).unwrap();
    assert!(vm.read_file("/tmp/directory/data").unwrap() == data);
    vm.shutdown(SHORT).unwrap();
}

#[test]
fn the_agent_reaches_registers_and_memory() {
    let vm = testbed()
        .vm("registers")
        .machine(Machine::I440fx)
        .memory(5 << 30)
        .append("memmap=1M$0x10000000")
        .args(["-device", "edu"])
        .file("/etc/extra", 0o644, "from the host")
        .launch()
        .unwrap();
    vm.wait_agent(BOOT).unwrap();
    assert_eq!(vm.read_file("/etc/extra").unwrap(), b"from the host");

    let bdf = find(&vm, "1234:11e8");
    assert_eq!(vm.config_read(&bdf, 0, Width::U32).unwrap(), 0x11e8_1234);
    let command = vm.config_read(&bdf, 4, Width::U16).unwrap() | 6;
    vm.config_write(&bdf, 4, Width::U16, command).unwrap();
    let at = |offset| BarAddress {
        bdf: bdf.clone(),
        bar: 0,
        offset,
    };
    assert_eq!(vm.mmio_read(&at(0), Width::U32).unwrap(), 0x0100_00ed);
    // The device returns the complement of the written value.
    vm.mmio_write(&at(4), Width::U32, 0x0f0f).unwrap();
    assert_eq!(vm.mmio_read(&at(4), Width::U32).unwrap(), 0xffff_f0f0);
    let same = shell(&vm, &format!("guest-agent mmio read {bdf} 0 4 4"));
    assert_eq!(same.trim(), "0xfffff0f0");
    let error = vm.mmio_read(&at(1 << 20), Width::U32).unwrap_err();
    assert!(format!("{error:#}").contains("0x100000"), "{error:#}");

    for len in [4096, 2 << 20] {
        let page = vm.alloc_page(len).unwrap();
        assert!(page.gpa % len == 0 && page.len == len, "{page:?}");
        vm.write_page(page, len - 4, b"tail").unwrap();
        assert_eq!(vm.read_page(page, len - 5, 5).unwrap(), b"\0tail");
        vm.free_page(page).unwrap();
        assert!(vm.read_page(page, 0, 1).is_err());
    }
    vm.phys_write(0x1000_0ffe, b"over").unwrap();
    assert_eq!(vm.phys_read(0x1000_0ffd, 6).unwrap(), b"\0over\0");
    vm.kill().unwrap();
}

#[test]
fn devices_come_and_go_and_guests_reboot() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk.img");
    std::fs::File::create(&image)
        .unwrap()
        .set_len(64 << 20)
        .unwrap();
    let vm = testbed()
        .vm("hotplug")
        .memory(512 << 20)
        .args(["-device", "pcie-root-port,id=slot0,chassis=1"])
        .launch()
        .unwrap();
    vm.wait_agent(BOOT).unwrap();
    for _ in 0..2 {
        let drive = json!({
            "driver": "file", "node-name": "disk", "filename": image.to_str().unwrap(),
        });
        vm.qmp().execute("blockdev-add", drive).unwrap();
        let device = json!({
            "driver": "nvme", "id": "nvme0", "bus": "slot0", "drive": "disk", "serial": "1",
        });
        vm.qmp().device_add(device).unwrap();
        vm.wait_path("/dev/nvme0n1", SHORT).unwrap();
        let script = "mkfs.ext4 -q /dev/nvme0n1 && mount -t ext4 /dev/nvme0n1 /mnt \
                      && echo here >/mnt/file && umount /mnt && fsck.ext4 -fn /dev/nvme0n1";
        shell(&vm, script);
        vm.qmp().device_del("nvme0", SHORT).unwrap();
        vm.wait_no_path("/dev/nvme0n1", SHORT).unwrap();
        let node = json!({"node-name": "disk"});
        vm.qmp().execute("blockdev-del", node).unwrap();
    }
    let checked = testbed()
        .tool("fsck.ext4")
        .arg("-fn")
        .arg(&image)
        .output()
        .unwrap();
    assert!(checked.status.success(), "{checked:?}");

    vm.reboot(BOOT).unwrap();
    let cut_off = vm.exec_start("sleep 1000", BOOT).unwrap();
    vm.qmp().system_reset().unwrap();
    vm.wait_boot(3, BOOT).unwrap();
    let error = cut_off.wait().unwrap_err();
    assert!(format!("{error:#}").contains("rebooted"), "{error:#}");
    shell(&vm, "true");
    vm.shutdown(SHORT).unwrap();
}

#[test]
fn ovmf_boots_the_guest_from_a_drive() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("boot.img");
    testbed()
        .make_boot_image(&image, 256 << 20, "from.drive")
        .unwrap();
    let vm = testbed()
        .vm("ovmf")
        .firmware(Firmware::Ovmf)
        .boot(Boot::Device)
        .args([
            "-drive",
            &format!("if=none,id=disk,format=raw,file={}", image.display()),
            "-device",
            "nvme,drive=disk,serial=1,bootindex=0",
        ])
        .launch()
        .unwrap();
    vm.wait_agent(BOOT).unwrap();
    assert!(shell(&vm, "cat /proc/cmdline").contains("from.drive"));
    assert!(shell(&vm, "ls /sys/firmware").contains("efi"));
    vm.shutdown(SHORT).unwrap();
}

#[test]
fn a_machine_that_does_not_start_says_why() {
    let broken = testbed().vm("broken").args(["-device", "no-such-device"]);
    let error = format!("{:#}", broken.launch().unwrap_err());
    assert!(error.contains("VM broken"), "{error}");
    assert!(error.contains("no-such-device"), "{error}");

    let no_agent = testbed().vm("silent").append("rdinit=/no/such/init");
    let vm = no_agent.launch().unwrap();
    let error = vm.wait_agent(Duration::from_secs(1)).unwrap_err();
    assert!(error.to_string().contains("within 1s"), "{error}");

    let missing = testbed().vm("nowhere").base("/no/such/qemu", [""; 0]);
    let error = format!("{:#}", missing.launch().unwrap_err());
    assert!(error.contains("/no/such/qemu"), "{error}");
}
