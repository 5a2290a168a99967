//! A VM that borrows devices, started as a user would: by `farside qemu --run`.

use std::{fs, ops::Deref, path::PathBuf, process::ExitStatus, sync::OnceLock, time::Duration};

use anyhow::{Context, Result, anyhow, ensure};
use farside_testbed::{Accel, Boot, Machine, Progress, Testbed, Vm};

use crate::{BOOT, Cluster, MIB, SHORT};

/// What PCI functions are told apart by.
#[derive(Clone, Copy, Debug)]
pub enum FunctionId {
    /// Base class and subclass.
    Class(u16),
    /// Vendor and device.
    Device {
        /// Vendor ID.
        vendor: u16,
        /// Device ID.
        device: u16,
    },
}

/// Any NVMe controller.
pub const NVME: FunctionId = FunctionId::Class(0x0108);

/// How much of a log a failure shows.
const QUOTE: usize = 3000;

/// QEMU and a guest system, once in a process.
pub fn testbed() -> Result<&'static Testbed> {
    static TESTBED: OnceLock<Result<Testbed, String>> = OnceLock::new();
    TESTBED
        .get_or_init(|| Testbed::prepare(&Progress::auto()).map_err(|error| format!("{error:#}")))
        .as_ref()
        .map_err(|error| anyhow!("{error}"))
}

/// A VM to be started. Unless told otherwise it is a q35 with SeaBIOS, 512 MiB
/// and 1 processor.
pub struct GuestBuilder<'a> {
    cluster: &'a Cluster,
    vm: String,
    config: Option<PathBuf>,
    devices: Vec<String>,
    memory: u64,
    cpus: u32,
    machine: Machine,
    ovmf: bool,
    boot_from: Option<String>,
    append: Vec<String>,
    without: Vec<String>,
    args: Vec<String>,
    whole: bool,
    paused: bool,
}

impl<'a> GuestBuilder<'a> {
    pub(crate) fn new(cluster: &'a Cluster, vm: &str) -> Self {
        Self {
            cluster,
            vm: vm.to_owned(),
            config: None,
            devices: Vec::new(),
            memory: 512 * MIB,
            cpus: 1,
            machine: Machine::Q35,
            ovmf: false,
            boot_from: None,
            append: Vec::new(),
            without: Vec::new(),
            args: Vec::new(),
            whole: false,
            paused: false,
        }
    }

    /// Takes memory and processors from a VM's description.
    #[must_use]
    pub fn config(mut self, path: PathBuf) -> Self {
        self.config = Some(path);
        self
    }

    /// Has this device, and not all that its backend serves.
    #[must_use]
    pub fn device(mut self, id: &str) -> Self {
        self.devices.push(id.to_owned());
        self
    }

    /// Guest RAM, bytes.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// Processors.
    #[must_use]
    pub fn cpus(mut self, count: u32) -> Self {
        self.cpus = count;
        self
    }

    /// The chipset.
    #[must_use]
    pub fn machine(mut self, machine: Machine) -> Self {
        self.machine = machine;
        self
    }

    /// OVMF instead of SeaBIOS.
    #[must_use]
    pub fn ovmf(mut self) -> Self {
        self.ovmf = true;
        self
    }

    /// No kernel from the test bed: the firmware finds one on that device.
    #[must_use]
    pub fn boot_from(mut self, device: &str) -> Self {
        self.boot_from = Some(device.to_owned());
        self
    }

    /// More for the kernel's command line.
    #[must_use]
    pub fn append(mut self, text: &str) -> Self {
        self.append.push(text.to_owned());
        self
    }

    /// Does not load a module at boot.
    #[must_use]
    pub fn without_module(mut self, name: &str) -> Self {
        self.without.push(name.to_owned());
        self
    }

