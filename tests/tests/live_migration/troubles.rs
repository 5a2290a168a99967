//! Live migrations with failures.

use std::{fs, os::unix::fs::PermissionsExt, path::PathBuf, time::Instant};

use anyhow::{Context, Result, ensure};
use farside_testbed::Vm;
use farside_tests::{
    SHORT,
    two_hosts::{MIGRATION, Migration, Stage, VM, kill, shown},
};
use libtest_mimic::Completion;

use crate::{DRIVE, arrived, checksum, counter::Counter, fill, live, root_image, start};

/// Bytes per second: slow enough to interrupt a transfer.
const SLOW: u64 = 16 << 20;

pub fn a_guest_that_cannot_go_stays_and_gets_its_drive_back(stage: &Stage) -> Result<Completion> {
    let _lender = stage.lend()?;
    let guest = start(stage)?;
    let sum = fill(&guest)?;
    let mut counter = Counter::start(&guest)?;
    let (_, first) = stage.holder()?.context("nobody has the disk")?;
    let mut stayed = |what: &str, after: u64| -> Result<u64> {
        let mut all = || -> Result<u64> {
            ensure!(stage.running()? == ["a"], "{:?}", stage.running());
            guest.wait_path(DRIVE, SHORT)?;
            ensure!(checksum(&guest)? == sum, "the disk has other data");
            counter.goes_on(&guest)?;
            ensure!(!described(stage, "b"), "it is described at b");
            let (holder, generation) = stage.holder()?.context("nobody has the disk")?;
            ensure!(holder == VM && generation > after, "{holder} {generation}");
            Ok(generation)
        };
        all().with_context(|| what.to_owned())
    };

    // An address that the other host lacks: detected before any change.
    let mut nowhere = live("b");
    nowhere[6] = "10.99.0.77";
    stage.refused("a", &nowhere, &["cannot listen at 10.99.0.77", "as it was"])?;
    stayed("address", first - 1)?;
    let (_, same) = stage.holder()?.context("nobody has the disk")?;
    ensure!(same == first, "the disk was returned");

    // QEMU there does not start, which no check predicts.
    let text = stage.description()?;
    let program = shown(farside_tests::testbed()?.qemu());
    stage.describe(&text.replacen(&program, &shown(&broken(stage)?), 1))?;
    stage.refused("a", &live("b"), &["no guest can come", "as it was"])?;
    stage.describe(&text)?;
    let second = stayed("no QEMU", first)?;

    // QEMU there is killed during the transfer.
    let migration = begin_slowly(stage, &guest)?;
    stage.qemus("b")?.into_iter().for_each(kill);
    let (moved, said) = migration.end(stage)?;
    ensure!(!moved && said.contains("cannot send the guest"), "{said}");
    ensure!(said.contains("as it was"), "{said}");
    stayed("killed", second)?;

    // None of this prevents a successful migration.
    speed(&guest, 0)?;
    stage.ok("a", &live("b"))?;
    let guest = arrived(stage)?;
    ensure!(checksum(&guest)? == sum, "the disk has other data");
    counter.stop(&guest, &root_image(stage))?;
    Ok(Completion::Completed)
}

pub fn a_transfer_goes_on_without_the_command_that_began_it(stage: &Stage) -> Result<Completion> {
    let _lender = stage.lend()?;
    let guest = start(stage)?;
    let sum = fill(&guest)?;
    let mut counter = Counter::start(&guest)?;

    // Taken back during the transfer: QEMU receives a cancel request.
    let migration = begin_slowly(stage, &guest)?;
    kill(migration.pid());
    migration.end(stage)?;
    stage.ok("a", &["migration", "resume", VM, "--back"])?;
    ensure!(stage.running()? == ["a"], "{:?}", stage.running());
    guest.wait_path(DRIVE, SHORT)?;
    ensure!(checksum(&guest)? == sum, "the disk has other data");
    counter.goes_on(&guest)?;

    // Resumed without a direction: it waits for the transfer.
    let migration = begin_slowly(stage, &guest)?;
    kill(migration.pid());
    migration.end(stage)?;
    speed(&guest, 0)?;
    let said = stage.ok("a", &["migration", "resume", VM])?;
    ensure!(said.contains("stood still for"), "{said}");
    let guest = arrived(stage)?;
    ensure!(stage.running()? == ["b"], "{:?}", stage.running());
    ensure!(checksum(&guest)? == sum, "the disk has other data");
    ensure!(!described(stage, "a"));
    counter.stop(&guest, &root_image(stage))?;
    Ok(Completion::Completed)
}

/// Begins a migration from `a` to `b`, and waits until the transfer of guest memory has
/// begun.
fn begin_slowly(stage: &Stage, guest: &Vm) -> Result<Migration> {
    speed(guest, SLOW)?;
    let since = guest.qmp().event_count();
    let migration = stage.begin("a", &live("b"))?;
    let active = guest
        .qmp()
        .wait_event("MIGRATION", since, MIGRATION, |data| {
            data["status"] == "active"
        });
    active.context("the transfer does not begin")?;
    // The transfer has begun and is incomplete.
    let deadline = Instant::now() + SHORT;
    loop {
        let told = guest
            .qmp()
            .execute("query-migrate", serde_json::json!({}))?;
        ensure!(told["status"] == "active", "{told}");
        if told["ram"]["transferred"].as_u64() > Some(1 << 20) {
            return Ok(migration);
        }
        ensure!(Instant::now() < deadline, "nothing is sent: {told}");
    }
}

/// A QEMU that fails as the destination of a migration.
fn broken(stage: &Stage) -> Result<PathBuf> {
    let path = stage.directory().join("broken-qemu");
    let text = format!(
        "#!/bin/sh\ncase \"$*\" in *-incoming*) echo no guest can come >&2; exit 1;; esac\n\
         exec {} \"$@\"\n",
        farside_tests::testbed()?.qemu().display()
    );
    fs::write(&path, text)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700))?;
    Ok(path)
}

/// QEMU's bandwidth limit in bytes per second; 0 for none.
fn speed(guest: &Vm, limit: u64) -> Result<()> {
    let parameters = serde_json::json!({ "max-bandwidth": limit });
    guest.qmp().execute("migrate-set-parameters", parameters)?;
    Ok(())
}

fn described(stage: &Stage, host: &str) -> bool {
    fs::exists(stage.path(host, &format!("etc/vm/{VM}.toml"))).unwrap_or(true)
}
