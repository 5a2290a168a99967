//! A text that may be a libvirt domain, and the edits that `farside libvirt` makes to one.
//!
//! Input: a byte that selects the devices to add, then the text.
//!
//! Invariants: no panic; adding is idempotent; removing restores the text byte for byte;
//! the added devices can be read back.

use std::path::PathBuf;

use farside_qemu_configs::{
    Borrowed, BorrowedDevice, add_devices, check_domain, read_domain, remove_all,
};

use crate::input::Input;

/// Adds devices to the domain of `input`, and removes them again.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let which = input.u8();
    let Ok(text) = str::from_utf8(input.0) else {
        return;
    };
    let _ = check_domain(text, &|vm, device| socket(vm, device));
    let before = read_domain(text);
    let wanted = Borrowed {
        devices: (0..4)
            .filter(|bit| which & 1 << bit != 0)
            .map(device)
            .collect(),
        lenders: (0..which >> 6)
            .map(|n| format!("tcp:l{n}<&'\">:1"))
            .collect(),
        spare_ports: (which & 1 << 4 != 0).then_some(2),
        socket: &|vm, device| socket(vm, device),
    };
    let Ok(once) = add_devices(text, &wanted) else {
        return;
    };
    assert_eq!(
        add_devices(&once, &wanted).as_ref(),
        Ok(&once),
        "twice is once"
    );
    let after = read_domain(&once).expect("what was written can be read");
    for wanted in &wanted.devices {
        let mut devices = after.iter().flat_map(|vm| &vm.devices);
        assert!(
            devices.any(|device| device.id == wanted.id),
            "{}",
            wanted.id
        );
    }
    if before == Ok(None) {
        assert_eq!(remove_all(&once).as_deref(), Ok(text), "byte for byte");
    }
}

fn device(number: u16) -> BorrowedDevice {
    BorrowedDevice {
        id: format!("disk{number}").parse().expect("a valid id"),
        port: (number > 1).then_some(number + 5),
        function: 0,
        bootindex: (number == 3).then_some(0),
    }
}

fn socket(vm: &str, device: &str) -> PathBuf {
    format!("/run/farside/vm/{vm}/{device}.sock").into()
}
