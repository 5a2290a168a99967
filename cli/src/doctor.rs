//! `farside doctor`.

use std::time::Duration;

use anyhow::bail;
use clap::Args as ClapArgs;
use farside_doctor::{Facts, Host, Level};

use crate::terminal::Plain;

/// Diagnose this host and suggest fixes
///
/// Diagnoses what keeps VMs of this host from borrowing devices, and suggests
/// commands that fix it. Changes nothing. Fails if there is a problem; notes are
/// informational.
#[derive(Debug, ClapArgs)]
pub(crate) struct Doctor {
    /// Check this VM only [default: all configured VMs].
    #[arg(value_name = "VM")]
    vm: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Print problems and notes only.
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
    /// Timeout for tools (QEMU, virsh, systemctl) and lenders, which are queried in
    /// parallel.
    #[arg(long, value_name = "SECONDS", default_value_t = 1.5, value_parser = seconds)]
    timeout: f64,
}

pub(crate) fn run(args: &Doctor) -> anyhow::Result<()> {
    let host = Host::this().with_patience(Duration::from_secs_f64(args.timeout));
    let mut report = Facts::look(&host, args.vm.as_deref()).judge();
    let problems = report.count(Level::Problem);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        if args.quiet {
            report.findings.retain(|finding| finding.level != Level::Ok);
        }
        print!("{}", Plain(report.text()));
    }
    match problems {
        0 => Ok(()),
        1 => bail!("1 problem"),
        n => bail!("{n} problems"),
    }
}

/// A timeout in seconds.
fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "give a number of seconds")?;
    match (0.1..=3600.0).contains(&seconds) {
        true => Ok(seconds),
        false => Err("give 0.1 to 3600 seconds".to_owned()),
    }
}
