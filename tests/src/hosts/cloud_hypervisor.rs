//! cloud-hypervisor in place of QEMU, in a host with KVM: the README's commands, as printed there. The host's
//! kernel is Debian's, and so is that of the guest, whose init is a script that writes and reads the disk.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use farside_backend_api::ConnectionState;
use farside_testbed::Pending;
use serde::Serialize;

use super::{
    Set,
    facts::seconds,
    host::Host,
    network::{DEVICE, IMAGE, README, VM},
    programs::stripped,
};
use crate::{BOOT, SHORT, Status};

/// Init of the guest.
const GUEST: &str = include_str!("cloud_hypervisor.sh");

/// How often each of worker, lender and backend is killed.
const KILLS: u64 = 4;

/// The directory of the daemons' runtime directory.
const RUN: &str = "/run";

/// The guest's console, and the output of cloud-hypervisor.
const CONSOLE: &str = "/tmp/console";
const LOG: &str = "/tmp/cloud-hypervisor.log";

/// Memory of the README's guest, and of the guest here: an emulated host populates it slowly.
const MEMORY: [&str; 2] = ["size=1G,", "size=256M,"];

/// The guest's own disk and kernel in the README. The guest here boots from a kernel and an initramfs instead.
const GUESTS_OWN: &str = " --kernel vmlinux --cmdline root=/dev/vda1 --disk path=root.raw";

/// Recorded facts.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CloudHypervisorFacts {
    /// As cloud-hypervisor prints it.
    pub version: String,
    /// The model that the guest's driver found.
    pub model: String,
    /// Bytes of guest RAM pinned while the guest used the disk.
    pub bytes_pinned: u64,
    /// From the start of cloud-hypervisor until the guest's first I/O, seconds.
    pub boot_s: f64,
    /// MiB that the guest wrote, and read back.
    pub rounds: u64,
    /// Whether a reboot of the guest, which cloud-hypervisor takes with a new connection, found the data.
    pub kept_over_reboot: bool,
    /// How often each process was killed while the guest wrote and read.
    pub worker_kills: u64,
    /// As above.
    pub lender_kills: u64,
    /// As above.
    pub backend_kills: u64,
    /// What the guest reported as wrong.
    pub failures: Vec<String>,
    /// Interrupts that the guest counted.
    pub interrupts: u64,
    /// Whether the image, read in the host, has what the guest read last.
    pub image_ok: bool,
    /// Whether cloud-hypervisor ended by itself when the guest powered off.
    pub ended_in_order: bool,
    /// Whether the device was returned then, and by a cloud-hypervisor that was killed under I/O.
    pub returned: bool,
    /// Total duration, seconds.
    pub wall_s: f64,
}

impl CloudHypervisorFacts {
    /// The conditions to hold, and whether they do.
    pub fn checks(&self) -> Vec<(String, bool)> {
        let check = |what: &str, holds| (what.to_owned(), holds);
        vec![
            check(
                "the guest's driver found the disk",
                self.model.contains("farside"),
            ),
            check("guest RAM was pinned", self.bytes_pinned > 0),
            check("the guest read what it wrote", self.failures.is_empty()),
            check("a reboot found the data", self.kept_over_reboot),
            check("the guest got interrupts", self.interrupts > 0),
            check("the image has the data", self.image_ok),
            check("cloud-hypervisor ended in order", self.ended_in_order),
            check("the device was returned each time", self.returned),
        ]
    }
}

/// The README's commands.
struct Commands {
    lend: &'static str,
    serve: &'static str,
    vmm: String,
}

impl Commands {
    fn of_readme() -> Result<Self> {
        let (_, section) = README
            .split_once("\n### With cloud-hypervisor\n")
            .context("the README has no such section")?;
        let block = section.split("```sh\n").nth(1);
        let block = block.and_then(|block| block.split("```").next());
        let lines: Vec<&str> = block.unwrap_or_default().lines().collect();
        let [image, lend, serve, vmm] = lines[..] else {
            bail!("four commands, and not {lines:?}");
        };
        ensure!(image.starts_with("truncate "), "no image: {image}");
        let farside = |line: &'static str| {
            let args = line.strip_prefix("farside ");
            args.with_context(|| format!("not a command of farside: {line}"))
        };
        Ok(Self {
            lend: farside(lend)?,
            serve: farside(serve)?,
            vmm: vmm
                .strip_suffix(GUESTS_OWN)
                .filter(|vmm| vmm.contains(MEMORY[0]))
                .with_context(|| format!("another guest: {vmm}"))?
                .replace(MEMORY[0], MEMORY[1]),
        })
    }
}

