//! Two hosts with libvirt, each with files, processes and a network of its own, a wire
//! between them, and ssh over it.

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

/// How often to look at what has no event.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Where the next [`Trap`] is.
const TRAP: &str = "/run/trap";

/// At what a command waits that is held.
const GATE: &str = "/run/gate";

/// What stands in front of virsh.
const VIRSH: &str = include_str!("virsh.sh");

/// The hosts.
pub struct Hosts<'a> {
    pub a: Stage<'a>,
    pub b: Stage<'a>,
}

/// A command that waits until this is dropped.
#[must_use]
pub struct Held {
    _gate: OwnedFd,
}

/// What happens to who runs a command of virsh, once.
#[derive(Clone, Copy, Debug)]
pub enum Trap {
    /// It is killed before.
    DieBefore,
    /// It is killed when that is done.
    DieAfter,
}

impl<'a> Hosts<'a> {
    /// Makes and connects them.
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

    /// A host, and the other one.
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

    /// root of each may log in at the other, with a key that is made now.
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
            // What PAM wants of a session is not there.
            host.sh("mkdir -p /run/sshd && /usr/sbin/sshd -o UsePAM=no")?;
        }
        Ok(())
    }

    /// Who runs that command of virsh next on a host is killed there.
    pub fn trap(&self, host: &Stage, trap: Trap, command: &str) -> Result<()> {
        let when = match trap {
            Trap::DieBefore => "before",
            Trap::DieAfter => "after",
        };
        fs::write(host.path(TRAP), format!("{when} {command}\n")).context("a trap")
    }

    /// Whether somebody was caught.
    pub fn is_sprung(&self, host: &Stage) -> bool {
        !host.path(TRAP).exists()
    }

    /// That command of virsh waits on a host, when it is next run, for the end of what
    /// [`Hosts::wait_held`] returns.
    pub fn hold(&self, host: &Stage, command: &str) -> Result<()> {
        host.sh(&format!("mkfifo {GATE}"))?;
        fs::write(host.path(TRAP), format!("held {command}\n")).context("a trap")
    }

    /// Waits until a command is held.
    pub fn wait_held(&self, host: &Stage) -> Result<Held> {
        let gate = host.path(GATE);
        let deadline = Instant::now() + BOOT;
        loop {
            // Without a reader this fails.
            match rustix::fs::open(&gate, OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty()) {
                Ok(gate) => return Ok(Held { _gate: gate }),
                Err(rustix::io::Errno::NXIO) => {}
                Err(error) => return Err(error).context("the gate"),
            }
            ensure!(Instant::now() < deadline, "nobody is at the gate");
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// What helps to understand a failure.
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