    /// More arguments for QEMU.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|&arg| arg.to_owned()));
        self
    }

    /// With all programs and modules, not only busybox, the agent and the modules that init
    /// loads: 90 MB more to unpack, and it does not fit in 256 MiB.
    #[must_use]
    pub fn whole(mut self) -> Self {
        self.whole = true;
        self
    }

    /// The machine is made, but its processors stand still.
    #[must_use]
    pub fn paused(mut self) -> Self {
        self.paused = true;
        self
    }

    /// Starts it and waits for the guest's agent.
    pub fn boot(&self) -> Result<Guest<'a>> {
        let guest = self.start()?;
        guest.wait_agent(BOOT)?;
        Ok(guest)
    }

    /// Starts it.
    pub fn start(&self) -> Result<Guest<'a>> {
        let testbed = testbed()?;
        let mut builder = testbed.vm(&self.vm);
        if self.boot_from.is_some() {
            builder = builder.boot(Boot::Device);
        }
        if self.ovmf {
            // It does not take the kernel's ELF image.
            builder = builder.kernel(testbed.kernel());
        }
        if !self.whole {
            builder = builder.lean();
        }
        for text in &self.append {
            builder = builder.append(text);
        }
        for module in &self.without {
            builder = builder.without_module(module);
        }
        let staged = builder.stage()?;

        let mut command = self.cluster.farside(&["qemu", "--run", "--vm", &self.vm])?;
        command.arg("--qemu").arg(testbed.qemu());
        let tcg = testbed.accel() == Accel::Tcg;
        command.args(["--accel", if tcg { "tcg" } else { "kvm" }]);
        match &self.config {
            Some(config) => command.arg("--config").arg(config),
            None => command.args([
                "--memory",
                &format!("{}M", self.memory / MIB),
                "--cpus",
                &self.cpus.to_string(),
            ]),
        };
        command.args([
            "--machine",
            match self.machine {
                Machine::Q35 => "q35",
                Machine::I440fx => "pc",
            },
        ]);
        if self.ovmf {
            let vars = staged.folder().join("vars.fd");
            fs::copy(testbed.ovmf_vars(), &vars).context("copying OVMF's variables")?;
            command.arg("--ovmf").arg(testbed.ovmf_code()).arg(vars);
        }
        for device in &self.devices {
            command.args(["--device", device]);
        }
        if let Some(device) = &self.boot_from {
            command.args(["--boot", device]);
        }
        command.arg("--").args(staged.guest_args());
        if tcg {
            // Five-level page tables only make an emulated guest slower.
            command.args(["-cpu", "max,la57=off"]);
        }
        command.args(&self.args);
        if self.paused {
            command.arg("-S");
        }
        Ok(Guest {
            vm: Some(staged.launch_with(command)?),
            cluster: self.cluster,
        })
    }
}

/// A running VM; see [`Vm`] for what it can do. Dropped, it is killed, and its
/// logs are kept for the test's failure message.
pub struct Guest<'a> {
    vm: Option<Vm>,
    cluster: &'a Cluster,
}

impl Deref for Guest<'_> {
    type Target = Vm;

    fn deref(&self) -> &Vm {
        self.vm.as_ref().expect("a VM is there until it is ended")
    }
}

impl<'a> Guest<'a> {
    /// Takes a VM that was started in another way.
    pub fn adopt(cluster: &'a Cluster, vm: Vm) -> Self {
        Self {
            vm: Some(vm),
            cluster,
        }
    }

    /// Runs a shell command that has to succeed.
    pub fn sh(&self, command: &str) -> Result<String> {
        self.sh_within(command, SHORT)
    }

    /// As [`Guest::sh`], with more time.
    pub fn sh_within(&self, command: &str, timeout: Duration) -> Result<String> {
        self.exec_ok(command, timeout)
            .map(|printed| printed.trim().to_owned())
            .with_context(|| format!("VM {}: {command}", self.name()))
    }

    /// The address of the one PCI function of this [`FunctionId`].
    pub fn find(&self, id: FunctionId) -> Result<String> {
        let mut found = self.functions(id)?;
        ensure!(found.len() == 1, "not one function {id:?} but: {found:?}");
        Ok(found.remove(0))
    }

    /// The addresses of all PCI functions of this [`FunctionId`].
    pub fn functions(&self, id: FunctionId) -> Result<Vec<String>> {
        let test = match id {
            FunctionId::Class(class) => format!("grep -q ^0x{class:04x} $f/class"),
            FunctionId::Device { vendor, device } => {
                format!("grep -q 0x{vendor:04x} $f/vendor && grep -q 0x{device:04x} $f/device")
            }
        };
        let script =
            format!("cd /sys/bus/pci/devices; for f in *; do if {test}; then echo $f; fi; done");
        Ok(self.sh(&script)?.lines().map(str::to_owned).collect())
    }

    /// Waits until the first borrowed drive is there.
    pub fn wait_disk(&self) -> Result<()> {
        self.wait_path("/dev/nvme0n1", SHORT)
    }

    /// Powers the guest off.
    pub fn power_off(mut self) -> Result<ExitStatus> {
        self.keep_logs();
        self.vm.take().expect("a VM is there").shutdown(SHORT)
    }

    /// SIGKILL for QEMU.
    pub fn kill_qemu(mut self) -> Result<()> {
        self.keep_logs();
        self.vm.take().expect("a VM is there").kill()
    }

    fn keep_logs(&self) {
        if let Some(vm) = &self.vm {
            for (what, log) in [("QEMU", vm.qemu_log()), ("the console", vm.serial_log())] {
                let log = log.trim();
                if !log.is_empty() {
                    let note = format!("-- {what} of VM {}:\n{}", vm.name(), tail(log));
                    self.cluster.note(note);
                }
            }
        }
    }
}

impl Drop for Guest<'_> {
    fn drop(&mut self) {
        self.keep_logs();
    }
}

/// The end of a log.
fn tail(log: &str) -> &str {
    let start = (log.len().saturating_sub(QUOTE)..log.len())
        .find(|&at| log.is_char_boundary(at))
        .unwrap_or(0);
    &log[start..]
}
