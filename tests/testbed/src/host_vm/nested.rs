//! A guest of a VM that plays a host.

use std::ops::Deref;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use farside_guest_agent::PORT_NAME;

use super::channels::Channel;
use super::{HostVm, SHORT};
use crate::vm::{Board, EMULATED, Guest, Output, Pending, Qmp, kernel_args, read_lossy};
use crate::{
    Accel, NESTED_KVM_CPU, NESTED_KVM_MACHINE, TCG_ZEN_CPU, accel::NESTED_KVM_ZEN_CPU, tools_disk,
};

/// For QEMU to start in an emulated host: some 20 s on an idle machine, and other
/// VMs run beside it.
const START_LIMIT: Duration = Duration::from_secs(180);

/// Longer than any test.
const LIFE: Duration = Duration::from_secs(24 * 3600);

/// Configuration of a guest of a VM that plays a host: a Q35 with shared memory, Debian's
/// kernel, busybox and the agent. Drivers of borrowed devices are there for `modprobe`.
#[derive(Debug)]
pub struct NestedBuilder<'a> {
    host: &'a HostVm,
    name: String,
    memory: u64,
    vcpus: u32,
    huge_pages: bool,
    zen: bool,
    launcher: Option<String>,
    append: Vec<String>,
    args: Vec<String>,
}

/// A running guest of a VM that plays a host. Dropped, its QEMU is killed, unless others
/// started it.
#[derive(Debug)]
pub struct Nested<'a> {
    expected: Expected<'a>,
    /// QEMU's process id in the VM, if the test bed started it.
    pid: Option<u32>,
    /// `None` once its end has been observed, and if others started it.
    qemu: Option<Pending<'a>>,
}

/// Channels of a VM that plays a host, for a guest that others start there with
/// [`Expected::args`].
#[derive(Debug)]
pub struct Expected<'a> {
    name: String,
    host: &'a HostVm,
    slot: u32,
    board: Board,
    guest: Guest,
    qmp: Arc<Qmp>,
}

impl<'a> NestedBuilder<'a> {
    pub(super) fn new(host: &'a HostVm, name: &str) -> Self {
        Self {
            host,
            name: name.to_owned(),
            memory: 256 << 20,
            vcpus: 1,
            huge_pages: false,
            zen: false,
            launcher: None,
            append: Vec::new(),
            args: Vec::new(),
        }
    }

    /// Guest memory in bytes.
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// Number of CPUs.
    pub fn vcpus(mut self, count: u32) -> Self {
        self.vcpus = count;
        self
    }

    /// Guest memory in huge pages of 2 MiB, which the VM must have reserved
    /// (`/proc/sys/vm/nr_hugepages`).
    pub fn huge_pages(mut self) -> Self {
        self.huge_pages = true;
        self
    }

    /// A shell command that starts QEMU with machine, CPUs, memory and devices of its own
    /// choice, and takes more arguments for QEMU.
    pub fn launcher(mut self, command: &str) -> Self {
        self.launcher = Some(command.to_owned());
        self
    }

    /// A CPU on which Linux allows peer to peer ([`TCG_ZEN_CPU`]).
    pub fn zen(mut self) -> Self {
        self.zen = true;
        self
    }

    /// Appends to the kernel command line.
    pub fn append(mut self, text: &str) -> Self {
        self.append.push(text.to_owned());
        self
    }

    /// More arguments for the nested QEMU.
    pub fn args(mut self, args: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// A device served by a backend in the VM at that socket.
    pub fn vfio_user(self, socket: &str) -> Self {
        let socket = serde_json::json!({"type": "unix", "path": socket});
        // An emulated host on a loaded machine replies slowly, and QEMU exits when a reply
        // is late.
        let device = serde_json::json!({
            "driver": "vfio-user-pci", "socket": socket, "x-msg-timeout": 120_000,
        });
        self.args(["-device".to_owned(), device.to_string()])
    }

    /// Starts the guest; see [`Guest::wait_agent`] for the next step.
    pub fn launch(self) -> Result<Nested<'a>> {
        let host = self.host;
        let expected = host.expect_guest(&self.name)?;
        let pid_file = format!("/run/nested{}.pid", expected.slot);
        let command = self.command(expected.slot, &pid_file);
        host.exec_ok(&format!("rm -f {pid_file}"), SHORT)?;
        let qemu = host.exec_qemu(&command, LIFE, &expected.board)?;
        if let Err(error) = expected.qmp.negotiate(START_LIMIT) {
            let name = &expected.name;
            return match expected.board.look(|state| state.agent.closed) {
                true => bail!("VM {name}: QEMU ended: {}", qemu.wait()?),
                false => Err(error.context(format!("VM {name}"))),
            };
        }
        let pid = host.exec_ok(&format!("cat {pid_file}"), SHORT)?;
        Ok(Nested {
            expected,
            pid: Some(pid.trim().parse().context("reading QEMU's process id")?),
            qemu: Some(qemu),
        })
    }

