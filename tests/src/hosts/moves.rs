//! A VM with a borrowed disk moves between three hosts that share nothing but a network: cold to a
//! third host and back, then running, to every host, the lender's own included.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use farside_testbed::{Accel, Expected, Nested};

use super::{
    Set,
    facts::{NetworkFacts, seconds},
    host::Host,
    network::{DEVICE, IMAGE, PREALLOCATED, VM},
    play::LONG,
};
use crate::{BOOT, SHORT, two_hosts::Chain};

/// The lender's address; it is in the certificate that the README's commands issue.
const LENDER: &str = "tls:rack1-b:7410";

/// A mark of one boot of the guest.
const BOOT_ID: &str = "cat /proc/sys/kernel/random/boot_id";

/// Three hosts, of which b lends.
pub(super) struct Rack {
    pub(super) a: Host,
    pub(super) b: Host,
    pub(super) c: Host,
}

impl Rack {
    pub(super) fn all(&self) -> [&Host; 3] {
        [&self.a, &self.b, &self.c]
    }

    /// The hosts' names and addresses on their network.
    pub(super) fn names(&self) -> [(&Host, &'static str, &'static str); 3] {
        [
            (&self.a, "rack1-a", "10.0.0.1"),
            (&self.b, "rack1-b", "10.0.0.2"),
            (&self.c, "rack1-c", "10.0.0.3"),
        ]
    }

    fn host(&self, name: &str) -> Result<&Host> {
        let mut names = self.names().into_iter();
        let found = names.find(|(_, known, _)| *known == name);
        Ok(found.with_context(|| format!("no host {name}"))?.0)
    }
}

/// Moves the VM from `a`, whose certificates are there. `lend` is the lender's command for that
/// host alone.
pub(super) fn moves(
    set: &Set<'_>,
    rack: &Rack,
    lend: &str,
    facts: &mut NetworkFacts,
) -> Result<()> {
    let Rack { a, b, c } = rack;
    b.exec_ok("farside pki issue rack1-c", SHORT)?;
    let fetch = "mkdir -p /etc/farside/pki
        scp 'rack1-b:/etc/farside/pki/rack1-c/*' /etc/farside/pki";
    c.exec_ok(fetch, SHORT)?;
    let lender = b.start_lender(&format!("{lend} --borrower host=rack1-c"))?;
    // The lender's own host reaches it at its socket.
    for (host, lender) in [(a, LENDER), (c, LENDER), (b, "/run/farside/lender.sock")] {
        let file = format!("echo 'lenders = [\"{lender}\"]' >/etc/farside/host.toml");
        host.exec_ok(&file, SHORT)?;
    }
    (set.tell)("starting the VM that moves");
    let expected = a.expect_guest(VM)?;
    describe(a, &expected)?;
    a.exec_ok(&format!("farside start {VM}"), BOOT)?;
    let mut journey = Journey {
        set,
        rack,
        at: "rack1-a",
        guest: expected.adopt(BOOT)?,
        chain: Chain::default(),
    };
    journey.boots()?;
    journey.chain.grow(&journey.guest)?;
    for to in ["rack1-c", "rack1-a"] {
        facts.moves_s.push(journey.go(to, false)?.seconds);
    }
    facts.moved_there_and_back = true;
    let boot = journey.guest.exec_ok(BOOT_ID, SHORT)?;
    for to in ["rack1-c", "rack1-b", "rack1-a"] {
        let moved = journey.go(to, true)?;
        facts.moves_s.push(moved.seconds);
        facts
            .live_downtime_ms
            .push(moved.figure("stood still for ", " ms")?);
        let without = moved.figure("without its devices for ", " s")?;
        facts.live_without_devices_s.push(without);
    }
    facts.moved_live = journey.guest.exec_ok(BOOT_ID, SHORT)? == boot;

    let chain = journey.chain;
    a.exec_ok(&format!("farside stop {VM}"), BOOT)?;
    let hash = format!("head -c {} {IMAGE} | sha256sum | head -c 64", chain.bytes());
    let medium = b.exec_ok(&hash, SHORT)?;
    ensure!(
        chain.hash() == Some(medium.trim()),
        "the lender's image has other data: {medium}, not {:?}",
        chain.hash()
    );
    b.wait_returned(DEVICE)?;
    lender.stop()
}

/// Writes the VM's configuration. What the hosts' files name is not in it.
fn describe(host: &Host, expected: &Expected<'_>) -> Result<()> {
    let accel = match host.guests_accel() {
        Accel::Kvm => "kvm",
        Accel::Tcg => "tcg",
    };
    let args = [expected.args(), vec![PREALLOCATED.to_owned()]].concat();
    let toml = format!(
        "devices = [\"{DEVICE}\"]\nmemory = \"256 MiB\"\naccel = \"{accel}\"\nqemu-args = {}",
        serde_json::to_string(&args)?
    );
    let path = format!("/etc/farside/vm/{VM}.toml");
    let write = format!("mkdir -p /etc/farside/vm; cat >{path} <<'END'\n{toml}\nEND");
    host.exec_ok(&write, SHORT).map(drop)
}

struct Journey<'a> {
    set: &'a Set<'a>,
    rack: &'a Rack,
    at: &'static str,
    guest: Nested<'a>,
    chain: Chain,
}

/// A move that succeeded.
struct Moved {
    seconds: f64,
    output: String,
}

impl Moved {
    /// A figure between two texts of the output.
    fn figure(&self, before: &str, unit: &str) -> Result<f64> {
        let found = self.output.split_once(before).and_then(|(_, rest)| {
            let (figure, _) = rest.split_once(unit)?;
            figure.parse().ok()
        });
        found.with_context(|| format!("no figure after {before:?}: {}", self.output))
    }
}

impl<'a> Journey<'a> {
    /// Moves the VM, verifies its data and adds to it.
    fn go(&mut self, to: &'static str, live: bool) -> Result<Moved> {
        let (source, destination) = (self.rack.host(self.at)?, self.rack.host(to)?);
        let option = if live { " --live" } else { "" };
        let command = format!("farside migrate {VM} --to {to}{option}");
        (self.set.tell)(&format!("{}: {command}", self.at));
        let expected = destination.expect_guest(VM)?;
        let started = Instant::now();
        let ended = source.exec(&command, BOOT)?;
        ensure!(ended.success(), "{}: {command}: {ended}", self.at);
        let seconds = seconds(started.elapsed());
        self.guest = expected.adopt(BOOT)?;
        match live {
            true => self.guest.wait_path("/dev/nvme0n1", LONG)?,
            false => self.boots()?,
        }
        self.chain.verify(&self.guest)?;
        self.chain.grow(&self.guest)?;
        let refused = source.exec(&format!("farside start {VM}"), SHORT)?;
        ensure!(
            refused.stderr.contains("has moved to") && refused.stderr.contains(to),
            "farside start {VM} where it has left: {refused}"
        );
        self.at = to;
        let output = ended.stdout + &ended.stderr;
        Ok(Moved { seconds, output })
    }

    fn boots(&self) -> Result<()> {
        self.guest.wait_agent(BOOT)?;
        self.guest.exec_ok("modprobe nvme", LONG)?;
        self.guest.wait_path("/dev/nvme0n1", LONG)
    }
}
