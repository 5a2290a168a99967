//! Boots a guest, runs a shell command in it and prints its output: `cargo run -p
//! farside-testbed --example shell -- 'lspci -v' [QEMU-ARGUMENT…]`

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use farside_testbed::{Progress, Testbed};

fn main() -> Result<()> {
    env_logger::init();
    let mut args = std::env::args().skip(1);
    let command = args
        .next()
        .context("usage: shell COMMAND [QEMU-ARGUMENT…]")?;
    let start = Instant::now();
    let testbed = Testbed::prepare(&Progress::auto())?;
    eprintln!("prepared after {:.2?}", start.elapsed());
    eprintln!("{}, {:?}", testbed.qemu_version(), testbed.accel());

    let start = Instant::now();
    let vm = testbed
        .vm("shell")
        .append(std::env::var("APPEND").unwrap_or_default())
        .args(args)
        .launch()?;
    vm.wait_agent(Duration::from_secs(120))?;
    eprintln!("agent answers after {:.2?}", start.elapsed());
    let start = Instant::now();
    let output = vm.exec(&command, Duration::from_secs(600))?;
    eprintln!("command took {:.2?}", start.elapsed());
    println!("{output}");
    let start = Instant::now();
    vm.shutdown(Duration::from_secs(60))?;
    eprintln!("off after {:.2?}", start.elapsed());
    Ok(())
}