    /// A shell command that runs QEMU.
    fn command(&self, slot: u32, pid_file: &str) -> String {
        let accel = match self.host.has_kvm() {
            true => Accel::Kvm,
            false => Accel::Tcg,
        };
        let huge = match self.huge_pages {
            true => ",hugetlb=on,hugetlbsize=2M",
            false => "",
        };
        let mut words: Vec<String> = match self.launcher {
            Some(_) => Vec::new(),
            None => [
                "-name",
                &self.name,
                "-machine",
                "q35,memory-backend=mem",
                "-m",
                &format!("{}b", self.memory),
                "-object",
                &format!(
                    "memory-backend-memfd,id=mem,size={}b,share=on{huge}",
                    self.memory
                ),
                "-smp",
                &self.vcpus.to_string(),
                "-accel",
                match accel {
                    Accel::Kvm => "kvm",
                    Accel::Tcg => "tcg",
                },
            ]
            .map(str::to_owned)
            .into(),
        };
        // Of two, the last one counts.
        words.extend(cpu_args(accel, self.zen));
        words.extend(["-pidfile".to_owned(), pid_file.to_owned()]);
        words.extend(guest_args(accel, slot, &self.append));
        words.extend(self.args.iter().cloned());
        let mut script = format!(
            "exec {}",
            self.launcher.as_deref().unwrap_or(tools_disk::QEMU)
        );
        for word in words {
            script.push(' ');
            script += &quoted(&word);
        }
        script
    }
}

/// The CPU of a nested guest: see [`NESTED_KVM_CPU`].
fn cpu_args(accel: Accel, zen: bool) -> Vec<String> {
    let cpu = match (accel, zen) {
        (Accel::Kvm, false) => NESTED_KVM_CPU,
        (Accel::Kvm, true) => NESTED_KVM_ZEN_CPU,
        (Accel::Tcg, false) => return Vec::new(),
        (Accel::Tcg, true) => TCG_ZEN_CPU,
    };
    ["-cpu", cpu].map(str::to_owned).into()
}

/// The arguments of a nested QEMU for boot, console, agent and monitor.
fn guest_args(accel: Accel, slot: u32, append: &[String]) -> Vec<String> {
    let mut command_line = vec![kernel_args(accel)];
    if accel == Accel::Kvm {
        // Its KVM is the VM's, which may be emulated.
        command_line.push(EMULATED.to_owned());
    }
    command_line.extend(append.iter().cloned());
    let mut args: Vec<String> = [
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-kernel",
        tools_disk::KERNEL,
        "-initrd",
        tools_disk::INITRAMFS,
        "-append",
        &command_line.join(" "),
        "-serial",
        "chardev:console",
        "-qmp",
        "chardev:qmp",
        "-device",
        "virtio-serial-pci,id=farside-serial",
        "-device",
        &format!("virtserialport,bus=farside-serial.0,chardev=agent,name={PORT_NAME}"),
    ]
    .map(str::to_owned)
    .into();
    if accel == Accel::Kvm {
        args.extend(["-machine", NESTED_KVM_MACHINE].map(str::to_owned));
    }
    for (id, channel) in [
        ("agent", Channel::Agent),
        ("qmp", Channel::Qmp),
        ("console", Channel::Console),
    ] {
        let chardev = format!("pipe,id={id},path={}", channel.device(slot));
        args.extend(["-chardev".to_owned(), chardev]);
    }
    args
}

/// One word of a shell command.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

