//! The VMs of a plan, and their RAM layout in QEMU.

use std::fmt;

use farside_fabric::Size;
use farside_guest_layout::{Gpa, GpaRange, HIGH_MEMORY, Layout, Plan, PlanRules, plan};
use farside_qemu_configs::{Device, HugePages, Machine, Vm, VmError, ram_split};

/// Most RAM of a guest, bytes: high memory has to end at 2^52, the most that
/// x86 can address physically.
pub const MAX_RAM: u64 = (1 << 52) - HIGH_MEMORY.get();

/// The legacy video and firmware area of a PC. It is not RAM for a device.
const HOLE: (u64, u64) = (640 << 10, 1 << 20);

/// A number of VMs that are alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guest {
    /// How many, at least 1.
    pub vms: u32,
    /// RAM of each, bytes: whole MiB, or whole huge pages.
    pub ram: u64,
    /// Chipset, which determines how much of RAM is below 4 GiB.
    pub machine: Machine,
    /// Devices that each borrows from the lender, at least 1.
    pub devices: u16,
    /// Page size of guest RAM.
    pub huge_pages: HugePages,
}

/// Why a guest is invalid.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum GuestError {
    /// No VMs.
    #[error("0 VMs of {}: give at least 1", Size(*ram))]
    NoVms { ram: u64 },
    /// The VMs borrow no devices.
    #[error("a guest of {} that borrows 0 devices: give it at least 1", Size(*ram))]
    NoDevices { ram: u64 },
    /// More RAM than a PC can address.
    #[error(
        "guest RAM of {} is more than x86 can address beside the space below 4 GiB: at most {}",
        Size(*ram), Size(MAX_RAM)
    )]
    TooLarge { ram: u64 },
    /// QEMU would reject the VM.
    #[error(transparent)]
    Vm(#[from] VmError),
}

impl Guest {
    /// One q35 VM that borrows one device.
    pub fn new(ram: u64) -> Self {
        Self {
            vms: 1,
            ram,
            machine: Machine::Q35,
            devices: 1,
            huge_pages: HugePages::None,
        }
    }

    /// Checks that QEMU could start such a VM.
    ///
    /// # Errors
    /// The first invalid value.
    pub fn check(&self) -> Result<(), GuestError> {
        let ram = self.ram;
        if self.vms == 0 {
            return Err(GuestError::NoVms { ram });
        }
        if self.devices == 0 {
            return Err(GuestError::NoDevices { ram });
        }
        let mut vm = Vm::new("plan".parse().expect("a valid name"), ram);
        vm.machine = self.machine;
        vm.huge_pages = self.huge_pages;
        vm.devices = (0..self.devices)
            .map(|n| Device {
                port: None,
                id: format!("d{n}").parse().expect("a valid id"),
                socket: format!("d{n}").into(),
                function: 0,
                bootindex: None,
            })
            .collect();
        vm.check()?;
        if ram > MAX_RAM {
            return Err(GuestError::TooLarge { ram });
        }
        Ok(())
    }

    /// Where the machine puts RAM.
    pub fn layout(&self) -> Layout {
        layout(self.machine, self.ram)
    }

    /// The windows that a device needs to reach all of it.
    pub fn windows(&self) -> Plan {
        windows(self.machine, self.ram)
    }
}

/// "1 VM of 4 GiB (q35), 1 device", "30 VMs of 16 GiB (pc), 2 devices each".
impl fmt::Display for Guest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (vms, each) = match self.vms {
            1 => ("1 VM".to_owned(), ""),
            vms => (format!("{vms} VMs"), " each"),
        };
        let devices = match self.devices {
            1 => "1 device".to_owned(),
            devices => format!("{devices} devices"),
        };
        let (ram, machine) = (Size(self.ram), self.machine.name());
        write!(f, "{vms} of {ram} ({machine}), {devices}{each}")
    }
}

/// Where RAM of a machine with `ram` bytes is, as a device may see it.
pub(crate) fn layout(machine: Machine, ram: u64) -> Layout {
    let (low, high) = ram_split(machine, ram);
    let between = |start, end| GpaRange::between(Gpa::new(start), Gpa::new(end)).ok();
    let below = between(0, low.min(HOLE.0));
    let above = between(HOLE.1, low);
    let high = GpaRange::new(HIGH_MEMORY, high).ok();
    Layout {
        low: below.into_iter().chain(above).collect(),
        high: high.into_iter().collect(),
        probes: 0,
    }
}

/// The windows that a device needs for a machine with `ram` bytes.
pub(crate) fn windows(machine: Machine, ram: u64) -> Plan {
    plan(&layout(machine, ram), &PlanRules::default())
}
