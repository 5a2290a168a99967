//! VM configurations and their exact QEMU arguments.

use std::{process::Command, time::Duration};

use farside_qemu_configs::{
    Accel, Device, Firmware, HugePages, Machine, MonitorSocket, SharedMemoryError, ViommuError, Vm,
    VmError, check_shared_memory, message_timeout_ms,
};
use proptest::prelude::*;

fn device(id: &str) -> Device {
    Device {
        port: None,
        id: id.parse().unwrap(),
        socket: format!("/run/farside/vm1/{id}.sock").into(),
        function: 0,
        bootindex: None,
    }
}

fn vm() -> Vm {
    let mut vm = Vm::new("vm1".parse().unwrap(), 1 << 30);
    vm.devices.push(device("disk0"));
    vm
}

fn args(vm: &Vm) -> Vec<String> {
    vm.command_line("qemu-system-x86_64").unwrap().args
}

fn error(vm: &Vm) -> String {
    vm.command_line("qemu-system-x86_64")
        .unwrap_err()
        .to_string()
}

#[test]
fn a_q35_with_one_device() {
    assert_eq!(
        args(&vm()),
        [
            "-name",
            "guest=vm1,debug-threads=on",
            "-machine",
            "q35,memory-backend=mem",
            "-accel",
            "kvm",
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            "max",
            "-smp",
            "1",
            "-m",
            "1024M",
            "-object",
            "memory-backend-memfd,id=mem,size=1024M,share=on",
            "-device",
            r#"{"driver":"pcie-root-port","id":"port0","bus":"pcie.0","addr":"0x10.0x0","multifunction":true,"chassis":1,"slot":1}"#,
            "-device",
            r#"{"driver":"vfio-user-pci","id":"dev-disk0","bus":"port0","addr":"0x0","socket":{"type":"unix","path":"/run/farside/vm1/disk0.sock"},"x-msg-timeout":10000}"#,
        ]
    );
}

#[test]
fn an_i440fx_with_two_devices_has_them_on_its_bus() {
    let mut vm = vm();
    vm.machine = Machine::I440fx;
    vm.accel = Accel::Tcg;
    vm.spare_ports = 4;
    vm.vcpus = 2;
    vm.devices[0].bootindex = Some(1);
    vm.devices.push(device("0dma"));
    vm.extra_args = vec!["-nographic".to_owned()];
    assert_eq!(
        args(&vm),
        [
            "-name",
            "guest=vm1,debug-threads=on",
            "-machine",
            "pc,memory-backend=mem",
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            "max",
            "-smp",
            "2",
            "-m",
            "1024M",
            "-object",
            "memory-backend-memfd,id=mem,size=1024M,share=on",
            "-device",
            r#"{"driver":"vfio-user-pci","id":"dev-disk0","bus":"pci.0","addr":"0x10","socket":{"type":"unix","path":"/run/farside/vm1/disk0.sock"},"x-msg-timeout":10000,"bootindex":1}"#,
            "-device",
            r#"{"driver":"vfio-user-pci","id":"dev-0dma","bus":"pci.0","addr":"0x11","socket":{"type":"unix","path":"/run/farside/vm1/0dma.sock"},"x-msg-timeout":10000}"#,
            "-nographic",
        ]
    );
}

#[test]
fn a_monitor_is_a_socket_where_qemu_listens() {
    let mut vm = vm();
    vm.monitor = Some(MonitorSocket::Path("/run/a,b/qmp".into()));
    let args = args(&vm);
    let at = args.iter().position(|arg| arg == "-qmp").unwrap();
    assert_eq!(args[at + 1], "unix:/run/a,,b/qmp,server=on,wait=off");
}

