//! The ports and slots of a running VM for borrowed devices, from QEMU's object tree (QOM), which
//! shows plugged-in devices even before the guest has enumerated them.

use farside_daemon::DeviceId;
use farside_qemu_configs::{Device, Machine, Vm};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{Error, Monitor};

const PERIPHERALS: &str = "/machine/peripheral";
/// How `farside_qemu_configs` names root ports.
const PORT: &str = "port";
/// How it names borrowed devices.
const DEVICE: &str = "dev-";
/// The i440FX's one bus, in the object tree.
const PC_BUS: &str = "pci.0";

/// The ports of a VM.
pub(crate) struct Slots {
    machine: Machine,
}

/// One port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) port: u16,
    pub(crate) taken: bool,
}

impl Slots {
    /// Queries the ports of a running VM.
    pub(crate) fn of(monitor: &mut Monitor) -> Result<Self, Error> {
        let kind = get(monitor, "/machine", "type")?;
        let machine = match kind.as_str() {
            Some(kind) if kind.starts_with("pc-q35") || kind.starts_with("q35") => Machine::Q35,
            Some(kind) if kind.starts_with("pc-i440fx") || kind.starts_with("pc-") => {
                Machine::I440fx
            }
            _ => {
                return Err(Error::Unsupported {
                    vm: monitor.vm().to_owned(),
                    what: format!(
                        "its machine is {kind}: devices are plugged into a q35 or pc (i440FX) only"
                    ),
                });
            }
        };
        Ok(Self { machine })
    }

    pub(crate) fn machine(&self) -> Machine {
        self.machine
    }

    /// The number of the port of device `qemu_id`. `None` if it is not at a numbered port.
    pub(crate) fn port_of(
        &self,
        monitor: &mut Monitor,
        qemu_id: &str,
    ) -> Result<Option<u16>, Error> {
        let path = format!("{PERIPHERALS}/{qemu_id}");
        let bus = get(monitor, &path, "parent_bus")?;
        let bus = bus.as_str().unwrap_or_default();
        let name = bus.rsplit('/').next().unwrap_or_default();
        match self.machine {
            Machine::Q35 => Ok(port_number(name)),
            Machine::I440fx if name == PC_BUS => {
                let address = get(monitor, &path, "addr")?;
                let slot = address.as_u64().map(|devfn| devfn >> 3);
                Ok(slot.and_then(|slot| slot.checked_sub(first_slot())?.try_into().ok()))
            }
            Machine::I440fx => Ok(None),
        }
    }

    /// All ports, in order.
    pub(crate) fn all(&self, monitor: &mut Monitor) -> Result<Vec<Slot>, Error> {
        let mut slots = match self.machine {
            Machine::Q35 => root_ports(monitor)?,
            Machine::I440fx => self.bus_slots(monitor)?,
        };
        slots.sort_by_key(|slot| slot.port);
        Ok(slots)
    }

    fn bus_slots(&self, monitor: &mut Monitor) -> Result<Vec<Slot>, Error> {
        let buses = monitor.run("query-pci", json!({}))?;
        let root = buses
            .as_array()
            .into_iter()
            .flatten()
            .find(|bus| bus["bus"] == 0);
        let devices = root.and_then(|bus| bus["devices"].as_array());
        let taken: Vec<u64> = devices
            .into_iter()
            .flatten()
            .filter_map(|device| device["slot"].as_u64())
            .collect();
        // A bus has 32 device numbers.
        let first = first_slot();
        Ok((first..32)
            .map(|slot| Slot {
                port: (slot - first) as u16,
                taken: taken.contains(&slot),
            })
            .collect())
    }
}

/// The ids of the borrowed devices that QEMU has.
pub(crate) fn plugged(monitor: &mut Monitor) -> Result<Vec<DeviceId>, Error> {
    Ok(list(monitor, PERIPHERALS)?
        .into_iter()
        .filter(|(_, kind)| kind == "child<vfio-user-pci>")
        .filter_map(|(name, _)| name.strip_prefix(DEVICE)?.parse().ok())
        .collect())
}

/// Guest RAM, bytes.
pub(crate) fn ram(monitor: &mut Monitor) -> Result<u64, Error> {
    let memory = monitor.run("query-memory-size-summary", json!({}))?;
    let part = |name: &str| memory[name].as_u64().unwrap_or(0);
    Ok(part("base-memory") + part("plugged-memory"))
}

/// The device number on the i440FX's bus of port 0, as on command lines.
fn first_slot() -> u64 {
    const NAME: &str = "a valid name";
    let mut vm = Vm::new("any".parse().expect(NAME), 1 << 20);
    vm.machine = Machine::I440fx;
    vm.devices.push(Device {
        id: "any".parse().expect(NAME),
        port: Some(0),
        socket: "any".into(),
        function: 0,
        bootindex: None,
    });
    let add = vm.device_add(0).unwrap_or_default();
    let address = add["addr"].as_str().unwrap_or_default();
    u64::from_str_radix(address.trim_start_matches("0x"), 16).unwrap_or(32)
}

fn root_ports(monitor: &mut Monitor) -> Result<Vec<Slot>, Error> {
    let mut slots = Vec::new();
    for (name, kind) in list(monitor, PERIPHERALS)? {
        if kind != "child<pcie-root-port>" {
            continue;
        }
        if let Some(port) = port_number(&name) {
            // The bus below a port has the port's name.
            let below = list(monitor, &format!("{PERIPHERALS}/{name}/{name}"))?;
            let taken = below.iter().any(|(name, _)| name.starts_with("child["));
            slots.push(Slot { port, taken });
        }
    }
    Ok(slots)
}

fn port_number(name: &str) -> Option<u16> {
    name.strip_prefix(PORT)?.parse().ok()
}

/// Names and types of an object's properties.
fn list(monitor: &mut Monitor, path: &str) -> Result<Vec<(String, String)>, Error> {
    #[derive(Deserialize)]
    struct Property {
        name: String,
        #[serde(rename = "type")]
        kind: String,
    }
    let listed = monitor.run("qom-list", json!({ "path": path }))?;
    let listed: Vec<Property> =
        serde_json::from_value(listed).map_err(|error| Error::MonitorLost {
            vm: monitor.vm().to_owned(),
            why: format!("its answer to qom-list is malformed: {error}"),
        })?;
    let listed = listed.into_iter();
    Ok(listed
        .map(|property| (property.name, property.kind))
        .collect())
}

fn get(monitor: &mut Monitor, path: &str, property: &str) -> Result<Value, Error> {
    monitor.run("qom-get", json!({ "path": path, "property": property }))
}
