//! A scripted VM that does I/O and checks it, while something is done to the processes of its disk.
//!
//! It keeps commands in flight (writes, zeroes, flushes, then reads whose data is compared with what was written), each
//! of which must succeed and complete once.

mod vm;

use std::{
    panic::resume_unwind,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

use crate::Cluster;
pub use vm::{Disk, Medium, Vm};

/// Timeout of what the VM waits for.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// SplitMix64.
pub struct Random(u64);

impl Random {
    /// From a seed.
    pub fn seeded(seed: u64) -> Self {
        Self(seed)
    }

    /// From `$FARSIDE_SEED`, else the clock. The seed is printed.
    ///
    /// # Panics
    /// If the variable has no number.
    pub fn from_environment() -> Self {
        let seed = match std::env::var("FARSIDE_SEED") {
            Ok(text) => text.parse().expect("a number in FARSIDE_SEED"),
            Err(_) => std::time::SystemTime::UNIX_EPOCH
                .elapsed()
                .unwrap_or_default()
                .as_nanos() as u64,
        };
        eprintln!("FARSIDE_SEED={seed}");
        Self(seed)
    }

    /// Another sequence, which depends on this one.
    pub fn fork(&mut self) -> Self {
        Self(self.below(u64::MAX))
    }

    /// A number below `most`.
    pub fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % most
    }
}

/// Rounds of I/O that a VM has done.
#[derive(Default)]
pub struct Progress(AtomicU64);

impl Progress {
    /// Waits until the VM has done I/O that it began after this call, then for a random time.
    ///
    /// # Errors
    /// When it does none within [`TIMEOUT`].
    pub fn wait(&self, random: &mut Random, most: Duration) -> Result<()> {
        let before = self.0.load(Ordering::Acquire);
        let deadline = Instant::now() + TIMEOUT;
        while self.0.load(Ordering::Acquire) < before + 2 {
            ensure!(Instant::now() < deadline, "no I/O within {TIMEOUT:?}");
            std::thread::sleep(Duration::from_micros(200));
        }
        std::thread::sleep(Duration::from_micros(random.below(most.as_micros() as u64)));
        Ok(())
    }
}

/// Has VM `a` of the cluster do I/O on `disk` while `disturb` does its work on another thread. Returns the VM, whose disk
/// has been checked, and what `disturb` returns.
///
/// # Errors
/// When a command fails, data is wrong, or `disturb` fails.
pub fn disturbed<T: Send>(
    cluster: &Cluster,
    disk: Disk,
    random: &mut Random,
    disturb: impl FnOnce(Random, &Progress) -> Result<T> + Send,
) -> Result<(Vm, T)> {
    let mut vm = Vm::at(cluster.directory(), disk)?;
    let over = AtomicBool::new(false);
    let progress = Progress::default();
    let others = random.fork();
    let done = std::thread::scope(|scope| {
        let disturber = scope.spawn(|| {
            let done = disturb(others, &progress);
            over.store(true, Ordering::Release);
            done
        });
        let mut went_on = Ok(());
        while went_on.is_ok() && !(over.load(Ordering::Acquire) || disturber.is_finished()) {
            went_on = vm.round(random);
            progress.0.fetch_add(1, Ordering::Release);
        }
        let done = disturber
            .join()
            .unwrap_or_else(|panic| resume_unwind(panic));
        match (went_on, done) {
            (Ok(()), done) => done,
            (Err(error), Ok(_)) => Err(error),
            // Either may be the cause.
            (Err(error), Err(other)) => Err(error.context(format!("{other:#}"))),
        }
    })?;
    vm.round(random)?;
    vm.check()?;
    Ok((vm, done))
}
