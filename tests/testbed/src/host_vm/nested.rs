//! A guest of a VM that plays a host.

use std::ops::Deref;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use farside_guest_agent::PORT_NAME;

use super::channels::Channel;
use super::{HostVm, SHORT};
use crate::vm::{Board, EMULATED, Guest, Output, Pending, Qmp, kernel_args, read_lossy};
use crate::{Accel, tools_disk};

/// For QEMU to start in an emulated host: some 20 s on an idle machine, and other
/// VMs run beside it.
const START_LIMIT: Duration = Duration::from_secs(180);

/// Longer than any test.
const LIFE: Duration = Duration::from_secs(24 * 3600);

/// Configuration of a guest of a VM that plays a host: a Q35 with shared memory, Debian's
/// kernel, busybox and the agent. No module is loaded: those for NVMe and for igb's virtual
/// functions are there for `modprobe`.
#[derive(Debug)]
pub struct NestedBuilder<'a> {
    host: &'a HostVm,
    name: String,
    memory: u64,
    vcpus: u32,
    huge_pages: bool,
    launcher: Option<String>,
    append: Vec<String>,
    args: Vec<String>,
}

/// A running guest of a VM that plays a host. Dropped, its QEMU is killed.
#[derive(Debug)]
pub struct Nested<'a> {
    host: &'a HostVm,
    slot: u32,
    guest: Guest,
    qmp: Qmp,
    /// QEMU's process id in the VM.
    pid: u32,
    /// `None` once its end has been observed.
    qemu: Option<Pending<'a>>,
}

impl<'a> NestedBuilder<'a> {
    pub(super) fn new(host: &'a HostVm, name: &str) -> Self {
        Self {
            host,
            name: name.to_owned(),
            memory: 256 << 20,
            vcpus: 1,
            huge_pages: false,
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

    /// Starts the guest; see [`Nested::wait_agent`] for the next step.
    pub fn launch(self) -> Result<Nested<'a>> {
        let slot = self.host.take_slot()?;
        let launched = self.launch_in(slot);
        if launched.is_err() {
            self.host.give_slot(slot);
        }
        launched
    }

    fn launch_in(&self, slot: u32) -> Result<Nested<'a>> {
        let host = self.host;
        let directory = host.directory();
        let connect = |channel: Channel| {
            let path = channel.path(directory, slot);
            UnixStream::connect(&path).with_context(|| format!("connecting to {}", path.display()))
        };
        let board = Board::default();
        let console = Channel::Console.path(directory, slot);
        // Earlier guests wrote to the same file.
        let before = read_lossy(&console).len();
        let words = move || {
            let log = read_lossy(&console);
            let log = log.get(before..).unwrap_or_default().trim();
            match log {
                "" => String::new(),
                log => format!(
                    "\n-- its serial console ends with:\n{}",
                    crate::vm::tail(log)
                ),
            }
        };
        let name = format!("{} in {}", self.name, host.name());
        let guest = Guest::start(
            name.clone(),
            connect(Channel::Agent)?,
            board.clone(),
            Box::new(words),
        )?;
        let qmp = Qmp::new(connect(Channel::Qmp)?, board.clone(), "/dev/null".into())?;

        let pid_file = format!("/run/nested{slot}.pid");
        let command = self.command(slot, &pid_file);
        host.exec_ok(&format!("rm -f {pid_file}"), SHORT)?;
        let qemu = host.exec_qemu(&command, LIFE, &board)?;
        if let Err(error) = qmp.negotiate(START_LIMIT) {
            return match board.look(|state| state.agent.closed) {
                true => bail!("VM {name}: QEMU ended: {}", qemu.wait()?),
                false => Err(error.context(format!("VM {name}"))),
            };
        }
        let pid = host.exec_ok(&format!("cat {pid_file}"), SHORT)?;
        let nested = Nested {
            host,
            slot,
            guest,
            qmp,
            pid: pid.trim().parse().context("reading QEMU's process id")?,
            qemu: Some(qemu),
        };
        Ok(nested)
    }

