//! The data that the hook reads.

use farside_qemu_configs::{
    Borrowed, DomainDevice, DomainError, Machine, add_devices, read_domain,
};

use crate::common::{VIRT_INSTALL, borrowed};

#[test]
fn a_domain_of_ours() {
    let wanted = Borrowed {
        lenders: vec!["tcp:10.0.0.2:7410".into(), "/run/a & 'b'".into()],
        spare_ports: Some(1),
        ..borrowed(&["disk0", "net-1"])
    };
    let vm = read_domain(&add_devices(VIRT_INSTALL, &wanted).unwrap());
    let vm = vm.unwrap().unwrap();
    assert_eq!(vm.name, "web1");
    assert_eq!(vm.memory, 4 << 30);
    assert_eq!(vm.machine, Machine::Q35);
    assert_eq!(vm.lenders, wanted.lenders);
    assert_eq!(vm.spare_ports, 1);
    let device = |id: &str, port| DomainDevice {
        id: id.parse().unwrap(),
        port,
        function: 0,
        bootindex: None,
    };
    assert_eq!(vm.devices, [device("disk0", 0), device("net-1", 1)]);
}

#[test]
fn a_domain_that_is_not_ours() {
    assert_eq!(read_domain(VIRT_INSTALL), Ok(None));
}

#[test]
fn metadata_that_cannot_be_read() {
    let with = |inside: &str| {
        let ours = format!("<metadata>\n<f:vm xmlns:f='urn:farside:libvirt:1'>{inside}</f:vm>");
        read_domain(&VIRT_INSTALL.replace("<metadata>", &ours)).unwrap_err()
    };
    let error = with("\n<f:device id='a' port='70000'/>");
    assert!(matches!(
        error,
        DomainError::Value {
            line: 11,
            what: "port",
            ..
        }
    ));
    assert_eq!(
        with("<f:device port='1'/>").to_string(),
        "line 10, column 39: id \"\" cannot be read: it is to be said"
    );
}
