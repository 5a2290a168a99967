//! `farside doctor`.

use std::time::Duration;

use anyhow::bail;
use clap::Args as ClapArgs;
use farside_doctor::{Facts, Host, Level};

/// Says what keeps VMs of this host from borrowing, why that matters, and what
/// to type to fix it. Changes nothing. Fails when there is a problem; notes are
/// for you to know.
#[derive(Debug, ClapArgs)]
pub(crate) struct Doctor {
    /// Look at what this VM needs [default: all that are described].
    #[arg(value_name = "VM")]
    vm: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Only problems and notes.
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
    /// How long tools (QEMU, virsh, systemctl) and lenders may take to answer;
    /// all are asked at once.
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
        print!("{}", report.text());
    }
    match problems {
        0 => Ok(()),
        1 => bail!("1 problem"),
        n => bail!("{n} problems"),
    }
}

/// A time that a program waits for.
fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "give a number of seconds")?;
    match (0.1..=3600.0).contains(&seconds) {
        true => Ok(seconds),
        false => Err("give 0.1 to 3600 seconds".to_owned()),
    }
}
