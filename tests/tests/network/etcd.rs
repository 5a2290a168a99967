//! Lenders that are found in etcd, while members of it die and are cut off, and backends borrow and return.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use farside_tests::{Daemon, SHORT, scripted_vmm_program};
use serde_json::Value;

use crate::{
    cluster::{Cluster, MEMBERS},
    stage::{Host, ROOT, Vmm},
};

/// Backends that borrow and return, each a device of its own.
const BACKENDS: usize = 20;

/// The device of the VM that keeps it.
const KEPT: &str = "kept";

/// The lender of each device.
fn lent() -> BTreeMap<&'static str, Vec<String>> {
    let ids = |from, to| (from..to).map(|n| format!("disk{n}"));
    let first = ids(0, BACKENDS / 2).chain([KEPT.to_owned()]);
    let second = ids(BACKENDS / 2, BACKENDS);
    BTreeMap::from([("lender1", first.collect()), ("lender2", second.collect())])
}

/// The backends that borrow and return.
struct Cycles {
    ended: AtomicBool,
    /// The number of the present situation.
    situation: AtomicUsize,
    /// For each backend, the situation in which the last cycle that it has ended began.
    done: Vec<AtomicUsize>,
    failed: Mutex<Option<anyhow::Error>>,
}

impl Cycles {
    /// Borrows and returns until the end.
    fn run(&self, borrower: &Host, number: usize) {
        while !self.ended.load(Ordering::SeqCst) {
            let situation = self.situation.load(Ordering::SeqCst);
            if let Err(error) = cycle(borrower, number) {
                let error = error.context(format!("VM vm{number}"));
                let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
                failed.get_or_insert(error);
                return;
            }
            self.done[number].store(situation, Ordering::SeqCst);
        }
    }

    fn check(&self) -> Result<()> {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.take().map_or(Ok(()), Err)
    }

