//! QEMU's arguments for a VM.

use std::{fmt, path::PathBuf, process::Command};

use serde::Serialize;

use crate::{
    Accel, Device, Firmware, HugePages, Machine, Vm, VmError, check::path_text,
    check_shared_memory, message_timeout_ms, qemu_id,
};

/// A program and its arguments.
///
/// Its `Display` is for a shell: quoted, an option a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandLine {
    /// The program.
    pub program: PathBuf,
    /// Its arguments, not quoted.
    pub args: Vec<String>,
}

impl CommandLine {
    /// Ready to be started.
    pub fn to_command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args);
        command
    }
}

impl fmt::Display for CommandLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quoted = |word: &str| {
            shlex::try_quote(word)
                .map_err(|_| fmt::Error)
                .map(String::from)
        };
        f.write_str(&quoted(&self.program.to_string_lossy())?)?;
        for arg in &self.args {
            // Values stay with their option.
            f.write_str(if arg.starts_with('-') { " \\\n  " } else { " " })?;
            f.write_str(&quoted(arg)?)?;
        }
        Ok(())
    }
}

impl Vm {
    /// All of QEMU's arguments. `program` is QEMU, by name or path.
    pub fn command_line(&self, program: impl Into<PathBuf>) -> Result<CommandLine, VmError> {
        self.check()?;
        let mut args = Args::default();
        args.option("-name", format!("guest={},debug-threads=on", self.name));
        args.option("-machine", self.machine_value());
        match self.accel {
            // QEMU takes the first that works.
            Accel::Auto => {
                args.option("-accel", "kvm");
                args.option("-accel", TCG);
            }
            Accel::Kvm => args.option("-accel", "kvm"),
            Accel::Tcg => args.option("-accel", TCG),
        }
        args.option("-cpu", "max");
        args.option("-smp", self.vcpus.to_string());
        args.option("-m", self.ram_value());
        args.option("-object", self.memory_backend());
        if let Some(socket) = &self.monitor {
            let path = path_text(socket)?.replace(',', ",,");
            args.option("-qmp", format!("unix:{path},server=on,wait=off"));
        }
        if let Firmware::Ovmf { code, vars } = &self.firmware {
            for (name, file, read_only) in [(CODE, code, true), (VARS, vars, false)] {
                let node = BlockNode {
                    driver: "raw",
                    name,
                    read_only,
                    file: File {
                        driver: "file",
                        filename: path_text(file)?,
                    },
                };
                args.json("-blockdev", &node);
            }
        }
        if self.machine == Machine::Q35 {
            for port in 0..self.devices.len() + usize::from(self.spare_ports) {
                args.json("-device", &RootPort::new(port));
            }
        }
        for position in 0..self.devices.len() {
            args.json("-device", &self.vfio_user_pci(position)?);
        }
        args.0.extend(self.extra_args.iter().cloned());
        check_shared_memory(&args.0).map_err(VmError::Memory)?;
        Ok(CommandLine {
            program: program.into(),
            args: args.0,
        })
    }

    /// What plugs device number `position` in: the arguments of QMP's
    /// `device_add`, and of `-device`. Also for a device that was unplugged,
    /// and, with `position` at a spare port, for one that was not there before:
    /// put it into [`Vm::devices`] and ask again.
    ///
    /// # Panics
    /// When there is no such device.
    pub fn device_add(&self, position: usize) -> Result<serde_json::Value, VmError> {
        let arguments = self.vfio_user_pci(position)?;
        Ok(serde_json::to_value(arguments).expect(SERIALISES))
    }

    fn vfio_user_pci(&self, position: usize) -> Result<VfioUserPci<'_>, VmError> {
        let device: &Device = &self.devices[position];
        let (bus, addr) = ports::place(self.machine, position);
        Ok(VfioUserPci {
            driver: "vfio-user-pci",
            id: qemu_id(&device.id),
            bus,
            addr,
            socket: Socket {
                kind: "unix",
                path: path_text(&device.socket)?,
            },
            timeout: message_timeout_ms(self.ram),
            bootindex: device.bootindex,
        })
    }

    fn machine_value(&self) -> String {
        let flash = match self.firmware {
            Firmware::Default => String::new(),
            Firmware::Ovmf { .. } => format!(",pflash0={CODE},pflash1={VARS}"),
        };
        format!("{},memory-backend={MEMORY}{flash}", self.machine.name())
    }

    fn ram_value(&self) -> String {
        format!("{}M", self.ram >> 20)
    }

    fn memory_backend(&self) -> String {
        let pages = match self.huge_pages {
            HugePages::None => "",
            HugePages::Of2MiB => ",hugetlb=on,hugetlbsize=2M",
            HugePages::Of1GiB => ",hugetlb=on,hugetlbsize=1G",
        };
        let size = self.ram_value();
        format!("memory-backend-memfd,id={MEMORY},size={size},share=on{pages}")
    }
}

