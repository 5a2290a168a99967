//! `cargo xtask bench --only network`, between network namespaces and without SPDK.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use farside_bench::{Hosts, Network, output};
use farside_testbed::lacks_root;
use farside_tests::farside_program;

pub(crate) const NAME: &str = "a_disk_of_another_host_is_measured_with_and_without_tls";

pub(crate) fn run() -> Result<()> {
    if let Some(reason) = lacks_root() {
        // For `cargo xtask test`.
        println!("skipped: {NAME}: {reason}");
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let json = directory.path().join("results.json");
    let bench = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["bench", "--only", "network", "--hosts", "namespaces"])
        .args(["--quick", "--repeats", "1", "--seconds", "1"])
        .args(["--job", "randread-4k-qd1", "--delay", "200", "--program"])
        .arg(farside_program()?)
        .arg("--json")
        .arg(&json)
        .output()
        .context("running xtask bench")?;
    ensure!(
        bench.status.success(),
        "xtask bench: {}\n{}",
        bench.status,
        String::from_utf8_lossy(&bench.stderr)
    );
    let results = output::read(&json)?;
    let found: Vec<_> = results.jobs.iter().map(|job| &job.network).collect();
    let expected = Some(Network {
        hosts: Hosts::Namespaces,
        delay_us: 200,
        peer: "farside without TLS".to_owned(),
        tls: true,
    });
    ensure!(found == [&expected], "{found:?}");
    for pair in &results.jobs[0].pairs {
        for side in [&pair.borrowed, &pair.beside] {
            // No I/O takes less than the wire's delay.
            ensure!(side.iops > 0.0 && side.p50 >= 200e3, "{side:?}");
            ensure!(side.host_cpu.is_some_and(|cpu| cpu > 0.0), "{side:?}");
        }
    }
    Ok(())
}
