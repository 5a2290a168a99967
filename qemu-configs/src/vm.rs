//! The model of a VM.

use std::{
    os::fd::RawFd,
    path::{Path, PathBuf},
    time::Duration,
};

use farside_daemon::{DeviceId, VmName};
use serde::Deserialize;

/// A VM that borrows devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vm {
    /// Its name.
    pub name: VmName,
    /// Guest RAM, in bytes: whole MiB, and whole huge pages if it uses them.
    pub ram: u64,
    /// CPUs, 1 to 255.
    pub vcpus: u32,
    /// Chipset.
    pub machine: Machine,
    /// What runs the guest's instructions.
    pub accel: Accel,
    /// Page size of guest RAM.
    pub huge_pages: HugePages,
    /// The backend's time limit for a bus-master enable. `None`: it follows from `ram`.
    pub open_timeout: Option<Duration>,
    /// What starts the guest.
    pub firmware: Firmware,
    /// Borrowed devices. A device's port determines its address in the guest.
    pub devices: Vec<Device>,
    /// Root ports to leave free for devices that are added while the VM runs.
    /// The i440FX has free slots on its bus and needs none.
    pub spare_ports: u16,
    /// Socket of a QMP monitor, which serves one client at a time. `None`: no monitor.
    pub monitor: Option<MonitorSocket>,
    /// Extra arguments, appended unchanged: disks, networks, consoles.
    pub extra_args: Vec<String>,
}

impl Vm {
    /// A q35 with one CPU, SeaBIOS, KVM if available, and no devices.
    pub fn new(name: VmName, ram: u64) -> Self {
        Self {
            name,
            ram,
            vcpus: 1,
            machine: Machine::default(),
            accel: Accel::default(),
            huge_pages: HugePages::default(),
            open_timeout: None,
            firmware: Firmware::default(),
            devices: Vec::new(),
            spare_ports: 0,
            monitor: None,
            extra_args: Vec::new(),
        }
    }
}

/// The socket where QEMU listens for clients of its monitor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MonitorSocket {
    /// QEMU creates it at this path, at most 107 bytes.
    Path(PathBuf),
    /// QEMU inherits it, listening, as this file descriptor.
    Fd(RawFd),
}

impl MonitorSocket {
    /// The path, if QEMU creates the socket.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Path(path) => Some(path),
            Self::Fd(_) => None,
        }
    }
}

/// A borrowed device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The cluster-wide id. QEMU knows the device by [`qemu_id`].
    pub id: DeviceId,
    /// Number of its root port (on the i440FX: of its place on the bus). Default: its position
    /// among the VM's devices.
    pub port: Option<u16>,
    /// Which function of the device at that port, 0 to 7. Devices at one port, of which one is function 0, are one
    /// multifunction device for the guest.
    pub function: u8,
    /// Its vfio-user socket, at most 107 bytes.
    pub socket: PathBuf,
    /// Position in the firmware's boot order; 0 is first. `None` leaves it to the firmware.
    pub bootindex: Option<u32>,
}

/// The QEMU id of the borrowed device `id`: `dev-` and the id, since QEMU's ids begin with a letter
/// and must not collide with those of ports and memory.
pub fn qemu_id(id: &DeviceId) -> String {
    format!("dev-{id}")
}

/// Chipset of a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Machine {
    /// PCI Express, a root port for each borrowed device.
    #[default]
    Q35,
    /// Conventional PCI (`-machine pc`), borrowed devices on the one bus.
    #[serde(rename = "pc")]
    I440fx,
}

impl Machine {
    /// QEMU's name for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q35 => "q35",
            Self::I440fx => "pc",
        }
    }
}

/// What runs the guest's instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    /// KVM, or TCG if KVM is unavailable.
    #[default]
    Auto,
    /// KVM only.
    Kvm,
    /// QEMU's translator (TCG), with a thread for each CPU.
    Tcg,
}

/// Page size of guest RAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum HugePages {
    /// The system's base pages.
    #[default]
    #[serde(rename = "none")]
    None,
    /// 2 MiB, from the host's pool.
    #[serde(rename = "2M")]
    Of2MiB,
    /// 1 GiB, from the host's pool.
    #[serde(rename = "1G")]
    Of1GiB,
}

impl HugePages {
    /// Granularity of guest RAM, in bytes. 1 MiB without huge pages.
    pub fn granule(self) -> u64 {
        match self {
            Self::None => 1 << 20,
            Self::Of2MiB => 2 << 20,
            Self::Of1GiB => 1 << 30,
        }
    }
}

/// What starts the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Firmware {
    /// QEMU's default, SeaBIOS.
    #[default]
    Default,
    /// OVMF from two flash images.
    Ovmf {
        /// The firmware code, read-only.
        code: PathBuf,
        /// The VM's own copy of the variables.
        vars: PathBuf,
    },
}
