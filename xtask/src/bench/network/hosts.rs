//! Two hosts that are network namespaces, and the wire between them.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use farside_testbed::Testbed;
use tempfile::TempDir;

use super::wire::{DEVICE, MTU};
use crate::{
    child::Child,
    interrupt,
    scene::{self, SHORT},
};

/// The wire's rate, Mbit/s.
pub(super) const MBIT: u64 = 10_000;

/// The lender's address.
pub(super) const FAR: &str = "10.99.0.2";
const NEAR: &str = "10.99.0.1";
const NETWORK: &str = "10.99.0.0/24";

/// A network namespace, with directories for farside's files.
pub(super) struct Host {
    holder: Child,
    directory: TempDir,
}

impl Host {
    fn new(name: &'static str) -> Result<Self> {
        // Its name is a part of sockets' paths.
        let directory = scene::directory(name)?;
        let mut unshare = Command::new("unshare");
        unshare.args(["--net", "sleep", "infinity"]);
        let holder = Child::spawn(name, unshare, &directory.path().join("holder.log"))?;
        let host = Self { holder, directory };
        let ours = fs::read_link("/proc/self/ns/net").context("reading this namespace")?;
        let deadline = Instant::now() + SHORT;
        while fs::read_link(host.namespace()).is_ok_and(|theirs| theirs == ours) {
            ensure!(
                Instant::now() < deadline,
                "no network namespace for {name}{}",
                host.holder.last_words()
            );
            thread::sleep(Duration::from_millis(5));
        }
        Ok(host)
    }

    fn namespace(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns/net", self.holder.pid()))
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A command on this host.
    pub(super) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net={}", self.namespace().display()))
            .arg("--")
            .arg(program)
            .env("FARSIDE_RUNTIME_DIR", self.directory.path())
            .env("FARSIDE_CONFIG_DIR", self.directory.path())
            .env("FARSIDE_STATE_DIR", self.directory.path());
        command
    }

    /// Runs a command to its end.
    pub(super) fn run(&self, program: &Path, args: &[&str]) -> Result<()> {
        interrupt::check()?;
        let output = self.command(program).args(args).output()?;
        ensure!(
            output.status.success(),
            "{} {}: {}",
            program.display(),
            args.join(" "),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    }

    /// Starts a daemon, and waits until its log has `ready`.
    pub(super) fn start(&self, name: &str, command: Command, ready: &str) -> Result<Child> {
        let log = self.path(&format!("{name}.log"));
        let mut child = Child::spawn(name, command, &log)?;
        let deadline = Instant::now() + SHORT;
        while !fs::read_to_string(&log).unwrap_or_default().contains(ready) {
            interrupt::check()?;
            child.check_running()?;
            ensure!(
                Instant::now() < deadline,
                "{name} does not print `{ready}`{}",
                child.last_words()
            );
            thread::sleep(Duration::from_millis(5));
        }
        Ok(child)
    }
}

/// The hosts of the borrower and of the lender.
pub(super) struct Hosts {
    // Dropped in this order.
    _wire: Option<Child>,
    pub(super) near: Host,
    pub(super) far: Host,
}

impl Hosts {
    /// Two hosts whose round-trip time is `delay_us` longer than without a wire.
    pub(super) fn new(testbed: &Testbed, delay_us: u32) -> Result<Self> {
        let (near, far) = (Host::new("near")?, Host::new("far")?);
        let tool = |name: &str| PathBuf::from(testbed.tool(name).get_program());
        let (ip, tc) = (tool("ip"), tool("tc"));
        let wire = match delay_us {
            0 => {
                // The kernel can do that by itself.
                let far_pid = far.holder.pid().to_string();
                let peer = ["type", "veth", "peer", "name", DEVICE, "netns", &far_pid];
                near.run(&ip, &[&["link", "add", DEVICE][..], &peer[..]].concat())?;
                None
            }
            _ => Some(wire(&near, &far, delay_us)?),
        };
        let mtu = MTU.to_string();
        for (host, address) in [(&near, NEAR), (&far, FAR)] {
            let run = |args: &str| host.run(&ip, &args.split(' ').collect::<Vec<_>>());
            run(&format!("address add {address}/24 dev {DEVICE}"))?;
            run(&format!("link set {DEVICE} mtu {mtu} up"))?;
            run("link set lo up")?;
            // SPDK leaves Nagle's algorithm on: with jumbo frames and delayed acknowledgements, its
            // reads take 44 ms.
            run(&format!("route change {NETWORK} dev {DEVICE} quickack 1"))?;
            if delay_us == 0 {
                let shape = format!(
                    "qdisc add dev {DEVICE} root tbf rate {MBIT}mbit burst 1mb latency 50ms"
                );
                host.run(&tc, &shape.split(' ').collect::<Vec<_>>())?;
            }
        }
        Ok(Self {
            _wire: wire,
            near,
            far,
        })
    }
}

/// Starts the wire, with real-time priority if the system allows it.
fn wire(near: &Host, far: &Host, delay_us: u32) -> Result<Child> {
    const START: &str =
        "chrt --fifo 10 true 2>/dev/null && exec chrt --fifo 10 \"$@\"; exec \"$@\"";
    let mut wire = Command::new("sh");
    wire.args(["-c", START, "sh"])
        .arg(std::env::current_exe().context("finding this program")?)
        .args(["wire", "--delay-us", &delay_us.to_string()])
        .args(["--mbit", &MBIT.to_string()])
        .args([near.namespace(), far.namespace()]);
    near.start("the wire", wire, "ready")
}
