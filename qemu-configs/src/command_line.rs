//! QEMU's arguments for a VM.

use std::{fmt, path::PathBuf, process::Command};

use serde::Serialize;

use crate::{
    Accel, Firmware, MonitorSocket, Vm, VmError,
    check::path_text,
    check_shared_memory,
    parts::{MEMORY, MONITOR, MemoryBackend},
};

/// A command and its arguments.
///
/// Its `Display` is for a shell: quoted, one option per line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandLine {
    /// The executable.
    pub program: PathBuf,
    /// Its arguments, not quoted.
    pub args: Vec<String>,
}

impl CommandLine {
    /// As a [`std::process::Command`].
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
            // Keep values on the line of their option.
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
        for (accel, threads) in self.accels() {
            let threads = threads.map_or(String::new(), |threads| format!(",thread={threads}"));
            args.option("-accel", format!("{accel}{threads}"));
        }
        args.option("-cpu", CPU);
        args.option("-smp", self.vcpus.to_string());
        args.option("-m", self.ram_value());
        args.option("-object", self.memory_value());
        match &self.monitor {
            None => {}
            Some(MonitorSocket::Path(path)) => {
                let path = path_text(path)?.replace(',', ",,");
                args.option("-qmp", format!("unix:{path},server=on,wait=off"));
            }
            // Not by `-mon`, which later QEMUs deprecate.
            Some(MonitorSocket::Fd(fd)) => {
                let socket = format!("socket,id={MONITOR},fd={fd},server=on,wait=off");
                args.option("-chardev", socket);
                args.option("-qmp", format!("chardev:{MONITOR}"));
            }
        }
        self.blockdevs(&mut args)?;
        for port in self.root_ports() {
            args.json("-device", &port);
        }
        self.devices_and_extra(&mut args)?;
        check_shared_memory(&args.0).map_err(VmError::Memory)?;
        Ok(CommandLine {
            program: program.into(),
            args: args.0,
        })
    }

    /// The arguments of QMP's `device_add`, and of `-device`, for device number `position`. Also
    /// for hot-plugging an unplugged or new device: add it to [`Vm::devices`] with a free port,
    /// then call this.
    ///
    /// # Panics
    /// Panics if there is no such device.
    pub fn device_add(&self, position: usize) -> Result<serde_json::Value, VmError> {
        let arguments = self.vfio_user_pci(position)?;
        Ok(serde_json::to_value(arguments).expect(SERIALISES))
    }

    /// The options that a file for `-readconfig` cannot express.
    pub(crate) fn args_beside_config(&self) -> Result<Vec<String>, VmError> {
        let mut args = Args::default();
        args.option("-cpu", CPU);
        self.blockdevs(&mut args)?;
        self.devices_and_extra(&mut args)?;
        Ok(args.0)
    }

    fn devices_and_extra(&self, args: &mut Args) -> Result<(), VmError> {
        for position in 0..self.devices.len() {
            args.json("-device", &self.vfio_user_pci(position)?);
        }
        args.0.extend(self.extra_args.iter().cloned());
        Ok(())
    }

    fn blockdevs(&self, args: &mut Args) -> Result<(), VmError> {
        let Firmware::Ovmf { code, vars } = &self.firmware else {
            return Ok(());
        };
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
        Ok(())
    }

    /// Accelerators, of which QEMU uses the first that works, and their thread options.
    pub(crate) fn accels(&self) -> &'static [(&'static str, Option<&'static str>)] {
        match self.accel {
            Accel::Auto => &[KVM, TCG],
            Accel::Kvm => &[KVM],
            Accel::Tcg => &[TCG],
        }
    }

    /// Properties of the machine that name the flash images.
    pub(crate) fn flash(&self) -> &'static [(&'static str, &'static str)] {
        match self.firmware {
            Firmware::Default => &[],
            Firmware::Ovmf { .. } => &[("pflash0", CODE), ("pflash1", VARS)],
        }
    }

    fn machine_value(&self) -> String {
        let mut value = format!("{},memory-backend={MEMORY}", self.machine.name());
        for (property, node) in self.flash() {
            value += &format!(",{property}={node}");
        }
        value
    }

    fn ram_value(&self) -> String {
        format!("{}M", self.ram >> 20)
    }

    fn memory_value(&self) -> String {
        let MemoryBackend {
            kind,
            id,
            size,
            share: _,
            hugetlb: _,
            hugetlbsize,
        } = self.memory_backend();
        let pages = hugetlbsize.map_or(String::new(), |size| {
            format!(",hugetlb=on,hugetlbsize={}", short_size(size))
        });
        format!("{kind},id={id},size={}M,share=on{pages}", size >> 20)
    }
}

/// A huge page size in the usual notation.
fn short_size(bytes: u64) -> String {
    match bytes >> 30 {
        0 => format!("{}M", bytes >> 20),
        gib => format!("{gib}G"),
    }
}

const CPU: &str = "max";
const KVM: (&str, Option<&str>) = ("kvm", None);
const TCG: (&str, Option<&str>) = ("tcg", Some("multi"));
const CODE: &str = "ovmf-code";
const VARS: &str = "ovmf-vars";

pub(crate) const SERIALISES: &str = "text, numbers and booleans make JSON";

// The values that contain paths or nested properties are JSON: in QEMU's older syntax a comma
// separates properties.

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