impl HostVm {
    /// The accelerator of its guests.
    pub fn guests_accel(&self) -> Accel {
        match self.has_kvm() {
            true => Accel::Kvm,
            false => Accel::Tcg,
        }
    }

    /// Takes the channels for a guest that others start in this VM.
    pub fn expect_guest(&self, name: &str) -> Result<Expected<'_>> {
        let slot = self.take_slot()?;
        let expected = self.expect_in(slot, name);
        if expected.is_err() {
            self.give_slot(slot);
        }
        expected
    }

    fn expect_in(&self, slot: u32, name: &str) -> Result<Expected<'_>> {
        let directory = self.directory();
        let connect = |channel: Channel| {
            let path = channel.path(directory, slot);
            UnixStream::connect(&path).with_context(|| format!("connecting to {}", path.display()))
        };
        let board = Board::default();
        let console = Channel::Console.path(directory, slot);
        // Earlier guests wrote to the same file.
        let before = read_lossy(&console).len();
        let name = format!("{name} in {}", self.name());
        let (agent, qmp) = (connect(Channel::Agent)?, connect(Channel::Qmp)?);
        let qmp = Arc::new(Qmp::new(qmp, board.clone(), "/dev/null".into())?);
        let words = {
            let qmp = Arc::clone(&qmp);
            move || {
                let log = read_lossy(&console);
                let console = match log.get(before..).unwrap_or_default().trim() {
                    "" => String::new(),
                    log => format!(
                        "\n-- its serial console ends with:\n{}",
                        crate::vm::tail(log)
                    ),
                };
                format!("{console}\n{}", qmp.cpus())
            }
        };
        Ok(Expected {
            guest: Guest::start(name.clone(), agent, board.clone(), Box::new(words))?,
            qmp,
            name,
            host: self,
            slot,
            board,
        })
    }
}

impl<'a> Expected<'a> {
    /// The arguments for the guest's QEMU: CPU, boot, console, agent and monitor.
    pub fn args(&self) -> Vec<String> {
        let accel = self.host.guests_accel();
        let cpu = cpu_args(accel, false);
        [cpu, guest_args(accel, self.slot, &[])].concat()
    }

    /// Waits for the guest's QEMU. Its guest may have booted in another VM.
    pub fn adopt(self, timeout: Duration) -> Result<Nested<'a>> {
        let negotiated = self.qmp.negotiate(timeout);
        negotiated.with_context(|| format!("VM {}: no QEMU answers", self.name))?;
        Ok(Nested {
            expected: self,
            pid: None,
            qemu: None,
        })
    }
}

impl Drop for Expected<'_> {
    fn drop(&mut self) {
        self.host.give_slot(self.slot);
    }
}

impl Nested<'_> {
    /// QEMU's process id in the VM that runs it, if the test bed started it.
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// QEMU's monitor.
    pub fn qmp(&self) -> &Qmp {
        &self.expected.qmp
    }

    /// Reboots the guest from within, and waits until the agent is back.
    pub fn reboot(&self, timeout: Duration) -> Result<()> {
        let boots = self.boots();
        self.expected.guest.ask_reboot()?;
        self.wait_boot(boots + 1, timeout)
    }

    /// Powers the guest off from within, and waits until QEMU has ended. Returns QEMU's
    /// exit status and output.
    pub fn shutdown(mut self, timeout: Duration) -> Result<Output> {
        self.expected.guest.power_off()?;
        let Some(qemu) = self.qemu.take() else {
            bail!(
                "VM {}: its QEMU has ended before, or others started it",
                self.name()
            );
        };
        qemu.wait_for(timeout)
    }

    /// Kills QEMU, and waits for its end.
    pub fn kill(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let (Some(qemu), Some(pid)) = (self.qemu.take(), self.pid) else {
            return Ok(());
        };
        let kill = format!("kill -9 {pid} 2>/dev/null || true");
        self.expected.host.exec_ok(&kill, SHORT)?;
        qemu.wait_for(SHORT).map(drop)
    }
}

impl Drop for Nested<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            log::warn!("killing VM {}: {error:#}", self.name());
        }
    }
}

impl Deref for Nested<'_> {
    type Target = Guest;

    fn deref(&self) -> &Guest {
        &self.expected.guest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_stay_words() {
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted("$HOME"), "'$HOME'");
    }
}
