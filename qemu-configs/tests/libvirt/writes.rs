//! Complete domains.

use farside_qemu_configs::{
    Accel, Device, DomainOptions, Firmware, HugePages, Machine, Vm, check_domain, read_domain,
};

use crate::common::socket;

fn vm() -> Vm {
    let mut vm = Vm::new("web1".parse().unwrap(), 4 << 30);
    vm.vcpus = 4;
    vm.spare_ports = 1;
    vm.devices.push(Device {
        id: "disk0".parse().unwrap(),
        port: None,
        socket: "/run/farside/vm/web1/disk0.sock".into(),
        function: 0,
        bootindex: Some(0),
    });
    vm
}

#[test]
fn a_domain_with_everything() {
    let mut vm = vm();
    vm.huge_pages = HugePages::Of1GiB;
    vm.firmware = Firmware::Ovmf {
        code: "/usr/share/OVMF/OVMF_CODE_4M.fd".into(),
        vars: "/var/lib/a&b/vars.fd".into(),
    };
    vm.extra_args = vec!["-append".into(), "it's <here>".into()];
    let options = DomainOptions {
        emulator: Some("/usr/bin/qemu-system-x86_64".into()),
        lenders: vec!["tcp:10.0.0.2:7410".into()],
        numa_cells: 2,
        iommu: true,
    };
    assert_eq!(
        vm.libvirt_domain(&options).unwrap(),
        include_str!("everything.xml")
    );
}

#[test]
fn what_is_written_is_right_and_as_the_command_line() {
    for machine in [Machine::Q35, Machine::I440fx] {
        let mut vm = vm();
        vm.machine = machine;
        vm.accel = Accel::Tcg;
        vm.devices[0].port = Some(1);
        vm.devices.push(Device {
            id: "audio".parse().unwrap(),
            socket: "/run/farside/vm/web1/audio.sock".into(),
            function: 1,
            bootindex: None,
            ..vm.devices[0].clone()
        });
        let xml = vm.libvirt_domain(&DomainOptions::default()).unwrap();
        assert!(xml.starts_with("<domain type='qemu' "));
        assert_eq!(check_domain(&xml, &socket), Ok(vec![]));
        let read = read_domain(&xml).unwrap().unwrap();
        assert_eq!((read.machine, read.memory), (machine, vm.ram));
        for value in vm.command_line("qemu").unwrap().args {
            if value.starts_with('{') {
                assert!(
                    xml.contains(&format!("<qemu:arg value='{value}'/>")),
                    "{value}"
                );
            }
        }
    }
}

#[test]
fn a_domain_that_borrows_nothing_yet_has_shared_memory_and_ports() {
    let mut vm = vm();
    vm.devices.clear();
    let xml = vm.libvirt_domain(&DomainOptions::default()).unwrap();
    assert_eq!(check_domain(&xml, &socket), Ok(vec![]));
    assert!(xml.contains("\"id\":\"port0\"") && !xml.contains("port1"));
}

#[test]
fn what_makes_no_domain() {
    let error = |change: fn(&mut Vm, &mut DomainOptions)| {
        let (mut vm, mut options) = (vm(), DomainOptions::default());
        change(&mut vm, &mut options);
        vm.libvirt_domain(&options).unwrap_err().to_string()
    };
    assert_eq!(
        error(|_, options| options.numa_cells = 3),
        "3 NUMA cells for 4 vCPUs and 4096 MiB: give a number of vCPUs that it divides"
    );
    assert_eq!(
        error(|vm, options| {
            vm.huge_pages = HugePages::Of1GiB;
            vm.vcpus = 8;
            options.numa_cells = 8;
        }),
        "8 NUMA cells for 8 vCPUs and 4096 MiB: give memory that it divides, into whole pages"
    );
    assert_eq!(
        error(|vm, options| {
            vm.machine = Machine::I440fx;
            options.iommu = true;
        }),
        "a pc VM has no IOMMU: use the machine q35"
    );
    assert_eq!(error(|vm, _| vm.vcpus = 0), "0 vCPUs: a VM has 1 to 255");
}
