//! A model without a medium: the DMA test device, whose lender only keeps its lease.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use farside_backend_api::ConnectionState;
use farside_devices::dma_test::{self, Command, reg, status};
use farside_tests::SHORT;
use serde_json::Value;

use crate::{
    cuts::{ANOTHER_SYSTEM, wait_connection_of},
    stage::{Stage, Vmm},
};

const DEVICE: &str = "dma0";
const VM: (&str, &str) = ("web1", DEVICE);

/// Guest RAM, of 64 MiB, and an address outside it.
const HERE: u64 = 0x20_0000;
const THERE: u64 = 0x40_0000;
const OUTSIDE: u64 = 0x4000_0000;

const PATTERN: u32 = 0x5afe_c0de;

/// Longer than one poll of the device moves.
const LONG: u32 = 1 << 20;

fn lend(stage: &mut Stage) -> Result<usize> {
    stage.lend_also("disk0.img", &["--dma-test", DEVICE])
}

fn start(stage: &mut Stage, lost_after: u64) -> Result<(usize, usize)> {
    let lender = lend(stage)?;
    let backend = stage.serve_device(VM.0, DEVICE, lost_after)?;
    stage.boot_device(VM.0, DEVICE)?;
    Ok((lender, backend))
}

fn get(vmm: &mut Vmm, register: u64) -> Result<u32> {
    let answer = vmm.step(&format!("peek 0 {register:#x}"))?;
    let value = answer["found"]["value"].as_u64();
    Ok(value.context("no value")? as u32)
}

fn set(vmm: &mut Vmm, register: u64, value: u32) -> Result<()> {
    vmm.step(&format!("poke 0 {register:#x} {value:#x}"))
        .map(drop)
}

/// Starts a command.
fn begin(vmm: &mut Vmm, command: Command, (src, dst): (u64, u64), len: u32) -> Result<()> {
    for (register, address) in [(reg::SRC, src), (reg::DST, dst)] {
        set(vmm, register, address as u32)?;
        set(vmm, register + 4, (address >> 32) as u32)?;
    }
    set(vmm, reg::LENGTH, len)?;
    set(vmm, reg::PATTERN, PATTERN)?;
    set(vmm, reg::STATUS, u32::MAX)?;
    set(vmm, reg::COMMAND, command as u32)
}

/// The status of a command that has ended.
fn end(vmm: &mut Vmm) -> Result<u32> {
    let deadline = Instant::now() + SHORT;
    loop {
        let found = get(vmm, reg::STATUS)?;
        if found & status::BUSY == 0 {
            return Ok(found);
        }
        ensure!(Instant::now() < deadline, "still busy after {SHORT:?}");
    }
}

fn run(vmm: &mut Vmm, command: Command, at: (u64, u64), len: u32) -> Result<u32> {
    begin(vmm, command, at, len)?;
    end(vmm)
}

/// Fills memory, copies it, and compares both.
fn moves_data(vmm: &mut Vmm) -> Result<()> {
    assert_eq!(run(vmm, Command::Fill, (0, HERE), LONG)?, status::DONE);
    assert_eq!(run(vmm, Command::Copy, (HERE, THERE), LONG)?, status::DONE);
    let mut sums = [0; 2];
    for (sum, at) in sums.iter_mut().zip([HERE, THERE]) {
        assert_eq!(run(vmm, Command::Checksum, (at, 0), LONG)?, status::DONE);
        *sum = get(vmm, reg::RESULT)?;
    }
    assert_eq!(sums[0], sums[1]);
    assert_eq!(run(vmm, Command::Read, (THERE + 8, 0), 4)?, status::DONE);
    assert_eq!(get(vmm, reg::DATA)?, PATTERN);
    Ok(())
}

fn is_free(stage: &Stage) -> Result<()> {
    stage.wait("dma0 free", |stage| {
        let status = stage.far_status()?.0;
        let entry = &status.lent(DEVICE).context("no dma0")?.entry;
        Ok((entry.borrowed_by.is_none() && entry.kept.is_none()).then_some(()))
    })
}

