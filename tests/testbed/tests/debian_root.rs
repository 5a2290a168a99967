//! A Debian root, entered and left. Skipped where the machine cannot make one.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use farside_testbed::{DebianRoot, Inside, Progress, Testbed};
use libtest_mimic::{Arguments, Completion, Trial};

fn main() {
    farside_testbed::become_root();
    let name = "what_is_written_inside_is_gone_afterwards_and_what_runs_ends";
    let trial = Trial::ignorable_test(name, || {
        if let Some(why) = DebianRoot::missing() {
            return Ok(Completion::ignored_with(why));
        }
        let result = enter_and_leave().map_err(|error| format!("{error:#}"));
        Ok(result.map(|()| Completion::Completed)?)
    });
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit();
}

fn enter_and_leave() -> Result<()> {
    let testbed = Testbed::prepare(&Progress::auto())?;
    let root = DebianRoot::prepare(&testbed, "plain", &[], &Progress::auto())?;
    let shared = tempfile::tempdir()?;
    fs::write(shared.path().join("note"), "from outside")?;

    let inside = root.enter_with(&[(shared.path(), Path::new("/srv/shared"))])?;
    ensure!(sh(&inside, "cat /srv/shared/note")? == "from outside");
    ensure!(sh(&inside, "id -u; ls /tmp")? == "0");
    sh(&inside, "touch /etc/written")?;
    ensure!(inside.path("/etc/written").exists());
    ensure!(!root.directory().join("etc/written").exists());
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    ensure!(!mounts.contains("farside-root-"), "{mounts}");

    // The first process must reap orphans, or their process ids would stay in use.
    let orphan = sh(&inside, "sleep 1000 >/dev/null 2>&1 & echo $!")?;
    sh(&inside, &format!("kill {orphan}"))?;
    sh(
        &inside,
        &format!("timeout 60 sh -c 'while kill -0 {orphan}; do :; done' 2>/dev/null"),
    )?;

    let mut lasting = inside
        .command("sh")
        .args(["-c", "echo up; exec sleep 1000"])
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    let stdout = lasting.stdout.take().context("no output")?;
    BufReader::new(stdout).read_line(&mut line)?;
    ensure!(line == "up\n", "{line:?}");
    drop(inside);
    let status = lasting.wait()?;
    ensure!(!status.success(), "{status}");

    let again = root.enter()?;
    ensure!(!again.path("/etc/written").exists());
    Ok(())
}

fn sh(inside: &Inside, script: &str) -> Result<String> {
    let mut command: Command = inside.command("sh");
    let output = command.args(["-c", script]).output()?;
    ensure!(output.status.success(), "{script}: {output:?}");
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}
