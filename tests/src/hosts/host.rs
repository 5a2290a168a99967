//! A host that runs the product's daemons.

use std::{
    ops::Deref,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use farside_testbed::{HostVm, Pending, VmBuilder};

use super::Programs;
use crate::{BOOT, Borrow, Lent, MIB, SHORT, Status};

/// Longer than any test.
const LIFE: Duration = Duration::from_secs(24 * 3600);

/// The daemons' runtime directory.
const RUNTIME: &str = "/run/farside";

/// What the threads of processes do: name, state, CPU time in ticks, and where in the kernel.
const THREADS: &str = "for thread in /proc/[0-9]*/task/*; do
    readlink $thread/exe >/dev/null || continue
    echo $(cat $thread/comm; sed 's/.*) //' $thread/stat | cut -d ' ' -f 1,12,13; cut -d ' ' -f 1-4 $thread/syscall; head -n 4 $thread/stack)
done";

/// A VM that plays a host, with the `farside` binary.
pub(super) struct Host {
    vm: HostVm,
    logs: Mutex<Vec<String>>,
}

/// A daemon in a host.
pub(super) struct Service<'a> {
    host: &'a Host,
    name: String,
    running: Pending<'a>,
}

impl Host {
    pub(super) fn launch(builder: VmBuilder, programs: &Programs) -> Result<Self> {
        let vm = programs.add_to(builder).launch_host(BOOT)?;
        vm.exec_ok(&format!("mkdir -p {RUNTIME}"), SHORT)?;
        Ok(Self {
            vm,
            logs: Mutex::default(),
        })
    }

    /// Reserves memory as huge pages of 2 MiB.
    pub(super) fn reserve_huge_pages(&self, bytes: u64) -> Result<()> {
        let wanted = bytes.div_ceil(2 * MIB);
        let file = "/proc/sys/vm/nr_hugepages";
        let got = self.exec_ok(&format!("echo {wanted} >{file}; cat {file}"), SHORT)?;
        ensure!(
            got.trim() == wanted.to_string(),
            "VM {} has {} huge pages of 2 MiB, and {wanted} are needed",
            self.name(),
            got.trim()
        );
        Ok(())
    }