pub fn a_device_without_a_medium_crosses(stage: &mut Stage) -> Result<()> {
    start(stage, 60)?;
    let vmm = stage.vmm()?;
    vmm.step("place")?;
    assert_eq!(get(vmm, reg::ID)?, dma_test::ID);
    // Nothing is reachable before bus-master enable.
    let refused = run(vmm, Command::Fill, (0, HERE), 64)?;
    assert_eq!(refused, status::DONE | status::FAULT);
    vmm.step("bme")?;
    moves_data(vmm)?;
    // An interrupt, after its data.
    let raised = |answer: &Value| answer["found"]["interrupts"]["vectors"]["3"].as_u64();
    set(vmm, reg::VECTOR, 3)?;
    run(vmm, Command::Raise, (0, 0), 0)?;
    assert_eq!(raised(&vmm.step("irqs")?), Some(1));
    // Outside the VM's memory.
    let before = get(vmm, reg::FAULTS)?;
    for command in [Command::Fill, Command::Checksum] {
        let refused = run(vmm, command, (OUTSIDE, OUTSIDE), 4096)?;
        assert_eq!(refused, status::DONE | status::FAULT, "{command:?}");
        assert_eq!(get(vmm, reg::MOVED)?, 0);
    }
    assert_eq!(get(vmm, reg::FAULTS)?, before + 2);
    let near = stage.near_status()?.0;
    let near = near.backend(VM.0).and_then(|it| it.device(DEVICE));
    let near = near.and_then(|device| device.controller.clone());
    let near = near.context("no controller in the status")?;
    ensure!(near.faults.total >= 2, "{:?}", near.faults);
    wait_connection_of(stage, VM, ConnectionState::Connected)?;
    // The lender has its lease, and no other VM gets it.
    let listed = stage.far.farside(&["devices"])?;
    ensure!(listed.contains("VM web1"), "{listed}");
    let other = stage.other_vm("web2", DEVICE)?;
    stage.wait("refused to web2", |stage| {
        let refused = stage.story().contains("dma0 is borrowed by VM web1");
        Ok(refused.then_some(()))
    })?;
    drop(other);
    stage.end_vmm();
    is_free(stage)
}

pub fn a_device_without_a_medium_waits_for_its_lender(stage: &mut Stage) -> Result<()> {
    stage.use_tls()?;
    let (lender, _) = start(stage, 120)?;
    let vmm = stage.vmm()?;
    vmm.step("bme")?;
    moves_data(vmm)?;
    stage.daemon(lender).kill()?;
    wait_connection_of(stage, VM, ConnectionState::Waiting)?;
    // Without its lender it moves nothing, and goes on by itself.
    let vmm = stage.vmm()?;
    begin(vmm, Command::Copy, (HERE, THERE), LONG)?;
    std::thread::sleep(Duration::from_millis(300));
    ensure!(get(vmm, reg::STATUS)? & status::BUSY != 0, "it goes on");
    assert_eq!(get(vmm, reg::MOVED)?, 0);
    // There is no medium that a restart of the lender's host could have changed.
    stage.far.boot = Some(ANOTHER_SYSTEM);
    lend(stage)?;
    wait_connection_of(stage, VM, ConnectionState::Connected)?;
    let vmm = stage.vmm()?;
    assert_eq!(end(vmm)?, status::DONE);
    moves_data(vmm)?;
    // A reset while the lender is out of reach does not set it going.
    stage.cut()?;
    wait_connection_of(stage, VM, ConnectionState::Waiting)?;
    let vmm = stage.vmm()?;
    vmm.step("reset")?;
    vmm.step("bme")?;
    begin(vmm, Command::Fill, (0, THERE), LONG)?;
    ensure!(get(vmm, reg::STATUS)? & status::BUSY != 0, "it goes on");
    stage.join()?;
    assert_eq!(end(stage.vmm()?)?, status::DONE);
    Ok(())
}

pub fn a_device_without_a_medium_is_revoked(stage: &mut Stage) -> Result<()> {
    let (_, backend) = start(stage, 120)?;
    let vmm = stage.vmm()?;
    vmm.step("bme")?;
    moves_data(vmm)?;
    // Its guest does not release it in time.
    stage.far.farside(&["revoke", DEVICE, "--limit", "1"])?;
    stage
        .daemon(backend)
        .wait_log("registers read as all ones", SHORT)?;
    assert_eq!(get(stage.vmm()?, reg::ID)?, u32::MAX);
    stage.end_vmm();
    is_free(stage)?;
    stage.far.farside(&["devices", "--available", DEVICE])?;
    // Revoked while the VM is cut off.
    let other = stage.serve_device("web2", DEVICE, 120)?;
    stage.boot_device("web2", DEVICE)?.step("bme")?;
    stage.cut()?;
    wait_connection_of(stage, ("web2", DEVICE), ConnectionState::Waiting)?;
    stage.wait("dma0 kept for web2", |stage| {
        let status = stage.far_status()?.0;
        let entry = &status.lent(DEVICE).context("no dma0")?.entry;
        let kept = entry.kept.as_ref().map(|kept| kept.vm.as_str());
        Ok((kept == Some("web2")).then_some(()))
    })?;
    stage.far.farside(&["revoke", DEVICE])?;
    stage.join()?;
    let line = stage
        .daemon(other)
        .wait_log("giving the device up", SHORT)?;
    ensure!(line.contains("its lease has ended since"), "{line}");
    Ok(())
}
