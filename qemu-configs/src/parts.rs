//! QEMU's options for a VM, as values: the source of every output format.

use serde::Serialize;

use crate::{Device, HugePages, Machine, Vm, VmError, check::path_text};
use crate::{ports, qemu_id};

/// Ids of farside's objects. Those of devices begin with `dev-`.
pub(crate) const MEMORY: &str = "mem";

/// The id of the monitor, and of its character device.
pub(crate) const MONITOR: &str = "qmp";

// Structs keep this order, whatever map type serde_json was built with.

/// A borrowed device.
#[derive(Serialize)]
pub(crate) struct VfioUserPci<'a> {
    pub(crate) driver: &'static str,
    pub(crate) id: String,
    pub(crate) bus: String,
    pub(crate) addr: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) multifunction: Option<bool>,
    pub(crate) socket: Socket<'a>,
    #[serde(rename = "x-msg-timeout")]
    pub(crate) timeout: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bootindex: Option<u32>,
}

#[derive(Serialize)]
pub(crate) struct Socket<'a> {
    #[serde(rename = "type")]
    pub(crate) kind: &'static str,
    pub(crate) path: &'a str,
}

/// The root port of a borrowed device. All properties are fixed, so that addresses do not change
/// when a VM is restarted.
#[derive(Serialize)]
pub(crate) struct RootPort {
    pub(crate) driver: &'static str,
    pub(crate) id: String,
    pub(crate) bus: &'static str,
    pub(crate) addr: String,
    pub(crate) multifunction: bool,
    pub(crate) chassis: usize,
    pub(crate) slot: usize,
}

impl RootPort {
    fn new(port: usize) -> Self {
        let (device, function) = ports::root_address(port);
        Self {
            driver: "pcie-root-port",
            id: ports::name(port),
            bus: "pcie.0",
            addr: format!("{device:#x}.{function:#x}"),
            multifunction: function == 0,
            // The guest names the hot-plug slot by these; 0 is the root bus.
            chassis: port + 1,
            slot: port + 1,
        }
    }
}

/// The memory backend of guest RAM.
#[derive(Serialize)]
pub(crate) struct MemoryBackend {
    #[serde(rename = "qom-type")]
    pub(crate) kind: &'static str,
    pub(crate) id: &'static str,
    /// Bytes.
    pub(crate) size: u64,
    pub(crate) share: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hugetlb: Option<bool>,
    /// Bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hugetlbsize: Option<u64>,
}

impl Vm {
    pub(crate) fn memory_backend(&self) -> MemoryBackend {
        let huge = self.huge_pages != HugePages::None;
        MemoryBackend {
            kind: "memory-backend-memfd",
            id: MEMORY,
            size: self.ram,
            share: true,
            hugetlb: huge.then_some(true),
            hugetlbsize: huge.then(|| self.huge_pages.granule()),
        }
    }

    pub(crate) fn root_ports(&self) -> Vec<RootPort> {
        match self.machine {
            Machine::Q35 => (0..self.port_count()).map(RootPort::new).collect(),
            Machine::I440fx => Vec::new(),
        }
    }

    pub(crate) fn vfio_user_pci(&self, position: usize) -> Result<VfioUserPci<'_>, VmError> {
        let device: &Device = &self.devices[position];
        let ports = self.ports();
        let (bus, addr) = ports::place(self.machine, ports[position], device.function);
        let at_port = ports.iter().filter(|port| **port == ports[position]);
        Ok(VfioUserPci {
            driver: "vfio-user-pci",
            id: qemu_id(&device.id),
            bus,
            addr,
            multifunction: (device.function == 0 && at_port.count() > 1).then_some(true),
            socket: Socket {
                kind: "unix",
                path: path_text(&device.socket)?,
            },
            timeout: self.message_timeout_ms(),
            bootindex: device.bootindex,
        })
    }
}
