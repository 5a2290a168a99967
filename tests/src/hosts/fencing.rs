//! One image of a host, shared by guests of two others over the network, of which one is cut off and fenced.

use anyhow::{Context, Result, ensure};
use farside_testbed::Nested;

use super::{
    Set,
    host::{Host, Service, socket},
    moves::Rack,
    network::boot,
    play::{KILL_WORKERS, LONG, kill_backend},
    with_programs::start_with,
};
use crate::{
    SHORT,
    reserving::{ACQUIRE, EXCLUSIVE_ACCESS, PREEMPT_AND_ABORT, Reserving, WRITE_EXCLUSIVE},
};

const ALL: (bool, bool) = (true, true);
const READ: (bool, bool) = (true, false);
const NONE: (bool, bool) = (false, false);

/// Where both guests write, in blocks of 4 KiB.
const BLOCK: u32 = 16;

pub(super) fn fencing(set: &Set<'_>) -> Result<()> {
    (set.tell)("booting the hosts");
    let rack = boot(set)?;
    play(set, &rack).map_err(|error| {
        let stories: String = rack.all().iter().map(|host| host.story()).collect();
        error.context(stories)
    })?;
    for host in [rack.a, rack.c, rack.b] {
        host.shutdown()?;
    }
    Ok(())
}

fn play(set: &Set<'_>, rack: &Rack) -> Result<()> {
    let Rack { a, b, c } = rack;
    b.exec_ok(
        "set -e; cd /tmp; farside pki init
        farside pki issue rack1-b --address 10.0.0.2 --output /etc/farside/pki
        farside pki issue rack1-a; farside pki issue rack1-c
        truncate -s 64M shared.img",
        SHORT,
    )?;
    let disk = |id: &str| format!("--nvme {id}=shared.img,shared=shared.reservations");
    let lender = b.lend(&format!(
        "--name rack1-b --listen tls:10.0.0.2:7410 --borrower host=rack1-a --borrower host=rack1-c {} {}",
        disk("left"),
        disk("right")
    ))?;
    let backends = [
        borrow(a, "rack1-a", "left")?,
        borrow(c, "rack1-c", "right")?,
    ];
    (set.tell)("starting a guest in each borrower");
    let (in_a, in_c) = std::thread::scope(|scope| {
        let in_c = scope.spawn(|| start(c, "right"));
        let in_a = start(a, "left");
        let in_c = in_c
            .join()
            .map_err(|_| anyhow::anyhow!("a guest's start panicked"));
        anyhow::Ok((in_a?, in_c??))
    })?;
    let (sh_a, sh_c) = (shell(&in_a), shell(&in_c));
    let left = Reserving { sh: &sh_a, key: 10 };
    let right = Reserving { sh: &sh_c, key: 11 };
    for host in [&left, &right] {
        host.identify()?;
        host.register()?;
    }
    left.acquire(WRITE_EXCLUSIVE, ACQUIRE, 0)?;
    ensure!((left.may()?, right.may()?) == (ALL, READ));
    ensure!(left.report()? == (1, vec![10, 11]), "{:?}", left.report()?);

    (set.tell)(
        "the holder is cut off while it writes; the other one takes over, and is done before the network is back",
    );
    let block = |what: &str| {
        format!(
            "yes {what} | dd of=/dev/nvme0n1 bs=4k count=1 seek={BLOCK} iflag=fullblock oflag=direct"
        )
    };
    a.exec_ok("ip link set eth0 down", SHORT)?;
    let late = in_a.exec_start(&block("late"), LONG)?;
    right.acquire(EXCLUSIVE_ACCESS, PREEMPT_AND_ABORT, 10)?;
    sh_c(&block("right"))?;
    right.release(EXCLUSIVE_ACCESS)?;
    a.exec_ok("ip link set eth0 up", SHORT)?;
    let late = late.wait()?;
    ensure!(!late.success(), "not aborted: {late}");
    let first = format!(
        "dd if=/dev/nvme0n1 bs=4k count=1 skip={BLOCK} iflag=direct 2>/dev/null | head -n 1"
    );
    ensure!(sh_c(&first)?.trim() == "right");
    ensure!((left.may()?, right.may()?) == (ALL, ALL));

    (set.tell)("processes of both ends are killed");
    right.acquire(EXCLUSIVE_ACCESS, ACQUIRE, 0)?;
    ensure!((left.may()?, right.may()?) == (NONE, ALL));
    b.exec_ok(KILL_WORKERS, SHORT)?;
    for (host, vm) in [(a, "left"), (c, "right")] {
        host.exec_ok(&kill_backend(vm), SHORT)?;
    }
    ensure!((left.may()?, right.may()?) == (NONE, ALL));
    ensure!(left.report()? == (2, vec![11]), "{:?}", left.report()?);
    left.register()?;
    right.release(EXCLUSIVE_ACCESS)?;
    ensure!((left.may()?, right.may()?) == (ALL, ALL));

    drop((sh_a, sh_c));
    for guest in [in_a, in_c] {
        let ended = guest.shutdown(SHORT)?;
        ensure!(ended.success(), "QEMU in a borrower: {ended}");
    }
    for device in ["left", "right"] {
        b.wait_returned(device)?;
    }
    for backend in backends {
        backend.stop()?;
    }
    lender.stop()
}

fn borrow<'a>(host: &'a Host, name: &str, device: &str) -> Result<Service<'a>> {
    let fetch = format!(
        "mkdir -p /etc/farside/pki
        scp 'rack1-b:/etc/farside/pki/{name}/*' /etc/farside/pki"
    );
    host.exec_ok(&fetch, SHORT)?;
    let args = "--lender tls:10.0.0.2:7410 --keeper";
    host.serve(device, device, args)
}

fn start<'a>(host: &'a Host, device: &str) -> Result<Nested<'a>> {
    let guest = host.guest(device).vfio_user(&socket(device, device));
    let guest = start_with(host, guest, &["/usr/sbin/nvme"]).context(device.to_owned())?;
    guest.exec_ok("modprobe nvme", LONG)?;
    guest.wait_path("/dev/nvme0n1", LONG)?;
    Ok(guest)
}

fn shell<'a>(guest: &'a Nested<'_>) -> impl Fn(&str) -> Result<String> + 'a {
    |command| guest.exec_ok(command, LONG)
}
