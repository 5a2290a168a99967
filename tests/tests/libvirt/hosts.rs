//! Two hosts with libvirt, each with separate files, processes and network, connected by a
//! veth pair, with ssh between them.

use std::{
    fs,
    os::{fd::OwnedFd, unix::fs::PermissionsExt},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use farside_tests::{BOOT, Cluster, testbed};
use rustix::fs::{Mode, OFlags};

use crate::stage::{AS_ROOT, Stage};

/// Polling interval for conditions without an event.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Path of the next [`Trap`].
const TRAP: &str = "/run/trap";

/// The FIFO at which a held command waits.
const GATE: &str = "/run/gate";

/// The wrapper of virsh.
const VIRSH: &str = include_str!("virsh.sh");

/// The hosts.
pub struct Hosts<'a> {
    pub a: Stage<'a>,
    pub b: Stage<'a>,
}

/// A held command, which continues when this is dropped.
#[must_use]
pub struct Held {
    _gate: OwnedFd,
}

/// What happens to the process that next runs a virsh command.
#[derive(Clone, Copy, Debug)]
pub enum Trap {
    /// It is killed before the command.
    DieBefore,
    /// It is killed after the command.
    DieAfter,
}

impl<'a> Hosts<'a> {
    /// Creates and connects the hosts.
    pub fn new(cluster: &'a Cluster) -> Result<Self> {
        let hosts = Self {
            a: Stage::named(cluster, AS_ROOT, "a")?,
            b: Stage::named(cluster, AS_ROOT, "b")?,
        };
        hosts.connect()?;
        hosts.let_each_other_in()?;
        for host in hosts.both() {
            let path = host.path("/usr/local/bin/virsh");
            fs::write(&path, VIRSH)
                .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o755)))
                .context("virsh's trap")?;
        }
        Ok(hosts)
    }

    fn both(&self) -> [&Stage<'a>; 2] {
        [&self.a, &self.b]
    }

    /// A host, and its peer.
    pub fn pair(&self, from: &str) -> (&Stage<'a>, &Stage<'a>) {
        match from {
            "a" => (&self.a, &self.b),
            _ => (&self.b, &self.a),
        }
    }

    fn connect(&self) -> Result<()> {
        let ip = testbed()?.tool("ip");
        let mut link = self.a.in_network(ip.get_program());
        link.args(["link", "add", "wire", "type", "veth"]).args([
            "peer",
            "name",
            "wire",
            "netns",
            &self.b.pid().to_string(),
        ]);
        run(link)?;
        for (host, address) in self
            .both()
            .into_iter()
            .zip(["10.99.0.1/24", "10.99.0.2/24"])
        {
            let words: [&[&str]; 3] = [
                &["link", "set", "lo", "up"],
                &["address", "add", address, "dev", "wire"],
                &["link", "set", "wire", "up"],
            ];
            for words in words {
                let mut command = host.in_network(ip.get_program());
                command.args(words);
                run(command)?;
            }
        }
        Ok(())
    }

    /// root of each may log in on the other, with a new key.
    fn let_each_other_in(&self) -> Result<()> {
        self.a.sh("umask 077 && mkdir -p /root/.ssh && ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519")?;
        let key = fs::read_to_string(self.a.path("/root/.ssh/id_ed25519"))?;
        let public = fs::read_to_string(self.a.path("/root/.ssh/id_ed25519.pub"))?;
        for host in self.both() {
            host.sh("umask 077 && mkdir -p /root/.ssh")?;
            for (name, text) in [
                ("id_ed25519", key.as_str()),
                ("authorized_keys", &public),
                ("config", "StrictHostKeyChecking accept-new\n"),
            ] {
                let path = host.path("/root/.ssh").join(name);
                fs::write(&path, text)
                    .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o600)))
                    .with_context(|| path.display().to_string())?;
            }
            let names = "127.0.0.1 localhost\n10.99.0.1 a\n10.99.0.2 b\n";
            fs::write(host.path("/etc/hosts"), names).context("/etc/hosts")?;
            // The requirements of a PAM session are missing.
            host.sh("mkdir -p /run/sshd && /usr/sbin/sshd -o UsePAM=no")?;
        }
        Ok(())
    }

    /// The process that next runs that virsh command on a host is killed there.
    pub fn trap(&self, host: &Stage, trap: Trap, command: &str) -> Result<()> {
        let when = match trap {
            Trap::DieBefore => "before",
            Trap::DieAfter => "after",
        };
        fs::write(host.path(TRAP), format!("{when} {command}\n")).context("a trap")
    }

    /// Whether the trap was triggered.
    pub fn is_sprung(&self, host: &Stage) -> bool {
        !host.path(TRAP).exists()
    }

    /// The next run of that virsh command on a host waits until the value of
    /// [`Hosts::wait_held`] is dropped.
    pub fn hold(&self, host: &Stage, command: &str) -> Result<()> {
        host.sh(&format!("mkfifo {GATE}"))?;
        fs::write(host.path(TRAP), format!("held {command}\n")).context("a trap")
    }

    /// Waits until a command is held.
    pub fn wait_held(&self, host: &Stage) -> Result<Held> {
        let gate = host.path(GATE);
        let deadline = Instant::now() + BOOT;
        loop {
            // Fails without a reader.
            match rustix::fs::open(&gate, OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty()) {
                Ok(gate) => return Ok(Held { _gate: gate }),
                Err(rustix::io::Errno::NXIO) => {}
                Err(error) => return Err(error).context("the gate"),
            }
            ensure!(Instant::now() < deadline, "nobody is at the gate");
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Logs for the analysis of a failure.
    pub fn story(&self) -> String {
        format!("{}\n{}", self.a.story(), self.b.story())
    }
}

fn run(mut command: Command) -> Result<()> {
    let ended = command
        .output()
        .with_context(|| format!("running {command:?}"))?;
    ensure!(ended.status.success(), "{command:?}: {ended:?}");
    Ok(())
}
