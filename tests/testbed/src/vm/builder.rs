//! Configures a virtual machine and starts it.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use farside_guest_agent::{PORT_NAME, SKIP_MODULES_OPTION};
use tempfile::TempDir;

use super::{Vm, kernel_args, qemu_log, serial_log};
use crate::accel::TCG_HOST_CPU;
use crate::archive::Archive;
use crate::host_vm;
use crate::process::Process;
use crate::{Accel, IommufdModules, Testbed};

/// The chipset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Machine {
    /// PCI Express.
    #[default]
    Q35,
    /// Conventional PCI.
    I440fx,
}

/// The firmware.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Firmware {
    /// A BIOS.
    #[default]
    SeaBios,
    /// UEFI.
    Ovmf,
}

/// The source of the guest's kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Boot {
    /// From the test bed, loaded by QEMU.
    #[default]
    Kernel,
    /// From a boot device, through the firmware; see [`Testbed::make_boot_image`].
    Device,
}

/// Configuration of a virtual machine; by default, a Q35 with SeaBIOS, 1 GiB of shared
/// memory and the CPUs that [`VmBuilder::vcpus`] describes.
#[derive(Debug, Clone)]
pub struct VmBuilder {
    testbed: Testbed,
    name: String,
    base: Option<(PathBuf, Vec<OsString>)>,
    machine: Machine,
    firmware: Firmware,
    boot: Boot,
    kernel: Option<PathBuf>,
    lean: bool,
    accel: Option<Accel>,
    memory: u64,
    vcpus: Option<u32>,
    append: Vec<String>,
    skip_modules: Vec<String>,
    args: Vec<OsString>,
    files: Vec<(PathBuf, u32, Vec<u8>)>,
    iommu: bool,
    nested: u32,
}

/// A VM about to be started: its directory and sockets exist, and QEMU's arguments refer to
/// them.
#[derive(Debug)]
pub struct Staged {
    name: String,
    program: PathBuf,
    base: Vec<OsString>,
    extra: Vec<OsString>,
    directory: Arc<TempDir>,
    sockets: Sockets,
}

/// The sockets that QEMU connects to.
#[derive(Debug)]
pub(super) struct Sockets {
    pub(super) agent: UnixListener,
    pub(super) qmp: UnixListener,
}

/// Queued invalidation and interrupt remapping, as on hardware; with caching mode, QEMU is
/// notified of each mapping, which emulated devices require.
const VTD: &str = "intel-iommu,intremap=on,caching-mode=on";

