//! Two hosts between which a VM can move: network namespaces, each with separate
//! directories, and a lender in a third one. The remote shell is a script that enters the
//! other namespace.

mod chain;
mod ledger;
mod migration;
mod netns;
mod play;

use std::{
    collections::BTreeMap,
    fs,
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use farside_backend_api::DeviceList;
use farside_testbed::{Accel, Staged, TCG_CPU, Vm, VmBuilder};
use tempfile::TempDir;

use crate::{BOOT, Daemon, Ended, MIB, SHORT, farside_program, testbed};
use netns::ip;

pub use chain::Chain;
pub use ledger::{Leases, Ledger};
pub use migration::{Migration, kill, kill_at_once};
pub use netns::unable;
pub use play::play;

/// The VM.
pub const VM: &str = "web1";

/// The two hosts between which it moves.
pub const HOSTS: [&str; 2] = ["a", "b"];

/// The lender's host.
const THIRD: &str = "c";

/// Polling interval for conditions without an event.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Timeout of one migration: the guest shuts down and boots.
pub const MIGRATION: Duration = Duration::from_secs(600);

/// The hosts, and all processes started on them, which are killed on drop.
pub struct Stage {
    directory: TempDir,
    prefix: String,
    staged: Staged,
    notes: Mutex<Vec<String>>,
}

impl Stage {
    /// The VM is configured on host `a`, and does not run.
    pub fn new() -> Result<Self> {
        Self::with(|_, builder| builder.lean())
    }

    /// As [`Stage::new`], for a machine that is not lean or has more. `change` receives the
    /// directory that both hosts share.
    pub fn with(change: impl FnOnce(&Path, VmBuilder) -> VmBuilder) -> Result<Self> {
        let directory = tempfile::Builder::new()
            .prefix("fs-")
            .tempdir_in("/tmp")
            .context("creating a directory")?;
        let testbed = testbed()?;
        let staged = change(directory.path(), testbed.vm(VM)).stage()?;
        static STAGES: AtomicUsize = AtomicUsize::new(0);
        let number = STAGES.fetch_add(1, Ordering::Relaxed);
        let stage = Self {
            // Namespace names are global on the machine.
            prefix: format!("fs{}-{number}", std::process::id()),
            directory,
            staged,
            notes: Mutex::default(),
        };
        for host in HOSTS.into_iter().chain([THIRD]) {
            netns::add(&stage.netns(host))?;
            ip(&["-n", &stage.netns(host), "link", "set", "lo", "up"])?;
            for kind in ["run", "etc/vm", "state"] {
                fs::create_dir_all(stage.directory.path().join(host).join(kind))?;
            }
        }
        stage.connect()?;
        stage.write_shell()?;
        stage.describe(&stage.description()?)?;
        Ok(stage)
    }

    /// Connects the two hosts by a veth pair.
    fn connect(&self) -> Result<()> {
        let [a, b] = HOSTS.map(|host| self.netns(host));
        // From inside: root of a user namespace has no privileges in the machine's own
        // network namespace.
        ip(&[
            "-n", &a, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", &b,
        ])?;
        for (host, address) in [(&a, "10.99.0.1/24"), (&b, "10.99.0.2/24")] {
            ip(&["-n", host, "address", "add", address, "dev", "wire"])?;
            ip(&["-n", host, "link", "set", "wire", "up"])?;
        }
        Ok(())
    }

    /// `ip` on a host, with the words of `line`.
    pub fn ip(&self, host: &str, line: &str) -> Result<()> {
        let name = self.netns(host);
        let words = ["-n", &name].into_iter().chain(line.split(' '));
        ip(&words.collect::<Vec<_>>()).map(drop)
    }

    /// A socket that listens on a host.
    pub fn listen(&self, host: &str, address: &str) -> Result<TcpListener> {
        netns::listen(&self.netns(host), address)
    }

    fn netns(&self, host: &str) -> String {
        format!("{}{host}", self.prefix)
    }

    /// The directory that all hosts share.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Path of a host's file.
    pub fn path(&self, host: &str, name: &str) -> PathBuf {
        self.directory.path().join(host).join(name)
    }

    /// The lender's socket.
    pub fn lender_socket(&self) -> PathBuf {
        self.path(THIRD, "run/lender.sock")
    }

    /// The rsh script: `HOST farside ARGS…`.
    fn write_shell(&self) -> Result<()> {
        let program = farside_program()?;
        let directory = program.parent().context("the program has a directory")?;
        let ip = testbed()?.tool("ip");
        let text = format!(
            "#!/bin/sh\nhost=$1; shift\n\
             export FARSIDE_RUNTIME_DIR={root}/$host/run FARSIDE_CONFIG_DIR={root}/$host/etc \
             FARSIDE_STATE_DIR={root}/$host/state PATH={bin}:$PATH\n\
             exec '{ip}' netns exec {prefix}$host \"$@\"\n",
            root = self.directory.path().display(),
            bin = directory.display(),
            ip = ip.get_program().display(),
            prefix = self.prefix,
        );
        let path = self.shell();
        fs::write(&path, text)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700))?;
        Ok(())
    }

    /// The remote shell.
    pub fn shell(&self) -> PathBuf {
        self.directory.path().join("rsh")
    }

    /// The VM configuration.
    pub fn description(&self) -> Result<String> {
        let testbed = testbed()?;
        let tcg = testbed.accel() == Accel::Tcg;
        let mut args: Vec<String> = Vec::new();
        for arg in self.staged.guest_args() {
            args.push(arg.to_str().context("an argument is UTF-8")?.to_owned());
        }
        if tcg {
            args.extend(["-cpu", TCG_CPU].map(str::to_owned));
        }
        Ok(format!(
            "devices = [{{ id = \"disk0\", port = 1 }}]\nlenders = [{:?}]\nmemory = \"{}M\"\n\
             accel = {:?}\nqemu = {:?}\nqemu-args = {}\n",
            self.lender_socket(),
            384 * MIB / MIB,
            if tcg { "tcg" } else { "kvm" },
            testbed.qemu(),
            serde_json::to_string(&args)?,
        ))
    }

    /// Writes the VM configuration on host `a`.
    pub fn describe(&self, text: &str) -> Result<()> {
        let path = self.path("a", &format!("etc/vm/{VM}.toml"));
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
    }

    /// `farside` on a host.
    pub fn command(&self, host: &str, args: &[&str]) -> Result<Command> {
        let mut command = Command::new(self.shell());
        command
            .arg(host)
            .arg(farside_program()?)
            .args(args)
            .env("FARSIDE_RSH", self.shell())
            .env("FARSIDE_LOG", "info")
            .stdin(Stdio::null());
        Ok(command)
    }

    /// Runs `farside` on a host to its end.
    pub fn run(&self, host: &str, args: &[&str]) -> Result<Ended> {
        let output = self.command(host, args)?.output()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let ended = Ended {
            status: output.status,
            stdout: text(&output.stdout),
            stderr: text(&output.stderr),
        };
        self.note(format!("-- {host}: farside {args:?}: {ended:?}"));
        Ok(ended)
    }

    /// Runs `farside` on a host; it must succeed.
    pub fn ok(&self, host: &str, args: &[&str]) -> Result<String> {
        let ended = self.run(host, args)?;
        ensure!(
            ended.status.success(),
            "farside {args:?} on {host}: {}",
            ended.stderr
        );
        Ok(ended.stdout)
    }

    /// Runs `farside` on a host; it must fail with these words.
    pub fn refused(&self, host: &str, args: &[&str], words: &[&str]) -> Result<()> {
        let ended = self.run(host, args)?;
        ensure!(
            !ended.status.success(),
            "farside {args:?} on {host} succeeds"
        );
        for word in words {
            ensure!(
                ended.stderr.contains(word),
                "no {word:?} in: {}",
                ended.stderr
            );
        }
        Ok(())
    }

    /// Starts a lender of `disk0`; creates its image if it is missing.
    pub fn lend(&self) -> Result<Daemon> {
        let image = self.path(THIRD, "disk0.img");
        if !image.exists() {
            fs::File::create(&image)?.set_len(64 * MIB)?;
        }
        let socket = self.lender_socket();
        // A killed lender leaves it.
        let _ = fs::remove_file(&socket);
        let drive = format!("disk0={}", image.display());
        let command = self.command(THIRD, &["lend", "--name", "rack1", "--nvme", &drive])?;
        let daemon = Daemon::start("the lender", command)?;
        daemon.wait_log("listens at", SHORT)?;
        Ok(daemon)
    }

    /// Waits for a QEMU that was started elsewhere. Its guest may have booted on another
    /// host.
    pub fn adopt(&self, timeout: Duration) -> Result<Vm> {
        self.staged.adopt(timeout)
    }

    /// Waits for a guest that was started elsewhere.
    pub fn guest(&self) -> Result<Vm> {
        let vm = self.adopt(BOOT)?;
        vm.wait_agent(BOOT)?;
        vm.wait_path("/dev/nvme0n1", SHORT)?;
        Ok(vm)
    }

    /// The lease holder and the lease generation, as reported by the lender.
    pub fn holder(&self) -> Result<Option<(String, u64)>> {
        let listed = self.ok(THIRD, &["devices", "--json"])?;
        let listed: DeviceList = serde_json::from_str(&listed)?;
        let listed = listed.devices.into_iter().next();
        let device = listed.context("the lender has no device")?.device;
        Ok(device
            .borrowed_by
            .map(|by| (by.vm.to_string(), by.generation.0)))
    }

    /// The processes of a host whose command line contains all these words.
    pub fn processes(&self, host: &str, words: &[&str]) -> Result<Vec<i32>> {
        let mut found = Vec::new();
        for (pid, line) in self.all_processes(host)? {
            if words.iter().all(|word| line.contains(word)) {
                found.push(pid);
            }
        }
        Ok(found)
    }

    /// The processes of a host that keep a backend or are one: of each VM the backend, its keeper and the spare.
    pub fn backends(&self, host: &str) -> Result<Vec<i32>> {
        self.processes(host, &["serve --keeper --vm"])
    }

    fn all_processes(&self, host: &str) -> Result<BTreeMap<i32, String>> {
        let pids = ip(&["netns", "pids", &self.netns(host)])?;
        let mut found = BTreeMap::new();
        for pid in pids.split_whitespace() {
            // It may have ended in between.
            if let Ok(line) = fs::read(format!("/proc/{pid}/cmdline")) {
                let line = String::from_utf8_lossy(&line).replace('\0', " ");
                found.insert(pid.parse()?, line);
            }
        }
        Ok(found)
    }

    /// The hosts that run a QEMU.
    pub fn running(&self) -> Result<Vec<&'static str>> {
        let mut hosts = Vec::new();
        for host in HOSTS {
            if !self.qemus(host)?.is_empty() {
                hosts.push(host);
            }
        }
        Ok(hosts)
    }

    /// The QEMU processes of a host.
    pub fn qemus(&self, host: &str) -> Result<Vec<i32>> {
        self.processes(host, &["qemu-system", "-name"])
    }

    /// Keeps a text that is shown if the test fails.
    pub fn note(&self, text: String) {
        if let Ok(mut notes) = self.notes.lock() {
            notes.push(text);
        }
    }

    /// Logs and notes for the analysis of a failure.
    pub fn story(&self) -> String {
        let mut story = String::new();
        for host in HOSTS {
            for name in ["backend.log", "qemu.log"] {
                let path = self.path(host, &format!("state/vm/{VM}/{name}"));
                if let Ok(text) = fs::read_to_string(&path) {
                    story.push_str(&format!("-- {host}, {name}:\n{}\n", tail(&text)));
                }
            }
            let journal = self.path(host, &format!("state/migrations/{VM}.json"));
            if let Ok(text) = fs::read_to_string(&journal) {
                story.push_str(&format!("-- {host}, journal:\n{}\n", tail(&text)));
            }
        }
        if let Ok(notes) = self.notes.lock() {
            let from = notes.len().saturating_sub(20);
            story.push_str(&notes[from..].join("\n"));
        }
        story
    }
}

fn tail(text: &str) -> &str {
    let start = (text.len().saturating_sub(3000)..text.len())
        .find(|&at| text.is_char_boundary(at))
        .unwrap_or(0);
    &text[start..]
}

impl Drop for Stage {
    fn drop(&mut self) {
        for host in HOSTS.into_iter().chain([THIRD]) {
            // All processes in the namespace belong to this test.
            for pid in self.all_processes(host).unwrap_or_default().into_keys() {
                kill(pid);
            }
            let _ = ip(&["netns", "delete", &self.netns(host)]);
        }
    }
}

/// The path, for a message.
pub fn shown(path: &Path) -> String {
    path.display().to_string()
}