const TCG: &str = "tcg,thread=multi";
/// Ids of our own objects. Those of devices begin with `dev-`.
const MEMORY: &str = "mem";
const CODE: &str = "ovmf-code";
const VARS: &str = "ovmf-vars";

const SERIALISES: &str = "text, numbers and booleans make JSON";

// The values that contain paths or nested properties are JSON: in QEMU's older
// form a comma in a path means something. As structs they keep this order,
// whatever map type serde_json was built with.

/// A borrowed device.
#[derive(Serialize)]
struct VfioUserPci<'a> {
    driver: &'static str,
    id: String,
    bus: String,
    addr: String,
    socket: Socket<'a>,
    #[serde(rename = "x-msg-timeout")]
    timeout: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    bootindex: Option<u32>,
}

#[derive(Serialize)]
struct Socket<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    path: &'a str,
}

/// The port above a borrowed device. All is fixed, so that a guest, and a VM
/// that is started again, find everything where it was.
#[derive(Serialize)]
struct RootPort {
    driver: &'static str,
    id: String,
    bus: &'static str,
    addr: String,
    multifunction: bool,
    chassis: usize,
    slot: usize,
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
            // By these the guest names the hot-plug slot; 0 is the root bus.
            chassis: port + 1,
            slot: port + 1,
        }
    }
}

/// A flash image.
#[derive(Serialize)]
struct BlockNode<'a> {
    driver: &'static str,
    #[serde(rename = "node-name")]
    name: &'static str,
    #[serde(rename = "read-only")]
    read_only: bool,
    file: File<'a>,
}

#[derive(Serialize)]
struct File<'a> {
    driver: &'static str,
    filename: &'a str,
}

#[derive(Default)]
struct Args(Vec<String>);

impl Args {
    fn option(&mut self, name: &str, value: impl Into<String>) {
        self.0.extend([name.to_owned(), value.into()]);
    }

    fn json(&mut self, name: &str, value: &impl Serialize) {
        self.option(name, serde_json::to_string(value).expect(SERIALISES));
    }
}

/// Where devices sit.
pub(crate) mod ports {
    use super::Machine;

    /// First device number on the root bus that we use. QEMU gives those
    /// below to what the user adds without an address.
    const FIRST_SLOT: usize = 0x10;
    /// Functions of a device number.
    const FUNCTIONS: usize = 8;
    /// Device numbers for root ports on the q35: 0x10 to 0x17. Above them the
    /// chipset has parts of its own (USB at 0x1a and 0x1d, LPC at 0x1f).
    const PORT_SLOTS: usize = 8;
    /// Device numbers for devices on the i440FX: 0x10 to 0x1f.
    const BUS_SLOTS: usize = 16;

    /// How many devices and spare ports there is room for.
    pub(crate) fn limit(machine: Machine) -> usize {
        match machine {
            Machine::Q35 => PORT_SLOTS * FUNCTIONS,
            Machine::I440fx => BUS_SLOTS,
        }
    }

    /// Bus and address of device number `position`.
    pub(crate) fn place(machine: Machine, position: usize) -> (String, String) {
        match machine {
            Machine::Q35 => (name(position), "0x0".to_owned()),
            Machine::I440fx => ("pci.0".to_owned(), format!("{:#x}", FIRST_SLOT + position)),
        }
    }

    /// Device and function number of root port number `port`.
    pub(super) fn root_address(port: usize) -> (usize, usize) {
        (FIRST_SLOT + port / FUNCTIONS, port % FUNCTIONS)
    }

    pub(super) fn name(port: usize) -> String {
        format!("port{port}")
    }
}
