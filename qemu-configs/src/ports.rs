//! PCI addresses of devices: root ports on the q35, slots of the bus on the i440FX.

use crate::{Device, Machine, Vm, VmError};

/// First device number on the root bus for borrowed devices. QEMU and libvirt assign lower ones to
/// devices without an address.
pub(crate) const FIRST_SLOT: usize = 0x10;
/// Functions of a device number.
const FUNCTIONS: usize = 8;
/// Device numbers for root ports on the q35: 0x10 to 0x17. The chipset uses those above (USB at
/// 0x1a and 0x1d, LPC at 0x1f).
const PORT_SLOTS: usize = 8;
/// Device numbers for devices on the i440FX: 0x10 to 0x1f.
const BUS_SLOTS: usize = 16;

impl Vm {
    /// The port of each device, in order: the configured one, else its position. On the i440FX a
    /// port is a slot of the bus.
    pub fn ports(&self) -> Vec<usize> {
        let devices = self.devices.iter().enumerate();
        devices
            .map(|(position, device)| device.port.map_or(position, usize::from))
            .collect()
    }

    /// The number of root ports: up to the highest used one, plus the spare ones. On the i440FX,
    /// the number of slots for borrowed devices.
    pub fn port_count(&self) -> usize {
        let used = self.ports().into_iter().max().map_or(0, |port| port + 1);
        match self.machine {
            Machine::Q35 => used + usize::from(self.spare_ports),
            Machine::I440fx => used,
        }
    }

    pub(crate) fn check_ports(&self) -> Result<(), VmError> {
        let limit = limit(self.machine);
        let room_for = |wanted: usize, what| match wanted > limit {
            true => Err(VmError::TooMany {
                wanted,
                what,
                machine: self.machine.name(),
                limit,
            }),
            false => Ok(()),
        };
        let whole = self.devices.iter().filter(|device| device.function == 0);
        room_for(whole.count(), "devices")?;
        let ports = self.ports();
        for (position, &port) in ports.iter().enumerate() {
            let id = &self.devices[position].id;
            if port >= limit {
                return Err(VmError::Port {
                    id: id.clone(),
                    port,
                    machine: self.machine.name(),
                    last: limit - 1,
                });
            }
            let function = self.devices[position].function;
            if usize::from(function) >= FUNCTIONS {
                return Err(VmError::Function {
                    id: id.clone(),
                    function,
                });
            }
            let mut others = ports.iter().zip(&self.devices).take(position);
            let is_same = |other: &Device| other.function == function;
            if let Some((_, other)) = others.find(|(at, other)| **at == port && is_same(other)) {
                return Err(VmError::SamePort {
                    port,
                    first: other.id.clone(),
                    second: id.clone(),
                });
            }
            let mut all = ports.iter().zip(&self.devices);
            if !all.any(|(at, other)| *at == port && other.function == 0) {
                return Err(VmError::NoFunction0 {
                    id: id.clone(),
                    function,
                    port,
                });
            }
        }
        room_for(self.port_count(), "ports, of devices and spare")
    }
}

/// The maximum number of ports.
pub(crate) fn limit(machine: Machine) -> usize {
    match machine {
        Machine::Q35 => PORT_SLOTS * FUNCTIONS,
        Machine::I440fx => BUS_SLOTS,
    }
}

/// Bus and address of a function of the device at a port.
pub(crate) fn place(machine: Machine, port: usize, function: u8) -> (String, String) {
    let (bus, slot) = match machine {
        Machine::Q35 => (name(port), 0),
        Machine::I440fx => ("pci.0".to_owned(), FIRST_SLOT + port),
    };
    let address = match function {
        0 => format!("{slot:#x}"),
        1.. => format!("{slot:#x}.{function:#x}"),
    };
    (bus, address)
}

/// The device numbers on the root bus for this number of ports.
pub(crate) fn slots(machine: Machine, ports: usize) -> std::ops::Range<usize> {
    let slots = match machine {
        Machine::Q35 => ports.div_ceil(FUNCTIONS),
        Machine::I440fx => ports,
    };
    FIRST_SLOT..FIRST_SLOT + slots
}

/// Device and function number of a root port.
pub(crate) fn root_address(port: usize) -> (usize, usize) {
    (FIRST_SLOT + port / FUNCTIONS, port % FUNCTIONS)
}

pub(crate) fn name(port: usize) -> String {
    format!("port{port}")
}
