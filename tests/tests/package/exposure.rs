//! The exposure level of a service, according to `systemd-analyze security`.

use anyhow::{Context, Result, ensure};

/// Maximum acceptable exposure level; 0 is the tightest, 10 the loosest.
const GREATEST: f64 = 1.2;

/// The same for the unit that is root, and reads nothing but the configuration and sysfs.
const GREATEST_OF_ROOT: f64 = 1.5;

/// Runs it where `sh` runs shell commands. `unit` is the unit, with preceding options.
pub fn is_small(sh: &dyn Fn(&str) -> Result<String>, unit: &str) -> Result<()> {
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
    let greatest = match unit.ends_with("farside-vfio.service") {
        true => GREATEST_OF_ROOT,
        false => GREATEST,
    };
    ensure!(
        figure <= greatest,
        "{unit} is exposed by {figure}, at most {greatest} is allowed:\n{said}"
    );
    println!("{verdict}");
    Ok(())
}
