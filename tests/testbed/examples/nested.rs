//! Boots guests of a VM that plays a host, one after another, and prints how long each took:
//! `cargo run -p farside-testbed --example nested -- GUESTS [KICK-MS]`
//!
//! With KICK-MS, the host's CPUs are stopped and continued with pauses of so many milliseconds:
//! then a guest that an emulated host may hang (see [`farside_testbed::NESTED_KVM_CPU`]) hangs
//! at once. Fails if a guest hangs, and prints where its CPU is.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use farside_testbed::{HostVm, Progress, Testbed};
use serde_json::json;

/// How long a boot may take before it counts as hung, the limit of the tests.
const LIMIT: Duration = Duration::from_secs(180);

fn main() -> Result<()> {
    env_logger::init();
    let mut args = std::env::args().skip(1);
    let guests = args.next().context("usage: nested GUESTS [KICK-MS]")?;
    let guests: u32 = guests.parse().context("GUESTS is no number")?;
    let pause = args
        .next()
        .map(|pause| pause.parse().context("KICK-MS is no number"))
        .transpose()?;
    let testbed = Testbed::prepare(&Progress::auto())?;
    let host = testbed.host_vm("host").launch_host(LIMIT)?;
    let done = AtomicBool::new(false);
    let (hung, kicks) = thread::scope(|scope| {
        let kicker = pause.map(|pause| {
            let (host, done) = (&host, &done);
            scope.spawn(move || kick(host, Duration::from_millis(pause), done))
        });
        let hung = boot(&host, guests);
        done.store(true, Ordering::Relaxed);
        let kicks = kicker.map_or(Ok(0), |kicker| kicker.join().expect("it does not panic"));
        anyhow::Ok((hung?, kicks?))
    })?;
    host.kill()?;
    println!("{hung} of {guests} guests hung, {kicks} kicks");
    ensure!(hung == 0, "{hung} of {guests} guests hung");
    Ok(())
}

/// Boots guests; returns how many hung.
fn boot(host: &HostVm, guests: u32) -> Result<u32> {
    let mut hung = 0;
    for number in 1..=guests {
        let start = Instant::now();
        let guest = host.guest("nested").launch()?;
        match guest.wait_agent(LIMIT) {
            Ok(()) => println!("guest {number}: {:.1?}", start.elapsed()),
            Err(error) => {
                hung += 1;
                eprintln!("guest {number}: {error:#}");
            }
        }
        guest.kill()?;
    }
    Ok(hung)
}

/// Makes the host's CPUs leave their loops again and again; returns how often.
fn kick(host: &HostVm, pause: Duration, done: &AtomicBool) -> Result<u64> {
    let mut kicks = 0;
    while !done.load(Ordering::Relaxed) {
        host.qmp().execute("stop", json!({}))?;
        host.qmp().execute("cont", json!({}))?;
        kicks += 1;
        thread::sleep(pause);
    }
    Ok(kicks)
}