    /// Waits until each backend has started, borrowed its device and returned it, all of it from now on.
    fn all_go_on(&self) -> Result<()> {
        let situation = self.situation.fetch_add(1, Ordering::SeqCst) + 1;
        let deadline = Instant::now() + SHORT;
        loop {
            self.check()?;
            let mut done = self.done.iter().map(|done| done.load(Ordering::SeqCst));
            if done.all(|done| done >= situation) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "backends do not go on");
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// A backend starts, its VM borrows the device, does checked I/O and returns it, and the backend ends.
fn cycle(borrower: &Host, number: usize) -> Result<()> {
    let (vm, device) = (format!("vm{number}"), format!("disk{number}"));
    let args = ["serve", "--vm", &vm, "--device", &device];
    let mut backend = borrower.start("a backend", &args)?;
    backend.wait_log("served at", SHORT)?;
    let socket = format!("{ROOT}/run/vm/{vm}/{device}.sock");
    let mut vmm = borrower.command(scripted_vmm_program()?);
    vmm.args(["--socket", &socket, "--ram", "16M", "io 1M"]);
    let output = vmm.output().context("running the scripted VMM")?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    ensure!(output.status.success(), "{said}\n{}", backend.log());
    backend.terminate()?;
    let ended = backend.wait_exit(SHORT)?;
    ensure!(ended.success(), "{}", backend.log());
    Ok(())
}

/// The lender of each device that the borrower can reach.
fn devices(borrower: &Host) -> Result<BTreeMap<String, String>> {
    let listed: Value = serde_json::from_str(&borrower.farside(&["devices", "--json"])?)?;
    let mut devices = BTreeMap::new();
    for device in listed["devices"].as_array().context("devices")? {
        let text = |key: &str| device[key].as_str().unwrap_or_default().to_owned();
        let twice = devices.insert(text("id"), text("lender"));
        ensure!(twice.is_none(), "{} is listed twice", text("id"));
    }
    Ok(devices)
}

fn expected() -> BTreeMap<String, String> {
    let of = |(lender, ids): (&str, Vec<String>)| -> Vec<(String, String)> {
        ids.into_iter().map(|id| (id, lender.to_owned())).collect()
    };
    lent().into_iter().flat_map(of).collect()
}

/// What the third lender says when it lends a device of another.
fn refused(cluster: &Cluster, device: &str) -> Result<String> {
    let mut rival = cluster.start_lender("lender3", &["mine".to_owned(), device.to_owned()])?;
    let ended = rival.wait_exit(SHORT)?;
    ensure!(!ended.success(), "it lends: {}", rival.log());
    Ok(rival.log())
}

fn refused_with_the_name_of(cluster: &Cluster, lender: &str, device: &str) -> Result<()> {
    let said = refused(cluster, device)?;
    let holder = format!(
        "device {device} is announced in etcd by lender {lender} at {}",
        Cluster::address(lender)
    );
    ensure!(said.contains(&holder), "{said}");
    Ok(())
}

/// Waits until etcd has all devices, each of its lender, and no other: what a watch prints first.
fn all_are_announced(borrower: &Host) -> Result<()> {
    let expected = expected();
    let mut watch = Watch::start(borrower)?;
    let mut seen = BTreeMap::new();
    while seen != expected {
        let line = watch.next(SHORT)?;
        let (device, rest) = line.split_once(": ").context("a line of a watch")?;
        match rest.strip_prefix("announced by lender ") {
            Some(by) => {
                let lender = by.split(' ').next().unwrap_or_default();
                let before = seen.insert(device.to_owned(), lender.to_owned());
                ensure!(before.is_none(), "{line}, and by lender {before:?} before");
            }
            None => drop(seen.remove(device)),
        }
    }
    Ok(())
}

/// `farside devices --watch`.
struct Watch {
    child: std::process::Child,
    lines: mpsc::Receiver<String>,
}

impl Watch {
    fn start(host: &Host) -> Result<Self> {
        use std::io::BufRead;
        let mut command = host.command(farside_tests::farside_program()?);
        command.args(["devices", "--watch"]);
        command.stdout(std::process::Stdio::piped());
        farside_testbed::die_with_us(&mut command);
        let mut child = command.spawn().context("watching")?;
        let stdout = child.stdout.take().context("its output")?;
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in std::io::BufReader::new(stdout)
                .lines()
                .map_while(Result::ok)
            {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, lines })
    }

    fn next(&mut self, limit: Duration) -> Result<String> {
        let line = self.lines.recv_timeout(limit);
        line.with_context(|| format!("no change within {limit:?}"))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Fails if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn ids_are_unique_and_leases_stay_while_members_die(cluster: &mut Cluster) -> Result<()> {
    for member in 0..MEMBERS {
        cluster.start_member(member)?;
    }
    for member in 0..MEMBERS {
        cluster.wait_member(member)?;
    }
    for (name, ids) in lent() {
        let lender = cluster.start_lender(name, &ids)?;
        lender.wait_log("is announced at", SHORT)?;
        cluster.lenders.push(lender);
    }
    all_are_announced(cluster.host("borrower"))?;
    refused_with_the_name_of(cluster, "lender1", "disk0")?;

    // A VM that keeps its device all the time.
    let borrower = cluster.host("borrower");
    let args = ["serve", "--vm", "steady", "--device", KEPT];
    let backend = borrower.start("the backend", &args)?;
    backend.wait_log("served at", SHORT)?;
    let mut command = borrower.command(scripted_vmm_program()?);
    let socket = format!("{ROOT}/run/vm/steady/{KEPT}.sock");
    command.args(["--socket", &socket, "--ram", "16M", "--step"]);
    let mut steady = Vmm::start(command)?;
    steady.step("io 1M")?;

    let cycles = Cycles {
        ended: AtomicBool::new(false),
        situation: AtomicUsize::new(0),
        done: (0..BACKENDS).map(|_| AtomicUsize::new(0)).collect(),
        failed: Mutex::default(),
    };
    // Threads borrow the host; the main one kills members of the cluster.
    let host = cluster.hosts.pop().context("the borrower")?;
    let result = thread::scope(|scope| {
        for number in 0..BACKENDS {
            let (cycles, host) = (&cycles, &host);
            scope.spawn(move || cycles.run(host, number));
        }
        let result = faults(cluster, &host, &cycles, &mut steady);
        cycles.ended.store(true, Ordering::SeqCst);
        result
    });
    cluster.hosts.push(host);
    result?;
    cycles.check()?;

    // Its lease was the same all the time, and no lender has lost one.
    let log = backend.log();
    ensure!(!log.contains("lost"), "the VM that keeps its device: {log}");
    for lender in &cluster.lenders {
        let log = lender.log();
        ensure!(
            !log.contains("is announced in etcd by"),
            "a conflict: {log}"
        );
        answers_again(lender)?;
    }
    drop(steady);
    drop(backend);
    a_killed_lender_is_gone_after_its_lease(cluster)
}

/// A lender logs once for each time that etcd is out of reach, and once when it is back; on a loaded
/// machine, it may be out of reach for a moment at the end, too.
fn answers_again(lender: &Daemon) -> Result<()> {
    let deadline = Instant::now() + SHORT;
    loop {
        let log = lender.log();
        let lines = |text: &str| log.lines().filter(|line| line.contains(text)).count();
        let (gone, back) = (lines("etcd does not answer"), lines("etcd answers again"));
        ensure!((1..10).contains(&gone), "{gone} times gone: {log}");
        if gone == back {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "it does not come back: {log}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Members die and are cut off. Returns when etcd is whole again.
fn faults(cluster: &mut Cluster, borrower: &Host, cycles: &Cycles, steady: &mut Vmm) -> Result<()> {
    let mut go_on = |what: &str| {
        cycles.all_go_on().context(what.to_owned())?;
        steady.step("io 1M").context(what.to_owned())?;
        let listed = devices(borrower).context(what.to_owned())?;
        ensure!(listed == expected(), "{what}: {listed:?}");
        Ok(())
    };
    go_on("with all members")?;
    cluster.kill_member(0)?;
    go_on("with one member killed")?;
    cluster.start_member(0)?;
    cluster.wait_member(0)?;
    cluster.cut("m2", true)?;
    go_on("with one member cut off")?;
    cluster.kill_member(2)?;
    go_on("with one of three members")?;
    cluster.kill_member(0)?;
    cluster.kill_member(1)?;
    go_on("without etcd")?;
    cluster.cut("m2", false)?;
    for member in 0..MEMBERS {
        cluster.start_member(member)?;
    }
    for member in 0..MEMBERS {
        cluster.wait_member(member)?;
    }
    all_are_announced(borrower)?;
    go_on("with all members again")?;
    refused_with_the_name_of(cluster, "lender2", &format!("disk{}", BACKENDS - 1))
}

/// Its ids are free after that, and those who know it may still ask it.
fn a_killed_lender_is_gone_after_its_lease(cluster: &mut Cluster) -> Result<()> {
    let id = format!("disk{}", BACKENDS - 1);
    let mut watch = Watch::start(cluster.host("borrower"))?;
    let mut lender = cluster.lenders.pop().context("the second lender")?;
    lender.kill()?;
    let gone = format!("{id}: no longer announced by lender lender2 at ");
    wait_line(&mut watch, &gone)?;
    let rival: Daemon = cluster.start_lender("lender3", std::slice::from_ref(&id))?;
    rival.wait_log("is announced at", SHORT)?;
    cluster.lenders.push(rival);
    wait_line(
        &mut watch,
        &format!("{id}: announced by lender lender3 at "),
    )?;
    let mut again = cluster.start_lender("lender2", std::slice::from_ref(&id))?;
    let ended = again.wait_exit(SHORT)?;
    let log = again.log();
    ensure!(
        !ended.success() && log.contains("by lender lender3"),
        "{log}"
    );
    Ok(())
}

fn wait_line(watch: &mut Watch, start: &str) -> Result<()> {
    let deadline = Instant::now() + SHORT;
    while Instant::now() < deadline {
        if watch.next(SHORT)?.starts_with(start) {
            return Ok(());
        }
    }
    bail!("not seen: {start}")
}
