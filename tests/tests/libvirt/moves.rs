//! Domains that move between two hosts, each with a separate libvirt.

use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use farside_testbed::Guest;
use farside_tests::{
    Daemon, SHORT,
    two_hosts::{Chain, Ledger, VM},
};

use crate::{
    domain::Domain,
    hosts::{Hosts, Trap},
    stage::Stage,
};

/// Size of the NVMe namespace.
const DRIVE: u64 = 64 << 20;

/// Prints the device's address in the guest.
const PLACE: &str = "readlink -f /sys/class/nvme/nvme0/device";

fn migrate(to: &str) -> [&str; 5] {
    ["farside", "migrate", VM, "--to", to]
}

/// A configured domain on host `a`, which does not run.
fn define<'s, 'a>(hosts: &'s Hosts<'a>) -> Result<Domain<'s, 'a>> {
    let domain = Domain::define(&hosts.a, VM, &["disk0"])?;
    domain.describe(&["disk0"], "")?;
    Ok(domain)
}

/// libvirt and farside have the domain on the host `at` only.
fn has_one_home(hosts: &Hosts, at: &str) -> Result<()> {
    let (home, other) = hosts.pair(at);
    let known = |host: &Stage| -> Result<(String, bool)> {
        let description = host.path(format!("/etc/farside/vm/{VM}.toml"));
        Ok((
            host.virsh(&["list", "--all", "--name"])?,
            description.exists(),
        ))
    };
    let (here, there) = (known(home)?, known(other)?);
    ensure!(here == (VM.to_owned(), true), "at home: {here:?}");
    ensure!(there == (String::new(), false), "elsewhere: {there:?}");
    Ok(())
}

pub fn a_domain_moves_to_another_host_and_back_with_its_drive(hosts: &Hosts) -> Result<()> {
    let (a, b) = (&hosts.a, &hosts.b);
    let (lender, _) = a.cluster.lend_disk(DRIVE)?;
    let domain = define(hosts)?;
    let xml = domain.xml()?;
    let guest = domain.boot()?;
    let place = guest.exec_ok(PLACE, SHORT)?;
    let mut chain = Chain::default();
    chain.grow(&guest)?;

    what_cannot_go_there_runs_on(hosts, &guest, &lender)?;
    let said = a.ok(&["farside", "migrate", VM, "--to", "b", "--check"])?;
    ensure!(said.contains("nothing stops VM web1"), "{said}");
    chain.verify(&guest)?;

    let begin = Instant::now();
    let said = a.ok(&migrate("b"))?;
    let moved = begin.elapsed();
    let runs = format!("VM {VM} runs on b now\nit was off for ");
    ensure!(said.starts_with(&runs), "{said}");
    let guest = domain.guest()?;
    chain.verify(&guest)?;
    eprintln!("moved in {moved:.1?}, with boot in {:.1?}", begin.elapsed());
    has_one_home(hosts, "b")?;
    ensure!(b.virsh(&["dumpxml", "--inactive", VM])? == xml);
    ensure!(guest.exec_ok(PLACE, SHORT)? == place);
    let said = a.fails(&["farside", "start", VM])?;
    ensure!(said.contains("has moved to b"), "{said}");
    chain.grow(&guest)?;

    // Back, with a farside that dies while libvirt there starts the domain.
    hosts.hold(a, "start")?;
    std::thread::scope(|scope| {
        let migration = scope.spawn(|| b.run(&migrate("a")));
        let held = hosts.wait_held(a)?;
        b.sh(&format!("kill -9 {}", b.pid_of_command(&migrate("a"))?))?;
        let ended = migration.join().map_err(|_| anyhow!("no end"))??;
        ensure!(!ended.status.success(), "{ended:?}");
        // libvirt still has it defined here, and must not run it.
        let said = b.fails(&["virsh", "start", VM])?;
        ensure!(said.contains("on its way"), "{said}");
        b.nothing_left_of(VM)?;
        drop(held);
        Ok(())
    })?;
    let said = b.ok(&["farside", "migration", "resume", VM])?;
    // Another process shut it down.
    ensure!(said == format!("VM {VM} runs on a now"), "{said}");
    let guest = domain.guest()?;
    chain.verify(&guest)?;
    has_one_home(hosts, "a")?;
    ensure!(domain.xml()? == xml);
    ensure!(guest.exec_ok(PLACE, SHORT)? == place);

    let leases = Ledger::default().audit(&lender)?;
    ensure!(leases.count == 3 && leases.handovers == 2, "{leases:?}");
    ensure!(leases.holder.is_some(), "{leases:?}");
    domain.destroy()?;
    a.nothing_left_of(VM)
}

