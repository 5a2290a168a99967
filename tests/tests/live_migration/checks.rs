//! Obstacles to a migration, and a guest that does not release its device.

use std::{collections::BTreeMap, fs, path::PathBuf};

use anyhow::{Context, Result, ensure};
use farside_tests::two_hosts::{HOSTS, Stage, VM, shown};
use libtest_mimic::Completion;
use serde_json::json;

use crate::{checksum, fill, live, root_image, start};

pub fn what_would_stop_a_migration_is_told_before(stage: &Stage) -> Result<Completion> {
    let text = stage.description()?;
    // Neither a lender nor a running VM: both are reported together.
    told(
        stage,
        &live("b"),
        &["state", "does not run", "device", "disk0"],
    )?;
    let lender = stage.lend()?;
    let guest = start(stage)?;
    let sum = fill(&guest)?;
    let cold = ["migrate", VM, "--to", "b"];
    let before = files(stage)?;
    fine(stage, &cold)?;
    fine(stage, &live("b"))?;

    // The name is in use.
    let there = stage.path("b", &format!("etc/vm/{VM}.toml"));
    fs::write(&there, "devices = []\n")?;
    told(stage, &cold, &["name", "there is a VM web1 already"])?;
    fs::remove_file(&there)?;

    // An unknown host; a host without farside.
    told(
        stage,
        &["migrate", VM, "--to", "nowhere"],
        &["other host", "remote shell gets there"],
    )?;
    let no_agent = [&cold[..], &["--rsh", "sh -c 'cat >/dev/null & exit 1'"]].concat();
    told(stage, &no_agent, &["other host", "same farside installed"])?;

    // The address is unknown, is not that host's, or is unreachable.
    stage.refused(
        "a",
        &["migrate", VM, "--to", "b", "--live", "--check"],
        &["--migrate-address"],
    )?;
    let mut other = live("b");
    other[6] = "10.99.0.77";
    told(stage, &other, &["address", "cannot listen at 10.99.0.77"])?;
    other[6] = "127.0.0.1";
    told(
        stage,
        &other,
        &["network", "127.0.0.1", "cannot be reached"],
    )?;

    // Requirements of the configuration. The VM keeps running, so only the text changes.
    let describe = |from: &str, to: &str| -> Result<()> {
        ensure!(text.contains(from), "no {from} in {text}");
        stage.describe(&text.replacen(from, to, 1))
    };
    let program = shown(farside_tests::testbed()?.qemu());
    describe(&program, "/no/such/qemu")?;
    told(stage, &cold, &["QEMU", "/no/such/qemu", "install it"])?;
    describe("memory = \"384M\"", "memory = \"1T\"")?;
    told(
        stage,
        &cold,
        &["windows", "guest too large", "memory", "1 TiB", "free here"],
    )?;
    describe("port = 1", "port = 1, function = 1")?;
    told(
        stage,
        &live("b"),
        &["state", "disk0 of VM web1 is one function"],
    )?;
    describe(
        "qemu-args = [",
        "qemu-args = [\"-machine\", \"pc-q35-10.0\", ",
    )?;
    let machine = ["machine", "would be pc-q35-10.0", "qemu-args"];
    told(stage, &live("b"), &machine)?;
    let noted = fine(stage, &cold)?;
    ensure!(
        noted.contains("note") && noted.contains("would be pc-q35-10.0"),
        "{noted}"
    );
    let socket = shown(&stage.lender_socket());
    describe(&format!("lenders = [{socket:?}]"), "")?;
    std::os::unix::fs::symlink(&socket, stage.path("a", "run/lender.sock"))?;
    told(
        stage,
        &cold,
        &["device", "lender.sock", "as both hosts reach it"],
    )?;
    fs::remove_file(stage.path("a", "run/lender.sock"))?;
    stage.describe(&text)?;

    // The image is on a file system that the other host lacks.
    let hidden = root_image(stage).with_extension("hidden");
    fs::rename(root_image(stage), &hidden)?;
    told(
        stage,
        &live("b"),
        &["disk", "root.img", "storage that both hosts see"],
    )?;
    fs::rename(&hidden, root_image(stage))?;

    guest.qmp().execute("stop", json!({}))?;
    told(stage, &live("b"), &["state", "does not run (paused)"])?;
    guest.qmp().execute("cont", json!({}))?;

    // None of this has left any state.
    fine(stage, &live("b"))?;
    ensure!(files(stage)? == before, "{:?}, {before:?}", files(stage));

    // No check can predict this: the guest does not release the device.
    let (_, generation) = stage.holder()?.context("nobody has the disk")?;
    let late = [&live("b")[..], &["--shutdown-timeout", "2"]].concat();
    stage.refused(
        "a",
        &late,
        &["has not released disk0 within 2s", "as it was"],
    )?;
    ensure!(stage.running()? == ["a"], "{:?}", stage.running());
    ensure!(stage.holder()? == Some((VM.to_owned(), generation)));
    ensure!(checksum(&guest)? == sum);

    drop(lender);
    Ok(Completion::Completed)
}

/// Checks that nothing prevents the migration.
fn fine(stage: &Stage, args: &[&str]) -> Result<String> {
    let said = stage.ok("a", &[args, &["--check"]].concat())?;
    ensure!(!said.contains("problem"), "{said}");
    ensure!(said.contains("nothing stops"), "{said}");
    Ok(said)
}

/// Checks that these words are all in lines about problems.
fn told(stage: &Stage, args: &[&str], words: &[&str]) -> Result<()> {
    let ended = stage.run("a", &[args, &["--check"]].concat())?;
    ensure!(
        !ended.status.success(),
        "nothing stops {args:?}: {}",
        ended.stdout
    );
    ensure!(
        ended.stderr.contains("VM web1 from moving"),
        "{}",
        ended.stderr
    );
    let mut about = false;
    let bad = ended.stdout.lines().filter(|line| {
        let advice = line.starts_with(' ');
        about = line.starts_with("problem") || about && advice;
        about
    });
    let bad: Vec<&str> = bad.collect();
    let bad = bad.join("\n");
    for word in words {
        ensure!(
            bad.contains(word),
            "{args:?}: no {word:?} in:\n{}",
            ended.stdout
        );
    }
    Ok(())
}

/// The hosts' files about VMs and migrations, with their sizes.
fn files(stage: &Stage) -> Result<BTreeMap<PathBuf, u64>> {
    let mut found = BTreeMap::new();
    let mut directories: Vec<PathBuf> = HOSTS
        .iter()
        .flat_map(|host| ["etc", "state"].map(|kind| stage.path(host, kind)))
        .collect();
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory)? {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                true => directories.push(entry.path()),
                // The backend logs its activity.
                false if entry.path().extension().is_some_and(|ext| ext == "log") => {}
                false => drop(found.insert(entry.path(), entry.metadata()?.len())),
            }
        }
    }
    Ok(found)
}
