//! Reboots guests beside two busy loops and prints how long the boots took:
//! `cargo run -p farside-testbed --example reboots -- 200 [KERNEL-PARAMETER…]`
//!
//! Two guests share the reboots, as the tests run two at a time. Fails if a guest hangs;
//! then it prints where its CPUs are.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use farside_testbed::{Progress, Testbed, Vm, VmBuilder};

/// How long a boot may take before it counts as hung, the limit of the tests.
const LIMIT: Duration = Duration::from_secs(180);

fn main() -> Result<()> {
    env_logger::init();
    let mut args = std::env::args().skip(1);
    let reboots: usize = args
        .next()
        .context("usage: reboots COUNT [KERNEL-PARAMETER…]")?
        .parse()
        .context("COUNT is no number")?;
    let append = args.collect::<Vec<_>>().join(" ");
    let progress = Progress::auto();
    let testbed = Testbed::prepare(&progress)?;
    eprintln!("{}, {:?}", testbed.qemu_version(), testbed.accel());

    let task = progress.bar("Rebooting", reboots as u64);
    let left = AtomicUsize::new(reboots);
    let done = AtomicBool::new(false);
    let results = thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let guests = [(); 2].map(|()| scope.spawn(|| reboot_in_turns(&testbed, &append, &left)));
        let mut told = 0;
        while !guests.iter().all(thread::ScopedJoinHandle::is_finished) {
            let begun = reboots - left.load(Ordering::Relaxed);
            task.set(begun as u64);
            // A log has no progress bar.
            if begun / 10 > told {
                told = begun / 10;
                eprintln!("{begun} of {reboots} begun");
            }
            thread::sleep(Duration::from_secs(1));
        }
        done.store(true, Ordering::Relaxed);
        guests.map(|guest| guest.join().expect("a guest's thread panicked"))
    });
    task.done();

    let mut all = Boots::default();
    for boots in results {
        let boots = boots?;
        all.times.extend(boots.times);
        all.hung += boots.hung;
    }
    all.times.sort();
    let at = |percent: usize| {
        let time = all
            .times
            .get(all.times.len().saturating_sub(1) * percent / 100);
        time.copied().unwrap_or_default().as_secs_f64()
    };
    println!(
        "{} reboots, {} hung; seconds: median {:.1}, p90 {:.1}, max {:.1}",
        all.times.len() + all.hung,
        all.hung,
        at(50),
        at(90),
        at(100),
    );
    ensure!(all.hung == 0, "{} of {reboots} reboots hung", all.hung);
    Ok(())
}

#[derive(Default)]
struct Boots {
    times: Vec<Duration>,
    hung: usize,
}

/// Reboots one guest until none of the reboots are left.
fn reboot_in_turns(testbed: &Testbed, append: &str, left: &AtomicUsize) -> Result<Boots> {
    let builder = testbed
        .vm("reboots")
        .lean()
        .memory(512 << 20)
        .append(append);
    let take = |left: usize| left.checked_sub(1);
    let mut boots = Boots::default();
    let mut vm = start(&builder)?;
    while left
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
        .is_ok()
    {
        let began = Instant::now();
        match vm.reboot(LIMIT) {
            Ok(()) => boots.times.push(began.elapsed()),
            Err(error) => {
                boots.hung += 1;
                eprintln!("{error:#}\n{}", vm.qmp().cpus());
                vm = start(&builder)?;
            }
        }
    }
    vm.kill()?;
    Ok(boots)
}

fn start(builder: &VmBuilder) -> Result<Vm> {
    let vm = builder.launch()?;
    vm.wait_agent(LIMIT)?;
    Ok(vm)
}