/// A guest uses an image by cloud-hypervisor, `program`.
pub fn cloud_hypervisor(set: &Set<'_>, program: &Path) -> Result<CloudHypervisorFacts> {
    let started = Instant::now();
    let mut facts = CloudHypervisorFacts::default();
    (set.tell)("booting the host");
    let builder = set
        .testbed
        .host_vm("host")
        .nested_guests(1)
        .file("usr/bin/cloud-hypervisor", 0o755, stripped(program)?)
        .file("check", 0o755, GUEST);
    let host = Host::launch(builder, set.programs)?;
    ensure!(
        host.has_kvm(),
        "the host has no KVM, without which cloud-hypervisor runs no guest"
    );
    let played = play(set, &host, &mut facts);
    played.map_err(|error| {
        let printed = host.exec(&format!("tail -n 60 {CONSOLE} {LOG}"), SHORT);
        let printed = printed.map(|output| output.stdout).unwrap_or_default();
        error.context(format!("{printed}{}", host.story()))
    })?;
    host.shutdown()?;
    facts.wall_s = seconds(started.elapsed());
    Ok(facts)
}

fn play(set: &Set<'_>, host: &Host, facts: &mut CloudHypervisorFacts) -> Result<()> {
    let commands = Commands::of_readme()?;
    // The initramfs of nested guests, with another init.
    let prepare = format!(
        "set -e; truncate -s 64M {IMAGE}
        cd /
        (cat /tools/boot/nested.cpio; echo check | busybox cpio -o -H newc) >/tmp/guest.cpio
        cloud-hypervisor --version"
    );
    let printed = host.exec_ok(&prepare, SHORT)?;
    facts.version = printed.lines().next().unwrap_or_default().to_owned();
    let mut lender = host.start_lender(commands.lend)?;
    let backend = host.start_backend(VM, DEVICE, commands.serve)?;

    (set.tell)("starting cloud-hypervisor");
    let began = Instant::now();
    let guest = Guest::start(host, &commands.vmm)?;
    guest.wait_rounds(2)?;
    facts.boot_s = seconds(began.elapsed());
    facts.bytes_pinned = host.borrow(VM, DEVICE)?.bytes_pinned;
    facts.model = guest.found(1)?.1;

    (set.tell)("the guest reboots");
    tell(host, "reboot")?;
    let kept = guest.line("KEPT", 1)?;
    facts.kept_over_reboot = kept == guest.found(2)?.0;

    (set.tell)("workers are killed");
    for kill in 1..=KILLS {
        guest.wait_rounds(2)?;
        // awk's own command line does not match.
        let worker = "ps | awk '/farside [l]ease-worker/ { print $1 }'";
        host.exec_ok(&format!("kill -9 $({worker})"), SHORT)?;
        wait_status(host, |status| Ok(restarts(status)? == Some(kill)))?;
        facts.worker_kills = kill;
    }
    (set.tell)("lenders are killed");
    for kill in 1..=KILLS {
        guest.wait_rounds(2)?;
        lender.kill()?;
        lender = host.start_lender(commands.lend)?;
        wait_status(host, |status| {
            Ok(status.lent(DEVICE)?.borrowed_by.as_deref() == Some(VM))
        })?;
        facts.lender_kills = kill;
    }
    (set.tell)("backends are killed");
    for kill in 1..=KILLS {
        guest.wait_rounds(2)?;
        let children = format!("cat /proc/$(cat /run/backend-{VM}.pid)/task/*/children");
        host.exec_ok(&format!("kill -9 $({children})"), SHORT)?;
        wait_status(host, |status| {
            let backend = status.0.backend(VM).and_then(|it| it.restarts);
            Ok(backend == Some(kill) && restarts(status)?.is_some())
        })?;
        facts.backend_kills = kill;
    }
    guest.wait_rounds(2)?;

    (set.tell)("the guest powers off");
    tell(host, "off")?;
    let kept = guest.line("KEPT", 2)?;
    facts.rounds = guest.rounds()?;
    facts.interrupts = guest
        .line("INTERRUPTS", 2)?
        .parse()
        .context("a number of interrupts")?;
    facts.failures = guest.failures()?;
    facts.ended_in_order = guest.end()?;
    host.wait_returned(DEVICE)?;
    let image = host.exec_ok(
        &format!("dd if={IMAGE} bs=1M skip=1 count=1 2>/dev/null | sha256sum | cut -c -64"),
        SHORT,
    )?;
    facts.image_ok = image.trim() == kept;

    (set.tell)("cloud-hypervisor is killed");
    tell(host, "go")?;
    let guest = Guest::start(host, &commands.vmm)?;
    guest.wait_rounds(2)?;
    host.exec_ok("kill -9 $(pidof cloud-hypervisor)", SHORT)?;
    guest.end()?;
    host.wait_returned(DEVICE)?;
    facts.returned = true;
    backend.stop()?;
    lender.stop()
}