#[test]
fn a_monitor_that_listens_already_is_a_descriptor() {
    let mut vm = vm();
    vm.monitor = Some(MonitorSocket::Fd(3));
    let args = args(&vm);
    let of = |option: &str| {
        let at = args.iter().position(|arg| arg == option);
        at.map(|at| args[at + 1].as_str())
    };
    assert_eq!(
        of("-chardev"),
        Some("socket,id=qmp,fd=3,server=on,wait=off")
    );
    assert_eq!(of("-qmp"), Some("chardev:qmp"));
    let config = vm.read_config("qemu", "/tmp/a.cfg".as_ref()).unwrap();
    let chardev = "[chardev \"qmp\"]\n  fd = \"3\"\n  backend = \"socket\"\n  server = \"on\"\n";
    assert!(config.text.contains(chardev), "{}", config.text);
    let form = vm.json_form(&config.command_line).unwrap();
    assert_eq!(form["monitor"], serde_json::Value::Null);
}

#[test]
fn ovmf_is_two_flash_images_whose_paths_may_have_commas() {
    let mut vm = vm();
    vm.devices.clear();
    vm.accel = Accel::Kvm;
    vm.huge_pages = HugePages::Of2MiB;
    vm.firmware = Firmware::Ovmf {
        code: "/usr/share/OVMF/OVMF_CODE_4M.fd".into(),
        vars: "/var/lib/a, b/vars.fd".into(),
    };
    assert_eq!(
        args(&vm)[2..],
        [
            "-machine",
            "q35,memory-backend=mem,pflash0=ovmf-code,pflash1=ovmf-vars",
            "-accel",
            "kvm",
            "-cpu",
            "max",
            "-smp",
            "1",
            "-m",
            "1024M",
            "-object",
            "memory-backend-memfd,id=mem,size=1024M,share=on,hugetlb=on,hugetlbsize=2M",
            "-blockdev",
            r#"{"driver":"raw","node-name":"ovmf-code","read-only":true,"file":{"driver":"file","filename":"/usr/share/OVMF/OVMF_CODE_4M.fd"}}"#,
            "-blockdev",
            r#"{"driver":"raw","node-name":"ovmf-vars","read-only":false,"file":{"driver":"file","filename":"/var/lib/a, b/vars.fd"}}"#,
        ]
    );
}

#[test]
fn ports_stay_where_they_are_when_more_are_added() {
    let mut vm = vm();
    let before = args(&vm);
    vm.spare_ports = 9;
    let after = args(&vm);
    let ports: Vec<_> = after
        .iter()
        .filter(|arg| arg.contains("pcie-root-port"))
        .collect();
    assert_eq!(ports.len(), 10);
    assert_eq!(ports[0], &before[17]);
    assert_eq!(
        ports[9],
        r#"{"driver":"pcie-root-port","id":"port9","bus":"pcie.0","addr":"0x11.0x1","multifunction":false,"chassis":10,"slot":10}"#
    );
    assert_eq!(before.last(), after.last(), "the device has not moved");
}

#[test]
fn a_device_with_a_port_stays_when_others_come_and_go() {
    let mut vm = vm();
    vm.devices[0].port = Some(2);
    let alone = vm.device_add(0).unwrap();
    assert_eq!(alone["bus"], "port2");
    vm.devices.insert(0, device("disk1"));
    vm.spare_ports = 1;
    assert_eq!(vm.ports(), [0, 2]);
    assert_eq!(vm.device_add(1).unwrap(), alone);
    let args = args(&vm);
    let ports = args.iter().filter(|arg| arg.contains("pcie-root-port"));
    assert_eq!(ports.count(), 4, "0 to 2, and a spare one");

    vm.machine = Machine::I440fx;
    assert_eq!(vm.device_add(1).unwrap()["addr"], "0x12");
}

