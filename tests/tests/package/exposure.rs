//! The exposure level of a service, according to `systemd-analyze security`.

use anyhow::{Context, Result, ensure};

/// Maximum acceptable exposure level; 0 is the tightest, 10 the loosest.
const GREATEST: f64 = 1.2;

/// The same for the unit that is root, and reads nothing but the configuration and sysfs.
const GREATEST_OF_ROOT: f64 = 1.5;

/// The same for QEMU's example, which has devices, the network, and memory that it writes and executes.
const GREATEST_OF_QEMU: f64 = 1.6;

/// The same for root's unit with the drop-in for NVMe controllers, which has CAP_SYS_ADMIN.
pub const GREATEST_WITH_ADMIN_COMMANDS: f64 = 1.7;

/// Runs it where `sh` runs shell commands. `unit` is the unit, with preceding options.
pub fn is_small(sh: &dyn Fn(&str) -> Result<String>, unit: &str) -> Result<()> {
    let greatest = match unit {
        _ if unit.ends_with("farside-vfio.service") => GREATEST_OF_ROOT,
        _ if unit.ends_with("farside-qemu@web1.service") => GREATEST_OF_QEMU,
        _ => GREATEST,
    };
    is_at_most(sh, unit, greatest)
}

/// As [`is_small`], with the maximum.
pub fn is_at_most(sh: &dyn Fn(&str) -> Result<String>, unit: &str, greatest: f64) -> Result<()> {
    let said = sh(&format!("systemd-analyze security --no-pager {unit} 2>&1"))?;
    let verdict = said
        .lines()
        .find(|line| line.contains("Overall exposure level"))
        .with_context(|| format!("systemd-analyze gives no verdict: {said}"))?
        .trim();
    let figure = verdict
        .split_whitespace()
        .find_map(|word| word.parse::<f64>().ok())
        .with_context(|| format!("no figure in {verdict:?}"))?;
    ensure!(
        figure <= greatest,
        "{unit} is exposed by {figure}, at most {greatest} is allowed:\n{said}"
    );
    println!("{verdict}");
    Ok(())
}