    /// A shell command that runs QEMU.
    fn command(&self, slot: u32, pid_file: &str) -> String {
        let (accel, args) = match self.host.has_kvm() {
            true => (Accel::Kvm, "-accel kvm -cpu host"),
            false => (Accel::Tcg, "-accel tcg"),
        };
        let huge = match self.huge_pages {
            true => ",hugetlb=on,hugetlbsize=2M",
            false => "",
        };
        let mut append = vec![kernel_args(accel)];
        if accel == Accel::Kvm {
            // Its KVM is the VM's, which may be emulated.
            append.push(EMULATED.to_owned());
        }
        append.extend(self.append.iter().cloned());
        let append = append.join(" ");
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
            ]
            .into_iter()
            .chain(args.split(' '))
            .map(str::to_owned)
            .collect(),
        };
        let fixed = [
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-pidfile",
            pid_file,
            "-kernel",
            tools_disk::KERNEL,
            "-initrd",
            tools_disk::INITRAMFS,
            "-append",
            &append,
            "-serial",
            "chardev:console",
            "-qmp",
            "chardev:qmp",
            "-device",
            "virtio-serial-pci,id=farside-serial",
            "-device",
            &format!("virtserialport,bus=farside-serial.0,chardev=agent,name={PORT_NAME}"),
        ];
        words.extend(fixed.map(str::to_owned));
        words.extend(self.args.iter().cloned());
        let mut script = String::new();
        for (id, channel) in [
            ("agent", Channel::Agent),
            ("qmp", Channel::Qmp),
            ("console", Channel::Console),
        ] {
            script += &format!(
                "for port in /sys/class/virtio-ports/*; do
                    [ \"$(cat $port/name)\" != {} ] || {id}=/dev/${{port##*/}}
                done\n",
                channel.port(slot)
            );
            words.extend(["-chardev".to_owned(), format!("pipe,id={id},path=${id}")]);
        }
        script += "exec ";
        script += self.launcher.as_deref().unwrap_or(tools_disk::QEMU);
        for word in words {
            script.push(' ');
            script += &quoted(&word);
        }
        script
    }
}

/// One word of a shell command, in which a trailing `$name` remains a variable.
fn quoted(word: &str) -> String {
    let escaped = |text: &str| format!("'{}'", text.replace('\'', r"'\''"));
    match word.rsplit_once("path=$") {
        Some((head, variable)) => format!("{}\"${variable}\"", escaped(&format!("{head}path="))),
        None => escaped(word),
    }
}

impl Nested<'_> {
    /// QEMU's process id in the VM that runs it.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// As [`Guest::wait_agent`]; the error also has where the guest's CPUs are.
    pub fn wait_agent(&self, timeout: Duration) -> Result<()> {
        let started = self.guest.wait_agent(timeout);
        started.map_err(|error| anyhow!("{error:#}\n{}", self.qmp.cpus()))
    }

    /// QEMU's monitor.
    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    /// Powers the guest off from within, and waits until QEMU has ended. Returns QEMU's
    /// exit status and output.
    pub fn shutdown(mut self, timeout: Duration) -> Result<Output> {
        self.guest.power_off()?;
        let Some(qemu) = self.qemu.take() else {
            bail!("VM {}: QEMU has ended before", self.guest.name());
        };
        qemu.wait_for(timeout)
    }

    /// Kills QEMU, and waits for its end.
    pub fn kill(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let Some(qemu) = self.qemu.take() else {
            return Ok(());
        };
        let kill = format!("kill -9 {} 2>/dev/null || true", self.pid);
        self.host.exec_ok(&kill, SHORT)?;
        qemu.wait_for(SHORT).map(drop)
    }
}

impl Drop for Nested<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            log::warn!("killing VM {}: {error:#}", self.guest.name());
        }
        self.host.give_slot(self.slot);
    }
}

impl Deref for Nested<'_> {
    type Target = Guest;

    fn deref(&self) -> &Guest {
        &self.guest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_stay_words_and_ports_are_looked_up() {
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted("$HOME"), "'$HOME'");
        assert_eq!(quoted("pipe,path=$agent"), "'pipe,path='\"$agent\"");
    }
}
