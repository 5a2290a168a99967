//! A VM with a borrowed disk moves between hosts that share nothing but what joins them. The disk is
//! an image, lent over a network to any of three hosts, or a physical drive, which one host has and
//! another reaches through an NTB.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use farside_testbed::{Accel, Expected, Nested, acquaint};

use super::{
    Set,
    facts::{NetworkFacts, NtbMoves, seconds},
    host::Host,
    network::{DEVICE, IMAGE, PREALLOCATED, README, VM},
    play::{DRIVE, LONG, NTB},
    stage::{self, ADDRESSES},
};
use crate::{BOOT, SHORT, sha256_of, two_hosts::Chain};

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
    let hosts = rack.names().map(|(host, name, _)| (host, name)).into();
    let mut journey = Journey::start(set, hosts, "")?;
    for to in ["rack1-c", "rack1-a"] {
        let moved = journey.go(to, false)?;
        facts.moves_s.push(moved.seconds);
        facts
            .cold_off_s
            .push(moved.figure("it was off for ", " s")?);
    }
    facts.moved_there_and_back = true;
    let boot = journey.guest.exec_ok(BOOT_ID, SHORT)?;
    for to in ["rack1-c", "rack1-b", "rack1-a"] {
        if to == "rack1-b" {
            let commands = ["--check", "--live"].map(|option| command(to, option));
            let printed = README
                .lines()
                .filter(|line| line.starts_with("farside migrate"));
            let printed: Vec<_> = printed.map(|line| line.split(" #").next()).collect();
            for command in &commands {
                let found = printed
                    .iter()
                    .flatten()
                    .any(|line| line.trim_end() == command);
                ensure!(found, "the README does not print {command}: {printed:?}");
            }
            journey.host(journey.at)?.exec_ok(&commands[0], BOOT)?;
        }
        let moved = journey.go(to, true)?;
        facts.moves_s.push(moved.seconds);
        facts
            .live_downtime_ms
            .push(moved.figure("stood still for ", " ms")?);
        let without = moved.figure("without its devices for ", " s")?;
        facts.live_without_devices_s.push(without);
    }
    facts.moved_live = journey.guest.exec_ok(BOOT_ID, SHORT)? == boot;

    let chain = journey.end()?;
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

/// A VM with a physical drive moves between the host that has it and one that reaches it through an
/// NTB: cold to its own host and back, then running.
pub(super) fn through_ntb(set: &Set<'_>) -> Result<NtbMoves> {
    let mut facts = NtbMoves::default();
    let image = stage::image(set, "moves.img")?;
    let drive = stage::drive(&image);
    let mut chain = Chain::default();
    stage::across_ntb(set, &drive, |a, b| {
        let [at_a, at_b] = ADDRESSES;
        acquaint(&[(&**a, "a", at_a), (&**b, "b", at_b)])?;
        let lender = b.lend(&format!(
            "--name b --listen tls:{at_b}:4000 --borrower host=a --vfio {DEVICE}={DRIVE} --ntb {NTB}"
        ))?;
        // b's endpoint is its lender's.
        let files = [
            (
                a,
                format!("lenders = [\"tls:{at_b}:4000\"]\nntb = \"{NTB}\""),
            ),
            (b, "lenders = [\"/run/farside/lender.sock\"]".to_owned()),
        ];
        for (host, text) in files {
            let write = format!("cat >/etc/farside/host.toml <<'END'\n{text}\nEND");
            host.exec_ok(&write, SHORT)?;
        }
        let hosts = vec![(a, "a"), (b, "b")];
        let mut journey = Journey::start(set, hosts, "ntb = true\nopen-timeout = 100\n")?;
        facts.lut_entries.push(b.lent(DEVICE)?.lut_entries.into());
        for (to, live) in [("b", false), ("a", false), ("b", true)] {
            facts.moves_s.push(journey.go(to, live)?.seconds);
            facts.lut_entries.push(b.lent(DEVICE)?.lut_entries.into());
        }
        chain = journey.end()?;
        b.wait_returned(DEVICE)?;
        lender.stop()
    })?;
    let medium = sha256_of(&image, 0, chain.bytes() as u64)?;
    facts.data_ok = chain.hash() == Some(medium.as_str());
    Ok(facts)
}

/// Writes the VM's configuration: `device`, these `lines`, and no fact about a host.
pub(super) fn describe(
    host: &Host,
    expected: &Expected<'_>,
    device: &str,
    lines: &str,
) -> Result<()> {
    let accel = match host.guests_accel() {
        Accel::Kvm => "kvm",
        Accel::Tcg => "tcg",
    };
    let args = [expected.args(), vec![PREALLOCATED.to_owned()]].concat();
    let toml = format!(
        "{lines}devices = [\"{device}\"]\nmemory = \"256 MiB\"\naccel = \"{accel}\"\nqemu-args = {}",
        serde_json::to_string(&args)?
    );
    let path = format!("/etc/farside/vm/{VM}.toml");
    let write = format!("mkdir -p /etc/farside/vm; cat >{path} <<'END'\n{toml}\nEND");
    host.exec_ok(&write, SHORT).map(drop)
}

/// The command that moves the VM.
fn command(to: &str, option: &str) -> String {
    let command = format!("farside migrate {VM} --to {to} {option}");
    command.trim_end().to_owned()
}

struct Journey<'a> {
    set: &'a Set<'a>,
    /// The hosts, with their names.
    hosts: Vec<(&'a Host, &'static str)>,
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
    /// Starts the VM on the first host, with `lines` in its configuration.
    fn start(set: &'a Set<'a>, hosts: Vec<(&'a Host, &'static str)>, lines: &str) -> Result<Self> {
        (set.tell)("starting the VM that moves");
        let (host, at) = hosts[0];
        let expected = host.expect_guest(VM)?;
        describe(host, &expected, DEVICE, lines)?;
        host.exec_ok(&format!("farside start {VM}"), BOOT)?;
        let mut journey = Self {
            set,
            hosts,
            at,
            guest: expected.adopt(BOOT)?,
            chain: Chain::default(),
        };
        journey.boots()?;
        journey.chain.grow(&journey.guest)?;
        Ok(journey)
    }

    /// Stops the VM; what it has written.
    fn end(self) -> Result<Chain> {
        self.host(self.at)?
            .exec_ok(&format!("farside stop {VM}"), BOOT)?;
        Ok(self.chain)
    }

    fn host(&self, name: &str) -> Result<&'a Host> {
        let mut hosts = self.hosts.iter();
        let found = hosts.find(|(_, known)| *known == name);
        Ok(found.with_context(|| format!("no host {name}"))?.0)
    }

    /// Moves the VM, verifies its data and adds to it.
    fn go(&mut self, to: &'static str, live: bool) -> Result<Moved> {
        let (source, destination) = (self.host(self.at)?, self.host(to)?);
        let command = command(to, if live { "--live" } else { "" });
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
