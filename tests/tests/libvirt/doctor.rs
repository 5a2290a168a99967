//! `farside doctor` on a host with a fresh libvirt: the suggested commands make a VM start.

use std::fs;

use anyhow::{Context, Result, ensure};
use farside_tests::Ended;
use serde_json::Value;

use crate::stage::Stage;

/// Size of the NVMe namespace.
const DRIVE: u64 = 64 << 20;

/// Findings on one VM.
fn doctor(stage: &Stage) -> Result<Vec<Value>> {
    // A loaded machine must not cause timeouts.
    let words = ["farside", "doctor", "web1", "--json", "--timeout", "120"];
    let ended: Ended = stage.run(&words)?;
    let report: Value =
        serde_json::from_str(&ended.stdout).with_context(|| format!("no JSON: {ended:?}"))?;
    let healthy = report["problems"] == 0;
    ensure!(ended.status.success() == healthy, "{ended:?}");
    let findings = report["findings"].as_array().context("no findings")?;
    Ok(findings.clone())
}

/// The suggested command for a finding.
fn fix(findings: &[Value], check: &str, word: &str) -> Result<String> {
    let found = findings.iter().find(|finding| {
        let what = finding["what"].as_str().unwrap_or_default();
        finding["level"] == "problem" && finding["check"] == check && what.contains(word)
    });
    let found = found.with_context(|| format!("no problem {check} {word:?} in {findings:#?}"))?;
    Ok(found["fix"][0].as_str().context("no command")?.to_owned())
}

pub fn what_it_says_to_type_makes_a_domain_start(stage: &Stage) -> Result<()> {
    let (_lender, _) = stage.cluster.lend_disk(DRIVE)?;
    let description = format!(
        "manager = \"libvirt\"\ndevices = [\"disk0\"]\nlenders = [\"{}\"]\nmemory = \"512M\"\n\
         accel = \"tcg\"\n",
        stage.lender().display()
    );
    fs::write(stage.path("/etc/farside/vm/web1.toml"), description).context("describing")?;
    // As after a failed upgrade.
    stage.sh("chmod 644 /etc/libvirt/hooks/qemu")?;

    let found = doctor(stage)?;
    let hook = fix(&found, "hook", "not executable")?;
    // Only its first part: systemd is not running on this host.
    let (chmod, restart) = hook.split_once(" && ").context("two commands")?;
    ensure!(restart.starts_with("systemctl restart"), "{hook}");
    stage.sh(chmod)?;
    stage.sh(&fix(&found, "socket-group", "QEMU runs as libvirt-qemu")?)?;
    stage.sh(&fix(&found, "domain", "does not return the domain")?)?;

    let found = doctor(stage)?;
    let ill: Vec<_> = found
        .iter()
        .filter(|finding| finding["level"] == "problem")
        .collect();
    ensure!(ill.is_empty(), "{ill:#?}");
    for check in ["qemu", "hook", "socket-group", "domain", "lender", "device"] {
        ensure!(
            found
                .iter()
                .any(|finding| finding["check"] == check && finding["level"] == "ok"),
            "{check} is not ok: {found:#?}"
        );
    }
    stage.virsh(&["start", "--paused", "web1"])?;
    let found = doctor(stage)?;
    let ill: Vec<_> = found
        .iter()
        .filter(|finding| finding["level"] == "problem")
        .collect();
    ensure!(ill.is_empty(), "of a VM that runs: {ill:#?}");

    // A killed backend leaves its sockets.
    stage.kill_backend("web1")?;
    stage.virsh(&["destroy", "web1"])?;
    let stale = doctor(stage)?;
    stage.sh(&fix(&stale, "sockets", "disk0.sock")?)?;
    let found = doctor(stage)?;
    let left = found.iter().find(|finding| finding["check"] == "sockets");
    ensure!(
        left.is_some_and(|finding| finding["level"] == "ok"),
        "{left:?}"
    );
    stage.virsh(&["start", "--paused", "web1"])?;
    stage.virsh(&["destroy", "web1"])?;
    Ok(())
}