#[test]
fn ports_that_cannot_be_are_refused() {
    let with = |ports: &[Option<u16>], machine| {
        let mut vm = vm();
        vm.machine = machine;
        vm.devices = ports
            .iter()
            .enumerate()
            .map(|(n, &port)| {
                let mut device = device(&format!("d{n}"));
                device.port = port;
                device
            })
            .collect();
        error(&vm)
    };
    assert_eq!(
        with(&[Some(1), None], Machine::Q35),
        "devices d0 and d1 are both at port 1: give one of them another, or another `function` \
         (a device without `port` has its position in the list, counted from 0)"
    );
    assert_eq!(
        with(&[Some(64)], Machine::Q35),
        "device d0 at port 64: the ports of a q35 VM are 0 to 63"
    );
    assert_eq!(
        with(&[Some(16)], Machine::I440fx),
        "device d0 at port 16: the ports of a pc VM are 0 to 15"
    );
}

#[test]
fn devices_at_one_port_are_functions_of_one_device() {
    let mut vm = vm();
    vm.devices.push(device("disk1"));
    for device in &mut vm.devices {
        device.port = Some(2);
    }
    vm.devices[1].function = 3;
    for (machine, bus, slot) in [
        (Machine::Q35, "port2", "0x0"),
        (Machine::I440fx, "pci.0", "0x12"),
    ] {
        vm.machine = machine;
        let [first, other] = [0, 1].map(|position| vm.device_add(position).unwrap());
        assert_eq!((&first["bus"], &other["bus"]), (&bus.into(), &bus.into()));
        assert_eq!(
            (&first["addr"], &first["multifunction"]),
            (&slot.into(), &true.into())
        );
        assert_eq!(other["addr"], format!("{slot}.0x3"));
        assert!(other.get("multifunction").is_none());
    }
    assert_eq!(vm.port_count(), 3);
    vm.devices[1].function = 8;
    assert_eq!(
        error(&vm),
        "device disk1 is function 8: the functions of a device are 0 to 7"
    );
    vm.devices[1].function = 3;
    vm.devices[1].port = None;
    assert_eq!(
        error(&vm),
        "device disk1 is function 3 of the device at port 1, which has no function 0: \
         give another device that `port`, without `function`"
    );
}

#[test]
fn hot_plug_uses_what_the_command_line_uses() {
    let mut vm = vm();
    vm.spare_ports = 1;
    vm.devices.push(device("disk1"));
    let plug = vm.device_add(1).unwrap();
    assert_eq!(plug["id"], "dev-disk1");
    assert_eq!(plug["bus"], "port1");
    let last: serde_json::Value = serde_json::from_str(args(&vm).last().unwrap()).unwrap();
    assert_eq!(plug, last);
}

#[test]
fn printed_for_a_shell_it_comes_back_the_same() {
    let mut vm = vm();
    vm.extra_args = vec![
        "-append".into(),
        "it's $HOME \"x\" \\".into(),
        String::new(),
    ];
    let line = vm.command_line("/opt/my qemu/qemu").unwrap();
    let printed = line.to_string();
    assert!(
        printed.starts_with("'/opt/my qemu/qemu' \\\n  -name 'guest=vm1,debug-threads=on' \\\n")
    );
    let said = Command::new("sh")
        .args(["-c", &format!("printf '%s\\0' {printed}")])
        .output()
        .unwrap();
    let words = String::from_utf8(said.stdout).unwrap();
    let words: Vec<_> = words.split_terminator('\0').collect();
    assert_eq!(words[0], "/opt/my qemu/qemu");
    assert_eq!(words[1..], line.args);
}

#[test]
fn the_timeout_grows_with_ram() {
    assert_eq!(message_timeout_ms(0), 5_000);
    assert_eq!(message_timeout_ms(5 << 30), 27_000);
    assert_eq!(message_timeout_ms(4 << 40), 17_598_000);
    assert_eq!(message_timeout_ms(u64::MAX), u32::MAX);
}

