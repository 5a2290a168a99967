//! Boots guests of a VM that plays a host, one after another, and prints how long each took:
//! `cargo run -p farside-testbed --example nested -- GUESTS [CPUS-OF-THE-HOST]`
//!
//! Fails if a guest hangs; then it prints where its CPU is.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use farside_testbed::{Progress, Testbed};

/// How long a boot may take before it counts as hung, the limit of the tests.
const LIMIT: Duration = Duration::from_secs(180);

fn main() -> Result<()> {
    env_logger::init();
    let mut args = std::env::args().skip(1);
    let guests = args
        .next()
        .context("usage: nested GUESTS [CPUS-OF-THE-HOST]")?;
    let guests: u32 = guests.parse().context("GUESTS is no number")?;
    let testbed = Testbed::prepare(&Progress::auto())?;
    let mut builder = testbed.host_vm("host");
    if let Some(cpus) = args.next() {
        builder = builder.vcpus(cpus.parse().context("CPUS-OF-THE-HOST is no number")?);
    }
    let host = builder.launch_host(LIMIT)?;
    let mut hung = 0;
    for number in 1..=guests {
        let start = Instant::now();
        let guest = host.guest("nested").launch()?;
        match guest.wait_agent(LIMIT) {
            Ok(()) => println!("guest {number}: {:.1?}", start.elapsed()),
            Err(error) => {
                hung += 1;
                eprintln!("guest {number}: {error:#}\n{}", guest.qmp().cpus());
            }
        }
        guest.kill()?;
    }
    host.kill()?;
    ensure!(hung == 0, "{hung} of {guests} guests hung");
    Ok(())
}