/// Tells the guest what to do.
fn tell(host: &Host, what: &str) -> Result<()> {
    let write = format!("printf {what} | dd of={IMAGE} bs=4k conv=notrunc,sync 2>/dev/null");
    host.exec_ok(&write, SHORT).map(drop)
}

/// Waits for a status of the daemons. Those that start do not answer yet.
fn wait_status(host: &Host, is_right: impl Fn(&Status) -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + SHORT;
    loop {
        let status = host.status();
        let right = status.as_ref().map(&is_right);
        if let Ok(Ok(true)) = right {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "the device is lost: {right:?}, {status:?}"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// How often the connection of the device has been restarted, if it has one.
fn restarts(status: &Status) -> Result<Option<u64>> {
    let connection = status.borrow(VM, DEVICE)?.connection;
    let connected = connection.filter(|it| it.state == ConnectionState::Connected);
    Ok(connected.map(|it| it.restarts))
}

/// cloud-hypervisor with a guest.
struct Guest<'a> {
    host: &'a Host,
    vmm: Pending<'a>,
}

impl<'a> Guest<'a> {
    /// Starts it by the README's command, with a kernel, an initramfs and a console.
    fn start(host: &'a Host, command: &str) -> Result<Self> {
        let command = format!(
            "cd /tmp; export XDG_RUNTIME_DIR={RUN}
            exec {command} --kernel /tools/boot/vmlinux --initramfs /tmp/guest.cpio \
                --cmdline \"{}\" --serial tty --console off >{CONSOLE} 2>{LOG}",
            "console=ttyS0 quiet loglevel=5 rdinit=/check mitigations=off cryptomgr.notests nokaslr audit=0"
        );
        let vmm = host.exec_start(&command, 10 * BOOT)?;
        Ok(Self { host, vmm })
    }

    /// Words after `kind` in the lines of this kind so far.
    fn lines(&self, kind: &str) -> Result<Vec<String>> {
        let command = format!("grep -a '^{kind} ' {CONSOLE}; true");
        let text = self.host.exec_ok(&command, SHORT)?;
        let words = |line: &str| {
            // The last line may be incomplete.
            let line = line.trim_end().strip_suffix(" .")?;
            Some(line.split_once(' ')?.1.trim_end().to_owned())
        };
        Ok(text.lines().filter_map(words).collect())
    }

    /// The `n`th line of a kind.
    fn line(&self, kind: &str, n: usize) -> Result<String> {
        self.wait(&format!("line {n} of {kind}"), || {
            Ok(self.lines(kind)?.into_iter().nth(n - 1))
        })
    }

    /// What the guest found at its `n`th boot: a checksum and the device's model.
    fn found(&self, n: usize) -> Result<(String, String)> {
        let line = self.line("FOUND", n)?;
        let (sum, model) = line.split_once(' ').context("no model")?;
        Ok((sum.to_owned(), model.to_owned()))
    }

    fn rounds(&self) -> Result<u64> {
        Ok(self.lines("ROUND")?.len() as u64)
    }

    /// Waits until the guest has done that many rounds more.
    fn wait_rounds(&self, count: u64) -> Result<()> {
        let before = self.rounds()?;
        self.wait(&format!("{count} rounds"), || {
            Ok((self.rounds()? >= before + count).then_some(()))
        })
    }

    fn failures(&self) -> Result<Vec<String>> {
        let mut failures = self.lines("FAILED")?;
        failures.extend(
            self.lines("LOG")?
                .into_iter()
                .filter(|line| !line.starts_with("0 ")),
        );
        Ok(failures)
    }

    fn wait<T>(&self, what: &str, look: impl Fn() -> Result<Option<T>>) -> Result<T> {
        let deadline = Instant::now() + BOOT;
        loop {
            let runs = self.host.exec("pidof cloud-hypervisor", SHORT)?;
            if let Some(found) = look()? {
                return Ok(found);
            }
            ensure!(runs.success(), "no {what}: cloud-hypervisor has ended");
            ensure!(Instant::now() < deadline, "no {what} within {BOOT:?}");
            std::thread::sleep(Duration::from_millis(500));
        }
    }

    /// Waits for the end of cloud-hypervisor; returns whether it ended successfully.
    fn end(self) -> Result<bool> {
        Ok(self.vmm.wait_for(SHORT)?.success())
    }
}
