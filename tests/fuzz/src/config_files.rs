//! Files that an operator writes, and names and addresses of the command line.
//!
//! Input: a byte that selects the kind, then the text.

use farside_daemon::{DeviceId, VmName};
use farside_lender_protocol::Address;
use farside_vm_config::{VmConfig, parse_memory};

use crate::{access::Borrower, input::Input};

/// Parses the text of `input`, checks it, and makes what it is for: QEMU's command line, names that
/// print as they were read.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let kind = input.u8();
    let Ok(text) = str::from_utf8(input.0) else {
        return;
    };
    match kind % 6 {
        0 => {
            if let Ok(config) = toml::from_str::<VmConfig>(text) {
                let name: VmName = "vm1".parse().expect("a valid name");
                let _ = (config.memory(), config.lenders(), config.device_ids());
                let vm = config.to_vm(&name);
                let _ = vm.command_line("qemu");
            }
        }
        1 => {
            if let Ok(config) = toml::from_str::<farside_lender::config::Config>(text) {
                let _ = config.check();
                let _ = farside_fabric::soft::Adapter::new(config.fabric);
            }
        }
        2 => {
            if let Ok(address) = text.parse::<Address>() {
                let again = address.to_string().parse::<Address>();
                assert_eq!(again.as_ref().ok(), Some(&address));
            }
        }
        3 => {
            if let Ok(id) = text.parse::<DeviceId>() {
                assert_eq!(id.as_str(), text);
                assert!(!text.contains('/') && !text.starts_with('.'));
            }
        }
        4 => drop(parse_memory(text)),
        _ => drop(text.parse::<Borrower>()),
    }
}