    /// Starts `farside lend`, and waits until it listens.
    pub(super) fn lend(&self, args: &str) -> Result<Service<'_>> {
        self.start_lender(&format!("lend {args}"))
    }

    /// Starts a second `farside lend`, and waits until it listens.
    pub(super) fn lend_another(&self, args: &str) -> Result<Service<'_>> {
        let socket = format!("{RUNTIME}/another.sock");
        let args = format!("lend --socket {socket} {args}");
        self.start("another-lender", &args, &socket)
    }

    /// Starts `farside serve` for `vm`, and waits until it serves `device`.
    pub(super) fn serve(&self, vm: &str, device: &str, args: &str) -> Result<Service<'_>> {
        // An emulated host under load pins memory slowly.
        let args = format!("serve --vm {vm} --device {device} --open-timeout 100 {args}");
        self.start_backend(vm, device, &args)
    }

    /// Starts `farside` with `args`, a lender, and waits until it listens.
    pub(super) fn start_lender(&self, args: &str) -> Result<Service<'_>> {
        self.start("lender", args, &format!("{RUNTIME}/lender.sock"))
    }

    /// Starts `farside` with `args`, a backend of `vm`, and waits until it serves `device`.
    pub(super) fn start_backend(&self, vm: &str, device: &str, args: &str) -> Result<Service<'_>> {
        self.start(&format!("backend-{vm}"), args, &socket(vm, device))
    }

    fn start(&self, name: &str, args: &str, socket: &str) -> Result<Service<'_>> {
        let log = format!("/tmp/{name}.log");
        self.logs
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(log.clone());
        let command = format!(
            "echo $$ >/run/{name}.pid
            export FARSIDE_RUNTIME_DIR={RUNTIME}
            cd /tmp
            exec farside {args} >{log} 2>&1"
        );
        let service = Service {
            host: self,
            name: name.to_owned(),
            running: self.exec_start(&command, LIFE)?,
        };
        self.wait_path(socket, SHORT)
            .with_context(|| format!("farside {args}{}", self.story()))?;
        Ok(service)
    }

    /// The logs of all daemons, and the end of the kernel log.
    pub(super) fn story(&self) -> String {
        let logs = self.logs.lock().unwrap_or_else(PoisonError::into_inner);
        let mut story = String::new();
        for what in logs.iter().map(|log| format!("cat {log}")).chain([
            "dmesg | tail -n 20".to_owned(),
            "cat /tmp/scripted-vmm.log".to_owned(),
            "cat /tmp/sshd.log".to_owned(),
            "tail -n 40 /var/lib/farside/vm/*/*.log".to_owned(),
            THREADS.to_owned(),
        ]) {
            if let Ok(output) = self.exec(&what, SHORT)
                && output.success()
            {
                story += &format!("\n-- {what} in {}:\n{}", self.name(), output.stdout);
            }
        }
        story
    }

    /// `farside status --json`.
    pub(super) fn status(&self) -> Result<Status> {
        let command = format!("FARSIDE_RUNTIME_DIR={RUNTIME} farside status --json");
        let text = self.exec_ok(&command, SHORT)?;
        Status::from_json(&text)
    }

    /// The report on a device by this host's lender.
    pub(super) fn lent(&self, device: &str) -> Result<Lent> {
        self.status()?.lent(device)
    }

    /// The report on a device by this host's backend of `vm`.
    pub(super) fn borrow(&self, vm: &str, device: &str) -> Result<Borrow> {
        self.status()?.borrow(vm, device)
    }

    /// Waits until the kernel log has `expected` faults of a function; returns fewer on
    /// timeout. The driver logs them from an interrupt, after the device's request.
    pub(super) fn wait_dmar_faults(&self, function: &str, expected: u64) -> Result<u64> {
        wait_count(expected, || {
            let faults = self.dmar_faults()?;
            Ok(faults
                .iter()
                .filter(|fault| fault.device == function)
                .count() as u64)
        })
    }

    /// Waits until the lender reports `expected` faults of a device; returns fewer on
    /// timeout. It reads them from the kernel log, with a delay.
    pub(super) fn wait_faults_in_status(&self, device: &str, expected: u64) -> Result<u64> {
        wait_count(expected, || Ok(self.lent(device)?.fault_total))
    }

    /// Waits until a device is returned to the lender.
    pub(super) fn wait_returned(&self, device: &str) -> Result<()> {
        let deadline = std::time::Instant::now() + SHORT;
        loop {
            let lent = self.lent(device)?;
            if lent.borrowed_by.is_none() && lent.is_closed() {
                return Ok(());
            }
            ensure!(
                std::time::Instant::now() < deadline,
                "{device} was not returned: {lent:?}"
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

fn wait_count(expected: u64, count: impl Fn() -> Result<u64>) -> Result<u64> {
    let deadline = std::time::Instant::now() + SHORT;
    loop {
        let count = count()?;
        if count >= expected || std::time::Instant::now() > deadline {
            return Ok(count);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The socket at which a backend serves a device.
pub(super) fn socket(vm: &str, device: &str) -> String {
    format!("{RUNTIME}/vm/{vm}/{device}.sock")
}

impl Service<'_> {
    /// Stops it by SIGTERM; it must exit successfully.
    pub(super) fn stop(self) -> Result<()> {
        let kill = format!("kill -TERM $(cat /run/{}.pid)", self.name);
        self.host.exec_ok(&kill, SHORT)?;
        let ended = self.running.wait_for(SHORT)?;
        ensure!(
            ended.success(),
            "{}: {ended}{}",
            self.name,
            self.host.story()
        );
        Ok(())
    }

    /// Kills it by SIGKILL, and waits for its end.
    pub(super) fn kill(self) -> Result<()> {
        let kill = format!("kill -KILL $(cat /run/{}.pid)", self.name);
        self.host.exec_ok(&kill, SHORT)?;
        let ended = self.running.wait_for(SHORT)?;
        ensure!(
            ended.signal.is_some(),
            "{} had ended before: {ended}{}",
            self.name,
            self.host.story()
        );
        Ok(())
    }
}

impl Deref for Host {
    type Target = HostVm;

    fn deref(&self) -> &HostVm {
        &self.vm
    }
}

impl Host {
    /// Powers it off.
    pub(super) fn shutdown(self) -> Result<()> {
        self.vm.shutdown(SHORT)
    }
}