/// Obstacles on host `b`: the domain continues to run undisturbed.
fn what_cannot_go_there_runs_on(hosts: &Hosts, guest: &Guest, lender: &Daemon) -> Result<()> {
    let (a, b) = (&hosts.a, &hosts.b);
    let refused = |words: &[&str]| -> Result<()> {
        let said = a.fails(&migrate("b"))?;
        for word in words.iter().chain(&["as it was"]) {
            ensure!(said.contains(word), "no {word:?} in {said}");
        }
        ensure!(a.virsh(&["domstate", VM])? == "running");
        guest.exec_ok("dd if=/dev/nvme0n1 of=/dev/null bs=4k count=1", SHORT)?;
        let leases = Ledger::default().audit(lender)?;
        ensure!(leases.count == 1 && leases.holder.is_some(), "{leases:?}");
        Ok(())
    };
    let foreign = |name: &str, uuid: &str| -> Result<()> {
        let xml = format!(
            "<domain type='qemu'><name>{name}</name>{uuid}<memory unit='MiB'>64</memory>\
             <os><type arch='x86_64' machine='q35'>hvm</type></os></domain>"
        );
        let file = b.cluster.file("foreign.xml", &xml)?;
        b.virsh(&["define", &file.display().to_string()])?;
        Ok(())
    };
    foreign(VM, "")?;
    let theirs = b.virsh(&["dumpxml", VM])?;
    refused(&["has a domain web1 already"])?;
    ensure!(b.virsh(&["dumpxml", VM])? == theirs);
    b.virsh(&["undefine", VM])?;

    let uuid = a.virsh(&["domuuid", VM])?;
    foreign("web2", &format!("<uuid>{uuid}</uuid>"))?;
    refused(&["a domain web2 with the UUID", &uuid])?;
    b.virsh(&["undefine", "web2"])?;

    b.kill_libvirtd()?;
    refused(&["libvirt-sock"])?;
    b.start_libvirtd()?;
    has_one_home(hosts, "a")
}

/// The domain does not run, so that each move is quick.
pub fn a_domain_has_one_home_whatever_command_of_virsh_was_the_last(hosts: &Hosts) -> Result<()> {
    let (lender, _) = hosts.a.cluster.lend_disk(DRIVE)?;
    let domain = define(hosts)?;
    hosts.a.virsh(&["autostart", VM])?;
    let xml = domain.xml()?;

    what_would_stay_behind_is_refused(hosts, &domain)?;

    // Old host, host of the killed process, time of the kill, virsh command, expected host at
    // the end.
    let rounds = [
        ("a", "b", Trap::DieBefore, "define", "b"),
        ("b", "a", Trap::DieAfter, "define", "b"),
        ("b", "b", Trap::DieAfter, "undefine", "a"),
        ("a", "b", Trap::DieAfter, "autostart", "a"),
        ("a", "a", Trap::DieBefore, "undefine", "b"),
    ];
    for (from, at, trap, command, home) in rounds {
        let what = format!("from {from}: {trap:?} {command} on {at}");
        let (here, there) = hosts.pair(from);
        let to = if from == "a" { "b" } else { "a" };
        let trapped = if at == from { here } else { there };
        hosts.trap(trapped, trap, command)?;
        let ended = here.run(&migrate(to))?;
        ensure!(!ended.status.success(), "{what}: {ended:?}");
        ensure!(hosts.is_sprung(trapped), "{what}: nobody died: {ended:?}");
        let mut resume = vec!["farside", "migration", "resume", VM];
        if home == from {
            resume.push("--back");
        }
        here.ok(&resume).with_context(|| what.clone())?;
        has_one_home(hosts, home).with_context(|| what.clone())?;
        let (home, _) = hosts.pair(home);
        ensure!(home.virsh(&["domstate", VM])? == "shut off", "{what}");
        ensure!(home.virsh(&["dumpxml", "--inactive", VM])? == xml, "{what}");
        let info = home.virsh(&["dominfo", VM])?;
        let autostart = info.lines().find(|line| line.starts_with("Autostart:"));
        ensure!(
            autostart.is_some_and(|line| line.contains("enable")),
            "{what}: {info}"
        );
    }

    // The host that now has the domain can borrow the device: at QEMU's reset, before any
    // guest runs.
    let b = &hosts.b;
    b.virsh(&["start", "--paused", VM])?;
    let leases = Ledger::default().audit(&lender)?;
    ensure!(leases.count == 1 && leases.holder.is_some(), "{leases:?}");
    b.virsh(&["destroy", VM])?;
    b.nothing_left_of(VM)
}

/// A part of the domain that exists only in this libvirt.
fn what_would_stay_behind_is_refused(hosts: &Hosts, domain: &Domain) -> Result<()> {
    let a = &hosts.a;
    // A domain without disks has nothing to copy.
    let xml = domain.xml()?;
    let snapshot = format!(
        "<domainsnapshot><name>one</name><state>shutoff</state>\
         <creationTime>1</creationTime>{xml}</domainsnapshot>"
    );
    let file = a.cluster.file("snapshot.xml", &snapshot)?;
    let file = file.display().to_string();
    a.virsh(&["snapshot-create", VM, &file, "--redefine"])?;
    let said = a.fails(&migrate("b"))?;
    ensure!(said.contains("has snapshots of it"), "{said}");
    a.virsh(&["snapshot-delete", VM, "one", "--metadata"])?;

    let display = "<graphics type='vnc' passwd='secret'/></devices>";
    domain.redefine(&xml.replace("</devices>", display))?;
    let said = a.fails(&migrate("b"))?;
    ensure!(said.contains("has a password"), "{said}");
    domain.redefine(&xml)?;
    has_one_home(hosts, "a")
}