#[test]
fn the_timeout_exceeds_the_backends_limit_for_bus_master_enable() {
    let timeout = |open_timeout: Option<u64>| {
        let mut vm = Vm::new("web1".parse().unwrap(), 1 << 30);
        vm.open_timeout = open_timeout.map(Duration::from_secs);
        vm.message_timeout_ms()
    };
    assert_eq!(timeout(None), 10_000);
    assert_eq!(timeout(Some(8)), 10_000);
    assert_eq!(timeout(Some(9)), 11_250);
    assert_eq!(timeout(Some(100)), 125_000);
    assert_eq!(timeout(Some(u64::MAX)), u32::MAX);
}

#[test]
fn bad_descriptions_say_what_to_do() {
    let with = |change: fn(&mut Vm)| {
        let mut vm = vm();
        change(&mut vm);
        error(&vm)
    };
    assert_eq!(
        with(|vm| vm.ram += 1),
        "guest RAM of 1073741825 bytes is not a multiple of 1048576 bytes: \
         use 1073741824 or 1074790400"
    );
    assert_eq!(
        with(|vm| {
            vm.huge_pages = HugePages::Of1GiB;
            vm.ram = 512 << 20;
        }),
        "guest RAM of 536870912 bytes is not a multiple of 1073741824 bytes: \
         use 1073741824 or 2147483648"
    );
    assert_eq!(
        with(|vm| vm.ram = 0),
        "guest RAM of 0 bytes: give the VM some"
    );
    assert_eq!(with(|vm| vm.vcpus = 0), "0 vCPUs: a VM has 1 to 255");
    assert_eq!(
        with(|vm| vm.devices.push(device("disk0"))),
        "device id \"disk0\" is used twice in this VM"
    );
    assert_eq!(
        with(|vm| {
            vm.devices.push(device("disk1"));
            vm.devices[1].socket = vm.devices[0].socket.clone();
        }),
        "socket \"/run/farside/vm1/disk0.sock\" is used twice in this VM"
    );
    assert_eq!(
        with(|vm| {
            vm.devices.push(device("disk1"));
            vm.devices.iter_mut().for_each(|d| d.bootindex = Some(0));
        }),
        "bootindex \"0\" is used twice in this VM"
    );
    assert!(
        with(|vm| vm.devices[0].socket = format!("/{}", "x".repeat(107)).into()).ends_with(
            "has 108 bytes, and 107 is the most a UNIX socket can have: use a shorter directory"
        )
    );
    assert_eq!(
        with(|vm| vm.spare_ports = 64),
        "65 ports, of devices and spare: a q35 VM has room for 64"
    );
    assert_eq!(
        with(|vm| vm.extra_args.push("a\0".into())),
        "the extra argument \"a\\0\" has a zero byte"
    );
}

#[test]
fn extra_arguments_must_not_undo_the_shared_memory() {
    let mut vm = vm();
    vm.extra_args = vec!["-machine".into(), "memory-backend=other".into()];
    let error = vm.command_line("qemu").unwrap_err();
    let unknown = SharedMemoryError::UnknownBackend {
        user: "-machine",
        id: "other".to_owned(),
    };
    assert_eq!(error, VmError::Memory(unknown));
}

#[test]
fn a_viommu_that_ends_qemu_is_refused() {
    let with = |args: &str| {
        let mut vm = vm();
        vm.extra_args = shlex::split(args).unwrap();
        vm.command_line("qemu").map(drop)
    };
    let caching_mode = VmError::Viommu(ViommuError {
        driver: "intel-iommu",
        property: "caching-mode",
    });
    for args in [
        "-device intel-iommu",
        "--device intel-iommu,intremap=on",
        "-device intel-iommu,caching-mode=off",
        r#"-device '{"driver": "intel-iommu", "caching-mode": false}'"#,
        "-device intel-iommu -global amd-iommu.dma-remap=on",
    ] {
        assert_eq!(with(args).as_ref().err(), Some(&caching_mode), "{args}");
    }
    let dma_remap = with("-device amd-iommu").unwrap_err();
    let source = std::error::Error::source(&dma_remap).unwrap();
    assert_eq!(
        source.to_string(),
        "-device amd-iommu without dma-remap=on: QEMU exits when the guest enables the vIOMMU, \
         since borrowed devices do not get the guest's mappings; use -device \
         amd-iommu,dma-remap=on"
    );
    for args in [
        "",
        "-device intel-iommu,caching-mode=on",
        r#"-device '{"driver": "intel-iommu", "caching-mode": true}'"#,
        "-device intel-iommu -global intel-iommu.caching-mode=on",
        "-global driver=intel-iommu,property=caching-mode,value=on -device intel-iommu",
        "-device amd-iommu,dma-remap=on",
        "-device virtio-iommu-pci",
    ] {
        assert_eq!(with(args), Ok(()), "{args}");
    }
}

