//! Boots a VM that plays a host, runs shell commands in it and prints their output: `cargo
//! run -p farside-testbed --example host -- 'lspci' [QEMU-ARGUMENT…]`.
//! `FILES="/in/the/vm=/here …"` copies files into it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use farside_testbed::{Progress, Testbed};

fn main() -> Result<()> {
    env_logger::init();
    let mut args = std::env::args().skip(1);
    let commands = args
        .next()
        .context("usage: host COMMANDS [QEMU-ARGUMENT…]")?;
    let testbed = Testbed::prepare(&Progress::auto())?;
    let mut builder = testbed.host_vm("host").args(args);
    let files = std::env::var("FILES").unwrap_or_default();
    for pair in files.split_whitespace() {
        let (to, from) = pair.split_once('=').context("FILES: /to=/from …")?;
        let content = std::fs::read(from).with_context(|| format!("reading {from}"))?;
        builder = builder.file(to, 0o755, content);
    }
    let start = Instant::now();
    let vm = builder.launch_host(Duration::from_secs(180))?;
    eprintln!("ready after {:.2?}; KVM: {}", start.elapsed(), vm.has_kvm());
    let start = Instant::now();
    println!("{}", vm.exec(&commands, Duration::from_secs(600))?);
    eprintln!("commands took {:.2?}", start.elapsed());
    vm.shutdown(Duration::from_secs(60)).map(drop)
}
