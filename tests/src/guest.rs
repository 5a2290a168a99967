//! A VM that borrows devices, started with `farside qemu --run` as a user would.

use std::{fs, ops::Deref, path::PathBuf, process::ExitStatus, sync::OnceLock, time::Duration};

use anyhow::{Context, Result, anyhow, ensure};
use farside_testbed::{Accel, Boot, Machine, Progress, TCG_CPU, Testbed, Vm};

use crate::{BOOT, Cluster, MIB, SHORT};

/// Identifies PCI functions.
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

/// How much of a log a failure shows, bytes.
const QUOTE: usize = 3000;

/// QEMU and a guest system, prepared once per process.
pub fn testbed() -> Result<&'static Testbed> {
    static TESTBED: OnceLock<Result<Testbed, String>> = OnceLock::new();
    TESTBED
        .get_or_init(|| Testbed::prepare(&Progress::auto()).map_err(|error| format!("{error:#}")))
        .as_ref()
        .map_err(|error| anyhow!("{error}"))
}

/// A VM to start. By default a q35 with SeaBIOS, 512 MiB and 1 CPU.
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

    /// Takes memory and CPUs from the VM configuration.
    #[must_use]
    pub fn config(mut self, path: PathBuf) -> Self {
        self.config = Some(path);
        self
    }

    /// Adds this device only, instead of all that the backend serves.
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

    /// Number of CPUs.
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

    /// Boots from that device through the firmware, without the test bed's kernel.
    #[must_use]
    pub fn boot_from(mut self, device: &str) -> Self {
        self.boot_from = Some(device.to_owned());
        self
    }

    /// Appends to the kernel command line.
    #[must_use]
    pub fn append(mut self, text: &str) -> Self {
        self.append.push(text.to_owned());
        self
    }

    /// Skips a module at boot.
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

    /// Uses the full initramfs with all binaries and modules, instead of busybox, the agent
    /// and the modules that init loads: 90 MB more to unpack, too large for 256 MiB.
    #[must_use]
    pub fn whole(mut self) -> Self {
        self.whole = true;
        self
    }

    /// Starts the machine with stopped CPUs.
    #[must_use]
    pub fn paused(mut self) -> Self {
        self.paused = true;
        self
    }

    /// Starts it and waits for the guest agent.
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
            // This machine cannot boot the kernel's ELF image.
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
            let vars = staged.directory().join("vars.fd");
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
            command.args(["-cpu", TCG_CPU]);
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

/// A running VM; see [`Vm`] for its methods. On drop it is killed, and its logs are kept
/// for the test's failure message.
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
    /// Wraps a VM that was started by other means.
    pub fn adopt(cluster: &'a Cluster, vm: Vm) -> Self {
        Self {
            vm: Some(vm),
            cluster,
        }
    }

    /// Runs a shell command that must succeed.
    pub fn sh(&self, command: &str) -> Result<String> {
        self.sh_within(command, SHORT)
    }

    /// As [`Guest::sh`], with a given timeout.
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

    /// Waits until the first borrowed NVMe device is present.
    pub fn wait_disk(&self) -> Result<()> {
        self.wait_path("/dev/nvme0n1", SHORT)
    }

    /// Powers the guest off.
    pub fn power_off(mut self) -> Result<()> {
        self.keep_logs();
        self.vm.take().expect("a VM is there").shutdown(SHORT)
    }

    /// SIGKILL for QEMU; see [`Vm::kill`].
    pub fn kill_qemu(mut self) -> Result<ExitStatus> {
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