#[test]
fn says_which_option_a_foreign_command_line_lacks() {
    let check = |line: &str| check_shared_memory(&shlex::split(line).unwrap());
    let said = |line: &str| check(line).unwrap_err().to_string();

    assert_eq!(
        said("-M q35 -m 2G -device vfio-user-pci"),
        "guest RAM is private to QEMU: add `-object \
         memory-backend-memfd,id=mem,size=SIZE,share=on` (SIZE as in -m) and \
         `memory-backend=mem` to -machine"
    );
    assert_eq!(
        said("-machine q35,memory-backend=mem -object memory-backend-ram,id=mem,size=2G"),
        "the memory backend \"mem\" (memory-backend-ram) is private to QEMU: \
         add share=on to its -object"
    );
    assert_eq!(
        said("-machine q35,memory-backend=pc.ram -m 2G"),
        "-machine names the memory backend \"pc.ram\", but no -object has that id"
    );
    let file = "memory-backend-file,mem-path=/dev/hugepages/a,,b,size=2G,id=m0";
    assert!(check(&format!("-numa node,memdev=m0 -object {file}")).is_err());
    assert!(check(&format!("-numa node,memdev=m0 -object {file},share=on")).is_ok());
    assert!(
        check(&format!(
            "--machine memory-backend=m0 --object {file},share=yes"
        ))
        .is_ok()
    );
    assert!(check("-machine q35,memory-backend=m -object memory-backend-memfd,id=m").is_ok());
    let off = "-machine q35,memory-backend=m -object memory-backend-memfd,id=m,share=off";
    assert!(check(off).is_err());
    let json = r#"-machine q35,memory-backend=m
        -object '{"qom-type":"memory-backend-file","id":"m","share":true,"size":1}'"#;
    assert!(check(json).is_ok());
    assert!(check("-object").is_err());
    assert!(check("-object '{' -machine ,,=,").is_err());
}

proptest! {
    /// Any input returns arguments that QEMU's parser accepts, or an error.
    #[test]
    fn any_description_gives_arguments_or_an_error(
        name in "[a-z0-9][a-z0-9.-]{0,3}",
        mib in 0u64..1 << 40,
        vcpus in 0u32..300,
        ids in prop::collection::vec("[a-z0-9][a-z0-9_.-]{0,2}", 0..5),
        spare in 0u16..80,
        i440fx in any::<bool>(),
    ) {
        let mut vm = Vm::new(name.parse().unwrap(), mib << 20);
        vm.vcpus = vcpus;
        vm.spare_ports = spare;
        vm.machine = if i440fx { Machine::I440fx } else { Machine::Q35 };
        vm.devices = ids.iter().map(|id| device(id)).collect();
        if let Ok(line) = vm.command_line("qemu") {
            prop_assert!(check_shared_memory(&line.args).is_ok());
            for arg in line.args.iter().filter(|arg| arg.starts_with('{')) {
                serde_json::from_str::<serde_json::Value>(arg).unwrap();
            }
            let command = line.to_command();
            prop_assert_eq!(command.get_program(), "qemu");
            prop_assert_eq!(command.get_args().len(), line.args.len());
        }
    }
}
