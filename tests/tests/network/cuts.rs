//! The wire is cut, and processes at its other end die.

use std::{
    fs,
    os::unix::fs::FileExt,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use farside_backend_api::ConnectionState;
use farside_lender_protocol::DeviceStatus;
use farside_tests::{Keepers, SHORT, from_env, load::Random, sha256};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::stage::{IMAGE, Stage};

/// Longer than a silent connection counts as one.
const SILENCE: Duration = Duration::from_secs(13);

/// In seconds.
const YOUNG_LOST_AFTER: u64 = 5;

/// Number of kills, and of cuts, unless `FARSIDE_KILLS` is set.
const KILLS: u64 = 50;

/// A boot id.
pub const ANOTHER_SYSTEM: &str = "0c1d2e3f405162738495a6b7c8d9eaf0";

/// Compares the image with what the VMM has written.
#[track_caller]
pub fn check_medium(stage: &Stage, image: &str, io: &Value) {
    let found = &io["found"]["io"];
    let field = |name: &str| found[name].as_u64().unwrap();
    let mut bytes = vec![0; field("bytes") as usize];
    let file = fs::File::open(stage.far.path(image)).unwrap();
    file.read_exact_at(&mut bytes, field("offset")).unwrap();
    assert_eq!(sha256(&bytes), found["sha256_source"].as_str().unwrap());
    assert_eq!(found["checksum_ok"], true);
}

fn connection(stage: &Stage, vm: &str) -> Result<ConnectionState> {
    connection_of(stage, vm, "disk0")
}

fn connection_of(stage: &Stage, vm: &str, device: &str) -> Result<ConnectionState> {
    let status = stage.near_status()?.0;
    let device = status
        .backend(vm)
        .and_then(|backend| backend.device(device));
    let connection = device.and_then(|device| device.connection.clone());
    Ok(connection.context("no connection in the status")?.state)
}

fn wait_connection(stage: &Stage, vm: &str, state: ConnectionState) -> Result<()> {
    wait_connection_of(stage, (vm, "disk0"), state)
}

pub fn wait_connection_of(
    stage: &Stage,
    (vm, device): (&str, &str),
    state: ConnectionState,
) -> Result<()> {
    stage.wait(&format!("connection {state:?}"), |stage| {
        Ok((connection_of(stage, vm, device)? == state).then_some(()))
    })
}

/// The VM for which the lender keeps the device.
fn kept_for(stage: &Stage) -> Result<Option<String>> {
    let status = stage.far_status()?.0;
    let lent = status.lent("disk0").context("the lender lends no disk0")?;
    Ok(lent.entry.kept.as_ref().map(|kept| kept.vm.to_string()))
}

pub fn a_drive_crosses_with_one_round_trip_for_each_command(stage: &mut Stage) -> Result<()> {
    stage.lend("disk0.img")?;
    stage.serve("web1", 60)?;
    let vmm = stage.boot("web1")?;
    let before = vmm.step("before-bme")?;
    assert_eq!(before["found"]["before_bme"]["ram_bytes_changed"], 0);
    let io = vmm.step("io 8M")?;
    vmm.step("interrupts 100")?;
    vmm.step("rogue hole")?;
    check_medium(stage, "disk0.img", &io);
    let status = stage.near_status()?.0;
    let near = status.backend("web1").and_then(|it| it.device("disk0"));
    let near = near.and_then(|device| device.controller.clone());
    let near = near.context("no controller in the status")?;
    let far = stage.far_status()?.0;
    let far = far.lent("disk0").context("no disk0")?;
    let count = |status: &DeviceStatus, name: &str| {
        let mut counters = status.counters.iter();
        counters.find(|counter| counter.name == name).unwrap().value
    };
    for name in ["reads", "writes", "bytes_read", "bytes_written"] {
        assert!(count(&near, name) > 0, "{name}");
        assert_eq!(count(&near, name), count(far, name), "{name}");
    }
    ensure!(near.faults.total >= 1, "the rogue DMA is not counted");
    assert_eq!(connection(stage, "web1")?, ConnectionState::Connected);
    // The device is free when the VMM has gone.
    stage.end_vmm();
    stage.wait("disk0 free", |stage| {
        let status = stage.far_status()?.0;
        let entry = &status.lent("disk0").context("no disk0")?.entry;
        Ok((entry.borrowed_by.is_none() && entry.kept.is_none()).then_some(()))
    })
}

pub fn limits_hold_over_the_network(stage: &mut Stage) -> Result<()> {
    stage.lend("disk0.img,bandwidth=10M")?;
    stage.serve("web1", 60)?;
    let vmm = stage.boot("web1")?;
    let start = Instant::now();
    let io = vmm.step("io 16M")?;
    // 16 MiB written and read, without 100 ms that were not used before, and the last command, of 1 MiB
    // at most.
    let least = Duration::from_millis(3000);
    ensure!(start.elapsed() >= least, "{:?}", start.elapsed());
    check_medium(stage, "disk0.img", &io);
    ensure!(connection(stage, "web1")? == ConnectionState::Connected);
    Ok(())
}

pub fn a_drive_crosses_with_tls(stage: &mut Stage) -> Result<()> {
    stage.use_tls()?;
    let lender = stage.lend("disk0.img")?;
    stage.serve("web1", 60)?;
    let vmm = stage.boot("web1")?;
    let io = vmm.step("io 8M")?;
    check_medium(stage, "disk0.img", &io);
    stage.daemon(lender).kill()?;
    stage.vmm()?.begin("io 4M 16M")?;
    wait_connection(stage, "web1", ConnectionState::Waiting)?;
    stage.lend("disk0.img")?;
    let io = stage.vmm()?.succeeded()?;
    check_medium(stage, "disk0.img", &io);
    Ok(())
}

/// Of a lease that is older than `lost-after` when its first connection is lost, and younger than what makes a connection a
/// stable one.
pub fn a_young_lease_is_kept_for_all_of_the_time(stage: &mut Stage) -> Result<()> {
    let lender = stage.lend("disk0.img")?;
    stage.serve("web1", YOUNG_LOST_AFTER)?;
    stage.boot("web1")?.step("io 1M")?;
    std::thread::sleep(Duration::from_secs(YOUNG_LOST_AFTER + 1));
    stage.daemon(lender).kill()?;
    stage.vmm()?.begin("io 4M 16M")?;
    wait_connection(stage, "web1", ConnectionState::Waiting)?;
    stage.lend("disk0.img")?;
    let io = stage.vmm()?.succeeded()?;
    check_medium(stage, "disk0.img", &io);
    Ok(())
}

pub fn io_goes_on_after_a_silent_cut(stage: &mut Stage) -> Result<()> {
    stage.lend("disk0.img")?;
    stage.serve("web1", 120)?;
    stage.boot("web1")?.step("io 1M")?;
    for _ in 0..2 {
        stage.cut()?;
        let vmm = stage.vmm()?;
        vmm.begin("io 8M 8M")?;
        ensure!(vmm.answer(SILENCE)?.is_none(), "I/O without a wire");
        wait_connection(stage, "web1", ConnectionState::Waiting)?;
        stage.join()?;
        let io = stage.vmm()?.succeeded()?;
        check_medium(stage, "disk0.img", &io);
        assert_eq!(connection(stage, "web1")?, ConnectionState::Connected);
    }
    Ok(())
}

/// Up to 1 s, which TCP bridges.
pub fn io_goes_on_after_short_cuts(stage: &mut Stage) -> Result<()> {
    stage.lend("disk0.img")?;
    stage.serve("web1", 120)?;
    stage.boot("web1")?.step("io 1M")?;
    let mut random = Random::from_environment();
    let mut pauses = Vec::new();
    for round in 0..kills()? {
        stage.vmm()?.begin(&format!("io 4M {}", offset(round)))?;
        std::thread::sleep(Duration::from_micros(random.below(5000)));
        stage.cut()?;
        std::thread::sleep(Duration::from_millis(random.below(1000)));
        stage.join()?;
        let joined = Instant::now();
        let io = stage.vmm()?.succeeded()?;
        pauses.push(joined.elapsed());
        check_medium(stage, "disk0.img", &io);
    }
    pauses.sort();
    println!(
        "{} cuts; I/O ends after the wire is back: median {:.1?}, at most {:.1?}",
        pauses.len(),
        pauses[pauses.len() / 2],
        pauses[pauses.len() - 1]
    );
    // I/O that had ended before the cut is answered at once.
    ensure!(
        pauses[pauses.len() / 2] > Duration::from_millis(10),
        "the wire was cut after most I/O: {pauses:?}"
    );
    Ok(())
}

fn kills() -> Result<u64> {
    Ok(from_env("FARSIDE_KILLS")?.unwrap_or(KILLS))
}

/// Where a round does its I/O, in bytes.
fn offset(round: u64) -> u64 {
    (8 + 4 * (round % 10)) << 20
}

pub fn io_goes_on_when_worker_and_lender_are_killed(stage: &mut Stage) -> Result<()> {
    let mut lender = stage.lend("disk0.img")?;
    stage.serve("web1", 120)?;
    stage.boot("web1")?.step("io 1M")?;
    for round in 0..kills()? {
        stage.vmm()?.begin(&format!("io 4M {}", offset(round)))?;
        match round % 2 {
            0 => {
                let pid = stage.daemon(lender).pid().to_string();
                // The worker's parent is the lender, below nsenter or not.
                stage.far.run("pkill", &["-KILL", "-P", &pid])?;
            }
            _ => {
                stage.daemon(lender).kill()?;
                lender = stage.lend("disk0.img")?;
            }
        }
        let io = stage.vmm()?.succeeded()?;
        check_medium(stage, "disk0.img", &io);
    }
    Ok(())
}

/// Kills the backend, which is a child of its keeper, and returns it. `last` was killed before.
fn kill_backend(stage: &Stage, keeper: usize, last: Option<Pid>) -> Result<Pid> {
    stage.wait("a backend", |stage| {
        let backend = stage.children(keeper).into_iter().next();
        let backend = backend.filter(|it| Some(*it) != last);
        Ok(backend.filter(|it| kill_process(*it, Signal::KILL).is_ok()))
    })
}

pub fn io_goes_on_when_the_backend_is_killed(stage: &mut Stage) -> Result<()> {
    stage.use_tls()?;
    let lender = stage.lend("disk0.img")?;
    let keeper = stage.serve_kept("web1", 120)?;
    stage.boot("web1")?.step("io 1M")?;
    let (mut last, mut killed) = (None, 0);
    for round in 0..kills()? {
        let began = Instant::now();
        let killed_before = killed;
        stage.vmm()?.begin(&format!("io 4M {}", offset(round)))?;
        last = Some(kill_backend(stage, keeper, last)?);
        killed += 1;
        match round % 4 {
            2 => {
                last = Some(kill_backend(stage, keeper, last)?);
                killed += 1;
            }
            3 => {
                let pid = stage.daemon(lender).pid().to_string();
                // It may be between two workers.
                let _ = stage.far.run("pkill", &["-KILL", "-P", &pid]);
            }
            _ => {}
        }
        let io = stage.vmm()?.succeeded()?;
        check_medium(stage, "disk0.img", &io);
        let pause = Keepers::INTERVAL * (killed - killed_before) as u32;
        std::thread::sleep(pause.saturating_sub(began.elapsed()));
    }
    let status = stage.near_status()?.0;
    let restarts = status.backend("web1").and_then(|it| it.restarts);
    assert_eq!(restarts, Some(killed));
    stage.end_vmm();
    stage.wait("disk0 free", |stage| {
        let status = stage.far_status()?.0;
        let entry = &status.lent("disk0").context("no disk0")?.entry;
        Ok((entry.borrowed_by.is_none() && entry.kept.is_none()).then_some(()))
    })?;
    let keeper = stage.daemon(keeper);
    keeper.terminate()?;
    let ended = keeper.wait_end(SHORT)?;
    ensure!(ended.success(), "the keeper: {ended}");
    Ok(())
}

pub fn a_drive_that_is_out_of_reach_for_too_long_is_given_up(stage: &mut Stage) -> Result<()> {
    stage.lend("disk0.img")?;
    let backend = stage.serve("web1", 3)?;
    stage.boot("web1")?.step("io 1M")?;
    stage.cut()?;
    stage.vmm()?.begin("io 1M 8M")?;
    let answer = stage.vmm()?.answer(SHORT)?.context("I/O still waits")?;
    ensure!(answer["ok"] == false, "I/O without a wire: {answer}");
    wait_connection(stage, "web1", ConnectionState::GivenUp)?;
    stage
        .daemon(backend)
        .wait_log("takes it back within", SHORT)?;
    // Another VM may have it then, once the lender has noticed the silence and its time is over.
    stage.join()?;
    stage.wait("disk0 free", |stage| {
        let status = stage.far_status()?.0;
        let entry = &status.lent("disk0").context("no disk0")?.entry;
        Ok((entry.borrowed_by.is_none() && entry.kept.is_none()).then_some(()))
    })?;
    stage.serve("web2", 60)?;
    stage.boot("web2")?.step("io 1M")?;
    Ok(())
}

/// Cuts VM web1 off, which has written, and waits until the device is kept for it.
fn cut_off(stage: &mut Stage) -> Result<(usize, usize)> {
    let lender = stage.lend("disk0.img")?;
    let backend = stage.serve("web1", 120)?;
    stage.boot("web1")?.step("io 1M")?;
    stage.cut()?;
    stage.vmm()?.begin("io 1M 8M")?;
    wait_connection(stage, "web1", ConnectionState::Waiting)?;
    Ok((lender, backend))
}

/// Checks that VM web1, whose network is back, does not go on, and has written nothing.
fn is_given_up(stage: &mut Stage, backend: usize, image: &str, why: &str) -> Result<()> {
    let line = stage
        .daemon(backend)
        .wait_log("giving the device up", SHORT)?;
    ensure!(line.contains(why), "{line}");
    let answer = stage.vmm()?.answer(SHORT)?.context("I/O still waits")?;
    ensure!(answer["ok"] == false, "I/O has gone on: {answer}");
    let mut bytes = vec![0; 1 << 20];
    let file = fs::File::open(stage.far.path(image))?;
    file.read_exact_at(&mut bytes, 8 << 20)?;
    ensure!(bytes.iter().all(|byte| *byte == 0), "a late write was done");
    Ok(())
}

pub fn a_vm_does_not_go_on_with_another_image_of_the_same_size(stage: &mut Stage) -> Result<()> {
    let (lender, backend) = cut_off(stage)?;
    stage.daemon(lender).kill()?;
    fs::File::create(stage.far.path("other.img"))?.set_len(IMAGE)?;
    stage.lend("other.img")?;
    stage.join()?;
    is_given_up(stage, backend, "other.img", "another medium")
}

pub fn a_revoked_vm_does_not_go_on_when_the_network_is_back(stage: &mut Stage) -> Result<()> {
    let (_, backend) = cut_off(stage)?;
    stage.wait("disk0 kept for web1", |stage| {
        Ok((kept_for(stage)?.as_deref() == Some("web1")).then_some(()))
    })?;
    stage.far.farside(&["revoke", "disk0"])?;
    stage.far.farside(&["devices", "--available", "disk0"])?;
    stage.join()?;
    is_given_up(stage, backend, "disk0.img", "its lease has ended since")
}

pub fn a_vm_does_not_go_on_after_another_has_written(stage: &mut Stage) -> Result<()> {
    let (mut lender, backend) = cut_off(stage)?;
    stage.wait("disk0 kept for web1", |stage| {
        Ok((kept_for(stage)?.as_deref() == Some("web1")).then_some(()))
    })?;
    stage.far.farside(&["revoke", "disk0"])?;
    stage.far.farside(&["devices", "--available", "disk0"])?;
    // On the lender's host, where the wire is not needed.
    let written = stage.write_at_far("web2", "io 1M 16M")?;
    for _ in 0..2 {
        stage.daemon(lender).kill()?;
        lender = stage.lend("disk0.img")?;
    }
    stage.join()?;
    check_medium(stage, "disk0.img", &written);
    is_given_up(stage, backend, "disk0.img", "its lease has ended since")
}

/// A host that crashes loses what its cache had of a medium, which nobody else knows.
pub fn a_vm_does_not_go_on_after_its_lenders_host_has_restarted(stage: &mut Stage) -> Result<()> {
    let (lender, backend) = cut_off(stage)?;
    stage.daemon(lender).kill()?;
    stage.far.boot = Some(ANOTHER_SYSTEM);
    stage.lend("disk0.img")?;
    stage.join()?;
    is_given_up(stage, backend, "disk0.img", "host has restarted")
}