/// A path as a value in one of QEMU's options: commas are doubled.
pub(crate) fn option_value(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

impl VmBuilder {
    pub(crate) fn new(testbed: Testbed, name: &str) -> Self {
        VmBuilder {
            testbed,
            name: name.to_owned(),
            base: None,
            machine: Machine::default(),
            firmware: Firmware::default(),
            boot: Boot::default(),
            kernel: None,
            lean: false,
            accel: None,
            memory: 1 << 30,
            vcpus: None,
            append: Vec::new(),
            skip_modules: Vec::new(),
            args: Vec::new(),
            files: Vec::new(),
            iommu: false,
            nested: 0,
        }
    }

    /// Starts this command with these arguments, which configure the whole machine; only
    /// boot, console, agent and monitor are added. Machine, memory, CPUs and accelerator of
    /// this builder are then ignored.
    pub fn base(
        mut self,
        program: impl Into<PathBuf>,
        args: impl IntoIterator<Item = impl Into<OsString>>,
    ) -> Self {
        let args = args.into_iter().map(Into::into).collect();
        self.base = Some((program.into(), args));
        self
    }

    /// The chipset.
    pub fn machine(mut self, machine: Machine) -> Self {
        self.machine = machine;
        self
    }

    /// The firmware. Each VM has a separate copy of OVMF's variables.
    pub fn firmware(mut self, firmware: Firmware) -> Self {
        self.firmware = firmware;
        self
    }

    /// The source of the kernel.
    pub fn boot(mut self, boot: Boot) -> Self {
        self.boot = boot;
        self
    }

    /// A kernel image to boot instead of [`Testbed::kernel`] (with direct kernel boot). It
    /// must have its drivers built in: the initramfs has modules for the other kernel.
    pub fn kernel(mut self, image: impl Into<PathBuf>) -> Self {
        self.kernel = Some(image.into());
        self
    }

    /// A smaller guest (with direct kernel boot): an initramfs with busybox and the modules
    /// that init loads, without other binaries and modules.
    pub fn lean(mut self) -> Self {
        self.lean = true;
        self
    }

    /// The accelerator, instead of [`Testbed::accel`].
    pub fn accel(mut self, accel: Accel) -> Self {
        self.accel = Some(accel);
        self
    }

    /// Guest memory in bytes.
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// Number of CPUs. By default 2, but 1 for an emulated VM with nested guests: a CPU that
    /// another one makes leave its loop may hang its guest (see [`NESTED_KVM_CPU`](crate::NESTED_KVM_CPU)).
    pub fn vcpus(mut self, count: u32) -> Self {
        self.vcpus = Some(count);
        self
    }

    /// Appends to the kernel command line (with direct kernel boot).
    pub fn append(mut self, text: impl Into<String>) -> Self {
        self.append.push(text.into());
        self
    }

    /// Prevents init from loading a module, such as `nvme`; `modprobe` still can.
    pub fn without_module(mut self, name: impl Into<String>) -> Self {
        self.skip_modules.push(name.into());
        self
    }

    /// One more argument for QEMU.
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// More arguments for QEMU.
    pub fn args(mut self, args: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Adds a file to the guest's initramfs (with direct kernel boot). The path is relative
    /// to `/`.
    pub fn file(mut self, path: impl Into<PathBuf>, mode: u32, data: impl Into<Vec<u8>>) -> Self {
        self.files.push((path.into(), mode, data.into()));
        self
    }

    /// Replaces the guest's VFIO by one with iommufd (with direct kernel boot).
    pub fn iommufd(mut self, modules: &IommufdModules) -> Self {
        for (path, bytes) in &modules.files {
            self = self.file(path, 0o644, bytes.as_slice());
        }
        self
    }

    /// Adds an emulated VT-d, which the guest's kernel uses for all DMA and interrupts.
    /// Requires a [`Machine::Q35`].
    pub fn iommu(mut self) -> Self {
        self.iommu = true;
        self
    }

    /// Adds the disk with QEMU ([`Testbed::tools_disk`]) and channels to `count` nested
    /// guests; see [`VmBuilder::launch_host`].
    pub fn nested_guests(mut self, count: u32) -> Self {
        self.nested = count;
        self
    }

    fn chosen_accel(&self) -> Accel {
        self.accel.unwrap_or_else(|| self.testbed.accel())
    }

    pub(crate) fn nested_count(&self) -> u32 {
        self.nested
    }

    /// Starts the machine; see [`Vm::wait_agent`] for the next step.
    pub fn launch(&self) -> Result<Vm> {
        self.stage()?.launch()
    }

    /// Makes the directory and sockets, and the arguments that refer to them, without
    /// starting QEMU.
    pub fn stage(&self) -> Result<Staged> {
        let directory = tempfile::Builder::new()
            .prefix("farside-vm-")
            .tempdir()
            .context("creating a directory for a VM")?;
        let path = directory.path();
        let listen = |name: &str| {
            UnixListener::bind(path.join(name))
                .with_context(|| format!("listening on {}", path.join(name).display()))
        };
        let sockets = Sockets {
            agent: listen("agent.sock")?,
            qmp: listen("qmp.sock")?,
        };
        let (program, base) = match &self.base {
            Some(base) => base.clone(),
            None => (self.testbed.qemu().to_owned(), self.machine_args()),
        };
        let mut extra = self.guest_args(path)?;
        extra.extend(self.args.iter().cloned());
        Ok(Staged {
            name: self.name.clone(),
            program,
            base,
            extra,
            directory: Arc::new(directory),
            sockets,
        })
    }

    /// The machine itself, with memory that can be shared with other processes.
    fn machine_args(&self) -> Vec<OsString> {
        let emulated_host = self.chosen_accel() == Accel::Tcg && self.nested > 0;
        let vcpus = self.vcpus.unwrap_or(if emulated_host { 1 } else { 2 });
        let machine = match self.machine {
            // Interrupt remapping requires the split irqchip.
            Machine::Q35 if self.iommu => "q35,kernel-irqchip=split",
            Machine::Q35 => "q35",
            Machine::I440fx => "pc",
        };
        let mut args: Vec<OsString> = [
            "-name",
            &self.name,
            "-machine",
            &format!("{machine},memory-backend=mem"),
            "-m",
            &format!("{}b", self.memory),
            "-object",
            &format!("memory-backend-memfd,id=mem,size={}b,share=on", self.memory),
            "-smp",
            &vcpus.to_string(),
        ]
        .map(OsString::from)
        .into();
        args.extend(self.chosen_accel().args().map(OsString::from));
        if emulated_host {
            // Of two, the last one counts.
            args.extend(["-cpu", TCG_HOST_CPU].map(OsString::from));
        }
        if self.iommu {
            // Before all other devices: it applies only to those that follow.
            args.extend(["-device", VTD].map(OsString::from));
        }
        args
    }

    /// The arguments that the test bed adds: boot, console, agent, monitor.
    fn guest_args(&self, directory: &Path) -> Result<Vec<OsString>> {
        let chardev = |kind: &str, id: &str, path: &Path| {
            format!("{kind},id={id},path={}", option_value(path))
        };
        let mut args: Vec<OsString> = [
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-chardev",
            &chardev("file", "farside-console", &serial_log(directory)),
            "-serial",
            "chardev:farside-console",
            "-chardev",
            &chardev("socket", "farside-qmp", &directory.join("qmp.sock")),
            "-qmp",
            "chardev:farside-qmp",
            "-chardev",
            &chardev("socket", "farside-agent", &directory.join("agent.sock")),
            "-device",
            "virtio-serial-pci,id=farside-serial",
            "-device",
            &format!("virtserialport,bus=farside-serial.0,chardev=farside-agent,name={PORT_NAME}"),
        ]
        .map(OsString::from)
        .into();
        if self.nested > 0 {
            args.extend(host_vm::channel_args(&self.testbed, self.nested, directory));
        }
        if self.firmware == Firmware::Ovmf {
            let vars = directory.join("vars.fd");
            fs::copy(self.testbed.ovmf_vars(), &vars).context("copying OVMF's variables")?;
            for (unit, path, options) in
                [(0, self.testbed.ovmf_code(), ",readonly=on"), (1, vars, "")]
            {
                let path = option_value(&path);
                args.push("-drive".into());
                args.push(format!("if=pflash,format=raw,unit={unit},file={path}{options}").into());
            }
        }
        if self.boot == Boot::Kernel {
            let usual = match self.firmware {
                Firmware::SeaBios => self.testbed.elf_kernel(),
                Firmware::Ovmf => self.testbed.kernel(),
            };
            args.extend([
                "-kernel".into(),
                self.kernel.as_deref().unwrap_or(usual).into(),
                "-initrd".into(),
                self.initramfs(directory)?.into(),
                "-append".into(),
                self.kernel_command_line().into(),
            ]);
        }
        Ok(args)
    }

    fn kernel_command_line(&self) -> String {
        let mut words = vec![kernel_args(self.chosen_accel())];
        if self.iommu {
            words.push("intel_iommu=on".to_owned());
        }
        words.extend(self.append.iter().cloned());
        if !self.skip_modules.is_empty() {
            words.push(format!(
                "{SKIP_MODULES_OPTION}={}",
                self.skip_modules.join(",")
            ));
        }
        words.join(" ")
    }

    /// The test bed's initramfs, or a copy with this VM's files appended.
    fn initramfs(&self, directory: &Path) -> Result<PathBuf> {
        let common = match self.lean {
            true => self.testbed.lean_initramfs(),
            false => self.testbed.initramfs(),
        };
        if self.files.is_empty() {
            return Ok(common.to_owned());
        }
        let path = directory.join("initramfs.cpio");
        let context = || format!("writing {}", path.display());
        let mut file = File::create(&path).with_context(context)?;
        let mut common_file =
            File::open(common).with_context(|| format!("opening {}", common.display()))?;
        io::copy(&mut common_file, &mut file).with_context(context)?;
        let mut archive = Archive::new(file);
        for (path, mode, data) in &self.files {
            let path = path.strip_prefix("/").unwrap_or(path);
            archive.file(path, *mode, data)?;
        }
        archive.finish()?;
        Ok(path)
    }
}

impl Staged {
    /// The arguments for boot, console, agent and monitor, and those of
    /// [`VmBuilder::args`]: all but those for machine and memory.
    pub fn guest_args(&self) -> &[OsString] {
        &self.extra
    }

    /// The VM's directory.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Starts the machine.
    pub fn launch(self) -> Result<Vm> {
        let mut command = Command::new(&self.program);
        command.args(&self.base).args(&self.extra);
        self.launch_with(command)
    }

    /// Starts the machine with a command of the caller, whose arguments include
    /// [`Staged::guest_args`].
    pub fn launch_with(self, mut command: Command) -> Result<Vm> {
        let path = qemu_log(self.directory.path());
        let log = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
        log::debug!("VM {}: {command:?}", self.name);
        let out = log.try_clone().context("duplicating a log file")?;
        command.stdin(Stdio::null()).stdout(out).stderr(log);
        let process = Process::spawn(command).with_context(|| format!("VM {}", self.name))?;
        Vm::start(self.name, self.directory, process, &self.sockets)
    }

    /// Waits until a QEMU that is started elsewhere with [`Staged::guest_args`] connects to
    /// its sockets. Can be called for each such QEMU.
    pub fn adopt(&self, timeout: Duration) -> Result<Vm> {
        let process = Process::adopt(&self.sockets.qmp, &self.sockets.agent, timeout)
            .with_context(|| format!("VM {}: no QEMU connects", self.name))?;
        let (process, qmp, agent) = process;
        Vm::of(
            self.name.clone(),
            Arc::clone(&self.directory),
            process,
            qmp,
            agent,
        )
    }
}
